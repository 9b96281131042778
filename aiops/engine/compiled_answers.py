"""Steady exchanges in compiled code, of which `aiops.engine.steady` is the specification.

`compiled_answers` gives an `aiops.compiled._core.Answers` all that it works with. It changes the
same objects as the way in Python does, so a connection may take either from one push to the next.
"""

from __future__ import annotations

import sys
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from aiops.algorithms.base import APPLY
from aiops.bandwidth.byte_accounting import Ledger
from aiops.codecs.whole_gradient import WholeGradient
from aiops.compiled.loading import core
from aiops.engine.coded_answers import CodedAnswers
from aiops.engine.delta_replies import DeltaReplies
from aiops.engine.held_pushes import HeldPushes
from aiops.engine.membership import Member
from aiops.engine.pace import Pace
from aiops.engine.push_closure import PushClosure
from aiops.engine.run_warnings import RunWarnings
from aiops.engine.staleness import RecentStaleness, StalenessHistogram
from aiops.engine.update_maker import CollectedSum, UpdateMaker
from aiops.engine.update_queue import UpdateQueue
from aiops.kernels.interface import Spans
from aiops.kernels.numba_kernel import NumbaKernel
from aiops.kernels.numba_source import DIRECT
from aiops.kernels.scan import bits_surveyed
from aiops.model.arena import Arena
from aiops.model.parts import Parts
from aiops.store.finite_guard import FiniteGuard
from aiops.store.parameters import Store
from aiops.store.snapshots import SnapshotPool, Version
from aiops.store.updater import Updater
from aiops.wire.connection import Connection
from aiops.wire.template import Slot, Template
from aiops.wire.traffic import KindTraffic, Traffic

if TYPE_CHECKING:
    from aiops.compiled._core import Answers, Increments

LEARNT = (
    *(Arena, CollectedSum, Connection, DeltaReplies, FiniteGuard, HeldPushes, KindTraffic, Ledger),
    *(Member, Pace),
    *(
        PushClosure,
        RecentStaleness,
        RunWarnings,
        SnapshotPool,
        StalenessHistogram,
        Store,
        Traffic,
        UpdateMaker,
    ),
    *(UpdateQueue, Version),
)
"""The classes whose fields compiled code reads and writes, of the engine and what is below."""

_INTEGERS = {"B": False, "H": False, "I": False, "Q": False, "b": True, "h": True, "i": True} | {
    "q": True
}
"""Whether integers are signed, by their `struct` codes."""


class PythonWay(Protocol):
    """The way of a connection's exchanges in Python: `aiops.engine.steady.Steady`."""

    member: Member
    peer: int
    store: Store
    gradient: Arena
    parts: Parts
    whole: WholeGradient | None
    coded: CodedAnswers | None

    @property
    def recorded(self) -> tuple[Any, bytes, bool]:
        """The last push, as it is recorded."""

    def general(self, nbytes: int, now: float, record: Any) -> bytes | None:
        """Answer a push, or return None."""


@cache
def _learn(library: Any) -> None:
    library.learn_fields({each.__name__: each for each in LEARNT})


def enter_kernels(updater: Updater) -> None:
    """Have compiled code call a rule's kernels by their addresses; on any thread, once warm.

    That takes Numba as long as a small loop, once; after that they are read from its cache. Where
    there is none, kernels are called as Python calls them.
    """
    library = core()
    if library is None or tuple(library.DIRECT.split()) != DIRECT:
        return
    for kernel in updater.kernels:
        if isinstance(kernel, NumbaKernel):
            kernel.enter()


