"""The idle time of workers when a merge takes as long as three gradients."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.algorithms.cases import AlgorithmCase
from benchmarks.algorithms.link import SlowLine
from benchmarks.algorithms.problem import Bench
from benchmarks.algorithms.training import TrainingPlan, carry_out

PACE = 0.060
"""Seconds that a gradient takes."""

MERGE = 3
"""Gradients that a push and its answer take on the line."""

SECONDS, WARMUP = 14.0, 3.0
"""How long a run takes, and how much of its beginning does not count."""

GOAL = 0.02
"""The workers' idle share with tau_max 8."""

_DELAY = 0.001
_OVERHEAD = 0.004  # seconds that a merge takes beside its way over the line: the server's, and two
# portions of the line's


def cases() -> list[AlgorithmCase]:
    """Return the policies that are compared."""
    first = [
        AlgorithmCase("no-delay", f"τ_max {tau}", {"tau_max": tau}) for tau in (1, 2, 4, 8, 16)
    ]
    second = [
        AlgorithmCase("no-delay", f"cycles, τ_max {tau}", {"tau_max": tau, "variant": 2})
        for tau in (2, 4, 8, 16)
    ]
    return [*first, *second, AlgorithmCase("hardsync")]


def line(bench: Bench, pace: float = PACE) -> SlowLine:
    """Return the line on which a model goes up and comes down in the time of `MERGE` gradients."""
    return SlowLine(2 * bench.nbytes / (MERGE * pace - 2 * _DELAY - _OVERHEAD), _DELAY)


def key(case: AlgorithmCase) -> dict[str, Any]:
    """Return what a run is a measurement of."""
    return {
        "policy": case.policy,
        "variant": case.variant,
        "settings": dict(case.settings),
        "pace": PACE,
        "seconds": SECONDS,
    }


async def measure(case: AlgorithmCase, bench: Bench) -> dict[str, Any]:
    """Run it; return its row.

    ``merge`` is the median time from the first byte of a push to the last of its answer, seen on
    the line, in gradients; ``pace`` the workers' steps, of the steps there are when none waits.
    """
    slow = line(bench)
    paces = (PACE,) * bench.problem.workers
    run = TrainingPlan(case=case, seconds=SECONDS, warmup=WARMUP, paces=paces, line=slow)

    outcome = await carry_out(run, bench)
    rates = [worker.steps / worker.seconds for worker in outcome.workers]
    return {
        "idle": round(outcome.idle, 4),
        "merge": round(statistics.median(outcome.merges) / PACE, 2),
        "speed": round(sum(rates) / len(rates) * PACE, 3),
        "bytes_per_second": round(slow.rate),
    }
