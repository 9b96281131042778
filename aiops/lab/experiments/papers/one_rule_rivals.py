"""The rules of `one_rule`: ours, its parts, and its rivals; and the run of each.

The protocol. A rival has four learning rates, three times as large each, around a middle that
belongs to its optimiser and task. The middle grows with the root of a barrier's examples in a
round, and falls with the fourth root of asgd's workers; sasgd and fasgd divide by staleness
themselves. Each rate is tried in full with a seed of its own (`TRIAL_SEED`), again for each number
of workers; the best is run with the seeds that are reported. Ours has one setting, and no trial.
The rate of rivals with an optimiser rises over 60 mini-batches, and over a sixth of a task that has
fewer than 360; ours over 25.

Time. With ``unequal`` speeds worker 0 takes three times as long for a mini-batch as the others, and
all rules have the same time: that in which workers who never wait compute the task's number of
mini-batches. A barrier waits for worker 0 in each round. What an exchange, an update and a
direction take is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from aiops.lab.experiments.experiment import MOST_SEEDS
from aiops.lab.experiments.papers.one_rule_tasks import LearnedTask
from aiops.lab.experiments.rate_search import ladder
from aiops.sim.turns.simulation import Simulation

TRIAL_SEED = MOST_SEEDS
TIMES = 3
"""How many times as long as the others worker 0 takes where speeds are unequal."""

_STEP = 3.0  # from rate to rate
_WARMUP = 60  # mini-batches until a rival's rate is full, or
_WARMUP_SHARE = 6  # this part of a run, of a short one; and
_OUR_WARMUP = 25  # until ours is, by default
_CLIP = "clip=1"
_OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "adamw": ("optimizer=adamw", "beta2=0.95", _CLIP),
    "momentum": ("optimizer=momentum", "momentum=0.9", _CLIP),
}
_TITLES = {"adamw": "AdamW", "momentum": "momentum"}


@dataclass(frozen=True)
class Contender:
    """A rule that trains.

    Attributes
    ----------
    name
        As it is reported.
    policy, settings
        The server's.
    optimizer
        By which its rates are chosen, a key of `LearnedTask.middles`; empty: it has one setting.
    barrier
        Whether all workers wait for each other in each round.
    cosine
        Whether it knows the horizon: its rate falls as a cosine.
    united
        Whether a round is simulated as one mini-batch of one worker: a barrier's mean gradient is
        that of all its examples.
    """

    name: str
    policy: str
    settings: tuple[str, ...] = ()
    optimizer: str = ""
    barrier: bool = False
    cosine: bool = False
    united: bool = False

    def rates(self, task: LearnedTask, workers: int) -> tuple[float, ...]:
        """Return the learning rates that are tried; of a rule with one setting that of it."""
        if not self.optimizer:
            return (_RATE,)
        middle = task.middles.get(self.optimizer, _RATE)
        if self.barrier:
            grown = workers * task.batch_size(workers) / task.batch_size(1)
            around = (2, 1) if self.united else (1, 2)
            return ladder(middle * math.sqrt(grown), _STEP, *around)
        if self.policy == "asgd":
            return ladder(middle * workers**-0.25, _STEP, 2, 1)
        return ladder(middle, _STEP, 2, 1)

    def runs_with(self, workers: int) -> bool:
        """Return whether it is a rule of its own then: one worker alone never waits."""
        return workers > 1 or not (self.united or self.policy == "asgd")


_RATE = 0.008
_FASTER_TABLES = "lr=0.016@table*"

OURS = Contender("schedule-free", "schedule-free")
TUNED = Contender("schedule-free, tuned", "schedule-free", optimizer="ours")
GRADIENTS = Contender(
    "schedule-free, gradients", "schedule-free", ("orthogonal=false",), optimizer="gradients"
)
BARRIER = Contender(
    "schedule-free, barrier", "schedule-free", optimizer="ours", barrier=True, united=True
)
PARTS = (TUNED, GRADIENTS, BARRIER)
"""Ours with rates to choose from, as rivals have: what its one setting loses. Ours without
directions. And behind a barrier: what directions do, without staleness."""


def _tuned(policy: str, optimizer: str, *, cosine: bool) -> Contender:
    name = f"{policy}, {_TITLES[optimizer]}{', cosine' if cosine else ''}"
    settings = _OPTIMIZERS[optimizer]
    return Contender(name, policy, settings, optimizer, policy == "hardsync", cosine)


RIVALS = (
    *(
        _tuned(policy, optimizer, cosine=cosine)
        for policy in ("asgd", "hardsync")
        for optimizer in _OPTIMIZERS
        for cosine in (True, False)
    ),
    Contender("sasgd", "sasgd", optimizer="sgd"),
    Contender("fasgd", "fasgd", optimizer="fasgd"),
)
RULES = (OURS, *PARTS, *RIVALS)
OF_TASK: Mapping[str, tuple[Contender, ...]] = {
    "tables": (
        Contender("schedule-free, tables at twice the rate", "schedule-free", (_FASTER_TABLES,)),
    )
}
"""Further rows of a task, which are no rivals. A row of a table is met by few of the updates that
its gradient is late for, so a rate that falls with all of them is too low for tables."""


def rules_of(task_name: str) -> tuple[Contender, ...]:
    """Return the rules that are run on a task."""
    return (*RULES, *OF_TASK.get(task_name, ()))


def simulation(
    task: LearnedTask, rule: Contender, workers: int, rate: float, seed: int, *, unequal: bool
) -> Simulation:
    """Return a run of a rule; without speeds each round has all workers, in a newly drawn order."""
    base = task.base
    count = mini_batches(base.iterations, workers, barrier=rule.barrier, unequal=unequal)
    each = workers if rule.barrier else 1  # mini-batches of an update
    batch, clients, iterations = task.batch_size(workers), workers, count
    if rule.united:
        batch, clients, iterations = batch * workers, 1, max(1, count // workers)
    paced = unequal and not rule.barrier
    return replace(
        base,
        policy=rule.policy,
        lr=rate,
        set=(*rule.settings, *_schedule(rule, base.iterations, max(1, count // each), each)),
        clients=clients,
        batch_size=batch,
        iterations=iterations,
        selection=f"paced:times={TIMES}" if paced else "softmax:add=-20",
        seed=seed,
    )


def mini_batches(count: int, workers: int, *, barrier: bool, unequal: bool) -> int:
    """Return how many mini-batches are computed in the time of ``count`` of workers who never wait.

    >>> mini_batches(600, 4, barrier=False, unequal=True)
    600
    >>> mini_batches(600, 4, barrier=True, unequal=True)  # 60 rounds, while the others make 180
    240
    """
    if not (barrier and unequal):
        return count
    rounds = count / (1 + TIMES * (workers - 1))
    return workers * max(1, int(rounds))


def _schedule(rule: Contender, length: int, updates: int, each: int) -> tuple[str, ...]:
    """Return a rule's setting of the schedule; warm-ups are of as many mini-batches for all.

    ``length`` is the task's mini-batches: of a short one no more than a sixth is warm-up.
    """
    if rule.policy == "schedule-free":
        return (f"schedule=warmup:{max(1, _OUR_WARMUP // each)}",) if each > 1 else ()
    if rule.policy in ("sasgd", "fasgd"):  # as published
        return ()
    warmup = max(1, min(_WARMUP, length // _WARMUP_SHARE) // each)
    if not rule.cosine:
        return (f"schedule=warmup:{warmup}",)
    return (f"schedule=warmup:{warmup},cosine:{max(updates, warmup + 1)}",)
