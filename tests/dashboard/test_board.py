"""The document of the live page: a viewer that adds up differences has the whole one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from aiops.common.gathering import gathered
from aiops.dashboard.board import _OWN, CHANGED, EVENTS, LOGGED, MOST_WORKERS, Board, ServerSample
from aiops.dashboard.document import LONGEST_TEXT, MOST_LINES, WorkerRow, sections
from aiops.dashboard.happenings import Happening, happened
from aiops.dashboard.series import MOST_NAMES
from tests.inline import Inline

_APART = ("tick", "clock", "point", "forgotten", "rows", "gone", "events")


def row(number: int, name: str = "", pushes: int = 0, **fields: Any) -> WorkerRow:
    given = WorkerRow(number, name or f"w{number}", "worker", pushes, 0, 0, 0, 10, 20, 1.0)
    return given._replace(**fields)


def sample(
    time: float,
    rows: Sequence[WorkerRow] | None = (),
    report: Mapping[str, Any] | None = None,
    **fields: Any,
) -> ServerSample:
    return ServerSample(time, time, report or {}, rows, len(rows or ()), **fields)


def read(event: bytes) -> tuple[str, dict[str, Any]]:
    """Return the kind and the document of a server-sent event, as a browser reads them."""
    first, second, *rest = event.decode().split("\n")
    assert rest == ["", ""], "an event ends with an empty line"
    return first.removeprefix("event: "), json.loads(second.removeprefix("data: "))


class Viewer:
    """The document that a viewer has, as the page's script makes it."""

    def __init__(self, board: Board) -> None:
        kind, whole = read(board.whole())
        assert kind == "whole"
        self.tick = whole["tick"]
        self.sections = {k: v for k, v in whole.items() if k not in (*_APART, "series", "about")}
        self.rows = {each[0]: each for each in whole["rows"]}
        self.series, self.events = whole["series"], whole["events"]

    def take(self, event: bytes) -> None:
        kind, change = read(event)
        assert (kind, change["tick"]) == ("tick", self.tick + 1)
        self.tick += 1
        self.sections |= {k: v for k, v in change.items() if k not in _APART}
        for each in self.rows.values() if "names" in change else ():
            each[-1] = []
        for number in change.get("gone", ()):
            del self.rows[number]
        self.rows |= {each[0]: each for each in change.get("rows", ())}
        count = len(self.series["t"])
        for name in change.get("forgotten", ()):
            del self.series[name]
        for name in change["point"]:
            self.series.setdefault(name, [None] * count)
        for name, values in self.series.items():
            values.append(change["point"].get(name))
        self.events = [*self.events, *change.get("events", ())][-EVENTS:]


def _logged(*names: str) -> dict[str, tuple[float, float, float]]:
    return dict.fromkeys(names, (1.0, 0.5, 2.0))


