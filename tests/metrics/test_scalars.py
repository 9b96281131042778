"""One value for each name, of one report after another."""

from __future__ import annotations

import math
from typing import Any

from aiops.metrics.scalars import RunScalars, rate, staleness_between


def report(version: int, **more: Any) -> dict[str, Any]:
    return {
        "version": version,
        "gradients": version,
        "mean_staleness": 2.0,
        "ignored": 1,
        "refused": {"stale": 2, "not finite": 3},
        "rate_gain": 1.5,
        "vbar": None,
        "memory": {"resident": 1000},
        "worker_counts": {"active": 3, "silent": 1, "observer": 9},
        "ledger": {"pushed": {"bytes": 100 * version}, "fetched": {"bytes": 200 * version}},
        "logged": {"loss": [0.5, 0.25, 0.75], "odd": [math.nan, 1.0, 2.0]},
        **more,
    }


def test_the_first_report_has_no_rates() -> None:
    assert RunScalars().take(10.0, report(4)) == {
        "loss": 0.5,
        "server/version": 4,
        "server/gradients": 4,
        "server/ignored": 1,
        "server/refused": 5,
        "server/rate_gain": 1.5,
        "server/resident_bytes": 1000,
        "server/workers": 4,
    }


def test_rates_are_since_the_report_before() -> None:
    scalars = RunScalars()
    scalars.take(10.0, report(4))
    found = scalars.take(12.0, report(14, mean_staleness=4.0, vbar=0.25))
    assert found["server/updates_per_second"] == 5
    assert found["server/received_bytes_per_second"] == 500
    assert found["server/sent_bytes_per_second"] == 1000
    assert found["server/staleness"] == (14 * 4.0 - 4 * 2.0) / 10
    assert found["server/vbar"] == 0.25


def test_after_a_rollback_there_is_no_rate() -> None:
    scalars = RunScalars()
    scalars.take(10.0, report(14))
    found = scalars.take(12.0, report(4))
    assert found["server/version"] == 4
    assert not {name for name in found if "per_second" in name or name == "server/staleness"}


def test_a_server_without_a_model_has_little_to_say() -> None:
    assert RunScalars().take(1.0, {"version": 0}) == {"server/version": 0, "server/refused": 0}
    assert rate({}, {"a": {"b": 1}}, 1.0, "a", "b") is None
    assert staleness_between({}, {}) is None


def test_a_worker_cannot_name_a_number_as_the_servers_are() -> None:
    found = RunScalars().take(1.0, report(4, logged={"server/version": [9.0, 9.0, 9.0]}))
    assert found["server/version"] == 4
