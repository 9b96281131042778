"""The catalogue of algorithms: families, shared topics, and each one's facts and settings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiops.algorithms import BUILT_IN, find
from aiops.algorithms.base import Algorithm, Policy
from aiops.algorithms.local_training import LocalTraining
from aiops.algorithms.modulation import Modulated
from aiops.algorithms.server_optimizer import Optimised
from aiops.algorithms.trimming import Trimmed
from aiops.client.strategies import no_overlap
from aiops.engine.client_plan import plan_of
from aiops.errors import ConflictError

FAMILIES: Mapping[str, str] = {
    "synchronous or bounded": "Every gradient used is of the current version, or little older.",
    "asynchronous": "Gradients are used however stale they are, all alike.",
    "staleness-aware": "Gradients are used however stale they are, each according to that.",
    "local training": "Workers step by themselves, and exchange the changes of their parameters.",
}
"""The families in their order, each with the property that its algorithms share."""

TOPICS: Mapping[str, str] = {
    "optimizers": "aiops.algorithms.optimizers",
    "schedules": "aiops.algorithms.schedules",
    "modulations": "aiops.algorithms.modulation",
    "per-tensor": "aiops.algorithms.per_tensor",
}
"""Topics that several algorithms share, and the modules whose docstrings explain them."""

WORKERS = 4
"""The number of workers that the facts assume."""

OWN = "Its own"
HEADINGS: Mapping[type[Algorithm], str] = {
    Modulated: "Modulation for staleness",
    LocalTraining: "Local training",
    Optimised: "The server's optimiser",
    Trimmed: "A trimmed mean",
    Algorithm: "Learning rate and clipping",
}
"""The headings of the settings of each shared base, in this order."""

_PUSHES = 1000  # by one worker alone; a policy that allows these never makes it wait


@dataclass(frozen=True)
class PolicyFacts:
    """The behaviour of an algorithm with its default settings.

    Attributes
    ----------
    waits_for
        The workers that a worker waits for.
    worker
        The actions of one worker.
    memory
        The values that the server keeps for each parameter, besides the parameters.
    overlap
        Whether a worker may overlap exchanges and computing (``overlap=True``), or why not.
    """

    waits_for: str
    worker: str
    memory: str
    overlap: str


@dataclass(frozen=True)
class Setting:
    """One setting of an algorithm, with its meaning from the docstring."""

    name: str
    type: str
    default: object
    meaning: str


@dataclass(frozen=True)
class SettingGroup:
    """Settings that are listed under one heading."""

    title: str
    settings: list[Setting]


def built_in() -> dict[str, type[Algorithm]]:
    """Return the algorithms that come with aiops, by name."""
    return {name: find(name) for name in BUILT_IN}


def family(kind: type[Algorithm]) -> str:
    """Return the heading of an algorithm: its class attribute ``family``, by default ``other``."""
    return str(getattr(kind, "family", "other"))


def neighbours(kind: type[Algorithm]) -> list[str]:
    """Return the algorithms that a page compares with its own, the nearest first.

    They are the words of the class attribute ``neighbours``.
    """
    return str(getattr(kind, "neighbours", "")).split()


def families(kinds: Mapping[str, type[Algorithm]]) -> dict[str, list[str]]:
    """Return the names of algorithms by family; families that are not ours come last."""
    found: dict[str, list[str]] = {title: [] for title in FAMILIES}
    for name in sorted(kinds):
        found.setdefault(family(kinds[name]), []).append(name)
    return {title: members for title, members in found.items() if members}


def command(name: str, kind: type[Algorithm]) -> str:
    """Return the command that serves an algorithm with its default settings."""
    try:
        kind().check(workers=None)
    except ConflictError:
        return f"aiops serve --policy {name} --workers N"
    return f"aiops serve --policy {name}"


def facts(kind: type[Algorithm]) -> PolicyFacts:
    """Return the facts of an algorithm, found by running its policy and reading its plan and rule.

    >>> from aiops.algorithms.hardsync import Hardsync
    >>> facts(Hardsync).waits_for, facts(Hardsync).worker, facts(Hardsync).memory
    ('all workers', 'pushes each gradient', '1: a sum')
    """
    algorithm = kind()
    with suppress(ConflictError):  # its other mistakes are told here, as a server would
        algorithm.check(WORKERS)
    plan = plan_of(algorithm, WORKERS)
    waits, collects = _watch(algorithm.policy(WORKERS))
    if waits != "no worker" and plan.get("limit"):
        waits += f", computing on for up to {plan['limit']} steps"
    return PolicyFacts(waits, _worker(plan), _memory(algorithm, collects), _overlap(plan))


def _overlap(plan: Mapping[str, Any]) -> str:
    """Return whether exchanges overlap with computing."""
    if "average" in plan:
        return "there are no exchanges with a server"
    if plan.get("overlap", "none") != "none":
        return "always"
    why = no_overlap(plan)
    return f"no: {why}" if why else "`overlap=True` in the worker"


def _watch(policy: Policy) -> tuple[str, bool]:
    """Push for one worker alone; return the workers it waits for, and if gradients are summed."""
    policy.workers_changed(frozenset(range(1, WORKERS + 1)))
    collects = False
    for count in range(1, _PUSHES):
        verdict = policy.push(1, 0)
        collects |= verdict.use and verdict.divide is None
        if not verdict.hold or policy.may_go(1, published=verdict.divide is not None):
            continue
        if verdict.divide is not None:
            return f"the slowest, when {count} steps ahead", collects
        needed = 1 + next(
            (n for n in range(1, WORKERS) if policy.push(n + 1, 0).divide is not None), WORKERS
        )
        return ("all workers" if needed >= WORKERS else f"the first {needed} of {WORKERS}"), True
    return "no worker", collects


def _worker(plan: Mapping[str, Any]) -> str:
    if "average" in plan:  # these workers push nothing
        return "trains a model of its own, and averages it with the others'"
    routine = plan.get("routine", "direct")
    describe = _ROUTINES.get(routine)
    does = describe(plan) if describe else f"follows the routine {routine}"
    return does + (", computes refused ones again" if plan.get("recompute") else "")


def _steps(count: int) -> str:
    return "every step" if count == 1 else f"every {count} steps"


def _local(plan: Mapping[str, Any]) -> str:
    inner = plan["inner"]["optimizer"]
    if plan.get("overlap") == "free":
        return f"steps by itself ({inner}), pushes its change as soon as it can"
    return f"steps by itself ({inner}), pushes its change {_steps(plan['push_every'])}"


_ROUTINES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "direct": lambda plan: "pushes each gradient",
    "accumulate": lambda plan: (
        f"steps by itself, pushes its summed gradients {_steps(plan['push_every'])},"
        f" fetches {_steps(plan['fetch_every'])}"
    ),
    "local": _local,
    "elastic": lambda plan: (
        f"steps by itself ({plan['inner']['optimizer']}), moves towards the centre"
        f" {_steps(plan['push_every'])}"
    ),
}


def _memory(algorithm: Algorithm, collects: bool) -> str:
    rule = algorithm.rule()
    arrays = [*rule.state, *(["a sum"] if collects else [])]
    text = f"{len(arrays)}: {', '.join(arrays)}" if arrays else "0"
    return text + (", and the versions that workers hold" if rule.reads else "")


@functools.cache
def references() -> Mapping[str, str]:
    """Return, by the references of docstrings, the page of each: an algorithm's name or a topic."""
    classes = {kind.__name__: name for name, kind in built_in().items()}
    topics = {module: topic for topic, module in TOPICS.items()}
    return {**classes, **topics}


