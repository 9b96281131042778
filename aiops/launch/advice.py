"""Advise on policy, settings, codecs and overlap: a job's description in, a command line out.

All that is advised was measured on small models (docs/guide-policies.md), and each reason names the
section of that guide that has the figures. What was not measured is said beside the advice.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from aiops.common import formatting
from aiops.common.frozen import value
from aiops.errors import UsageError, nearest

KINDS = ("mlp", "convnet", "transformer", "tables")

_FREE_OF_BARRIERS = 1.3  # times as long the slowest takes: above that a barrier is not advised
_BOUND = 1.5  # times its computing that a step may take before more is done about the link
_WORTH = {"transformer": 4.0}  # the same, before local steps learn more; of others `_BOUND`
_LOCAL_STEPS = 20  # of diloco's workers, by default
_MOST_LOCAL_STEPS = 10_000_000
_DIRECTION = 1.5e-8  # seconds that one thread takes for a parameter's share of its direction
_OF_SERVER = 2.1e-8  # the same of the server's, whose bits are the same on every machine
_COLLECTED, _EACH = 32, 16  # workers from which on the server makes them, and for each gradient
_BUSY = 0.5  # of the time between two updates that they may take it
_LARGEST, _MOST, _SLOWEST = 3_360_000, 16, 3.0  # bytes, workers and times that were measured

_LIMITS = (
    ("nbytes", 1, 1 << 52, "the bytes of the model"),
    ("workers", 1, 1_000_000, "--workers"),
    ("slowest", 1, 1_000_000, "--unequal, times as long as the others that the slowest takes,"),
    ("step", 0.000_001, 1_000_000, "--step, the seconds of a mini-batch,"),
)
"""Of the fields of a job: from which to which number, and what errors call them."""


def _plain_number(number: float) -> str:
    """Return a number as people write it: 1e+06 as 1,000,000.

    >>> [_plain_number(number) for number in (1_000_000, 0.00001, 0.5, 2.0)]
    ['1,000,000', '0.00001', '0.5', '2']
    """
    if isinstance(number, int) or not 1e-9 < abs(number) < 1e15:
        return f"{number:,}"
    return f"{number:,.9f}".rstrip("0").rstrip(".")


@value
class TrainingJob:
    """A job that advice is wanted for.

    Attributes
    ----------
    kind
        What is trained, one of `KINDS`.
    nbytes
        Of the parameters that are exchanged, in float32.
    workers
        Their number.
    rate
        Bytes per second that each worker's link carries each way; None: workers run on the server's
        machine.
    server_rate
        The same of the server's link, which all workers share; None: no limit.
    step
        Seconds that a worker computes for a mini-batch.
    slowest
        Times as long that the slowest worker takes for one.
    may_vanish
        Machines may disappear.

    Raises
    ------
    UsageError
        When there can be no such job (`check`).
    """

    kind: str
    nbytes: int
    workers: int
    rate: float | None = None
    server_rate: float | None = None
    step: float = 0.1
    slowest: float = 1.0
    may_vanish: bool = False

    def check(self) -> TrainingJob:
        """Return the job; UsageError when there can be no such one."""
        if self.kind not in KINDS:
            raise UsageError(f"no kind is called {self.kind!r}; {nearest(self.kind, KINDS)}")
        for name, least, most, what in _LIMITS:
            given = getattr(self, name)
            if not least <= given <= most:  # as NaN is not
                raise UsageError(
                    f"{what} must be from {_plain_number(least)} to {_plain_number(most)}, not"
                    f" {_plain_number(given)}"
                )
        rates = [rate for rate in (self.rate, self.server_rate) if rate is not None]
        if not all(0 < rate < math.inf for rate in rates):
            raise UsageError("a link carries bytes, and not infinitely many")
        return self

    @property
    def directions(self) -> float:
        """Seconds that directions of matrices take a worker's thread, if all are matrices."""
        return self.nbytes / 4 * _DIRECTION

    @property
    def apart(self) -> float:
        """Seconds between two updates, if the server collects gradients and links take none."""
        return self.step * max(1, self.workers // _EACH) / self.workers

    @property
    def of_server(self) -> float:
        """Seconds that the directions of an update take the server's thread."""
        return self.nbytes / 4 * _OF_SERVER

    @property
    def small_steps(self) -> bool:
        """True if directions of matrices take a worker longer than a mini-batch's gradient."""
        return self.directions > self.step

    @property
    def unequal(self) -> bool:
        """True if a barrier would have the others wait."""
        return self.slowest > _FREE_OF_BARRIERS


@value
class Exchange:
    """A way to exchange gradients and parameters with each mini-batch.

    Attributes
    ----------
    name
        In a table.
    up, down
        Bytes of a push and of a fetch, as shares of the parameters'.
    codec
        Of both; empty: none.
    overlap
        Whether workers compute meanwhile.
    """

    name: str
    up: float = 1.0
    down: float = 1.0
    codec: str = ""
    overlap: bool = False

    def seconds(self, job: TrainingJob) -> float:
        """Return those of a worker's step, when all workers take their steps."""
        crossing = self.crossing(job)
        return max(job.step, crossing) if self.overlap else job.step + crossing

    def crossing(self, job: TrainingJob) -> float:
        """Return the seconds that an exchange takes on the links.

        A worker's link carries its push and then its fetch; the server's, in as long, those of all
        workers, in both directions at once.
        """
        own = (self.up + self.down) * job.nbytes / job.rate if job.rate else 0.0
        if job.rate is None or job.server_rate is None:
            return own
        return max(own, job.workers * max(self.up, self.down) * job.nbytes / job.server_rate)


EXCHANGES: Sequence[Exchange] = (
    Exchange("raw"),
    Exchange("raw, beside computing", overlap=True),
    Exchange("int8, beside computing", 1 / 3.9, 1 / 1.9, "int8", overlap=True),
    Exchange("onebit, beside computing", 1 / 28, 1 / 13, "onebit", overlap=True),
)
"""From what costs nothing to what costs most; shares as measured on the transformer."""


@value
class Reason:
    """A reason of some advice.

    Attributes
    ----------
    text
        The reason, in a sentence.
    section
        That of docs/guide-policies.md that has its figures.
    """

    text: str
    section: str


@value
class Advice:
    """Policy, settings and codecs that are advised, and why.

    Attributes
    ----------
    policy, settings
        Of the server: ``--policy``, and each ``--set``.
    codec
        Of pushes and fetches; empty: none.
    overlap
        Of the workers.
    state
        Whether the server is to keep a state.
    reasons
        Why, in order of their weight.
    unmeasured
        What nothing was measured of, in sentences.
    steps
        Seconds of a worker's step with each of `EXCHANGES`, by name.
    """

    policy: str
    settings: tuple[str, ...]
    codec: str
    overlap: bool
    state: bool
    reasons: tuple[Reason, ...]
    unmeasured: tuple[str, ...]
    steps: tuple[tuple[str, float], ...]

    @property
    def flags(self) -> list[str]:
        """Those of the server."""
        flags = ["--policy", self.policy]
        for setting in self.settings:
            flags += ["--set", setting]
        if self.codec:
            flags += ["--push-codec", self.codec, "--fetch-codec", self.codec]
        return flags + ["--state", "run"] * self.state

    def commands(self, job: TrainingJob) -> list[str]:
        """Return the command lines: of one machine, or of the server and of each worker.

        Beyond loopback a server needs a token: then the first line makes one.
        """
        ahead = "AIOPS_OVERLAP=1 " * self.overlap
        if job.rate is None:
            line = ["aiops", "run", "--workers", str(job.workers), *self.flags, "train.py"]
            return [ahead + shlex.join(line)]
        counted = self.policy in COUNTED and job.workers >= COUNTED[self.policy]
        count = ["--workers", str(job.workers)] if counted else []
        server = ["aiops", "serve", *self.flags, *count, "--host", "0.0.0.0"]
        worker = f"{ahead}AIOPS_URL=aiops://SERVER:7171 python train.py"
        return [TOKEN, shlex.join(server), worker]


TOKEN = "export AIOPS_TOKEN=$(openssl rand -hex 16)  # the same value on each machine"
"""Of machines that train together."""


COUNTED = {"diloco": 1, "schedule-free": _COLLECTED}
"""Of those advised, which go by the number of workers, and from how many workers on."""


@value
class AdviceRule:
    """A row of `RULES`: a policy, and when it is advised.

    Attributes
    ----------
    section
        That of the guide that has its figures.
    applies
        Says whether to a job, given whether its link is the limit with all of `EXCHANGES`.
    policy, settings
        Advised.
    why
        In a sentence.
    exchanged
        Whether it exchanges with each mini-batch.
    coded
        Whether codecs are of use: rows of tables cross raw.
    """

    section: str
    applies: Callable[[TrainingJob, bool], bool]
    policy: str
    settings: tuple[str, ...]
    why: str
    exchanged: bool = True
    coded: bool = True

    @property
    def directed(self) -> bool:
        """True if workers make directions of matrices."""
        return self.policy == "schedule-free" and "orthogonal=false" not in self.settings


RULES: Sequence[AdviceRule] = (
    AdviceRule(
        "tables",
        lambda job, bound: job.kind == "tables",
        "asgd",
        ("optimizer=adagrad", "lr=0.01"),
        "Rows take the steps of their own pushes: Adagrad gives rows that are pushed seldom longer"
        " ones, and each push is used, however stale.",
        coded=False,
    ),
    AdviceRule(
        "links-that-no-codec-makes-fast",
        lambda job, bound: bound and job.slowest > _SLOWEST,
        "diloco",
        ("mode=async", "overlap=true"),
        "Workers step by themselves and exchange every 20 steps or more, and none waits for"
        " another; where the slowest takes three times as long, waiting was better.",
        exchanged=False,
    ),
    AdviceRule(
        "links-that-no-codec-makes-fast",
        lambda job, bound: bound,
        "diloco",
        ("overlap=true",),
        "Workers step by themselves, exchange every 20 steps or more, and compute meanwhile.",
        exchanged=False,
    ),
    AdviceRule(
        "perceptron",
        lambda job, bound: job.kind == "mlp" and job.small_steps,
        "schedule-free",
        ("orthogonal=false", "lr=0.003"),
        "One rate for any number of workers and no end to be known. Directions of matrices would"
        " take a worker longer than the gradient of so small a mini-batch.",
    ),
    AdviceRule(
        "in-short",
        lambda job, bound: True,
        "schedule-free",
        (),
        "One setting for any number of workers, equal or not, and no end to be known; no worker"
        " waits for another.",
    ),
)
"""In order: the first that applies counts."""


_LONG_WARM_UP = ("schedule=warmup:100",)
"""Of a transformer whose gradients are twice as stale, as exchanges are beside computing."""


def advise(job: TrainingJob) -> Advice:
    """Return what is advised for a job.

    Raises
    ------
    UsageError
        When there can be no such job.
    """
    job.check()
    bound = EXCHANGES[-1].seconds(job) > _WORTH.get(job.kind, _BOUND) * job.step
    rule = next(each for each in RULES if each.applies(job, bound))
    local = () if rule.exchanged else _local_steps(job)
    makers = _makers(job) if rule.directed else None
    if rule.directed and makers is not _SERVER:
        job = replace(job, step=job.step + job.directions)
    ways = [each for each in EXCHANGES if rule.coded or not each.codec]
    way = next((each for each in ways if each.seconds(job) <= _BOUND * job.step), ways[-1])
    if not rule.exchanged:
        way = Exchange(EXCHANGES[0].name, codec="int8")
    warm = _LONG_WARM_UP if rule.directed and way.overlap and job.kind == "transformer" else ()
    alone = ("collect=1",) if makers is _WORKERS else ()
    return Advice(
        policy=rule.policy,
        settings=(*rule.settings, *local, *alone, *warm),
        codec=way.codec,
        overlap=way.overlap,
        state=job.may_vanish,
        reasons=tuple(_reasons(job, rule, way, makers)),
        unmeasured=tuple(_unmeasured(job, rule, makers, bool(local))),
        steps=tuple((each.name, each.seconds(job)) for each in EXCHANGES),
    )


_SERVER = (
    "The server makes directions of the mean of {gathered} gradients, which trains better than"
    " those of single ones: an update takes a thread of it {took}, and updates are {apart} apart."
)
_WORKERS = (
    "Each worker makes the directions of its own gradients (collect=1): those of the mean of"
    " {gathered}, which train better, would take a thread of the server {took}, and updates are"
    " {apart} apart. Several servers (--shards) share them; then leave collect out."
)


def _makers(job: TrainingJob) -> str | None:
    """Return the reason for which the server makes directions, or workers; None: they do anyway."""
    if job.workers < _COLLECTED:
        return None
    return _SERVER if job.of_server <= _BUSY * job.apart else _WORKERS


def _local_steps(job: TrainingJob) -> tuple[str, ...]:
    """Return the setting with which an exchange takes no longer than the steps between two."""
    coded = next(each for each in EXCHANGES if each.codec == "int8")
    needed = math.ceil(coded.crossing(job) / job.step)
    if needed > _MOST_LOCAL_STEPS:
        raise UsageError(
            f"an exchange would take {formatting.seconds(coded.crossing(job))} in int8, as long as"
            f" {needed:,} mini-batches: such a link cannot carry this model; give a faster one, or"
            " a smaller model"
        )
    return (f"local_steps={needed}",) if needed > _LOCAL_STEPS else ()


def _reasons(
    job: TrainingJob, rule: AdviceRule, way: Exchange, makers: str | None
) -> Iterator[Reason]:
    yield Reason(rule.why, rule.section)
    if makers is not None:
        own = job.directions if makers is _WORKERS else 0.0  # they are in a worker's step
        text = makers.format(
            gathered=job.workers // _EACH,
            took=formatting.seconds(job.of_server),
            apart=formatting.seconds(replace(job, step=job.step - own).apart),
        )
        yield Reason(text, "many-workers")
    computed = formatting.seconds(job.step)
    if not rule.exchanged:
        last = EXCHANGES[-1]
        took = formatting.seconds(last.seconds(job))
        text = f"A step with an exchange would take {took} even in {last.codec}, to {computed} of"
        yield Reason(f"{text} computing.", rule.section)
    elif way is not EXCHANGES[0]:
        waited, took = (formatting.seconds(each.seconds(job)) for each in (EXCHANGES[0], way))
        text = f"To {computed} of computing a step would take {waited} if exchanges are raw and"
        yield Reason(f"{text} waited for; {took} {way.name}.", "slow-links")
        if way.overlap and rule.directed and job.kind == "transformer":
            text = "Beside computing gradients are twice as stale: the rate rises over 100 updates."
            yield Reason(text, "slow-links")
    if job.unequal:
        text = f"A worker takes {job.slowest:g} times as long: the others would wait at a barrier."
        yield Reason(text, "unequal-workers")
    if job.may_vanish:
        text = "A server that is started again goes on from its state; its workers wait for it."
        yield Reason(text, "machines-that-may-vanish")


def _unmeasured(
    job: TrainingJob, rule: AdviceRule, makers: str | None, local: bool
) -> Iterator[str]:
    own = rule.directed and makers is not _SERVER
    if own and job.directions > job.step / 2:  # which they are a part of
        took = formatting.seconds(job.directions)
        yield (
            f"Directions of matrices beside so short a mini-batch: {took} of a thread, computed."
            " With orthogonal=false lr=0.002 there are none, and each mini-batch tells less."
        )
    if job.nbytes > _LARGEST:
        yield f"Models of more than {formatting.nbytes(_LARGEST)}: settings may not carry over."
    if job.workers > _MOST:
        yield f"More than {_MOST} workers."
    if job.slowest > _SLOWEST:
        yield f"Workers more than {_SLOWEST:g} times as slow as the others."
    if job.kind == "tables":
        yield "Policies beside each other on tables: this is what is usual for them."
        if job.rate is not None:
            yield "Tables over slow links: rows cross raw, whatever the codec."
    if job.kind == "mlp" and not job.small_steps:
        yield "Perceptrons on large mini-batches."
    if local:
        yield f"More than {_LOCAL_STEPS} steps between two exchanges."
