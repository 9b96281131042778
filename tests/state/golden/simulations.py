"""A checkpoint of the simulator: half a run in which most of what can be kept is kept."""

from __future__ import annotations

from pathlib import Path

from aiops.sim.turns.run import Run
from aiops.sim.turns.simulation import Simulation
from tests.sim.turns.wide_task import WideTask

HALF, ALL = 22, 50
"""Turns before the checkpoint, and in all."""

CASE = Simulation(
    policy="diloco",
    set=("local_steps=4", "inner=momentum", "inner_lr=0.05", "momentum=0.5"),
    push_codec=("int8",),
    fetch_codec=("lowrank:rank=1",),
    clients=3,
    batch_size=8,
    iterations=ALL,
    samples=2,
    dataset="none",
    hidden=1,
    selection="softmax:add=-0.5",
    kernels="numpy",
)


def write(path: Path) -> None:
    """Write it after half of the turns, with an answer that is held back."""
    with Run(CASE, WideTask()) as run:
        run.dispatcher.run(HALF)
        assert any(worker.strategy.under_way for worker in run.dispatcher.workers)
        run.save(path)
