"""One run of the experiment, with nothing left open."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiops.algorithms import find
from aiops.bandwidth import gates
from aiops.bandwidth.units import parse_rate
from aiops.codecs.choice import CodecChoice
from aiops.errors import UsageError, nearest
from aiops.lab.experiments.bandwidth.networks import NETWORKS
from aiops.lab.experiments.execution import PERCEPTRON
from aiops.lab.workloads import DATASETS
from aiops.serving.config import Config

MAX_WORKERS = 64


@dataclass(frozen=True, kw_only=True)
class BandwidthCase:
    """The settings of one run, by which its result is found again.

    Attributes
    ----------
    policy, lr, set
        The server's algorithm, its learning rate (None: its own) and further settings.
    gate, push_codec, fetch_codec, budget
        What keeps bytes from crossing, as the server's flags ``--gate``, ``--push-codec``,
        ``--fetch-codec`` and ``--bandwidth-budget`` read it; empty: nothing.
    workers, per_process
        How many workers, and how many of them are threads of one process.
    network
        What they train, one of `aiops.lab.experiments.bandwidth.networks.NETWORKS`.
    dataset, hidden
        The data and the hidden units of the perceptron.
    batch_size, seed
        Of the mini-batches.
    gradients
        Mini-batches in all; workers compute them as fast as they can, and all end together.
    link, delay
        The rate of the link between all workers and the server, each way, and the seconds that a
        byte travels on it; empty: no link but the machine's own.
    samples
        How often the test error is looked at, beside the beginning and the end.
    """

    policy: str = "fasgd"
    lr: float | None = None
    set: tuple[str, ...] = ()
    gate: str = ""
    push_codec: tuple[str, ...] = ()
    fetch_codec: tuple[str, ...] = ()
    budget: str = ""
    workers: int = 4
    per_process: int = 1
    network: str = PERCEPTRON
    dataset: str = "mnist"
    hidden: int = 200
    batch_size: int = 8
    gradients: int = 40_000
    seed: int = 0
    link: str = ""
    delay: float = 0.0
    samples: int = 20

    def check(self) -> None:
        """Fail where a run would, before anything is started.

        Raises
        ------
        UsageError, ConflictError
            With what is wrong, and what would be right.
        """
        if self.dataset not in DATASETS:
            raise UsageError(
                f"no data set is called {self.dataset!r}; {nearest(self.dataset, DATASETS)}"
            )
        if self.network not in NETWORKS:
            raise UsageError(
                f"no network is called {self.network!r}; {nearest(self.network, NETWORKS)}"
            )
        for name, low, high in (
            ("workers", 1, MAX_WORKERS),
            ("per_process", 1, MAX_WORKERS),
            ("hidden", 1, 10**5),
            ("batch_size", 1, 10**6),
            ("gradients", self.workers, 10**9),
            ("seed", 0, 2**63 - 1),
            ("samples", 0, 10**4),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} must be {low:,} to {high:,}, not {value:,}")
        if self.delay and not self.link:
            raise UsageError("--delay needs --link, the rate of a link that delays: 20Mbit/s, say")
        if self.link:
            parse_rate("--link", self.link)
        CodecChoice.of(self.push_codec)
        CodecChoice.of(self.fetch_codec)
        algorithm = find(self.policy).make(self.server.settings())
        algorithm.check(self.workers)
        if "average" in algorithm.plan(self.workers):
            raise UsageError(f"{self.policy}: its workers average among themselves; choose another")
        if self.gate:
            gates.find(self.gate).check(algorithm, self.workers)

    @property
    def name(self) -> str:
        """Its name in tables and plots: gate, codecs, budget and link."""
        words = [self.gate or "no gate"]
        words += [f"push {' '.join(self.push_codec)}"] if self.push_codec else []
        words += [f"fetch {' '.join(self.fetch_codec)}"] if self.fetch_codec else []
        words += [f"budget {self.budget}"] if self.budget else []
        words += [f"link {self.link}"] if self.link else []
        words += [f"{self.workers} workers"] if self.workers != BandwidthCase.workers else []
        words += (
            [f"batches of {self.batch_size}"] if self.batch_size != BandwidthCase.batch_size else []
        )
        words = words if self.policy == "fasgd" else [self.policy, *words]
        return ", ".join(words if self.network == PERCEPTRON else [*words, self.network])

    @property
    def key(self) -> str:
        """Its settings as one line of JSON: two runs of equal keys measure the same."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> BandwidthCase:
        """Return the case of settings as JSON has them."""
        plain: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in settings.items()
        }
        return cls(**plain)

    def processes(self) -> list[range]:
        """Return the workers of each process."""
        steps = range(0, self.workers, self.per_process)
        return [range(first, min(first + self.per_process, self.workers)) for first in steps]

    @property
    def server(self) -> Config:
        """The server's settings."""
        return Config(
            policy=self.policy,
            workers=self.workers,
            set=list(self.set),
            lr=self.lr,
            gate=self.gate,
            push_codec=list(self.push_codec),
            fetch_codec=list(self.fetch_codec),
            bandwidth_budget=self.budget or None,
        )
