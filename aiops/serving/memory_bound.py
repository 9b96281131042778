"""One bound on a server's memory, computed from its settings and the size of its model.

It is what the settings allow clients to make the server hold, whatever they do, and not what it
usually holds. Each of its terms is held by the part of the server that takes the memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiops.access.strangers import MOST_STRANGERS
from aiops.common import formatting
from aiops.engine.admission import BUFFERS, ROOM, Admission
from aiops.engine.events import Options
from aiops.engine.membership import DEPARTED
from aiops.engine.steady import MOST as STEADY
from aiops.engine.steady import ROOM as STEADY_ROOM
from aiops.engine.steady_rows import ROOM as HEAD_BUFFERS
from aiops.filters.choice import most_bytes
from aiops.model.layout import Layout
from aiops.model.matrices import as_matrix
from aiops.model.tables import MAX_ROWS_BYTES
from aiops.net.mailboxes import ROOM as MAILBOXES
from aiops.net.memory_use import resident
from aiops.serving.shared_bounds import ANSWERS, HEADERS, SharedBound
from aiops.shards.measuring import SAMPLES
from aiops.store.evaluation import LIVE as EVALUATED
from aiops.wire.connection import SMALL

_log = logging.getLogger("aiops.server")

_PROGRAM = 256 << 20
"""Bytes: the interpreter, all code, compiled kernels and threads."""

_CONNECTION, _TLS = 48 << 10, 128 << 10
"""Bytes of one connection (its buffer of 16 KiB, the objects), and what TLS adds to them."""

_DIRECTIONS = 32
"""Bytes for each element of the largest matrix, while its direction is made: in float64."""

_CLIENT, _TENSOR = 16 << 10, 32
"""Bytes of one client that is remembered (its last answers, its account), and of each tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The settings by which a server may hold memory, beside its engine's options.

    Attributes
    ----------
    connections
        The most clients that are connected.
    states
        The arrays of the model's size that the policy's rule keeps, and a momentum if there is one.
    reads
        Whether the rule compares a gradient with the version that its worker had.
    near
        Whether versions are lent to clients on this machine, through shared memory.
    tls
        Whether connections speak TLS.
    kept
        Whether the state is kept (``--state``), so that it is captured for snapshots.
    gathered
        The gradients of a step that are held each, and not added up.
    directs
        Whether directions are made of sums of gradients.
    evaluates
        Whether the model is evaluated elsewhere than it is trained.
    saves
        Whether the model is saved at intervals (``--save-every``).
    """

    connections: int
    states: int
    reads: bool = False
    near: bool = False
    tls: bool = False
    kept: bool = False
    gathered: int = 1
    directs: bool = False
    evaluates: bool = False
    saves: bool = False


def terms(holdings: Holdings, options: Options, layout: Layout | None) -> Mapping[str, int]:
    """Return the terms of the bound, in bytes, by name.

    Parameters
    ----------
    holdings, options
        The settings.
    layout
        What the server has of the model; None: it is not defined yet, and taken to be
        ``options.max_model`` bytes of float32.
    """
    if layout is None:
        nbytes, wide, tensors = options.max_model, options.max_model, 0
        largest, whole = nbytes // 4, nbytes
    else:
        nbytes, tensors = layout.nbytes, len(layout.tensors)
        largest = max((math.prod(t.shape) for t in layout.tensors if as_matrix(t.shape)), default=0)
        whole = nbytes if layout.within is None else layout.within[0].nbytes
        wide = max(nbytes, 4 * layout.parameters)  # optimiser state of float16 is float32
    masters = wide > nbytes
    state = (holdings.states + masters) * wide
    live, people = options.live_of(nbytes), holdings.connections + MOST_STRANGERS
    workers = options.workers or holdings.connections
    found = {
        "program": _PROGRAM,
        "versions": (live + 2) * nbytes,  # one is being made, and one is on its way out
        "lent versions": live * nbytes if holdings.near else 0,
        "versions for evaluation": (EVALUATED + 2) * nbytes if holdings.evaluates else 0,
        "saved copy": whole if holdings.saves else 0,
        "workers' versions": workers * nbytes if holdings.reads else 0,
        "optimiser": state,
        "sum of gradients": holdings.gathered * wide,
        "directions": _DIRECTIONS * largest if holdings.directs else 0,
        "receive buffers": max(ROOM, BUFFERS * nbytes),
        "head buffers": STEADY_ROOM if SMALL < nbytes <= STEADY else 0,
        "decoded gradient": nbytes if nbytes <= STEADY else 0,
        "mailboxes": MAILBOXES if holdings.near and nbytes <= STEADY else 0,
        "rows": 4 * MAX_ROWS_BYTES + HEAD_BUFFERS,
        "kept gradients": options.recall if "skipped=reapply" in options.gate else 0,
        "answers": ANSWERS,
        "headers": HEADERS,
        "connections": people * (_CONNECTION + _TLS * holdings.tls),
        "clients": (holdings.connections + DEPARTED) * (_CLIENT + _TENSOR * tensors),
        "snapshot": state + nbytes if holdings.kept else 0,
    }
    if options.filter != "off" and (layout is None or layout.tensors):
        model = layout or Layout([("all", "float32", (max(nbytes // 4, 1),))])
        if model.within is not None:  # a lead's filters look at all of it
            model = model.within[0]
        found["filters"] = most_bytes(options.filter, model) * (1 + holdings.kept)
        if options.shards > 1:  # what followers have read of pushes
            found["filters"] += SAMPLES
    if options.fetch_codec:
        found["delta replica"] = (live + 3) * nbytes  # its versions, and the increments
        found["answers"] = max(ANSWERS, live * nbytes)
    return {name: count for name, count in found.items() if count}


class MemoryBound:
    """The bound of one server, which is logged when it starts and when its model is defined.

    Parameters
    ----------
    holdings, options
        The settings.
    admission
        Knows what the server has of the model.
    answers
        The bound on unread answers, which depends on the model.
    """

    def __init__(
        self, holdings: Holdings, options: Options, admission: Admission, answers: SharedBound
    ) -> None:
        self._holdings, self._options = holdings, options
        self._admission, self._answers = admission, answers
        admission.on_defined = self._defined

    @property
    def terms(self) -> Mapping[str, int]:
        """Its terms, in bytes, by name."""
        return terms(self._holdings, self._options, self._admission.layout)

    def report(self) -> dict[str, Any]:
        """Return the bound, its terms, and the bytes that the process has in memory now."""
        found = self.terms
        return {"bound": sum(found.values()), "terms": dict(found), "resident": resident()}

    def log(self) -> None:
        """Log the bound, and its largest terms."""
        layout, found = self._admission.layout, self.terms
        largest = sorted(found.items(), key=lambda item: -item[1])[:3]
        nbytes = self._options.max_model if layout is None else layout.nbytes
        _log.info(
            "memory: at most %s, with a model of %s%s; most of it for %s",
            formatting.nbytes(sum(found.values())),
            formatting.nbytes(nbytes),
            " (--max-model)" if layout is None else "",
            ", ".join(f"{name} ({formatting.nbytes(count)})" for name, count in largest),
        )

    def _defined(self) -> None:
        self._answers.bound = self.terms["answers"]
        self.log()
