"""Warn of settings with which a run does something else than they seem to say, each time once.

Some warnings follow from the settings alone, and are there from the start. One is given when more
workers are there than suit the settings. Others depend on the algorithm's statistic v̄, which falls
during a run. They are decided on between the updates, by the state: a replay, a standby and a
server that goes on from its ``--state`` give them at the same update, and not again.

The steady exchange (`aiops.engine.steady`) makes no effects. After each of its updates it compares
one number, `total`; when that is reached the next push goes the general way, which warns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from aiops.algorithms.base import Algorithm
from aiops.bandwidth.gate_controller import GateController
from aiops.bandwidth.gates import LEAST_SHARE, Gate
from aiops.codecs.choice import CodecChoice
from aiops.engine.events import Effect, Note
from aiops.kernels.interface import STATISTIC_SCALE
from aiops.store.parameters import Store

_SPARSE = "topk"
"""The codec that sends few elements of a gradient, and the sums of the others later."""

NEAR_FLOOR = 1.1
"""A statistic up to this many times its floor is taken to lie on it."""


def cautions(algorithm: Algorithm, pushed: CodecChoice) -> tuple[str, ...]:
    """Return the warnings that follow from the settings alone.

    ``pushed``: the codecs of gradients.
    """
    found = algorithm.cautions()
    if algorithm.second_moments and any(c.name == _SPARSE for _pattern, c in pushed.pairs):
        found += (
            f"{algorithm.name} divides by second moments, and {_SPARSE} sends an element of the"
            " gradient seldom, as the sum of many: with a rate found for it that cost nothing on"
            " MNIST under fasgd, and on a GPT training did badly; what carries over to other models"
            " is --push-codec int8, or diloco, which sends less",
        )
    return found


class RunWarnings:
    """The warnings of one engine.

    Parameters
    ----------
    algorithm
        Its rule has the statistic.
    gate
        The workers', or None.
    budget
        Chooses the gate's constants; None: they are the gate's own.
    cautions
        The warnings that are there from the start.

    Attributes
    ----------
    cautions
        The warnings that are there from the start.
    given
        These, and those since, in order.
    total
        The sum of the statistic over all parameters, in the store's units, from which on downwards
        one may be due; -1: none.
    due
        Whether one may be due now: the next update is not to be done at once.
    """

    # Those that compiled code reads: `aiops.compiled`.
    __slots__ = ("__dict__", "__weakref__", "due", "total")

    def __init__(
        self,
        algorithm: Algorithm,
        gate: Gate | None,
        budget: GateController | None,
        cautions: tuple[str, ...] = (),
    ) -> None:
        self._algorithm, self._gate = algorithm, gate
        self._budget = budget if budget is not None and budget.adaptive else None
        self._floor = NEAR_FLOOR * algorithm.rule().statistic_floor
        self._checks: dict[str, Callable[[Store], str | None]] = {}
        if self._floor:
            self._checks["floor"] = self._at_floor
        if gate is not None and (self._budget is not None or math.isfinite(gate.starves_below(()))):
            self._checks["gate"] = self._starved
        own = gate is not None and self._budget is None
        if own and gate is not None and gate.starves_below(()) == math.inf:
            cautions += (_starving(gate, float(np.min(gate.own_share(None, ()))), ""),)
        self.cautions, self.given = cautions, [*cautions]
        self.total, self.due = -1, False
        self._crowded = False  # it was said

    def joined(self, present: int, workers: int | None) -> list[Effect]:
        """Return the warning of the workers that are there now, if it is due, for the log.

        ``workers``: the number that the server was told.
        """
        text = "" if self._crowded else self._algorithm.crowded(present, workers)
        if not text:
            return []
        self._crowded = True
        self.given.append(text)
        return [Note(text)]

    def begin(self, store: Store) -> None:
        """Watch the statistic of a model."""
        self.due = bool(self._checks)
        self._await(store)

    def _await(self, store: Store) -> None:
        """Set the sum at which the next warning may be due."""
        levels = [self._floor] if "floor" in self._checks else []
        if "gate" in self._checks and self._gate is not None:
            # Constants of a budget change, and a tensor's v̄ is not the model's: look each time.
            changing = self._budget is not None or self._gate.by == "tensor"
            levels.append(math.inf if changing else self._gate.starves_below(()))
        if not levels:
            self.total = -1
            return
        highest = max(levels) * STATISTIC_SCALE * max(store.layout.parameters, 1)
        self.total = int(min(highest, float(1 << 62))) + 1  # the checks decide; this must not miss

    def give(self, store: Store) -> list[Effect]:
        """Return the warnings that are due before the next update, for the log."""
        effects: list[Effect] = []
        for name, check in [*self._checks.items()]:
            text = check(store)
            if text is not None:
                del self._checks[name]
                self.given.append(f"at version {store.version:,}: {text}")
                effects.append(Note(self.given[-1]))
        self.due = False
        self._await(store)
        return effects

    def state(self) -> dict[str, Any]:
        """Return the warnings given since the start, and those to come, for `restore`."""
        return {
            "given": self.given[len(self.cautions) :],
            "checks": [*self._checks],
            "crowded": self._crowded,
        }

    def restore(self, state: Mapping[str, Any], store: Store) -> None:
        """Continue from what `state` returned."""
        self.given += state["given"]
        self._crowded = state["crowded"]
        self._checks = {name: self._checks[name] for name in state["checks"]}
        self.begin(store)

    # ------------------------------------------------------------ inside

    def _at_floor(self, store: Store) -> str | None:
        vbar = store.vbar()
        return self._algorithm.at_floor(vbar) if vbar is not None and vbar <= self._floor else None

    def _starved(self, store: Store) -> str | None:
        gate, vbar = self._gate, store.vbar()
        assert gate is not None, "there is a check of it"
        if vbar is None:
            return None
        constants = self._budget.constants(vbar) if self._budget is not None else ()
        where, value = f"at v̄ = {vbar:.2g}", vbar
        if gate.by == "tensor":
            present = np.flatnonzero(store.layout.sizes > 0)
            each = np.frombuffer(store.vbars(), "<f4")[present]
            value = float(each.min(initial=math.inf))
            if len(each):
                name = store.layout.tensors[present[int(each.argmin())]].name
                where = f"of {name!r}, at its v̄ = {value:.2g},"
        if not value < gate.starves_below(constants):
            return None
        share = float(np.min(gate.own_share(np.array([value]), constants)))
        if self._budget is not None:
            wait = "gradients become old before they are pushed"
            if gate.share > share:
                wait = f"share={gate.share:g} of the gate asks for more, so workers wait for it"
            return (
                f"the bandwidth budget has room for {share:.1%} of the pushes ({where}): {wait};"
                " raise it, push with a codec (--push-codec int8), or compute on larger"
                " mini-batches"
            )
        return _starving(gate, share, f" {where}")


def _starving(gate: Gate, share: float, where: str) -> str:
    """Return the warning of a gate that lets few pushes pass."""
    kept = f"; share={gate.share:g} keeps it at {gate.share:.0%}" if gate.share > share else ""
    remedy = "choose a smaller constant"
    if gate.name == "bfasgd" and not getattr(gate, "relative", False):
        remedy = (
            "the constants c are for gradients of one scale, so on another model choose smaller"
            " ones, or relative=true, with which c_push=7 is one push in eight on any model"
        )
    elif gate.name != "bfasgd":
        remedy = "more pushes train better, and a codec (--push-codec int8) saves their bytes"
    return (
        f"the gate {gate.name} lets {share:.1%} of the pushes pass{where}, under"
        f" {LEAST_SHARE:.0%}{kept}: {remedy}"
    )
