"""The plan of a trial: all that its seed decides."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from aiops.lab.torture.checker import DIGITS, CellRange

_TINY, _LENT = 0, 12_288  # cells; what is above 64 KiB is lent through shared memory


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with its settings, and the way it is checked.

    Attributes
    ----------
    flags
        The server's.
    additive
        Whether the model is a sum of pushes: then each push is counted. Otherwise only the state
        after a restart is compared with the one before.
    scale
        The number of pushes of which it takes the mean.
    scaled
        Whether a push is divided by its staleness.
    own
        Whether the answer to a push has it applied.
    counted
        Whether it must be told the number of workers.
    """

    flags: tuple[str, ...]
    additive: bool = True
    scale: int = 1
    scaled: bool = False
    own: bool = False
    counted: bool = False


VARIANTS: Mapping[str, Variant] = {
    "asgd": Variant(("--policy", "asgd", "--set", "lr=1"), own=True),
    "ssp": Variant(("--policy", "ssp", "--set", "lr=1", "--set", "s=3"), own=True),
    "sasgd": Variant(("--policy", "sasgd", "--set", "lr=1"), scaled=True),
    "softsync": Variant(
        ("--policy", "softsync", "--set", "lr=1", "--set", "modulate=none"), scale=2, counted=True
    ),
    "fasgd": Variant(("--policy", "fasgd"), additive=False),
    "hardsync": Variant(
        ("--policy", "hardsync", "--set", "admission=wait"), additive=False, counted=True
    ),
    "momentum": Variant(("--policy", "asgd", "--set", "optimizer=momentum"), additive=False),
    "adam": Variant(("--policy", "asgd", "--set", "optimizer=adam"), additive=False),
    "coded": Variant(
        ("--policy", "asgd", "--push-codec", "topk:0.25", "--fetch-codec", "int8"), additive=False
    ),
}


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """One server, its workers, and the processes that are killed.

    Attributes
    ----------
    seed
        It decides all the rest. Instants are measured from events of real processes, so a trial
        that is repeated has the same plan, and not the same interleaving.
    variant
        A name of `VARIANTS`.
    near
        Whether workers use the machine's memory; False: TCP.
    acks
        The server's ``--acks``; empty: it has no ``--state``.
    workers
        Their number at any moment.
    kills
        The processes that are killed.
    delays
        Seconds before each kill: of a server after it has answered, of a worker after its start. A
        negative number: so long after the server was started, whether or not it listens.
    pauses
        Seconds between the pushes of each worker.
    size
        The model's cells.
    cells
        Those of each worker.
    """

    seed: int
    variant: str
    near: bool
    acks: str
    workers: int
    kills: int
    delays: tuple[float, ...]
    pauses: tuple[float, ...]
    size: int
    cells: int

    @property
    def checked(self) -> Variant:
        """The variant."""
        return VARIANTS[self.variant]

    def flags(self) -> list[str]:
        """Return the server's flags, but for its folder and its port."""
        flags = [*self.checked.flags, "--kernels", "numpy"]
        if self.checked.counted:
            flags += ["--workers", str(self.workers)]
        if self.variant == "softsync":
            flags += ["--set", f"n={self.workers // self.checked.scale}"]
        return flags if self.near else [*flags, "--no-shm"]

    def cells_of(self, life: int) -> CellRange:
        """Return the cells of a worker process, which are counted from 0."""
        digits = 1 if self.checked.scaled else DIGITS
        return CellRange(life * self.cells, self.cells, digits)


def draw_servers(seed: int, names: tuple[str, ...] = tuple(VARIANTS)) -> TrialPlan:
    """Return the plan of a trial in which the server is killed."""
    rng = random.Random(seed)
    variant = rng.choice(names)
    kills, workers = rng.randint(3, 6), rng.choice((2, 4))
    delays = tuple(
        -rng.uniform(0, 0.08) if rng.random() < 0.2 else rng.uniform(0, 0.25) for _ in range(kills)
    )
    cells = 512 if VARIANTS[variant].scaled else 128
    return TrialPlan(
        seed,
        variant,
        near=rng.random() < 0.5,
        acks=rng.choice(("written", "written", "durable")),
        workers=workers,
        kills=kills,
        delays=delays,
        pauses=tuple(rng.choice((0.0, 0.0005, 0.003)) for _ in range(workers)),
        size=max(cells * workers, rng.choice((_TINY, _TINY, _LENT))),
        cells=cells,
    )


def draw_workers(seed: int, names: tuple[str, ...] = tuple(VARIANTS)) -> TrialPlan:
    """Return the plan of a trial in which workers are killed."""
    rng = random.Random(seed)
    variant = rng.choice([name for name in names if VARIANTS[name].additive])
    kills, workers = rng.randint(20, 40), rng.choice((2, 4))
    longest = rng.choice((0.03, 0.1, 0.2))
    cells = 64 if VARIANTS[variant].scaled else 16
    return TrialPlan(
        seed,
        variant,
        near=rng.random() < 0.5,
        acks=rng.choice(("", "written", "durable")),
        workers=workers,
        kills=kills,
        delays=tuple(rng.uniform(0, longest) for _ in range(kills)),
        pauses=tuple(rng.choice((0.0, 0.0005, 0.003)) for _ in range(kills + workers)),
        size=max(cells * (kills + workers), rng.choice((_TINY, _TINY, _LENT))),
        cells=cells,
    )
