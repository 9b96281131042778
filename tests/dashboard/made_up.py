"""A made-up run for the page: any number of workers, the same each time, and no training."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from aiops.common.gathering import Gathering
from aiops.dashboard.board import ServerSample
from aiops.dashboard.document import WorkerRow
from aiops.errors import Unauthorised
from aiops.serving.members import Members

TENSORS = ("embedding", "block0.attention", "block0.mlp", "block1.attention", "block1.mlp", "head")
HOSTILE = "<img src=x onerror=document.title='owned'>"


class MadeUpRun:
    """A server as the live page sees it; each report is a second after the last.

    Parameters
    ----------
    workers
        How many there are.
    hostile
        Whether the first has a name that is HTML.
    """

    not_ready = ""

    def __init__(self, workers: int, *, hostile: bool = False) -> None:
        self.workers, self.hostile = workers, hostile
        self.seconds = 0
        self._gradients, self._staleness = 0, 0.0  # all so far, and the sum of theirs
        self._draw = random.Random(1)
        self._speeds = [self._draw.uniform(2.0, 9.0) for _ in range(workers)]
        self._pushes = [0.0] * workers
        self._left: set[int] = set()
        self._arrivals: list[tuple[int, str, str]] = []
        for number in range(workers):
            self._arrive("joined", number)

    def _name(self, number: int) -> str:
        return HOSTILE if self.hostile and not number else f"worker-{number}"

    def _arrive(self, how: str, number: int) -> None:
        self._arrivals.append((len(self._arrivals) + 1, how, self._name(number)))

    def _loss(self, number: int) -> float:
        noise = math.sin(1.7 * number + 0.6 * self.seconds) * 0.12
        return 0.35 + 2.0 * math.exp(-self.seconds / 60) * (1 + noise)

    def _step(self) -> None:
        self.seconds += 1
        for number, speed in enumerate(self._speeds):
            if number not in self._left:
                self._pushes[number] += speed * (0.9 + 0.2 * self._draw.random())
        if self.seconds in (70, 95) and self.workers > 2:
            lost = 1 if self.seconds == 70 else 2
            self._left.add(lost)
            self._arrive("lost" if lost == 1 else "left", lost)
        if self.seconds == 110 and self.workers > 2:
            self._left.discard(1)
            self._arrive("returned", 1)

    def report(self, shown: int) -> Mapping[str, Any]:
        """Return the report of the next second."""
        self._step()
        version = int(sum(self._pushes))
        stale = 5.4 + 0.7 * math.sin(self.seconds / 9) + 0.4 * self._draw.random()
        self._staleness += (version - self._gradients) * stale
        self._gradients = version
        losses = [self._loss(number) for number in range(self.workers)]
        accuracy = 0.97 - 0.87 * math.exp(-self.seconds / 45)
        bins = {0: 0.04, 1: 0.1, 2: 0.17, 4: 0.28, 7: 0.24, 13: 0.12, 25: 0.04, 40: 0.01}
        rate = sum(s for n, s in enumerate(self._speeds) if n not in self._left)
        wave = 1 + 0.05 * math.sin(self.seconds / 4)
        return {
            "policy": "fasgd",
            "settings": {"lr": 0.005, "gamma": 0.95, "beta": 0.9},
            "version": version,
            "gradients": version,
            "refused": {"bad-push": 3} if self.seconds >= 50 else {},
            "ignored": version // 90,
            "mean_staleness": self._staleness / max(1, version),
            "staleness": {str(tau): int(share * version) for tau, share in bins.items()},
            "parameters": 3_274_634,
            "tensors": len(TENSORS),
            "memory": {"resident": 412_000_000 + 40_000 * self.seconds, "bound": 3_600_000_000},
            "budget": {
                "bytes_per_second": 25_000_000,
                "worker_bytes_per_second": None,
                "used": 21_300_000 * wave,
                "backlog": 180_000,
                "utilisation": 0.86,
                "c_push": 0.42,
                "c_fetch": 0.87,
            },
            "ledger": {
                "pushed": self._flow(version * 21_000),
                "fetched": self._flow(version * 38_000),
            },
            "by_tensor": {
                "names": list(TENSORS),
                "sizes": [1_200_000, 590_000, 786_000, 590_000, 98_000, 10_634],
                "norm": [0.31, 0.88, 1.42, 1.1, 2.7, 0.09 * wave],
                "vbar": None,
                "params": [31.0, 14.2, 19.8, 13.9, 8.1, 0.9],
            },
            "logged": {
                "loss": [sum(losses) / len(losses), min(losses), max(losses)],
                "accuracy": [accuracy, accuracy, accuracy],
            },
            "worker_counts": {"active": self.workers - len(self._left), "silent": 0},
            "profile": {
                "seconds": self.seconds,
                **{what: {"share": share * wave} for what, share in _PROFILE.items()},
            },
            "updates_per_second": rate,
        }

    @staticmethod
    def _flow(nbytes: int) -> dict[str, int]:
        raw = 4 * nbytes
        return {"bytes": nbytes, "payload": nbytes, "raw": raw, "skipped": raw // 3}

    def sample(self, time: float) -> ServerSample:
        """Return the next second as a sample."""
        report, members = self.report(0), self.members(0)
        return ServerSample(
            *(time, members.clock, report, None, members.workers),
            *(members.arrivals, members.arrived, self.take()),
        )

    def take(self) -> dict[str, float]:
        """Return the shares of a processor, as `aiops.net.thread_times.ThreadShares`."""
        wave = 0.03 * math.sin(self.seconds / 7) + 0.02 * self._draw.random()
        return {"event loop": 0.36 + wave, "updates": 0.22 + wave / 2, "others": 0.01}

    def gather(self, shown: int) -> Gathering[Mapping[str, Any]]:
        """Return the report of the next second, without a pause."""
        return self.report(shown)
        yield

    def members(self, most: int) -> Members:
        """Return the rows of this second."""
        rows = [self._row(number) for number in range(self.workers) if number not in self._left][
            :most
        ]
        count = self.workers - len(self._left)
        arrivals = tuple(self._arrivals[-256:])
        return Members(float(self.seconds), tuple(rows), count, arrivals, len(self._arrivals))

    def administrator(self, token: str) -> str:
        """Return the name of the only token."""
        if token != "secret":
            raise Unauthorised("there is no such token")
        return "root"

    async def take_snapshot(self, by: str) -> str:
        """Return a sentence."""
        return f"{by}: snapshot"

    def send_away(self, by: str, client: str) -> str:
        """Return a sentence."""
        return f"{by}: remove {client}"

    def norms(self) -> None:
        """None: they are in the report."""

    def _row(self, number: int) -> WorkerRow:
        pushes, speed = int(self._pushes[number]), self._speeds[number]
        idle = 0.05 + 0.5 * (speed - 2.0) / 7.0
        state = "silent" if number % 97 == 96 else "worker"
        return WorkerRow(
            *(number + 1, self._name(number), state, pushes, int(number % 31 == 3), pushes // 90),
            *(int(speed * 2) % 13, pushes * 21_000, pushes * 38_000, self.seconds - 0.2),
            *(self.seconds * (1 - idle), self.seconds * idle),
            {"loss": self._loss(number), "accuracy": 0.9},
        )


_PROFILE = {"receive": 0.11, "decode": 0.04, "policy": 0.03, "kernel": 0.29, "send": 0.13}
