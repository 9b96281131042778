"""The settings of a simulation in turns, as one value."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiops.algorithms import find
from aiops.bandwidth.gates import find as find_gate
from aiops.common.settings import check_types
from aiops.engine.engine import Engine
from aiops.engine.events import Options
from aiops.errors import ConflictError, UsageError
from aiops.serving.config import settings_of

_SPARE = 8  # versions that may be alive beside one for each client
_FOR_EVER = 1e9  # seconds: without a clock no worker is late


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The settings of a simulation. Equal values give equal results, to the last bit.

    Attributes
    ----------
    policy, lr, set
        The server's algorithm, its learning rate (None: its own) and further settings,
        ``key=value``.
    gate, recall, push_codec, fetch_codec, fetch_lag
        As the server's flags of these names.
    clients
        The number of clients (the papers' λ).
    batch_size
        Examples in a mini-batch (µ).
    iterations
        Mini-batches in all, each computed by one client.
    dataset, hidden
        The names of what they train, as it is recorded, and compared when a run is resumed: a data
        set, and the hidden units of a perceptron. The task itself is given to `Run`.
    selection
        The rule that selects the client of each turn, as text
        (`aiops.sim.turns.client_selection.selection`).
    waits
        Whether a client waits for the answer to its push before it computes on. A client that does
        not is one gradient ahead at most (`aiops.client.strategies.overlapped`).
    order
        The order of examples: ``random``, or ``sequential`` as in FRED.
    samples
        The number of validations on the way, evenly spread; one more is at the beginning.
    seed
        Of the parameters, mini-batches, selection, and the gates' randomness.
    kernels
        ``auto``, ``numba`` or ``numpy``; all give the same bits.

    Raises
    ------
    UsageError
        When a value cannot work.
    """

    policy: str = "fasgd"
    lr: float | None = None
    set: tuple[str, ...] = ()
    gate: str = ""
    recall: int = 256 << 20
    push_codec: tuple[str, ...] = ()
    fetch_codec: tuple[str, ...] = ()
    fetch_lag: int = 0
    clients: int = 16
    batch_size: int = 8
    iterations: int = 2000
    dataset: str = "mnist"
    hidden: int = 200
    selection: str = "uniform"
    waits: bool = True
    order: str = "random"
    samples: int = 20
    seed: int = 0
    kernels: str = "auto"

    def __post_init__(self) -> None:
        """Check what can be checked without data."""
        check_types(self)
        for name in ("clients", "batch_size", "iterations", "hidden"):
            if getattr(self, name) < 1:
                what = name.replace("_", "-")
                raise UsageError(f"{what} must be 1 or more, not {getattr(self, name)}")
        for name in ("samples", "seed"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must be 0 or more, not {getattr(self, name)}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Simulation:
        """Return the simulation of a mapping that was read from JSON.

        Raises
        ------
        UsageError
            When a setting is missing or unknown, or a value cannot work.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if values.keys() != known:
            names = ", ".join(sorted(values.keys() ^ known))
            raise UsageError(f"this does not describe a simulation: check {names}")
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**given)

    def engine(self) -> Engine:
        """Return a server's engine for it.

        Raises
        ------
        UsageError, ConflictError
            When there is no such algorithm, gate or codec, or they cannot work together.
        """
        algorithm = find(self.policy).make(settings_of(self.set, self.lr))
        if "average" in algorithm.plan(self.clients):
            raise ConflictError(
                f"{self.policy}: workers average among themselves, at their own times, and a"
                " simulation in turns has no time: simulate a cluster instead"
            )
        if algorithm.schedule_unit == "seconds":
            raise ConflictError(
                "a simulation in turns has no time, so its schedule cannot count seconds: count"
                " updates or examples, or simulate a cluster instead"
            )
        gate = self.gate
        if gate and "seed=" not in gate:
            gate = dataclasses.replace(find_gate(gate), seed=self.seed).spec
        options = Options(
            workers=self.clients,
            worker_deadline=_FOR_EVER,
            live=self.clients + _SPARE,
            backend=self.kernels,
            gate=gate,
            recall=self.recall,
            push_codec=self.push_codec,
            fetch_codec=self.fetch_codec,
            fetch_lag=self.fetch_lag,
        )
        engine = Engine(algorithm, options)
        if not self.waits:
            _check_ahead(engine)
        return engine

    @property
    def key(self) -> str:
        """The settings as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def _check_ahead(engine: Engine) -> None:
    """Raise if clients that do not wait would follow a plan that relies on waiting."""
    name, plan = engine.algorithm.name, engine.plan
    if plan.get("routine", "direct") != "direct":
        case = "behind a gate" if "gate" in plan else f"under {name}"
        raise ConflictError(
            f"clients that do not wait: {case} a worker has a plan of its own for when it waits,"
            " so choose a policy to which workers push every gradient as it is, such as fasgd"
        )
    if plan.get("recompute"):
        raise ConflictError(
            f"clients that do not wait: under {name} a worker computes a refused gradient again at"
            " once, so it cannot be ahead; choose another policy or admission"
        )
