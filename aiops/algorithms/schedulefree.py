"""Schedule-free learning from stale gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiops.algorithms.base import Algorithm, Decision, Immediate, Policy
from aiops.algorithms.per_tensor import PerTensor
from aiops.algorithms.policies import EveryNth
from aiops.algorithms.schedules import UPDATES
from aiops.kernels.rule import Rule
from aiops.kernels.vocabulary import Array, Scalar, sqrt
from aiops.model.matrices import direction_rate

_FAR = 16.0
"""The staleness of which half is looked ahead."""

_MOST = 4096
"""The most gradients of an update."""

_WORKERS_EACH = 16
"""Workers for each gradient of an update, by default."""

_MOST_PER_RATE = 1e30
"""The most that 1/α counts as: of a float32, too, it is finite."""

_AVERAGED = 60.0
"""Updates after which half of ŷ − x is left out of what is evaluated, without staleness."""

_STRAIGHT, _OF_STALENESS, _OF_GAIN = 1.4, 0.5, 0.5
"""When the rate rises: ρ > (1.4 + τ̄/2) · √gain (`ScheduleFree`)."""


def schedule_free(
    w: Array,
    g: Array,
    s: Array,
    u: Array,
    o: Array,
    step: Scalar,
    pace: Scalar,
    root: Scalar,
    share: Scalar,
    rest: Scalar,
    lean: Scalar,
    ahead: Scalar,
    bend: Scalar,
    decay: Scalar,
    per_rate: Scalar,
    weight: Scalar,
    beta2: Scalar,
    one_minus_beta2: Scalar,
    eps: Scalar,
) -> tuple[Array, Array, Array, Array, Array]:
    """One update: ``w`` is ŷ, ``u`` is z − x, ``o`` is ŷ − x; ``rest`` is 1 − ``share``.

    The gauge is above 0 where this step goes on in the direction of z − x. Its ``weight`` is 0
    where the rate is 0, of tensors that keep their values, and else a sixteenth: a sum counts 64 of
    one element at most. ``per_rate`` is 1/α: to divide each element takes a GPU longer.
    """
    s = beta2 * s + one_minus_beta2 * (g * g)
    e = g / (root * sqrt(s) + eps)
    d = step * pace * (e + decay * w)
    x = w - o
    gone = u
    u = u - d
    x = x + share * u
    u = rest * u
    o = lean * u - ahead * d
    return x + o, s, u, o, -weight * e * (per_rate * gone + bend * e)


class CollectedSteps(EveryNth):
    """Take a step after every ``count`` gradients; rows of tables are updated push by push.

    `push` is overridden because what a class says of rows holds for its own `push` alone: softsync
    and fedbuff, whose steps are sums, may not say it.
    """

    rows_at_once = True

    def push(self, worker: int, staleness: int) -> Decision:
        """Collect the gradient, and take the step when it completes the count."""
        return super().push(worker, staleness)


@dataclass(frozen=True, kw_only=True)
class ScheduleFree(Algorithm):
    """Schedule-free Adam whose workers compute where the parameters will be: no horizon, any λ.

    .. math::

        s ← β₂ s + (1−β₂) g²          d = α(τ̄) · (g / (sqrt(s/(1−β₂ᵗ)) + ε) + δ ŷ)
        z ← z − d                     x ← x + c (z − x),     c = (p+1)/(t+p)
        y = (1−β) z + β x             ŷ = y + k (β c (z−x) − (1−β) d),     k = τ̄/(1+τ̄/16)

    z takes the steps and x is their average, with weights that grow like tᵖ. So x gains what a
    falling learning rate gains, and the end of training need not be known. Gradients are to be
    taken at y. A worker's gradient arrives τ̄ updates after its parameters were sent, so it is sent
    ŷ, where y will be by then if z goes on as it did. τ̄ is the mean staleness of the last 64 or so
    gradients before the one that is applied, which the server measures; one counts for at most 64
    more than four times the mean before it.

    The model is evaluated nearer to the average, the more updates there have been (``fetch`` with
    ``evaluation=True``, `Worker.evaluation`, ``--save``):

    .. math::

        x + φ (ŷ − x),     φ = 1/(1 + t/(60 (1+τ̄)))

    A gradient is never divided by its own staleness. The rate falls with the mean, which changes
    slowly: α(τ̄) = α / sqrt(1 + τ̄). A bound for convex functions says why: staleness multiplies the
    part of a gradient that is no noise, and no more (``docs/theory.md``).

    Where training goes straight on, the rate rises by itself: α(τ̄) = γ α / sqrt(1 + τ̄), with γ
    between 1 and ``rise``. The server measures ρ, by how many steps of the last updates the newest
    one goes on in their direction, of which z − x tells:

    .. math::

        e = g / (sqrt(s/(1−β₂ᵗ)) + ε)      ρ = Σ e (x−z)/(α a) / Σ e²,   a = γ/sqrt(1+τ̄)

    The sums are over the tensors of an update but those whose rate is 0, and means over 16 or so; α
    is the rate of the tensor without a schedule, so that γ does not work against one that falls.
    While ρ > (1.4 + τ̄/2) · √γ, γ doubles within 16 updates, and else it halves. Where steps turn
    back at every valley's other side, ρ is 0 and less; staleness lets each go on for τ̄ updates
    more. The numbers are those of a transformer at its best rate. A rate that is too high is not
    lowered: mini-batches of few examples have a small ρ at any rate. Each server of a model over
    several has the same γ, which ``aiops stats`` shows. A hostile worker can raise it, too, and no
    further.

    With ``orthogonal`` workers push the momentum of a matrix, orthogonalised, in the place of its
    gradient (`aiops.client.strategies.directions`), and α is the rate of a matrix of 64 × 64: one
    whose longer side is m has α · sqrt(64/m), so that each step changes what it makes of a vector
    about as much. Of matrices that are more than 64 times as long as wide (or 16 times, with fewer
    than 16 columns, as before few classes), and of all that is no matrix, the gradient is pushed,
    and the rate is α. The shorter side is split in blocks of at most 128, and each block is
    orthogonalised by itself, so that workers pay for a matrix of m × n with up to
    512·m·n + 426,000·m operations (m ≤ n), in float32. PyTorch makes directions of its own tensors
    (`RemoteOptimizer`'s, and those given to `Worker.step`) on the device where they are, with the
    precision of products that the program has set there (``torch.set_float32_matmul_precision``;
    not ``medium``), and NumPy of all others. The momentum takes 4 bytes for each value of a matrix,
    where the direction is made, and as much again until the step is taken: a gradient counts in it
    then, and not if it was refused, or its step raised the error of an earlier one.

    From 32 workers on (``--workers``) the server collects gradients: an update is of n = ⌊λ/16⌋ of
    them, and of one with fewer workers. Workers then push their gradients as they are, and the
    server makes the direction of the mean gradient, with a momentum of its own: the direction of a
    gradient of few examples is mostly noise. No worker waits, and τ̄ is λ/n. The server keeps the
    momentum in memory, and an update takes 22 ms of one thread for a matrix of 1024 × 1024
    (`aiops.kernels.exact_orthogonalise`: a standby and a replay have the same bits). If a matrix is
    cut over several servers, each makes the direction of its piece. If a step is refused, the
    momenta of its matrices become 0. Without ``--workers`` the server collects no gradients.

    A direction is as long as the gradient of its own mini-batch. So a mini-batch of which all is
    learnt moves little, a matrix that is frozen is not driven on by its momentum, and ``clip``
    clips directions as it would gradients. And as under Adam, one gradient that is 1,000 times as
    long as usual makes a step of 10·α, and shortens those of the next 900 updates: where gradients
    explode, set ``clip`` to a few times their usual length. A `Client` that pushes by itself,
    without a `Worker`, pushes gradients as they are.

    Settings
    --------
    lr : float, default 0.008
        Learning rate α without staleness.
    beta : float, default 0.8
        β: how near to x gradients are taken.
    beta2 : float, default 0.99
        β₂, memory of the mean square s.
    power : float, default 2
        p: the later a step, the more x is made of it.
    schedule : str, default ``warmup:25``
        The rate rises over the first 25 updates, since it is at first that stale gradients are
        most wrong, and needs no end. Keep the warm-up in another one. A transformer at a staleness
        of 7 wants 100 (four workers whose exchanges are beside computing: 1.86 nats, and 2.03).
    ahead : float, default 1
        What k is multiplied by; with 0 workers are sent y.
    eps : float, default 1e-8
        ε, added to the root.
    weight_decay : float, default 0
        δ, decoupled. For some tensors alone: ``--set weight_decay=0@*norm*,*bias``.
    orthogonal : bool, default True
        Whether workers push directions of matrices. With False all is schedule-free Adam; then
        choose a rate of 0.001 to 0.003.
    momentum : float, default 0.7
        The memory of that momentum, of which each worker has its own.
    rise : float, default 8
        The most that γ may be, up to 1024; with 1 the rate stays as it is set. It stays so without
        directions, too, whose ρ is another, and with ``scale_lr``, which has raised it already.
    collect : int, default 0
        n, the gradients of an update, up to 4,096; 0: ⌊λ/16⌋, at least 1. With 1 workers always
        push directions.

    Steps
    -----
    A step of a worker is one mini-batch of µ examples, and one push. n pushes are an update, and so
    a version; n is 1 up to 31 workers. t = 1, 2, ... counts updates, and ``schedule`` the pushes of
    all workers, each of µ examples. A rate that falls is not needed: it would be one more average.
    Staleness is in updates: with λ equal workers τ̄ is about λ/n.

    Source
    ------
    Defazio et al. 2024, *The road less scheduled* (z, x, y and c, with the second moment of Adam);
    Hakimi et al. 2019, *Taming momentum in a distributed asynchronous environment* (parameters sent
    ahead); Jordan et al. 2024, *Muon* (orthogonalised momentum).

    Note
    ----
    Measured on a byte-level transformer at the defaults, 600 mini-batches in all, with 1, 4 and 16
    equal workers: 1.392, 1.561 and 2.287 nats; the best rival, ``hardsync`` with AdamW at the best
    of four rates: 1.889, 2.283 and 2.713; ``asgd`` with 4 and 16: 2.372 and 3.021 (``aiops
    experiment run one-rule --full``). With four times as many mini-batches, of one seed: 1.222,
    1.235 and 1.484; the best rivals 1.337, 1.695 and 2.110. A small LSTM, which wants 0.024: 1.502,
    1.574 and 1.883 nats with 1, 4 and 16 workers; the best rivals at the best of their rates 1.560,
    1.680 and 1.920 (``--with task=lstm``).

    A direction of a matrix of 1024 × 1024 took NumPy 10 ms and PyTorch 2.13 19 ms, on one thread of
    an AMD EPYC (``OMP_NUM_THREADS=1 aiops bench directions``, in a checkout). Those of eight took
    an NVIDIA H200 1.9 ms. Perceptrons on small mini-batches pay most: the direction of 784 × 200
    took 1.3 ms, and the gradient of 32 examples of 784-200-10 0.2 ms; over a network of 1 Gbit/s
    such a step takes 10 ms all the same. With four workers and the server on two threads of one
    machine 7,500 such steps took 15 s, and 3.8 s with ``orthogonal=false lr=0.002``, which learnt
    as much there (97.8 % both; ``aiops bench algorithms --only schedule-free --epochs 4``).

    Of where the model is evaluated: Defazio et al. return x, which is better where few workers make
    many updates (the transformer with one worker: 1.389 nats, and 1.420 at ŷ), and worse where many
    workers make few of them (with 16 and a quarter of the mini-batches 2.833, and 2.780). φ follows
    the better of both: 1.388 and 2.779. What workers hold is ŷ.

    In a sparse table a row takes the steps of its pushes as they come (c = 1, β = 0, and α for
    α(τ̄)): rows that are pushed seldom would be averaged over much of their past.

    Example
    -------
    >>> pace, *_rest = ScheduleFree().scalars(update=1, staleness=3.0, gain=1.0)
    >>> pace
    0.5
    """

    family = "staleness-aware"
    neighbours = "asgd fasgd dcasgd hardsync"
    name = "schedule-free"
    lr: float = 0.008
    beta: float = 0.8
    beta2: float = 0.99
    power: float = 2.0
    schedule: str = "warmup:25"
    ahead: float = 1.0
    eps: float = 1e-8
    weight_decay: float = 0.0
    orthogonal: bool = True
    momentum: float = 0.7
    rise: float = 8.0
    collect: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require("beta", 0 <= self.beta < 1, "in [0, 1)")
        self.require("beta2", 0 <= self.beta2 < 1, "in [0, 1)")
        self.require("power", 0 <= self.power <= 100, "in [0, 100]")
        self.require("ahead", 0 <= self.ahead <= 10, "in [0, 10]")
        self.require("momentum", 0 <= self.momentum < 1, "in [0, 1)")
        self.require("rise", 1 <= self.rise <= 1024, "in [1, 1024]")
        self.require("collect", 0 <= self.collect <= _MOST, f"0 (by --workers) to {_MOST:,}")
        self.require("eps", self.eps > 0, "positive")
        self.require("weight_decay", self.weight_decay >= 0, "0 or more")

    def rule(self) -> Rule:
        """Return the update, in z − x and ŷ − x, which are 0 at first."""
        constants = {
            "beta2": self.beta2,
            "one_minus_beta2": 1 - self.beta2,
            "eps": self.eps,
        }
        of_update = ("pace", "root", "share", "rest", "lean", "ahead", "bend")
        names = (*of_update, "decay", "per_rate", "weight")
        states = {"s": 0.0, "u": 0.0, "o": 0.0}
        return Rule(schedule_free, states, constants, scalars=names, gauge=True, offset="o")

    def scalars(self, update: int, staleness: float, gain: float) -> tuple[float, ...]:
        """Return a, 1/√(1−β₂ᵗ), c, 1 − c, the weights of z − x and d in ŷ − x, a · ρ's bound."""
        t, k = update, self.ahead * staleness / (1 + staleness / _FAR)
        share = min(1.0, (self.power + 1) / (t + self.power))
        after = min(1.0, (self.power + 1) / (t + 1 + self.power))  # of the next update
        pace, lean = gain / math.sqrt(1 + staleness), 1 - self.beta + k * self.beta * after
        bend = (_STRAIGHT + _OF_STALENESS * staleness) * gain**_OF_GAIN * pace
        return pace, self._root(t), share, 1 - share, lean, k * (1 - self.beta), bend

    def offset_kept(self, updates: int, staleness: float) -> float:
        """Return φ: 1 at first, and 0 after many more updates than a gradient is late."""
        return 1 / (1 + updates / (_AVERAGED * (1 + staleness)))

    @property
    def most_gain(self) -> float:
        """``rise``, if workers push directions and α is what was set."""
        return self.rise if self.orthogonal and not self.scale_lr else 1.0

    def row_scalars(self, update: int) -> tuple[float, ...]:
        """Return those with which x takes each step of z: rows are not averaged."""
        return 1.0, self._root(update), 1.0, 0.0, 0.0, 0.0, 0.0

    def _root(self, t: int) -> float:
        return 1 / math.sqrt(1 - self.beta2**t)

    @property
    def patterned(self) -> tuple[str, ...]:
        """Add the weight decay."""
        return (*super().patterned, "weight_decay")

    def tensor_scalars(self, tensor: str, shape: Sequence[int] = ()) -> tuple[float, ...]:
        """Return the decay of a tensor, 1/α without a schedule, and its weight in the gauge."""
        decay = PerTensor.of(self.per_tensor).value("weight_decay", tensor, self.weight_decay)
        rate = self.lr * self.rate_factor(tensor, shape)
        return (decay, min(1 / rate, _MOST_PER_RATE), 0.0625) if rate else (decay, 0.0, 0.0)

    def rate_factor(self, tensor: str, shape: Sequence[int] = ()) -> float:
        """Return √(64/m) of a matrix whose longer side is m, if workers push directions of it."""
        factor = direction_rate(shape) if self.orthogonal else 1.0
        return factor * super().rate_factor(tensor, shape)

    def gathered(self, workers: int | None) -> int:
        """Return n, the gradients of an update."""
        return self.collect or max(1, (workers or 1) // _WORKERS_EACH)

    def crowded(self, present: int, workers: int | None) -> str:
        """Return that more workers are there than updates of one gradient suit."""
        if self.collect or workers is not None or self.gathered(present) == 1:
            return ""
        return (
            f"{present} workers are there, and each gradient is an update of its own, as the server"
            f" was not told how many there would be: with --workers {present} an update is of"
            f" {self.gathered(present)} gradients, which trains better (in a new run, as a state is"
            " kept for one number of workers; --set collect=1: it is meant so)"
        )

    def policy(self, workers: int | None) -> Policy:
        """Return the policy that steps after every n gradients."""
        count = self.gathered(workers)
        return CollectedSteps(count) if count > 1 else Immediate()

    def rates(self, workers: int | None) -> float | Callable[[float], float]:
        """Return the rate; of an update of n gradients, a schedule in updates counts n."""
        rates, count = super().rates(workers), self.gathered(workers)
        if count == 1 or not callable(rates) or self.schedule_unit != UPDATES:
            return rates
        return lambda position: rates(position * count)

    def row_rates(self, workers: int | None) -> float | Callable[[float], float]:
        """Return the rate of rows, which are not collected."""
        return super().rates(workers)

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Add to the plan the memory of the momentum that workers orthogonalise, if they do."""
        made = self.orthogonal and self.gathered(workers) == 1
        return {**super().plan(workers), **({"orthogonal": self.momentum} if made else {})}

    def sum_momentum(self, workers: int | None) -> float | None:
        """Return that of the server, which makes directions of what it collects."""
        made = self.orthogonal and self.gathered(workers) > 1
        return self.momentum if made else None

    def cautions(self) -> tuple[str, ...]:
        """Warn of a momentum without matrices that it would be of."""
        found = super().cautions()
        if not self.orthogonal and self.momentum != type(self).momentum:
            found += (
                f"{self.name}: momentum={self.momentum:g} has no effect with orthogonal=False: it"
                " is that of the directions of matrices",
            )
        return found

    @property
    def second_moments(self) -> bool:
        """True: s is of that kind."""
        return True

    @property
    def sparse(self) -> bool:
        """True: rows take their steps as they come, without an average, when they are pushed."""
        return True
