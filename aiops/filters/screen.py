"""Screen pushes with filters, and quarantine workers that are refused too often."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from aiops.errors import Refused
from aiops.filters import choice, compiled_screen
from aiops.filters.arithmetic import Values
from aiops.filters.compiled_screen import NOTHING, CompiledScreen
from aiops.filters.norm import NormFilter
from aiops.filters.observation import WORKERS, Filter, Objection, Observation
from aiops.filters.sample import Sample, SampleReader, seed_number
from aiops.filters.versions import SampledVersions
from aiops.model.arena import Arena
from aiops.model.layout import Bytes, Cover, Layout

QUARANTINE = 16
"""Refusals after which a worker is quarantined, each counted for 1; a push that is used takes 1/2
of one off. So a worker of whose pushes less than a third are refused never is."""

UNSURE = 1 / 4
"""A refusal that an honest worker may meet with counts for this much: after 64 of them, with no
push used in between, the worker is quarantined. At a barrier all others wait for it meanwhile, and
the model that its gradients are compared on does not change."""

SEEDING = 8
"""The first pushes, of which the positions of the sample are drawn."""

LEARNT = 8
"""The pushes after them, which are measured and not used."""

_LEARNING = f"the first {SEEDING + LEARNT} pushes teach the filters what gradients are like"

REASONS = 64
"""The workers refused last, of which the statistics tell the reason."""

FIRST_SEED = bytes(8)
"""Of the positions at which the first pushes are read."""


class Parameters(Protocol):
    """A version of the parameters: its number, and its values."""

    @property
    def number(self) -> int:
        """The number of updates that made it."""

    @property
    def arena(self) -> Arena:
        """Its values."""


class PushScreen:
    """The filters of one run, and their account of each worker.

    They see a sample of each push (`aiops.filters.sample`). Its positions are drawn from a digest
    of the first pushes, of several workers: so no worker knows them, and a replay draws the same.
    These pushes are not used, and neither are the next eight, from which the filters learn. Of the
    first ones the digest has what a sample of known positions reads.

    Of a model on several servers one has the screen, and each reads its part of the sample. So
    nothing that is decided depends on where the model is cut.

    Parameters
    ----------
    text
        The filters, as `aiops.filters.choice.chosen` takes them.
    layout
        The model.
    backend
        ``"auto"``, ``"numba"`` or ``"numpy"``. Until `warm` has returned NumPy decides, with the
        same bits.
    held
        The part of the model that is here; None: all of it.

    Attributes
    ----------
    spread
        Whether other servers hold parts of the model. Then `judge` is given all values.
    compares
        Whether the filters compare gradients with the parameters, and so look at values of these.
    sample
        The positions that are read at present.
    refused
        Pushes that were refused so far.
    quarantined
        By a worker's number, the reason.
    """

    def __init__(
        self, text: str, layout: Layout, backend: str = "auto", held: Layout | None = None
    ) -> None:
        self._text, self._layout, self._backend = text, layout, backend
        self.spread = held is not None and held.nbytes < layout.nbytes
        self._held = held if self.spread else None
        self._all = np.arange(len(layout.tensors) + 1)
        self.compares = choice.compares(text)
        self._seen = 0  # pushes so far, until they are enough
        self._digest = b""  # of those that the sample is drawn of
        self.sample, self._part = self._sampled()
        self._filters: list[Filter] = []
        self._versions = SampledVersions(0)
        self._compiled = False  # set by `warm`, on another thread
        self._loop: CompiledScreen | None = None  # None: the filters learn, or decide themselves
        self._rows: dict[int, int] = {}  # of the workers, those that pushed last at the end
        self._points: dict[int, float] = {}
        self._reasons: dict[int, str] = {}  # of the last refusal of each worker
        self.refused = 0
        self.quarantined: dict[int, str] = {}

    # ------------------------------------------------------------ measuring

    @property
    def seed(self) -> bytes:
        """The seed of the sample: at first that which is known, then one that is drawn."""
        return self._digest if self._seen >= SEEDING else FIRST_SEED

    def measure(self, data: Bytes, cover: Cover) -> Values:
        """Return the sampled values of a dense gradient, of the part of it that is here.

        It may be called on any thread.
        """
        return self._part.of_gradient(data, cover)

    def reader(self, current: Parameters) -> Callable[[Bytes], Values] | None:
        """Return what reads the sampled parameters of the part that is here, if `judge` lacks them.

        None: it has them, or no filter needs them.
        """
        drawn = self.spread and self._seen >= SEEDING
        lacking = drawn and self.compares and self._versions.find(current.number) is None
        return self._part.read if lacking else None

    def judge(
        self,
        worker: int,
        payload: Bytes,
        cover: Cover,
        largest: float,
        values: Values | None,
        current: Parameters,
        params: Values | None = None,
    ) -> str | None:
        """Return the reason for which a push is not used, or None.

        While the filters are learning that is the reason, and not held against the worker.

        Parameters
        ----------
        worker
            Its number.
        payload, cover
            What was received, and the tensors that it covers.
        largest
            The largest magnitude of its values.
        values
            As `measure` returned them, of all parts, for a gradient that was sent coded or to
            several servers; None: they are read here.
        current
            The version that it meets.
        params
            Its sampled values, if `reader` asked for them.
        """
        if params is not None:
            self._versions.keep(current.number, params)
        if self._seen < SEEDING:
            if values is None:
                values = self.measure(payload, cover)
            begin = values.tobytes()
            self._digest = hashlib.blake2b(self._digest + begin, digest_size=8).digest()
            self._seen += 1
            if self._seen == SEEDING:
                self._draw()
            return _LEARNING
        learnt = self._seen >= SEEDING + LEARNT
        if self._compiled and learnt and self._loop is None:
            self._loop = CompiledScreen(self.sample, self._versions, self._filters)
        if (self._loop is not None and cover.whole and worker in self._rows) and self._passes(
            worker, payload, values, _base(cover), largest, current
        ):
            return None
        if values is None:
            values = self.measure(payload, cover)
        seen = self._observed(worker, cover, largest, values, current)
        findings = [each.judge(seen) for each in self._filters]
        if not learnt:
            self._seen += 1
            return _LEARNING
        finding = next((each for each in findings if each is not None), None)
        for each in self._filters:
            each.settle(seen, finding is None)
        return self._account(worker, finding)

    def admits(
        self, worker: int, gradient: Bytes, base: int, largest: float, current: Parameters
    ) -> bool:
        """Return whether a gradient of the whole model is used, if that is found in one call.

        If it is not, nothing has changed, and `judge` has to decide.

        Parameters
        ----------
        worker, largest, current
            As of `judge`.
        gradient
            Its bytes.
        base
            The version that it was computed on.
        """
        if self._loop is None or worker not in self._rows or worker in self.quarantined:
            return False
        return self._passes(worker, gradient, None, base, largest, current)

    def _passes(
        self,
        worker: int,
        gradient: Bytes,
        values: Values | None,
        base: int,
        largest: float,
        current: Parameters,
    ) -> bool:
        """Note a push of a known worker in one call, if all filters let it pass."""
        assert self._loop is not None, "there is a loop"
        row, params = self._rows[worker], current.arena.data if self.compares else NOTHING
        found = (gradient, values, params, largest, base, current.number)
        if not self._loop.passes(row, *found):
            return False
        del self._rows[worker]  # it is the last to have pushed
        self._rows[worker] = row
        if worker in self._points:
            self._account(worker, None)
        return True

    def warm(self) -> None:
        """Compile the loop for the filters, if there is one; on any thread."""
        self._compiled = compiled_screen.warm(self._text, self._backend)

    def _draw(self) -> None:
        """Draw the positions of the sample, and make the filters."""
        self.sample, self._part = self._sampled()
        names = [tensor.name for tensor in self._layout.tensors]
        self._filters = choice.made(self._text, names, self.sample, seed_number(self.seed))
        self._versions = SampledVersions(self.sample.size if self.compares else 0)
        self._loop = None  # it is of other filters

    def _sampled(self) -> tuple[Sample, SampleReader]:
        """Return the sample of the seed, and what reads the part of it that is here."""
        sample = Sample(self._layout, seed_number(self.seed))
        return sample, sample if self._held is None else sample.of(self._held)

    def _observed(
        self, worker: int, cover: Cover, largest: float, values: Values, current: Parameters
    ) -> Observation:
        sample, versions, number = self.sample, self._versions, current.number
        if self.compares and versions.find(number) is None:
            versions.keep(number, sample.read(current.arena.data))
        base = _base(cover)
        norms = sample.norms(values, largest)
        tensors = self._all if cover.whole else np.append(cover.tensors, len(norms) - 1)
        return Observation(
            self._row(worker),
            tensors,
            norms if cover.whole else norms[tensors],
            values,
            None if cover.whole else sample.covered(cover),
            versions.find(base) if self.compares else None,
            versions.find(number) if self.compares else None,
        )

    def _row(self, worker: int) -> int:
        """Return the row of a worker, which may have been that of the one seen least."""
        row = self._rows.pop(worker, None)
        if row is None:
            row = len(self._rows)
            if row == WORKERS:
                row = self._rows.pop(next(iter(self._rows)))
            for each in self._filters:
                each.forget(row)
            if self._loop is not None:
                self._loop.grown()
        self._rows[worker] = row
        return row

    # ------------------------------------------------------------ accounts

    def _account(self, worker: int, finding: Objection | None) -> str | None:
        points = self._points.get(worker, 0.0)
        if finding is None:
            if points:
                self._points[worker] = max(points - 0.5, 0.0)
            return None
        why = f"its gradient {finding.why}"
        self.refused += 1
        self._reasons.pop(worker, None)
        self._reasons[worker] = why
        if len(self._reasons) > REASONS:
            del self._reasons[next(iter(self._reasons))]
        self._points[worker] = points = points + (1 if finding.blamed else UNSURE)
        if points >= QUARANTINE:
            self.quarantined[worker] = why
            for each in self._filters:
                each.expel(self._rows[worker])
        return why

    def fault(self, worker: int) -> Refused | None:
        """Return the refusal of all pushes of a worker that is quarantined, or None."""
        why = self.quarantined.get(worker)
        if why is None:
            return None
        return Refused(
            f"this worker is quarantined, because too many of its pushes were refused; of the last"
            f" one, {why}; look for bad data or a wrong loss, and start the worker again"
        )

    def report(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return its row of the statistics; ``names``: of workers, by number."""
        quarantined = [names.get(number, str(number)) for number in sorted(self.quarantined)]
        reasons = {names.get(number, str(number)): why for number, why in self._reasons.items()}
        counts = {"filter": self._text, "refused": self.refused}
        return {**counts, "quarantined": quarantined, "reasons": reasons}

    def norms(self) -> list[float] | None:
        """Return what the norm filter takes for usual: norms by tensor, and a largest value.

        NaN: no worker has pushed the tensor yet. None: no such filter is in use.
        """
        found = [each.median for each in self._filters if isinstance(each, NormFilter)]
        return found[0].tolist() if found else None

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return all of it as plain values, for `restore`; none before the sample is drawn."""
        accounts = list(self._points.items()), list(self.quarantined.items())
        return {
            "seen": self._seen,
            "digest": self._digest,
            "filters": [each.state() for each in self._filters],
            "versions": self._versions.state(),
            "rows": list(self._rows.items()),
            "accounts": accounts,
            "reasons": list(self._reasons.items()),
            "refused": self.refused,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._seen, self._digest = state["seen"], state["digest"]
        if self._seen >= SEEDING:
            self._draw()
            for each, kept in zip(self._filters, state["filters"], strict=True):
                each.restore(kept)
            self._versions.restore(state["versions"])
        self._rows = dict(state["rows"])
        points, quarantined = state["accounts"]
        self._points, self.quarantined = dict(points), dict(quarantined)
        self._reasons = dict(state["reasons"])
        self.refused = state["refused"]


def _base(cover: Cover) -> int:
    """Return the oldest version that a push was computed on."""
    return cover.level if cover.level is not None else int(cover.bases.min())
