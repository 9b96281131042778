"""Write and read orders for updates and parameters.

An array of equal numbers (the usual case) is sent as a single one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from aiops.errors import RemoteProtocolError
from aiops.kernels.clipping import Clip
from aiops.model.layout import MAX_TENSORS, Array, Ints
from aiops.model.parts import Part
from aiops.model.placement import RAW, Placement, ranges_of
from aiops.store.parameters import UpdateJob, UpdateRound
from aiops.wire.server_messages import SendIncrements, SendParams

REPLICA = "replica"
"""The key of work on the delta replica: the number of the oldest increment to keep."""

CAPTURE = "capture"
"""The key of a capture in the place of an update: the row of the lead's journal that it is of, and
0 if there is nothing to capture."""

EVALUATION = "evaluation"
"""The key of work on the parameters for evaluation: what is left out of each tensor's offset."""

REHEARSED = np.array([-1], "<i8").tobytes()
"""The sums in the report on a rehearsal whose result is finite."""


def work_of(
    job: UpdateJob, shard: int, placement: Placement, *, sent: int, replica: bool = False
) -> dict[str, Any]:
    """Return one shard's part of a job, as `aiops.wire.server_messages.RunUpdate` carries it.

    ``sent``: the version that the rule reads (-1: none); ``replica``: it is one of the
    delta replica.
    """
    found: dict[str, Any] = {"factor": float(job.factor), "round": job.round.value, "sent": sent}
    if replica:
        found["coded"] = True
    if job.gradient is not None and job.weights is not None:
        found["weights"] = _packed(job.weights[placement.rows(shard, job.pushed)])
        if job.begins_sum:
            found["begins_sum"] = True
    if job.target is not None:
        rows = placement.rows(shard, job.touched)
        touched = job.touched[rows] - placement.firsts[shard]
        count = len(placement.layouts[shard].tensors)
        found["spare"] = job.target is not job.store.current
        found["touched"] = None if len(touched) == count else touched.astype("<i8").tobytes()
        found["steps"] = _packed(job.steps[rows])
        if job.scales is not None:
            found["scales"] = _packed(job.scales[rows])
        if job.clip is not None:
            mine = job.clip.of(rows)
            groups = np.zeros(len(touched)) if mine.groups is None else mine.groups
            found["limits"] = np.array(mine.limits, "<f8").tobytes()
            found["groups"] = _packed(groups)
        if job.scalars is not None:
            found["scalars"] = _packed(job.scalars[rows].reshape(-1))
    return found


def evaluation_of(left: Array, shard: int, placement: Placement) -> dict[str, Any]:
    """Return one shard's part of an `EvaluationJob`, as `work_of` does of an update.

    ``left``: float64[tensors of the model].
    """
    return {EVALUATION: _packed(left[placement.rows(shard, placement.layout.all)])}


def left_out(work: Mapping[str, Any], tensors: int) -> Array:
    """Return what is left out of each of a shard's tensors, float64[tensors], checked.

    Raises
    ------
    RemoteProtocolError
        When they are no shares.
    """
    found = _numbers(work[EVALUATION], tensors)
    if not ((found >= 0) & (found <= 1)).all():
        raise RemoteProtocolError("run_update.work.evaluation: they are no shares")
    return found


def _packed(numbers: Array) -> bytes:
    numbers = np.ascontiguousarray(numbers, "<f8")
    if len(numbers) and (numbers == numbers[0]).all():
        numbers = numbers[:1]
    return numbers.tobytes()


def send_params(
    id: int,
    client: str,
    epoch: int,
    version: int,
    parts: Sequence[Part],
    *,
    evaluation: bool = False,
) -> SendParams:
    """Return the order to send a client these parts of a version, or of it for evaluation."""
    return SendParams(id, client, epoch, version, ranges_of(parts), evaluation)