def test_differences_add_up_to_the_whole() -> None:
    """Workers come, go and push at random; one viewer reads differences, others come later."""
    draw = np.random.default_rng(7)
    board, rows, pushes = Board({"policy": "asgd"}), dict[int, WorkerRow](), 0
    board.take(sample(0.0))
    viewer = Viewer(board)
    for tick in range(1, 60):
        for number in draw.integers(0, 40, 8).tolist():
            if draw.random() < 0.3:
                rows.pop(number, None)
            else:
                pushes += 1
                rows[number] = row(number, pushes=pushes, logged={"loss": pushes / 7})
        names = ["loss", "accuracy"][: 1 + tick // 30]
        report = {"version": pushes, "gradients": pushes, "logged": _logged(*names)}
        viewer.take(board.take(sample(float(tick), [*rows.values()], report)))
        later = Viewer(board)
        assert viewer.rows == later.rows
        assert viewer.sections == later.sections
        assert viewer.series == later.series
        assert viewer.events == later.events
    assert set(viewer.rows) == set(rows)
    assert viewer.series["log loss"][-1] == 1.0


def test_a_difference_has_a_bound_and_every_row_its_turn() -> None:
    board, count = Board({}), 1000
    board.take(sample(0.0, [row(k) for k in range(count)]))
    viewer, seen = Viewer(board), set[int]()
    for tick in range(1, 5):
        event = board.take(sample(float(tick), [row(k, pushes=tick) for k in range(count)]))
        changed = read(event)[1]["rows"]
        assert len(changed) == CHANGED
        assert len(event) < 30_000
        seen |= {each[0] for each in changed}
        viewer.take(event)
    assert len(seen) == count, "those that have waited longest go first"


def test_what_does_not_change_is_not_sent() -> None:
    board = Board({})
    given = {"version": 3, "settings": {"lr": 0.1}}
    board.take(sample(0.0, [row(1)], given))
    change = read(board.take(sample(1.0, [row(1)], given)))[1]
    assert set(change) == {"tick", "clock", "rows", "gone", "point"}
    assert not change["rows"]


def test_rows_of_others_than_viewers_are_forgotten() -> None:
    board = Board({})
    board.take(sample(0.0, [row(1)]))
    board.take(sample(1.0, None))
    assert not Viewer(board).rows


def test_hostile_names_and_numbers_are_bounded_and_no_html() -> None:
    board = Board({})
    name = "<script>alert(1)</script>\n\ndata: x" + "x" * 10_000
    bad = {"loss": math.nan, "up": math.inf, **{f"n{k}": 1.0 for k in range(100)}}
    rows = [row(k, name, logged=bad) for k in range(2 * MOST_WORKERS)]
    report = {"warnings": [name] * 1000, "vbar": math.nan, "mean_staleness": math.inf}
    report["logged"] = _logged(*bad)
    board.take(sample(0.0, rows, report))
    kind, whole = read(board.whole())
    assert kind == "whole", "a name cannot end an event and begin another"
    assert len(whole["rows"]) == MOST_WORKERS
    assert {len(each[1]) for each in whole["rows"]} == {LONGEST_TEXT}
    assert whole["rows"][0][-1] == [None, None, *[1.0] * (LOGGED - 2)]
    assert len(whole["warnings"]) == MOST_LINES
    assert whole["state"]["vbar"] is None


def test_names_that_most_clients_log_have_room_and_others_go() -> None:
    """One client has logged many names before the others came, and logs new ones for ever."""
    board = Board({})
    first = [f"n{k}" for k in range(16)]
    board.take(sample(0.0, [row(1, logged=dict.fromkeys(first, 1.0))], {"logged": _logged(*first)}))
    viewer = Viewer(board)
    assert viewer.sections["names"] == first[:LOGGED]
    assert viewer.rows[1][-1] == [1.0] * LOGGED
    for tick in range(1, 20):
        names = ["loss", *(f"n{tick}-{k}" for k in range(15))]
        logged = {"loss": 0.5, **dict.fromkeys(names[1:], 1.0)}
        report = {"logged": _logged(*names), "gradients": 5, "mean_staleness": 2.0}
        viewer.take(board.take(sample(float(tick), [row(1, logged=logged)], report)))
        assert "loss" in viewer.sections["names"]
        later = Viewer(board)
        assert viewer.rows == later.rows
        assert set(viewer.series) == set(later.series)
        assert len(viewer.series) <= 1 + len(_OWN) + MOST_NAMES
    assert viewer.rows[1][-1][viewer.sections["names"].index("loss")] == 0.5
    assert viewer.series["log loss"].count(1.0) == 19
    assert viewer.series["staleness"].count(2.0) == 1, "the page's own always have room"


def test_rates_are_between_samples_and_never_negative() -> None:
    board = Board({})

    def point(time: float, version: int, staleness: float) -> dict[str, Any]:
        report = {"version": version, "gradients": version, "mean_staleness": staleness}
        report["ledger"] = {"pushed": {"bytes": 100 * version}, "fetched": {"bytes": 0}}
        found: dict[str, Any] = read(board.take(sample(time, (), report)))[1]["point"]
        return found

    assert "updates" not in point(10.0, 100, 2.0)
    second = point(12.0, 150, 4.0)
    assert (second["updates"], second["received"], second["sent"]) == (25, 2500, 0)
    assert second["staleness"] == pytest.approx((150 * 4.0 - 100 * 2.0) / 50)
    assert "updates" not in point(13.0, 20, 1.0), "it went back"


def test_times_stand_still_while_a_clock_falls() -> None:
    board = Board({})
    board.take(sample(100.0, (), {"version": 1}))
    back = read(board.take(sample(40.0, (), {"version": 9})))[1]["point"]
    assert back["t"] == 100.0
    assert "updates" not in back
    assert Viewer(board).series["t"] == [100.0, 100.0]


def test_numbers_that_are_not_finite_are_left_out_of_points() -> None:
    board = Board({})
    huge = {"loss": (math.inf, -1.7e308, 1.79769e308), "up": (math.nan, 1.0, 2.0)}
    found = read(board.take(sample(0.0, (), {"logged": huge})))[1]["point"]
    assert {name for name in found if " " in name} == {"min loss", "min up", "max up"}
    Viewer(board)


def test_those_that_join_again_after_a_rollback_are_told() -> None:
    board = Board({})

    def told(generation: int, *arrivals: tuple[int, str, str], **state: Any) -> list[str]:
        report = {"state": {"generation": generation, **state}}
        given = {"arrivals": arrivals, "arrived": len(arrivals)}
        found = read(board.take(sample(float(board.tick), (), report, **given)))[1]
        return [text for _time, _kind, text in found.get("events", ())]

    assert told(1, (1, "joined", "a"), (2, "joined", "b")) == ["2 clients joined: a, b"]
    assert told(2, (1, "joined", "c"), (2, "joined", "a"))[0] == "2 clients joined: c, a"
    assert told(2, (1, "returned", "a"))[0] == "a came back"
    assert told(2, (1, "returned", "a"), standby_of="x") == []
    assert "a came back" not in told(3, (1, "returned", "a")), "it is promoted, and counts on"


def test_a_report_of_an_engine_and_one_of_a_follower() -> None:
    """Of a follower there is next to nothing to report, and all of it is shown."""
    inline = Inline("fasgd")
    json.dumps(sections(gathered(inline.engine.gather(0)), {}), allow_nan=False)
    inline.define({"b": np.ones(2, np.float32), "w": np.ones(9, np.float32)})
    found = sections(gathered(inline.engine.gather(0)), {"event loop": 0.5})
    json.dumps(found, allow_nan=False)
    assert [line[0] for line in found["tensors"]] == ["w", "b"], "the largest first"
    bare = sections({"version": 3, "memory": {"resident": 5, "bound": 10}}, {})
    assert bare["state"]["version"] == 3
    assert bare["tensors"] == []


class TestHappened:
    def test_clients_that_come_and_go_together_are_one_event(self) -> None:
        arrivals = [(k, "joined", f"w{k}") for k in range(1, 1001)]
        found = [*happened({}, {}, [*arrivals, (1001, "lost", "w1"), (1002, "left", "w2")], 0)]
        assert found == [
            Happening("joined", "1,000 clients joined: w1, w2, w3, …"),
            Happening("lost", "the connection to w1 was lost"),
            Happening("left", "w2 left"),
        ]

    def test_refusals_a_rollback_a_pause_and_a_shard(self) -> None:
        shard = {"shard": 1, "gone": "", "bytes": 1, "version": 1, "behind": 0}
        before = {"version": 9, "refused": {"stale": 1}, "ready": "", "shards": [shard]}
        now = {
            "version": 5,
            "refused": {"stale": 2, "bad-push": 4},
            "ready": "paused by root",
            "shards": [{**shard, "gone": "it is lost"}],
            "filter": {"quarantined": ["bad"]},
            "warnings": ["look out"],
        }
        found = [each.text for each in happened(before, now, [], 0)]
        assert found == [
            "1 push was refused: stale",
            "4 pushes were refused: bad-push",
            "the model went back from version 9 to 5",
            "paused by root",
            "shard 1 is lost",
            "look out",
            "bad is quarantined: its pushes are not used",
        ]
        back = [each.text for each in happened(now, {**before, "version": 6}, [], 0)]
        assert "the server takes pushes" in back
        assert "shard 1 is back" in back

    def test_a_restart_from_the_state_is_told(self) -> None:
        before, now = ({"version": 9, "state": {"generation": k}} for k in (1, 2))
        [event] = happened(before, now, [], 0)
        assert event == Happening("rolled back", "the server began again at version 9")
