"""The soak benchmark: what a trend is, what growth is, a tiny run of it."""

from __future__ import annotations

import json
import re
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiops.errors import UsageError
from benchmarks import crowd, soak
from benchmarks.crowd import ClientTally, Governor
from benchmarks.footprint import Sample
from benchmarks.sizes import MIB
from benchmarks.soak import Options
from tests.rows import each_row

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class TestTrend:
    def test_a_line_is_its_own_slope_without_an_error(self) -> None:
        x = np.arange(20.0)
        slope, error = soak.trend(x, 3 * x + 7)
        assert slope == pytest.approx(3)
        assert error == pytest.approx(0, abs=1e-9)

    def test_students_t(self) -> None:
        for free, wanted in ((8, 2.306), (10, 2.228), (30, 2.042), (58, 2.002)):
            assert soak._student(free) == pytest.approx(wanted, abs=1e-3)

    def test_independent_errors_are_covered_nineteen_times_in_twenty(self) -> None:
        rng, x = np.random.default_rng(0), np.arange(60.0)
        found = [soak.trend(x, x + rng.standard_normal(60)) for _ in range(400)]
        covered = np.mean([abs(slope - 1) <= error for slope, error in found])
        assert 0.9 <= covered <= 0.98

    def test_errors_like_their_neighbours_widen_it(self) -> None:
        rng, x = np.random.default_rng(0), np.arange(60.0)
        noise = rng.standard_normal((200, 60))
        alike = np.stack([np.convolve(row, np.ones(6) / 6**0.5, "same") for row in noise])
        apart = np.mean([soak.trend(x, row)[1] for row in noise])
        assert np.mean([soak.trend(x, row)[1] for row in alike]) > 1.5 * apart


def held(totals: list[int]) -> dict[str, Any]:
    samples = [Sample(float(n), total - 30, 30, 1 + n % 3, 0) for n, total in enumerate(totals)]
    return soak._figures(samples)


def test_what_is_said_of_a_servers_memory() -> None:
    found = held([1000 * MIB + n * MIB for n in range(120)])
    assert found["samples"] == 120
    assert len(found["blocks"]) == soak.BLOCKS
    assert found["versions_alive"] == 3
    assert found["slope_bytes_per_hour"] == pytest.approx(3600 * MIB)
    assert found["peak_bytes"] == 1119 * MIB
    assert (found["first_tenth_bytes"], found["last_tenth_bytes"]) == (
        round(1005.5 * MIB),
        round(1113.5 * MIB),
    )
    assert soak.grows(found)


