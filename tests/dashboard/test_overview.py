"""A server's report as a few numbers and rows for a terminal."""

from __future__ import annotations

from typing import Any

import pytest

from aiops.dashboard.overview import KEYS, Overview


def line(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "worker": number,
        "name": f"w{number}",
        "role": "worker",
        "present": True,
        "excused": False,
        "pushes": 0,
        "refused": 0,
        "ignored": 0,
        "staleness": 0,
        "bytes_pushed": 0,
        "bytes_fetched": 0,
        "seconds_since_answer": 0.0,
        "compute_seconds": None,
        "idle_seconds": None,
        "logged": {},
        **fields,
    }


def report(time: float, *lines: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "time": time,
        "policy": "asgd",
        "seconds": time,
        "version": 0,
        "mean_staleness": 0.0,
        "refused": {},
        "paused": "",
        "warnings": [],
        "budget": None,
        "memory": None,
        "logged": {},
        "ledger": {"pushed": {"bytes": 0}, "fetched": {"bytes": 0}},
        "workers": [*lines],
        **fields,
    }


def test_rates_and_idle_shares_are_of_the_time_between_two_reports() -> None:
    first = report(10.0, line(1, pushes=5, compute_seconds=8.0, idle_seconds=2.0), version=100)
    last = report(12.0, line(1, pushes=9, compute_seconds=9.0, idle_seconds=3.0), version=150)
    last["ledger"] = {"pushed": {"bytes": 500}, "fetched": {"bytes": 100}}
    found = Overview.of(last, first)
    assert found.facts["updates_per_second"] == 25
    assert found.facts["received_per_second"] == 250
    [row] = found.rows
    assert (row["rate"], row["idle"]) == (2.0, 0.5)
    alone = Overview.of(last)
    assert alone.facts["updates_per_second"] is None
    assert (alone.rows[0]["rate"], alone.rows[0]["idle"]) == (None, 0.25)


def test_a_server_that_has_gone_back_has_no_rates() -> None:
    found = Overview.of(report(2.0, line(1), version=1), report(1.0, line(1, pushes=4), version=9))
    assert found.facts["updates_per_second"] is None
    assert found.rows[0]["rate"] is None


def test_a_worker_that_is_slower_than_reports_has_an_even_rate() -> None:
    """It pushes every 5 s, and there is a report every 2 s."""
    before, last, rates = None, None, list[float | None]()
    for k in range(30):
        pushes, since = divmod(2 * k, 5)
        now = report(2.0 * k, line(1, pushes=pushes, seconds_since_answer=float(since)))
        last = Overview.of(now, before, last)
        rates.append(last.rows[0]["rate"])
        before = now
    assert rates[:3] == [None] * 3, "it has not pushed twice"
    assert set(rates[3:]) == {0.2}
    silent = Overview.of(
        report(158.0, line(1, pushes=11, seconds_since_answer=103.0)), before, last
    )
    assert silent.rows[0]["rate"] == pytest.approx(3 / 103), "it has stopped"


def test_pushes_that_are_refused_do_not_keep_a_rate_up() -> None:
    """One of two is refused, and then all are; each is answered."""
    before, last, rates = None, None, list[float | None]()
    for k in range(40):
        now = report(float(k), line(1, pushes=min(k // 2, 10)))
        last = Overview.of(now, before, last)
        rates.append(last.rows[0]["rate"])
        before = now
    assert set(rates[2:21]) == {0.5}
    assert rates[-1] == pytest.approx(3 / 19)


def test_an_idle_share_stays_until_a_worker_says_another() -> None:
    told = {"compute_seconds": 8.0, "idle_seconds": 2.0}
    more = {"compute_seconds": 9.0, "idle_seconds": 3.0}
    first, second, third = (
        report(1.0, line(1, **told)),
        *(report(k, line(1, **more)) for k in (2, 3)),
    )
    last = Overview.of(second, first, Overview.of(first))
    assert last.rows[0]["idle"] == 0.5
    assert Overview.of(third, second, last).rows[0]["idle"] == 0.5


def test_rates_do_not_follow_a_wall_clock_that_is_set() -> None:
    now, before = report(3.0, version=8), report(1.0, version=4)
    found = Overview.of(now | {"time": 10.0}, before | {"time": 5000.0})
    assert found.facts["updates_per_second"] == 2.0


def test_those_that_have_left_have_no_row_and_states_are_told() -> None:
    lines = (line(1, present=False), line(2, excused=True), line(3, role="observer"))
    found = Overview.of(report(0.0, *lines))
    assert [row["state"] for row in found.rows] == ["silent", "observer"]
    assert (found.facts["workers"], found.facts["silent"]) == (1, 1)


def test_order() -> None:
    names = ("w10", "w2", "top", "w1")
    lines = [line(n, name=name, pushes=n) for n, name in enumerate(names, 1)]
    lines[2]["role"] = "observer"
    lines[0]["logged"], lines[1]["logged"] = {"loss": 0.5}, {"loss": 0.7}
    found = Overview.of(report(0.0, *lines, logged={"loss": [0.6, 0.5, 0.7]}))
    assert [row["name"] for row in found.sorted_by("name")] == ["w1", "w2", "w10", "top"]
    assert [row["worker"] for row in found.sorted_by("pushes")] == [4, 3, 2, 1]
    assert [row["worker"] for row in found.sorted_by("pushes", reverse=True)] == [1, 2, 3, 4]
    assert [row["worker"] for row in found.sorted_by("loss")][:2] == [2, 1]


@pytest.mark.parametrize("name", KEYS)
def test_every_column_sorts_rows_that_know_nothing(name: str) -> None:
    found = Overview.of(report(0.0, line(1), line(2)))
    assert len(found.sorted_by(name)) == 2
