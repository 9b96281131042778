"""Decide on a push in one compiled call, if all filters let it pass.

The filters are the specification: what they compute with NumPy, `CompiledScreen` computes in one
loop over the same arrays, with the same bits. It notes a push that passes as they would. For one
that would be refused it changes nothing, and the filters decide on it, which takes five times as
long; they know the reason. They also decide on pushes of some tensors, and on the first of a
worker.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiops.filters import agreement, curvature
from aiops.filters.agreement import AgreementFilter, agrees_loop, direction_loop, score_loop
from aiops.filters.arithmetic import LANES, Values, copy_loop
from aiops.filters.choice import chosen
from aiops.filters.curvature import (
    CurvatureFilter,
    goes_down_loop,
    note_loop,
    products_loop,
    weighed_loop,
)
from aiops.filters.norm import (
    NormFilter,
    has_norms_loop,
    norms_loop,
    own_medians_loop,
    refresh_loop,
)
from aiops.filters.observation import Filter
from aiops.filters.sample import Sample, read_loop
from aiops.filters.versions import SampledVersions
from aiops.kernels.backend import resolve
from aiops.model.layout import Bytes

NOTHING = np.empty(0, np.uint8)

_NORM, _CURVATURE, _AGREEMENT = 1, 2, 4
_KINDS = {NormFilter: _NORM, CurvatureFilter: _CURVATURE, AgreementFilter: _AGREEMENT}


class CompiledScreen:
    """All filters of one run as one loop.

    Parameters
    ----------
    sample, versions
        What is read of gradients, and of versions of the parameters.
    filters
        Those of the run, whose names are among `KINDS`.
    """

    KINDS = frozenset({"norm", "curvature", "agreement"})

    def __init__(
        self, sample: Sample, versions: SampledVersions, filters: Sequence[Filter]
    ) -> None:
        self._sample, self._versions, self._filters = sample, versions, filters
        self._values = np.empty(sample.size)
        self._loop = _compiled()
        self._used = sum(_KINDS[type(each)] for each in filters)
        self.grown()

    def grown(self) -> None:
        """Take the filters' arrays again: they have grown, or are others."""
        known = {type(each): each for each in self._filters}
        sample, versions = self._sample, self._versions
        norm = known.get(NormFilter) or NormFilter(["none"], 2.0)
        curve = known.get(CurvatureFilter) or CurvatureFilter(0)
        agree = known.get(AgreementFilter) or AgreementFilter(0, 0)
        assert isinstance(norm, NormFilter)
        assert isinstance(curve, CurvatureFilter)
        assert isinstance(agree, AgreementFilter)
        limits = [norm.factor]
        limits += [curvature.KEPT, curvature.FEWEST, curvature.FRACTION, curvature.ERRORS]
        limits += [curvature.SPAN]
        limits += [agreement.KEPT, agreement.FEWEST, agreement.AGREED, agreement.TWINS]
        limits += [agreement.USUAL, agreement.ALL, agreement.MOST]
        self._arrays = (
            *(sample.runs, sample.scales, sample.ends, versions.values, versions.numbers),
            *(norm.norms, norm.medians, norm.counts, norm.median, norm.usual, norm.turn),
            *(curve.gradients, curve.points, curve.moves, curve.sums, curve.means),
            *(agree.signs, agree.means, agree.units, agree.counts, agree.scores, agree.closest),
            np.array(limits, float),
        )

    def passes(
        self,
        row: int,
        gradient: Bytes,
        values: Values | None,
        params: Bytes,
        largest: float,
        base: int,
        number: int,
    ) -> bool:
        """Note a push of all tensors if every filter lets it pass; else change nothing.

        Parameters
        ----------
        row
            Of its worker.
        gradient
            Its bytes.
        values
            Those sampled, if it was sent coded; None: they are read here.
        params
            The bytes of the version that it meets.
        largest
            The largest magnitude of the gradient.
        base, number
            The versions that it was computed on, and that it meets.
        """
        if values is None:
            values = self._values
        else:
            gradient = NOTHING
        found: bool = self._loop(
            *(gradient, params, values, *self._arrays, self._used, row, largest, base, number)
        )
        return found


def warm(text: str, backend: str) -> bool:
    """Compile the loop, or read it from the cache folder; return whether it is for these filters.

    Parameters
    ----------
    text
        The filters, as `aiops.filters.choice.chosen` takes them.
    backend
        ``"auto"``, ``"numba"`` or ``"numpy"``.
    """
    found = chosen(text)
    if not found or not CompiledScreen.KINDS.issuperset(found) or resolve(backend) == "numpy":
        return False
    _compiled()
    return True


