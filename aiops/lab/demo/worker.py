"""A worker of the demo: ``python -m aiops.lab.demo.worker`` with the flags of `Task`.

It speaks in lines of JSON on standard output: ``{"ready": true}`` when it is connected and has its
data, then, after its parent has said the word, its progress a few times per second (`Progress`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import aiops
from aiops.client.params import Params
from aiops.client.worker import Gradients
from aiops.errors import AiopsError
from aiops.lab.workloads import MLP, batches, load
from aiops.net.child_guard import ChildGuard

REPORT_EVERY = 0.25
"""Seconds between two lines of progress."""

PATIENCE = 120.0
"""Seconds that a worker waits for the others to be ready."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a worker has to do; every field is a flag."""

    url: str
    index: int
    workers: int
    dataset: str
    hidden: int
    steps: int
    batch_size: int
    seed: int

    def flags(self) -> list[str]:
        """Return the command line that stands for it."""
        return [f"--{f.name.replace('_', '-')}={getattr(self, f.name)}" for f in fields(self)]

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None) -> Task:
        """Read the command line."""
        parser = argparse.ArgumentParser(prog="python -m aiops.lab.demo.worker")
        for field in fields(cls):
            kind = str if field.type == "str" else int
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, required=True)
        return cls(**vars(parser.parse_args(arguments)))


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a worker says of itself.

    Attributes
    ----------
    steps
        Mini-batches done.
    loss
        Mean training loss of the mini-batches since the last line, in nats.
    idle
        Share of its time, since training began, that it waited for the server.
    recomputed
        Gradients it computed again because the policy refused them.
    """

    steps: int
    loss: float
    idle: float
    recomputed: int


class _Trainer:
    """The training loop, with its bookkeeping."""

    def __init__(self, worker: aiops.Worker, model: MLP, stream: Iterator[Any]) -> None:
        self._worker, self._model, self._stream = worker, model, stream
        self._room = worker.params.like()
        self._batch: Any = None
        self._losses: list[float] = []

    def train(self, steps: int) -> None:
        """Take so many steps."""
        began = time.monotonic()
        due = began + REPORT_EVERY
        for _ in range(steps):
            self._batch = next(self._stream)
            # A function, not arrays: some policies want a gradient again on newer parameters.
            self._worker.step(self._gradients)
            now = time.monotonic()
            if now >= due:
                due = now + REPORT_EVERY
                self._report(now - began)
        self._report(time.monotonic() - began)

    def _gradients(self, params: Params) -> Gradients:
        x, y = self._batch
        loss, gradients = self._model.gradients(params, x, y, out=self._room)
        self._losses.append(loss)
        return gradients

    def _report(self, seconds: float) -> None:
        losses, self._losses = self._losses, []
        progress = Progress(
            steps=self._worker.steps,
            loss=sum(losses) / len(losses) if losses else float("nan"),
            idle=self._worker.idle_seconds / seconds,
            recomputed=self._worker.recomputed,
        )
        say(dataclasses.asdict(progress))


def say(row: dict[str, Any]) -> None:
    """Write a line of JSON for the parent."""
    print(json.dumps(row), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one worker."""
    task, leash = Task.parse(arguments), ChildGuard()
    data = load(task.dataset, download=False).flat()
    model = MLP((data.features, task.hidden, data.classes))
    stream = batches(data, task.batch_size, task.seed, task.index, task.workers)
    name = f"worker-{task.index + 1}"
    with aiops.Worker(task.url, model.init(task.seed), name=name) as worker:
        say({"ready": True})
        if not leash.wait_for_word(PATIENCE):
            raise SystemExit(f"{name}: the others were not ready within {PATIENCE:g} s")
        _Trainer(worker, model, stream).train(task.steps)


if __name__ == "__main__":
    try:
        main()
    except AiopsError as error:
        sys.exit(f"aiops: {error}")