def send_increments(
    id: int, client: str, epoch: int, version: int, parts: Sequence[Part]
) -> SendIncrements:
    """Return the order to send a client these parts of a version of the delta replica."""
    whole = ranges_of([part for part in parts if part.codec == RAW])
    coded = [part[:2] for part in parts if part.codec != RAW]
    increments = tuple((*piece, len(list(each))) for piece, each in groupby(coded))
    return SendIncrements(id, client, epoch, version, whole, increments)


class ShardWork:
    """One shard's part of a job, read and checked by its follower.

    Parameters
    ----------
    work
        The map that `work_of` returned.
    tensors
        The number of tensors that this shard has pieces of.

    Raises
    ------
    RemoteProtocolError
        When a value is missing, or of another kind or range than allowed.
    """

    def __init__(self, work: Mapping[str, Any], tensors: int) -> None:
        try:
            self.factor, self.round = float(work["factor"]), UpdateRound(work["round"])
            if self.round is UpdateRound.ALONE:
                raise ValueError("it is no round on several servers")
            self.begins_sum = bool(work.get("begins_sum", False))
            self.sent, self.coded = int(work["sent"]), bool(work.get("coded", False))
            self.weights: bytes | None = work.get("weights")
            self.steps_taken = "steps" in work
            self.touched: Ints | None = None
            if self.round is UpdateRound.MEASURE and not (self.steps_taken and work.get("limits")):
                raise ValueError("there is nothing to measure")
            if self.steps_taken:
                self.spare = bool(work["spare"])
                self._steps, self._scalars = work["steps"], work.get("scalars")
                self._scales = work.get("scales")
                self._limits, self._groups = work.get("limits", b""), work.get("groups")
                if not isinstance(self._limits, bytes) or len(self._limits) > 8 * MAX_TENSORS:
                    raise ValueError("its limits are none")
                if work["touched"] is not None:
                    self.touched = np.frombuffer(work["touched"], "<i8").astype(np.int64)
                    rising = len(self.touched) < 2 or bool((np.diff(self.touched) > 0).all())
                    inside = not len(self.touched) or 0 <= self.touched[0] <= self.touched[-1]
                    if not rising or not inside or self.touched[-1:].sum() >= max(tensors, 1):
                        raise ValueError("its tensors are out of order")
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise RemoteProtocolError(f"run_update.work: {error}") from None

    def weights_of(self, tensors: int) -> Array | None:
        """Return the weight of each tensor of the gradient; None if it is not collected."""
        return None if self.weights is None else _numbers(self.weights, tensors)

    def steps(self, tensors: int) -> Array:
        """Return the learning rate of each tensor touched."""
        return _numbers(self._steps, tensors)

    def scalars(self, tensors: int, each: int) -> Array | None:
        """Return the rule's scalars for each tensor touched, if it has any."""
        if not each:
            return None
        return _numbers(self._scalars, tensors * each).reshape(tensors, each)

    def scales(self, tensors: int) -> Array | None:
        """Return what the factor is multiplied by for each tensor touched; None: 1."""
        return None if self._scales is None else _numbers(self._scales, tensors)

    def clip(self, tensors: int) -> Clip | None:
        """Return the groups of the tensors touched, whose norms are to be measured, if any."""
        if not self._limits:
            return None
        limits = _numbers(self._limits, len(self._limits) // 8).tolist()
        groups = _numbers(self._groups, tensors)
        if not np.isin(groups, np.arange(len(limits))).all():
            raise RemoteProtocolError("run_update.work: its groups are none of those with limits")
        return Clip(tuple(limits), groups.astype(np.int64))


def _numbers(packed: Any, count: int) -> Array:
    try:
        numbers = np.frombuffer(packed, "<f8").astype(np.float64)
        return np.full(count, numbers[0]) if len(numbers) == 1 else numbers.reshape(count)
    except (TypeError, ValueError, IndexError) as error:
        raise RemoteProtocolError(f"run_update.work: {error}") from None