@functools.cache
def _compiled() -> Any:
    from numba import types

    from aiops.kernels.numba_jit import array_of, compile_loop

    read = array_of("uint8")
    one, two, three = (types.Array(types.float64, axes, "C") for axes in (1, 2, 3))
    ints, rows = (types.Array(types.int64, axes, "C") for axes in (1, 2))
    signature = types.boolean(
        *(read, read, one, rows, one, ints, two, ints),
        *(three, two, one, one, one, ints),
        *(two, two, two, two, two),
        *(one, two, two, one, one, one),
        *(one, types.int64, types.int64, types.float64, types.int64, types.int64),
    )
    return compile_loop(_passes_loop, signature)


def _passes_loop(
    gradient: Any, params: Any, values: Any, runs: Any, scales: Any, ends: Any, kept: Any,
    kept_numbers: Any, norms: Any, norm_medians: Any, norm_counts: Any, median: Any, usual: Any,
    turn: Any, gradients: Any, points: Any, moves: Any, sums: Any, means: Any, signs: Any,
    directions: Any, units: Any, seen: Any, scores: Any, closest: Any, limits: Any, used: Any,
    row: Any, largest: Any, base: Any, number: Any,
) -> Any:  # fmt: skip
    lanes, room = np.empty((3, LANES)), np.empty(max(norm_counts.size, sums.shape[0], seen.size))
    if gradient.size:
        read_loop(gradient, runs, scales, values)

    fresh, own_medians = np.empty(median.size), np.empty(median.size)
    renewed, risen, place, next_turn = np.empty(median.size), np.empty(median.size), 0, 0
    if used & _NORM:
        copy_loop(median, renewed)
        copy_loop(usual, risen)
        next_turn = refresh_loop(renewed, risen, turn, norm_medians, norm_counts, room)
        norms_loop(values, ends, largest, fresh, lanes[0])
        if not has_norms_loop(fresh, renewed, risen, limits[0]):
            return False
        place = int(norm_counts[row]) % norms.shape[1]
        own_medians_loop(norms[row], place, fresh, np.empty(norms.shape[1:]), own_medians)

    own, noted = np.empty(8), False
    slot, base_slot = number % kept.shape[0], base % kept.shape[0]
    met, unread = kept[slot], False
    if used & _CURVATURE:
        if kept_numbers[slot] != number:
            met, unread = np.empty(values.size), True
            read_loop(params, runs, scales, met)
        copy_loop(sums[row], own)
        own[6], own[7] = means[row, 0], means[row, 1]
        known = base == number or (base_slot != slot and kept_numbers[base_slot] == base)
        if known and own[3] > 0.0 and own[5] > 0.0 and own[4] + 1.0 < limits[5]:
            own[4] += 1.0
        elif known:
            noted = True
            if own[3] > 0.0:
                before = met if base == number else kept[base_slot]
                way, cross, changed = products_loop(
                    values, gradients[row], moves[row], before, points[row], own[5] > 0.0, lanes
                )
                if 0.0 < way < np.inf:
                    weighed_loop(way, cross, changed, limits[1], own)
            else:
                own[3] = 1.0
        if not goes_down_loop(sums, means, row, own, limits[2], limits[3], limits[4], room):
            return False

    mean, unit = np.empty(directions.shape[1]), np.empty(directions.shape[1])
    turned, score, twin = False, np.nan, np.nan
    if used & _AGREEMENT:
        turned = direction_loop(values, signs, directions[row], limits[6], mean, unit, lanes[0])
        count, fewest, every = seen[row] + 1.0, limits[7], int(limits[11])
        score, twin = scores[row], closest[row]
        if count >= fewest:
            if int(count) % ((seen.size + every - 1) // every) == 0:
                now = unit if turned else units[row]
                found = score_loop(units, seen, row, now, fewest, room, lanes[0])
                if found[0] == found[0]:
                    score, twin = found
            wanted = (fewest, limits[8], limits[9], limits[10], limits[12])
            if not agrees_loop(seen, scores, closest, row, score, twin, wanted, room):
                return False

    if used & _NORM:
        copy_loop(fresh, norms[row, place])
        copy_loop(own_medians, norm_medians[row])
        copy_loop(renewed, median)
        copy_loop(risen, usual)
        norm_counts[row] += 1.0
        turn[0] = next_turn
    if used & _CURVATURE:
        if unread:
            copy_loop(met, kept[slot])
            kept_numbers[slot] = number
        if noted:
            own[4] = 0.0
            own[5] = note_loop(row, values, kept[base_slot], kept[slot], gradients, points, moves)
        for k in range(6):
            sums[row, k] = own[k]
        means[row, 0], means[row, 1] = own[6], own[7]
    if used & _AGREEMENT:
        if turned:
            copy_loop(mean, directions[row])
            copy_loop(unit, units[row])
        seen[row] += 1.0
        scores[row], closest[row] = score, twin
    return True
