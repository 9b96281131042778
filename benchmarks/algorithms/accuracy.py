"""The accuracy that each policy reaches in a fixed number of epochs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from benchmarks.algorithms.cases import AlgorithmCase
from benchmarks.algorithms.problem import Bench
from benchmarks.algorithms.training import TrainingPlan, carry_out

LOOKS = 20
"""Tests in the course of a run."""

GOAL = 0.96
"""Test accuracy, mean over the seeds."""


def key(case: AlgorithmCase, seed: int) -> dict[str, Any]:
    """Return what a run is a measurement of."""
    return {
        "policy": case.policy,
        "variant": case.variant,
        "settings": dict(case.settings),
        "seed": seed,
    }


async def measure(case: AlgorithmCase, seed: int, bench: Bench) -> dict[str, Any]:
    """Run it; return its row: see the top of docs/results/algorithms.txt for the meanings."""
    curve: list[list[float | None]] = []

    async def look(steps: int, params: Mapping[str, Any]) -> None:
        loss, accuracy = await asyncio.to_thread(bench.test, params)
        samples = steps * bench.problem.batch_size
        rounded = round(loss, 4) if math.isfinite(loss) else None
        curve.append([samples, round(accuracy, 4), rounded])

    run = TrainingPlan(case=case, seed=seed, steps=bench.steps, looks=LOOKS)
    outcome = await carry_out(run, bench, look)
    stats = outcome.stats
    return {
        "curve": curve,
        "accuracy": curve[-1][1],
        "seconds": round(outcome.seconds, 2),
        "updates": stats["version"],
        "staleness": None if case.averaging else round(stats["mean_staleness"], 3),
        "idle": round(outcome.idle, 4),
        "wasted": stats["wasted"],
        "bytes": outcome.nbytes,
    }