def compiled_answers(
    steady: PythonWay, template: Template, answer: Template, wire: Connection, updates: UpdateQueue
) -> Answers | None:
    """Return the compiled way of a connection's exchanges; None: Python's is taken.

    That is so without compiled code, with filters, with a schedule in examples or seconds, and for
    forms of numbers that MessagePack's encoders do not use for integers.

    Parameters
    ----------
    steady
        The way in Python.
    template, answer
        The forms of pushes and of answers.
    wire
        The state machine of the connection.
    updates
        The engine's.
    """
    library, maker = core(), updates.maker
    if library is None or sys.byteorder != "little":
        return None
    increments = None if steady.coded is None else steady.coded.compiled()
    if steady.coded is not None and increments is None:
        return None
    if updates.screen is not None or maker.position is not None:
        return None
    store, layout = steady.store, steady.store.layout
    forms = [_INTEGERS.get(slot.code) for slot in template.slots]
    coded = None if steady.whole is None else _coded(steady.whole, steady.gradient, template)
    if steady.whole is not None and coded is None:
        return None
    has_statistic = store.rule.statistic is not None
    given = sorted(answer.slots, key=lambda slot: slot.begin)
    if None in forms or not _is_usual(given, has_statistic):
        return None
    _learn(library)
    updater, numbers, gain = store.updater, maker.numbers, maker.numbers.gain
    nothing = np.zeros(len(layout.tensors))
    spans = []
    for section, (lo, hi) in zip(layout.sections, layout.whole, strict=True):
        rows = slice(section.first, section.last)
        each = Spans(lo, hi, lo, nothing[rows])
        spans.append((each.lo, each.hi, each.src, rows, 1.0))
    policy = updates.policy
    parts = SimpleNamespace(
        steady=steady,
        general=steady.general,
        template=template,
        wire=wire,
        member=steady.member,
        store=store,
        pool=store.snapshots,
        updates=updates,
        held=updates.held,
        maker=maker,
        collected=maker.collected,
        warnings=updates.warnings,
        closure=updates.closure,
        guard=store.guard,
        even=numbers.even,
        histogram=maker.staleness,
        recent=numbers.recent_staleness,
        pace=updates.pace,
        policy=None if updates.immediate else policy.push,
        apply=APPLY,
        gain=gain.note_total if gain.moves else None,
        kernels=updater.kernels,
        masters=updater.masters,
        states=updater.state,
        spans=tuple(spans),
        compiled_kernel=NumbaKernel,
        gradient=steady.gradient,
        recorded=steady.recorded,
        update=store.update,
        units=store.units,
        concatenate=np.concatenate,
        push_parts=steady.parts,
        zeros=partial(np.zeros, dtype=np.int64),
        **_coded_parts(steady.coded, increments, wire, steady.member),
    )
    varies = bytearray(template.size)
    for slot in template.slots:
        varies[slot.begin : slot.end] = b"\xff" * (slot.end - slot.begin)
    sections = [
        (section.stop - section.start, *bits_surveyed(section.dtype)) for section in layout.sections
    ]
    try:
        made: Answers = library.Answers(
            parts,
            steady.peer,
            wire.head,
            template.data,
            bytes(varies),
            answer.data,
            tuple(
                (slot.begin, slot.end - slot.begin, bool(signed))
                for slot, signed in zip(template.slots[:4], forms, strict=False)
            ),
            tuple(slot.begin for slot in given),
            tuple(sections),
            layout.nbytes,
            store.cost,
            4 * len(layout.tensors) if has_statistic else 0,
            max(layout.parameters, 1),
            numbers.scheduled,
            len(store.rule.scalars),
            has_statistic,
            coded,
        )
    except ValueError:  # a model of more sections than are usual
        return None
    return made


def _coded(whole: WholeGradient, gradient: Arena, template: Template) -> tuple[object, ...] | None:
    """Return how coded gradients lie in messages; None: the codecs' loops are not compiled.

    Also where a message has the versions of its parts in several widths.
    """
    first, *others = template.slots[3:]
    if any(slot.code != first.code for slot in others):
        return None
    pieces = []
    for piece in whole.pieces:
        address = second = 0
        if piece.codec is not None:
            entries = piece.codec.entered()
            if entries is None:
                return None
            address, second = entries.decode, piece.second
        pieces.append((address, *piece[:4], second))
    ages = tuple(slot.begin for slot in others)
    return ages, tuple(pieces), gradient.data, whole.nbytes, whole.between


def _coded_parts(
    coded: CodedAnswers | None, increments: Increments | None, wire: Connection, member: Member
) -> dict[str, Any]:
    """Return what coded answers are made of; all None if answers are raw."""
    found = dict.fromkeys(
        ("increments", "replica", "delta", "follow", "regions", "answer_coded"), None
    )
    if coded is None:
        return found
    replica = coded.replies.replica
    return {
        "increments": increments,
        "replica": replica.snapshots,
        "delta": coded.replies,
        "follow": coded.follow,
        "regions": replica.regions_since,
        "answer_coded": partial(coded.answer, wire, member.ledger),
    }


def _is_usual(slots: list[Slot], has_statistic: bool) -> bool:
    """Return whether the numbers of an answer are of the forms that our encoder uses for them."""
    codes = [slot.code for slot in slots]
    statistics = ["d", codes[6]] if has_statistic and len(codes) == 8 else []
    return codes == ["Q", "Q", "Q", "Q", "d", *statistics, "Q"]
