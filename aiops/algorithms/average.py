"""Asynchronous model average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiops.algorithms.base import Algorithm, Decision, Policy
from aiops.errors import ConflictError


class NoGradients(Policy):
    """Refuse every gradient: workers apply their own."""

    def push(self, worker: int, staleness: int) -> Decision:
        """Refuse the gradient, and tell what to use."""
        return Decision(
            False,
            why="this server takes no gradients: its workers train models of their own and average"
            " them; use aiops.client.ModelAverager, or start the server with another --policy",
        )


@dataclass(frozen=True, kw_only=True)
class Average(Algorithm):
    """Asynchronous model average: every worker trains its own model, and they are averaged.

    .. math::

        θ_i ← θ_i − α · g_i                  each worker, at its own pace
        θ_i ← θ_i + (mean_j θ_j' − θ_i')     every ``interval``; θ' are copies made just before

    Workers exchange their copies in a ring (`aiops.averaging.ring_allreduce`) while they go on
    training; the server only forms the rounds. A worker adds the difference to its model, so the
    steps between the copy and the average are kept, and averaging does not change the mean.

    Workers use `aiops.client.ModelAverager`, or in asyncio `aiops.client.AsyncModelAverager`. The
    server has no model but what the first worker began with, which a fetch and ``--state`` have,
    too; ``--init`` and ``--save`` are refused. To keep the model, have a worker write its own after
    a last ``average()``. If the last worker goes, the next one begins with its own parameters.

    Settings
    --------
    lr : float, default 0.1
        Learning rate α of the workers' steps, in ``ModelAverager.lr``; the server does not use it.
    interval : float, default 0.5
        Seconds of training between two averages.
    warmup : int, default 0
        The number of a worker's first steps after each of which it waits for an average.
    grace : float, default 1.0
        Seconds that workers that are ready (two at least) wait for the others; a worker that is not
        ready then misses the round. A worker that is ready alone waits ``interval`` + ``grace``.
    stall : float, default 5.0
        Seconds without a byte from another worker after which a round is abandoned.
    group : int, default 0
        The most workers of a ring. Those that are ready are cut into rings of at most this
        many, and the members of each are drawn again for each round. 0: one ring of all.
    seed : int, default 0
        Of those draws.

    Steps
    -----
    A step of a worker is one of its own model, with one mini-batch of µ examples. The server makes
    no updates: its version stays that of the model which was defined, and rounds of averages are
    counted apart. There is no ``schedule``: the training loop changes its rate by its own steps.

    Source
    ------
    Bagua, *Asynchronous Model Average* (algorithm, interval and warm-up); Lian et al. 2018,
    *Asynchronous decentralized parallel stochastic gradient descent*; Patarasuk & Yuan 2009 (ring);
    Ryabinin et al. 2021, *Moshpit SGD* (groups of which the members change).

    Note
    ----
    Bagua holds the lock of a model while it averages. Here the lock is held to copy the model and
    to add the difference, so that a slow or dead worker never stops the training of another.
    Bagua's warm-up averages gradients; here it averages models after each step, which for plain SGD
    from equal models is the same.

    With ``--push-codec`` bf16, fp16 or int8 the workers of a ring send each other differences to
    the last mean that they all have, in a half or a quarter of the bytes. (The values themselves,
    rounded to a few bits, would lose what training changes between two averages.) What is rounded
    away stays in the model of the worker that rounded, and so comes with its next difference: the
    mean of the models is what it is without a codec. A round with a newcomer, or with a worker that
    missed the last one, sends values as they are. So do most rounds with ``group``. On MNIST, with
    eight workers in one ring, int8 cost no accuracy and saved 71 % of the bytes, bf16 and fp16
    saved 47 %; with ``group`` none of them saved much. On a transformer, whose workers trained
    with AdamW, neither cost anything, and 13 rounds saved 61 and 43 % (``aiops experiment run
    average-codecs``).

    Under ``--worker-budget`` (or ``--bandwidth-budget``, divided by ``--workers``) the server
    chooses the codec of each round, unless ``--push-codec`` gives one (``raw``: none): the first of
    none, bf16 and int8 with which rounds can follow each other every ``interval`` within the
    budget, else int8. And a worker's next round begins when the bytes of those before, sent and
    received, have been paid for: where the codec is not enough ``interval`` stretches. Averages
    that are asked for, or of the warm-up, do not wait, but are paid for later.

    With ``group`` = K a round takes 2(K − 1) hops instead of 2(n − 1), each worker sends 2(K − 1)/K
    of its model, and one that dies costs K − 1 others their round. In return a round leaves the n
    models apart: of their variance about the mean, which stays the same, (n/K − 1)/(n − 1) is left
    on average, a fifth for n = 16 and K = 4. Moshpit SGD lays workers out in a grid and averages
    along its axes in turn, which needs a full grid to be exact; random rings need none, so
    that workers may come and go. A last ``average()`` is with the workers of one ring only.

    Example
    -------
    >>> Average(interval=2).plan(None)["average"]["interval"]
    2.0
    >>> Average().policy(None).push(worker=1, staleness=0).use
    False
    """

    family = "local training"
    neighbours = "easgd diloco no-delay"

    name = "average"
    lr: float = 0.1
    interval: float = 0.5
    warmup: int = 0
    grace: float = 1.0
    stall: float = 5.0
    group: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require("interval", self.interval >= 0, "0 seconds or more")
        self.require("warmup", self.warmup >= 0, "0 steps or more")
        self.require("grace", self.grace > 0, "more than 0 seconds")
        self.require("stall", self.stall > 0, "more than 0 seconds")
        self.require("group", self.group == 0 or self.group >= 2, "0, or 2 workers or more")
        self.require("seed", 0 <= self.seed < 1 << 53, "0 or more, and below 2⁵³")
        for name, unused in (
            *(("clip", 0.0), ("schedule", "constant"), ("schedule_unit", "updates")),
            *(("schedule_start", 0.0), ("mini_batch", 0), ("scale_lr", False)),
        ):
            if getattr(self, name) != unused:
                raise ConflictError(
                    f"average: workers take all steps by themselves, so the server has no use for"
                    f" {name}: apply it in the training loop"
                )

    @property
    def patterned(self) -> tuple[str, ...]:
        """None: workers take all steps by themselves."""
        return ()

    def policy(self, workers: int | None) -> Policy:
        """Return the policy that refuses gradients."""
        return NoGradients()

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Return the settings of averaging."""
        average = {
            "lr": float(self.lr),
            "interval": float(self.interval),
            "warmup": self.warmup,
            "grace": float(self.grace),
            "stall": float(self.stall),
            "group": self.group,
            "seed": self.seed,
        }
        return {**super().plan(workers), "average": average}
