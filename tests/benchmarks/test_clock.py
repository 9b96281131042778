"""The benchmarks of virtual time: they measure what they say, and refuse what makes no sense."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aiops.errors import UsageError
from benchmarks import clock, cluster
from tests.rows import each_row


@pytest.mark.slow
def test_a_small_measurement() -> None:
    """Nothing is asserted of how long it took: only that both sides did the same work."""
    options = clock.Options(
        policies=("hardsync",), paces=("log-normal",), workers=(2,), kib=8, gradients=4, rounds=1
    )
    result = clock.run(options)
    (case,) = result["cases"]
    assert case["error"] == pytest.approx(case["predicted"] / case["seconds"]["median"] - 1)
    assert case["staleness"]["median"] == case["predicted_staleness"] == 0
    assert case["seconds"]["median"] >= 4 * 0.1 / 4, "no worker computes faster than it sleeps"
    assert clock.table(result).row_count == 1


@each_row(
    ("wrong", "says"),
    [
        ({"rounds": 0}, "at least one round"),
        ({"paces": ("fast",)}, "no pace is called 'fast'"),
        ({"policies": ("fasdg",)}, "did you mean 'fasgd'"),
        ({"workers": (0,)}, "0 workers"),
        ({"rate": "slow"}, "is not a rate"),
    ],
)
def test_what_cannot_be_measured(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        clock.run(replace(clock.Options(), **wrong))


def test_every_case_of_speed_runs() -> None:
    result = cluster.run(cluster.Options(clients=2, many=20, seconds=0.05, rounds=1))
    assert all(case["median"] > 0 for case in result["cases"].values())
    assert cluster.table(result).row_count == len(result["cases"])
    with pytest.raises(UsageError, match="positive"):
        cluster.run(cluster.Options(clients=0))
