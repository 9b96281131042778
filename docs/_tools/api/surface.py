"""The public names: those that ``__all__`` of these modules lists, and their public members."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from aiops.algorithms import BUILT_IN

CORE = ("aiops", "aiops.client", "aiops.data", "aiops.errors", "aiops.server", "aiops.trackers")
"""The public modules that need no package of an extra."""

MODULES = (
    *CORE,
    *("aiops.client.torch", "aiops.client.jax", "aiops.client.keras", "aiops.data.torch"),
    "aiops.ray",
)
"""All public modules."""

MOST = 60
"""The most names that they may have together."""

PROVISIONAL: Mapping[str, str] = {
    "aiops.algorithms": "find",
    "aiops.algorithms.base": "Algorithm Policy Decision APPLY COLLECT IGNORE",
    "aiops.algorithms.local_training": "LocalTraining",
    "aiops.kernels.rule": "Rule",
    "aiops.kernels.vocabulary": "*",
    "aiops.codecs": "find Codec Encoder",
    "aiops.codecs.base": "elements length_fault",
    "aiops.testing": "*",
    "aiops.sim.turns.run": "simulate",
    "aiops.sim.turns.simulation": "Simulation",
    "aiops.sim.turns.task": "Task",
    "aiops.sim.turns.fred": "simulate_fred",
    "aiops.lab.workloads": "*",
    "aiops.lab.experiments.click_tables": "VALUES drawn_clicks",
}
"""Names that a minor version may change, by module; ``*`` are those of its ``__all__``."""

MADE_BY_SERVE = {"Server", "StandbyServer"}
"""Classes that a program gets from `aiops.serve`: their constructors are no public names."""

_CLIENT = "offer carry forked patience begin plan token info abandon note_log"
INTERNAL: Mapping[str, str] = {
    "AsyncClient": f"{_CLIENT} send_log",
    "Client": f"{_CLIENT} ask interrupt attend",
    "AsyncWorker": "forked directed plan token info abandon",
    "Worker": "forked directed plan token info abandon",
    "AsyncModelAverager": "forked plan token info abandon take_task",
    "ModelAverager": "forked plan token info abandon take_task",
    "Table": "described most evicts",
    "Params": "find_age held newest now_at lend own state restore",
    "Receipt": "vbar vbars",
    "Embedding": "attach discard push extra_repr",
    "RemoteOptimizer": "abandon changed",
    "RemoteTree": "abandon",
    "KerasOptimizer": "build",
    "SharedBatches": "feed_for note one_task ending over rows",
    "ShardedDataset": "rest",
    "Server": "administrator members norms on_taken run_state send_away socket take_snapshot"
    " follower_moved not_ready engine run coordinator warm start reload supersede replayer"
    " discard serve until_ending stop_with_lead forked",
    "StandbyServer": "administrator follower_moved forked generation members norms not_ready"
    " on_promotion reload send_away serve stand_by start stop_with_lead take_snapshot whole",
    "RunningServer": "accesses config heads present lead has_standby is_pair node servers",
}
"""Members that other rooms of aiops call, and that are promised to no program."""


class Name(NamedTuple):
    """A public name."""

    module: str
    name: str
    value: Any

    @property
    def home(self) -> str:
        """Its full name where it is defined, as a type checker calls it."""
        module = getattr(self.value, "__module__", self.module)
        ours = isinstance(module, str) and module.partition(".")[0] == "aiops"
        return f"{module if ours else self.module}.{self.name}"


def provisional() -> Mapping[str, frozenset[str]]:
    """Return the provisional names by module, with the algorithms that have a page."""
    found = {
        module: getattr(importlib.import_module(module), "__all__", ()) if given == "*" else given
        for module, given in PROVISIONAL.items()
    }
    named = {module: {*(of.split() if isinstance(of, str) else of)} for module, of in found.items()}
    for place in BUILT_IN.values():
        module, _, name = place.partition(":")
        named.setdefault(module, set()).add(name)
    return {module: frozenset(of) for module, of in named.items()}


def names(modules: Sequence[str] = MODULES) -> Iterator[Name]:
    """Yield each public name of these modules once, in the first that has it."""
    os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras takes it as it is imported
    seen: set[int] = set()
    for module in modules:
        home = importlib.import_module(module)
        for name in home.__all__:
            value = getattr(home, name)
            if not inspect.ismodule(value) and id(value) not in seen:
                seen.add(id(value))
                yield Name(module, name, value)


def _attributes(doc: str) -> list[str]:
    """Return the names in the section *Attributes* of a docstring."""
    section = re.search(
        r"^Attributes\n-+\n(.*?)(?:\n\n|\n\w+\n-+\n|\Z)", doc, re.DOTALL | re.MULTILINE
    )
    lines = section[1].splitlines() if section else []
    return [
        name
        for line in lines
        if not line.startswith(" ")
        for name in line.partition(":")[0].replace("*", "").split(", ")
    ]


def members(of: type) -> Iterator[tuple[str, Any]]:
    """Yield the public members of a class that aiops defines, sorted, with what defines them.

    Attributes of its objects are those that its docstring names.
    """
    found: dict[str, Any] = dict.fromkeys(_attributes(inspect.getdoc(of) or ""))
    for each in of.__mro__:
        if each.__module__.partition(".")[0] == "aiops":
            for name, value in vars(each).items():
                if found.get(name) is None:
                    found[name] = value
    internal = INTERNAL.get(of.__name__, "").split()
    for name in sorted(found):
        if not name.startswith("_") and name not in internal:
            yield name, found[name]