def test_what_stays_below_one_fiftieth_is_no_growth_and_what_swings_is_none() -> None:
    assert not soak.grows(held([10_000 + n for n in range(120)]))
    assert not soak.grows(held([10_000 + 4000 * (n // 15 % 2) for n in range(120)]))


def test_what_fills_and_then_stays_is_no_growth_and_what_begins_late_is() -> None:
    def wave(n: int) -> int:
        return n // 2 % 2 * 20

    assert not soak.grows(held([10_000 + min(n, 50) * 20 + wave(n) for n in range(120)]))
    assert soak.grows(held([10_000 + max(n - 40, 0) * 20 + wave(n) for n in range(120)]))


def test_what_is_said_of_all_servers() -> None:
    def said(*cells: dict[str, Any]) -> str:
        named = [{**cell, "cell": str(n), "failed": None} for n, cell in enumerate(cells)]
        (line,) = soak.notes({"options": {"minutes": 60}, "cells": named})
        return line

    flat = held([10_000 + n % 2 for n in range(120)])
    fills = held([10_000 + min(n, 50) * 20 + n // 2 % 2 * 20 for n in range(120)])
    leaks = held([10_000 + 40 * n for n in range(120)])
    assert said(flat) == "memory does not grow by more than 2%"
    assert re.fullmatch(r"memory grew by \d\.\d% at most, and does not go on growing", said(fills))
    assert said(fills, leaks) == "memory grows: 1"


def test_every_answered_push_was_applied_and_none_that_nobody_sent() -> None:
    tally = ClientTally(pushed=5, attempted=7)
    for applied in (5, 6, 7):
        soak.check(tally, applied)
    for applied in (4, 8):
        with pytest.raises(ValueError, match=f"5 pushes were answered.*applied {applied}"):
            soak.check(tally, applied)


def test_a_client_that_fails_fails_its_cell_alone() -> None:
    def check() -> None:
        raise KeyError("w")

    watch: Any = SimpleNamespace(close=lambda: None, samples=[])
    crowd: Any = SimpleNamespace(close=lambda: None, check=check, tally=ClientTally())
    found = soak._cell("tcp", Options(), watch, crowd, "aiops://127.0.0.1:1", 1.0)
    assert found == {"cell": "tcp", "failed": "KeyError: 'w'"}
    assert soak.failures({"cells": [found]}) == ["tcp: KeyError: 'w'"]


def test_a_server_that_nobody_called_has_not_been_measured() -> None:
    def close() -> None:
        return None

    watch: Any = SimpleNamespace(close=close, samples=[Sample(1.0, 1, 0, 1, 0)] * 99)
    idle: Any = SimpleNamespace(close=close, check=close, tally=ClientTally(pushed=9, attempted=9))
    found = soak._cell("tcp", Options(), watch, idle, "aiops://127.0.0.1:1", 1.0)
    assert "no client made a call: watching alone took more than --share" in found["failed"]


def test_the_model_has_large_and_small_tensors_of_every_kind() -> None:
    params = crowd.model(4 * MIB)
    sizes = [array.nbytes for array in params.values()]
    assert 0.9 * 4 * MIB < sum(sizes) <= 4 * MIB
    assert max(sizes) > 100 * min(sizes)
    assert {name[0] for name in params} == set("abcde")
    assert {array.ndim for array in params.values()} == {1, 2}


def test_the_governor_waits_until_all_is_over() -> None:
    over = threading.Event()
    assert not Governor(1e9, (), over).rest()
    slow = Governor(1e-9, (), over)
    sum(range(10**5))  # so much of a share that it would take years
    waiting = threading.Thread(target=slow.rest)
    waiting.start()
    assert waiting.is_alive()
    over.set()
    waiting.join(60)
    assert not waiting.is_alive()
    assert slow.rest()


def test_the_governor_does_not_make_up_for_a_time_in_which_all_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, spent, over = [100.0], [0.0], threading.Event()
    monkeypatch.setattr(crowd.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Governor, "_spent", lambda self: spent[0])
    waited: list[float] = []
    monkeypatch.setattr(over, "wait", lambda seconds: bool(waited.append(seconds)))
    governor = Governor(0.5, (), over)
    now[0] += 1000
    governor.rest()
    spent[0] += 1.25  # worth 2.5 seconds, of which 2 are made up for
    governor.rest()
    assert waited == [0.0, pytest.approx(0.5)]


def more_looks(figures: Any, samples: list[Sample]) -> Any:
    """The figures of a memory that goes on as it was last seen: as many looks as they need."""
    last = samples[-1]
    later = [last._replace(seconds=last.seconds + look) for look in range(1, 21)]
    return figures([*samples, *later])


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(soak, "_FEWEST", 1)  # a loaded machine looks seldom
    monkeypatch.setattr(soak, "_figures", partial(more_looks, soak._figures))
    file, plot = tmp_path / "out.json", tmp_path / "out.svg"
    line = "--minutes 0.03 --size 64KiB --seats 2 --known 3 --share 1"
    soak.main([*line.split(), f"--json={file}", f"--plot={plot}"])
    printed = capsys.readouterr().out
    for word in ("slope an hour", "cut off", "less than 5 minutes", *soak.CELLS):
        assert word in printed
    found = json.loads(file.read_text())
    for cell in found["cells"]:
        assert cell["failed"] is None
        assert cell["attempted"] >= cell["pushed"] >= 3
        assert cell["calls"] > 0
        assert cell["peak_bytes"] >= cell["first_tenth_bytes"] > 10 * MIB
    tcp, near, shards = found["cells"]
    assert near["blocks"][-1]["segments"]
    assert not tcp["blocks"][-1]["segments"]
    # A follower has fewer connections; in the first tenth either may have loaded all, or not yet.
    assert shards["peak_bytes"] > 1.05 * tcp["peak_bytes"], "both processes count"
    assert [cell.beside for cell in soak.cells(found)] == ["first tenth"] * 6
    assert "<svg" in plot.read_text()


@each_row(
    ("wrong", "says"),
    [
        ({"minutes": 0}, "positive"),
        ({"known": -1}, "positive"),
        ({"size": 4}, "at least 64 KiB"),
        ({"cells": ("udp",)}, "no cell is called 'udp'"),
        ({"policy": "hardsync"}, "wait for each other"),
    ],
)
def test_what_cannot_be_measured(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        soak.run(Options(**wrong))