# ---------------------------------------------------------------- settings


def grouped(algorithm: type[Algorithm]) -> list[SettingGroup]:
    """Return all settings: its own (which its page explains), then each base's; none empty.

    >>> from aiops.algorithms.fasgd import FASGD
    >>> [(group.title, [s.name for s in group.settings][:4]) for group in grouped(FASGD)]
    [('Its own', ['lr', 'gamma', 'beta', 'eps']), \
('Learning rate and clipping', ['schedule', 'schedule_unit', 'schedule_start', 'mini_batch'])]
    """
    meanings = described(algorithm)
    explained = [name for name in own_settings(algorithm) if not _below(algorithm, name)]
    own = list(dict.fromkeys(["lr", *explained]))  # lr has another meaning in each algorithm
    found: dict[str, list[Setting]] = {OWN: []}
    for base in (b for b in algorithm.__mro__[1:] if issubclass(b, Algorithm)):
        found.setdefault(_heading(base), [])
    for field in dataclasses.fields(algorithm):
        owner = algorithm if field.name in own else _owner(algorithm, field.name)
        meaning = described(owner)[field.name] if _below(algorithm, field.name) else ""
        kind = type(field.default).__name__
        setting = Setting(field.name, kind, field.default, meaning or meanings[field.name])
        found[OWN if owner is algorithm else _heading(owner)].append(setting)
    found[OWN].sort(key=lambda setting: own.index(setting.name))
    order = list(HEADINGS.values())
    groups = [SettingGroup(title, settings) for title, settings in found.items() if settings]
    return sorted(groups, key=lambda g: order.index(g.title) if g.title in order else -1)


def described(kind: type[Algorithm]) -> dict[str, str]:
    """Return the meaning of each setting: from the page of the class, or else of a base of it."""
    found: dict[str, str] = {}
    for base in kind.__mro__:
        for name, text in _descriptions(inspect.cleandoc(base.__doc__ or "")):
            found.setdefault(name, text)
    return {field.name: found.get(field.name, "") for field in dataclasses.fields(kind)}


def own_settings(kind: type[Algorithm]) -> list[str]:
    """Return the settings that a class's own page explains, or that the class defines."""
    explained = [name for name, _text in _descriptions(inspect.cleandoc(kind.__doc__ or ""))]
    own = dict.fromkeys([*explained, *vars(kind).get("__annotations__", ())])
    fields = {field.name for field in dataclasses.fields(kind)}
    return [name for name in own if name in fields]


def _descriptions(page: str) -> Iterator[tuple[str, str]]:
    """Yield (setting, description) from the section "Settings" of a docstring."""
    _before, _heading, section = page.partition("Settings\n--------\n")
    names: list[str] = []
    lines: list[str] = []
    for line in [*section.splitlines(), ""]:
        if line.startswith("    "):
            lines.append(line.strip())
            continue
        yield from ((name, " ".join(lines)) for name in names)
        names, lines = [], []
        head, colon, _type = line.partition(" : ")
        if not colon:
            return
        names = [name.strip() for name in head.split(",")]


def _below(algorithm: type[Algorithm], name: str) -> bool:
    """Return True if the page only refers to a base's explanation of a setting."""
    text = described(algorithm)[name].rstrip(".").lower()
    return text.endswith("see below") and _owner(algorithm, name) is not algorithm


def _heading(base: type[Algorithm]) -> str:
    return HEADINGS.get(base, f"As in {getattr(base, 'name', base.__name__)}")


def _owner(algorithm: type[Algorithm], name: str) -> type[Algorithm]:
    """Return the class that introduced a setting; a subclass may only change its default."""
    bases = [base for base in algorithm.__mro__ if name in vars(base).get("__annotations__", ())]
    return bases[-1]
