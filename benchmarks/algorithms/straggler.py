"""The cost to the others of a worker that is five times slower."""

from __future__ import annotations

from typing import Any

from benchmarks.algorithms.cases import AlgorithmCase, policies
from benchmarks.algorithms.problem import Bench
from benchmarks.algorithms.training import TrainingOutcome, TrainingPlan, carry_out

PACE = 0.040
"""Seconds that a gradient takes."""

SLOWER = 5
"""Times that the straggler takes longer."""

SECONDS, WARMUP = 8.0, 2.0
"""How long a run takes, and how much of its beginning does not count."""

GOAL = 0.9
"""The share of their throughput that the others keep, of the policies in `GOAL_FOR`."""

GOAL_FOR = ("average", "asgd", "fasgd")

_MEASURED = (
    *("average", "asgd", "fasgd", "sasgd", "softsync", "ssp", "rennala", "ringmaster"),
    *("downpour", "easgd", "fedbuff", "no-delay", "diloco", "hardsync"),
)


def cases() -> list[AlgorithmCase]:
    """Return the policies that are compared."""
    known = policies()
    return [AlgorithmCase(name) for name in _MEASURED if name in known]


def key(case: AlgorithmCase) -> dict[str, Any]:
    """Return what a run is a measurement of."""
    return {
        "policy": case.policy,
        "variant": case.variant,
        "settings": dict(case.settings),
        "pace": PACE,
        "slower": SLOWER,
        "seconds": SECONDS,
    }


async def measure(case: AlgorithmCase, bench: Bench) -> dict[str, Any]:
    """Run it twice; return its row.

    ``healthy`` and ``beside`` are the steps per second of all workers but the last, when that is as
    fast as they are, and when it is the straggler; ``kept`` is the ratio.
    """
    count = bench.problem.workers
    healthy = _throughput(await _run(case, bench, (PACE,) * count))
    beside = _throughput(await _run(case, bench, (*(PACE,) * (count - 1), PACE * SLOWER)))
    return {
        "healthy": round(healthy, 2),
        "beside": round(beside, 2),
        "kept": round(beside / healthy, 4),
    }


async def _run(case: AlgorithmCase, bench: Bench, paces: tuple[float, ...]) -> TrainingOutcome:
    run = TrainingPlan(case=case, seconds=SECONDS, warmup=WARMUP, paces=paces)
    return await carry_out(run, bench)


def _throughput(outcome: TrainingOutcome) -> float:
    """Return the steps per second of all workers but the last."""
    return sum(worker.steps / worker.seconds for worker in outcome.workers[:-1])
