"""A follower's part of one model: its parameters, its delta replica and the outstanding update.

The follower makes a `Shard` when the lead's `LoadShard` brings the model, so its methods need no
check for a missing one. It publishes a version only when an order names it: published as soon as it
is computed, this shard would be ahead of its lead, which may still order the version before to be
sent (`aiops.shards`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from aiops.algorithms.base import Algorithm
from aiops.codecs.choice import CodecChoice
from aiops.engine.events import Applied, Apply, Effect, Options, Reply
from aiops.model.arena import Arena, aligned
from aiops.model.layout import Array, Bytes, Ints, Layout
from aiops.model.parts import LARGEST, Part
from aiops.model.placement import RAW, Placement
from aiops.shards.measuring import PLAN, SAMPLE, PartSampler
from aiops.shards.orders import CAPTURE, EVALUATION, REHEARSED, REPLICA, ShardWork, left_out
from aiops.shards.receive import ShardBuffers
from aiops.store.capture_job import CaptureJob
from aiops.store.delta_replica import DeltaReplica, ReplicaJob
from aiops.store.evaluation import Evaluation, EvaluationJob
from aiops.store.gradient import Gradient
from aiops.store.parameters import MeasureJob, Store, UpdateJob, UpdateRound
from aiops.store.resources import Resources
from aiops.store.snapshots import Lease, Version
from aiops.wire.server_messages import (
    HoldVersion,
    LoadShard,
    RunUpdate,
    SendIncrements,
    SendParams,
    ShardParts,
    UpdateDone,
)
from aiops.wire.sinks import Sink

_ShardJob: TypeAlias = UpdateJob | ReplicaJob | EvaluationJob | CaptureJob | MeasureJob


class LoadSink(Sink):
    """The sink of the part of a model that a follower begins with.

    Parameters
    ----------
    lengths
        The bytes of each of its payloads, which are consecutive.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.data: Bytes = aligned(sum(lengths))
        self._offsets = np.cumsum([0, *lengths]).tolist()

    def view(self, part: int, offset: int) -> memoryview:
        """Return the memory for the rest of a payload."""
        return self.data[self._offsets[part] + offset : self._offsets[part + 1]].data

    def filled(self, part: int, offset: int, nbytes: int) -> None:
        """Do nothing: the lead has surveyed the values."""

    def abandoned(self) -> None:
        """Do nothing: the lead is lost, and the server ends."""


class Shard:
    """One shard of a model, on a follower. Its methods carry out the lead's orders.

    Parameters
    ----------
    order
        The model, its placement and its codecs.
    data
        The bytes of this shard, which it keeps.
    algorithm, options, machine
        Those of the follower.
    buffers
        The portions of pushes.

    Attributes
    ----------
    store
        Parameters, versions, leases, optimiser state.
    replica
        Answers coded fetches; None: they are not enabled.
    order
        The order that it was made of.
    shard, shards
        Its number, and the number of all.
    done
        The report on the last round of an update that was done, and the round.

    Raises
    ------
    ValueError
        By every method, and here: the order makes no sense, or (here) there is no room.
    """

    def __init__(
        self,
        order: LoadShard,
        data: Bytes,
        algorithm: Algorithm,
        options: Options,
        machine: Resources,
        buffers: ShardBuffers,
    ) -> None:
        placement = _placement(order)
        if not 0 < order.shard < len(placement):
            raise ValueError(f"there is no shard {order.shard}")
        layout = placement.layouts[order.shard]
        if len(data) != layout.nbytes:
            raise ValueError(f"{len(data)} bytes came for {layout.nbytes}")
        packed = order.plan.get("push_codecs", ())
        if not isinstance(packed, tuple) or not all(isinstance(name, str) for name in packed):
            raise ValueError("load_shard.plan.push_codecs: names of codecs were expected")
        choice = CodecChoice.from_announced(order.plan.get("fetch_codec", ()))
        if choice is None:
            raise ValueError("parameters are to be sent in a codec that is not known here")
        try:
            self.store = store = Store(
                layout,
                algorithm.rule(),
                backend=options.backend,
                live=options.live_of(layout.nbytes),
                relaxed=options.relaxed,
                arena=machine.memory.holding(layout, data),
                machine=machine,
                trim=algorithm.trimming(options.workers),
                momentum=algorithm.sum_momentum(options.workers),
            )
        except MemoryError as error:
            raise ValueError(f"there is no room for its part of the model: {error}") from None
        store.read_packed(packed)
        self.replica: DeltaReplica | None = None
        if choice:
            self.replica = DeltaReplica(
                *(store.current, choice, options.backend),
                live=options.live_of(layout.nbytes),
                placement=placement,
                shard=order.shard,
                parallel_map=machine.parallel_map,
            )
        self._evaluation = None if store.rule.offset is None else Evaluation(store)
        compares = order.plan.get(PLAN)
        self._sampler: PartSampler | None = None
        if compares is not None:
            self._sampler = PartSampler(placement.layout, layout, compares)
        self._buffers, self.order = buffers, replace(order, parts=())
        self.shard, self.shards = order.shard, len(placement)
        self.done: tuple[UpdateDone, UpdateRound] | None = None
        self._awaited = True  # the outstanding update is: it was ordered by the present lead
        self._asked: object = None  # the round that the last order was of
        # One or none, by its ticket:
        self._outstanding: dict[int, _ShardJob] = {}
        self._computed: tuple[Version, Ints] | None = None  # not published yet; tensors touched
        self._held: dict[tuple[int, bool], Lease] = {}  # by version; True: the delta replica's
        buffers.begin(layout)

    @staticmethod
    def nbytes_of(order: LoadShard) -> int:
        """Return the bytes of the shard that an order describes."""
        return _placement(order).layouts[order.shard].nbytes

    @property
    def idle(self) -> bool:
        """True if no update is outstanding."""
        return not self._outstanding

    # ------------------------------------------------------------ updates

    @property
    def version(self) -> int:
        """The newest version that was computed here."""
        return self.store.version + (self._computed is not None)

    @property
    def newest(self) -> Version:
        """That version, published or not; its numbers are those of the one before until it is."""
        return self.store.current if self._computed is None else self._computed[0]

    @property
    def held(self) -> list[tuple[int, bool]]:
        """The versions that are kept for the rule; True: those of the delta replica."""
        return sorted(self._held)

    @property
    def leases(self) -> Mapping[tuple[int, bool], Lease]:
        """The leases on those versions."""
        return self._held

    def restore(self, ticket: int, leases: Mapping[tuple[int, bool], Lease]) -> None:
        """Continue from a capture, which was done as this update, with these versions held."""
        self.done = UpdateDone(ticket, b"", b""), UpdateRound.STEP
        self._held = dict(leases)

    def lose_lead(self) -> None:
        """Report the outstanding update only to a lead that orders it again."""
        self._awaited = False

    def run_update(self, order: RunUpdate) -> Apply | UpdateDone | None:
        """Begin an update, bring the delta replica up to the model, or make one for evaluation.

        A lead that was lost orders its last update again. One that was done is answered from
        memory, and one that is still outstanding when it is done (None).
        """
        self._asked = order.work.get("round", UpdateRound.STEP)
        found = self._done_before(order.id)
        if found is not None:
            return found
        if order.id in self._outstanding:
            self._awaited = True
            return None
        self._reach(order.version)
        if self._outstanding or self._computed is not None:
            raise ValueError("one update at a time")
        job: _ShardJob
        if CAPTURE in order.work:
            job = self._capture(order)
        elif SAMPLE in order.work:
            job = self._measure(order)
        elif EVALUATION in order.work:
            job = self._evaluate(order)
        else:
            job = self._follow(order) if REPLICA in order.work else self._update(order)
        self._outstanding[order.id], self._awaited = job, True
        return Apply(order.id, job)

    def _done_before(self, id: int) -> UpdateDone | None:
        """Return the report on the round of an update that was asked for last, if it was done."""
        if self.done is None or self.done[0].id != id:
            return None
        report, reached = self.done
        if self._asked == UpdateRound.REHEARSE and reached is UpdateRound.STEP:
            # An earlier start of the lead has ordered the step: it was finite on all servers.
            return UpdateDone(id, REHEARSED, b"")
        return report if self._asked == reached else None

    def _capture(self, order: RunUpdate) -> CaptureJob:
        """Return the job that takes the place of an update, while the state is captured."""
        row = order.work[CAPTURE]
        if type(row) is not int or not 0 <= row <= LARGEST:
            raise ValueError(f"run_update.work.capture: {row!r} is no row")
        return CaptureJob(row, row)

    def _update(self, order: RunUpdate) -> UpdateJob:
        store = self.store
        work = ShardWork(order.work, len(store.layout.tensors))
        job = UpdateJob(store, store.cost, factor=work.factor, round=work.round)
        covered = None
        if order.push:
            job.gradient = self._buffers.gradient(order.push)
            covered = job.gradient.cover.tensors
            job.weights = work.weights_of(len(covered))
        job.begins_sum = work.begins_sum  # also where the gradient has nothing
        if work.steps_taken:
            touched = store.layout.all if work.touched is None else work.touched
            if covered is not None and job.weights is None and not np.array_equal(touched, covered):
                raise ValueError("the update is of other tensors than the push")
            job.touched, job.steps = touched, work.steps(len(touched))
            job.scalars = work.scalars(len(touched), len(store.rule.scalars))
            if not order.push or job.weights is not None:
                job.cost += store.updater.sum_cost
            job.scales, job.clip = work.scales(len(touched)), work.clip(len(touched))
            if store.rule.reads:
                job.sent = self._version(work.sent, replica=work.coded)
            if work.round is UpdateRound.STEP:
                # `spare`: later orders may still name the current version.
                job.target = store.begin(work.spare)
        return job

    def _measure(self, order: RunUpdate) -> MeasureJob:
        """Return the job that reads what the lead's filters look at."""
        if self._sampler is None:
            raise ValueError("its lead has no filters")
        gradient, largest = None, None
        if order.push:
            gradient = self._buffers.gradient(order.push)
            largest = self._buffers.largest(order.push)
        return self._sampler.job(self.store, order.work, gradient, largest)

    def measured(self, gradient: Gradient) -> tuple[bytes, bytes]:
        """Return the seed and the values of a portion that the lead's filters look at, if any."""
        return (b"", b"") if self._sampler is None else self._sampler.of_portion(gradient)

    def _follow(self, order: RunUpdate) -> ReplicaJob:
        """Return the job that brings the delta replica up to the model."""
        replica, oldest = self.replica, order.work[REPLICA]
        if replica is None or type(oldest) is not int:
            raise ValueError("there is no delta replica of this model")
        replica.forget(oldest)
        return replica.follow(self.store.current)

    def _evaluate(self, order: RunUpdate) -> EvaluationJob:
        """Return the job that makes the current version for evaluation."""
        if self._evaluation is None:
            raise ValueError("the model is evaluated where it is trained")
        return self._evaluation.begin(left_out(order.work, len(self.store.layout.tensors)))

    def applied(self, event: Applied) -> UpdateDone | None:
        """Take the result of the outstanding update; return the report to the lead, if awaited."""
        job, sample = self._outstanding.pop(event.ticket), (b"", b"")
        if isinstance(job, ReplicaJob):
            job.replica.followed(job, event.sums)
        elif isinstance(job, EvaluationJob):
            job.evaluation.publish(job)
        elif isinstance(job, UpdateJob) and job.target is not None:
            self._computed = job.target, job.touched
            if self._sampler is not None:
                sample = self._sampler.of_version(job.target)
        reached = job.round if isinstance(job, UpdateJob) else UpdateRound.STEP
        rehearsed = reached is UpdateRound.REHEARSE
        proof = self.store.guard.proof.packed() if rehearsed else b""
        report = UpdateDone(event.ticket, event.sums.astype("<i8").tobytes(), proof, *sample)
        self.done = report, reached
        return self._done_before(event.ticket) if self._awaited else None

    def evaluated(self, left: Array) -> Arena:
        """Return its part of the newest version where the model is evaluated; it is published.

        ``left``: what is left out of the offset of each tensor of the whole model.
        """
        self._reach(self.version)
        if self._evaluation is None:
            return self.store.current.arena
        placement = _placement(self.order)
        rows = placement.rows(self.shard, placement.layout.all)
        return self._evaluation.now(left[rows])

    # ------------------------------------------------------------ parameters

    def send_params(self, order: SendParams, peer: int | None) -> list[Effect]:
        """Send parts of a version on a connection; None: it was lost meanwhile."""
        self._reach(order.version)
        layout = self.store.layout
        parts = tuple(Part(*run[:2], RAW, run[1] - run[0], run[2]) for run in order.ranges)
        begin, end = layout.begin, layout.begin + layout.nbytes
        if any(not begin <= part.start < part.stop <= end for part in parts):
            raise ValueError("it holds other bytes")
        if peer is None:
            return []
        answer = ShardParts(order.id, order.version, parts)
        lease = self.store.lease
        if order.evaluation:
            if self._evaluation is None or self._evaluation.number != order.version:
                raise ValueError(f"it has not made version {order.version} for evaluation")
            lease = self._evaluation.lease
        return [Reply(peer, answer, lease() if parts else None)]

    def send_increments(self, order: SendIncrements, peer: int | None) -> list[Effect]:
        """Send parts of a version of the delta replica on a connection; None: it was lost."""
        replica = self._replica_at(order.version)
        if peer is None:
            return []
        parts, lease = replica.portion(order.ranges, order.increments)
        return [Reply(peer, ShardParts(order.id, order.version, parts), lease)]

    def hold(self, order: HoldVersion) -> None:
        """Keep a version, or let it go."""
        key = order.version, order.replica
        if not order.keep:
            lease = self._held.pop(key, None)
            if lease is not None:
                lease.release()
        elif key not in self._held and order.replica:
            self._held[key] = self._replica_at(order.version).lease()
        elif key not in self._held:
            self._reach(order.version)
            self._held[key] = self.store.lease()

    # ------------------------------------------------------------ versions

    def _reach(self, version: int) -> None:
        """Check that this is the version that an order names; publish it if just computed."""
        store, computed = self.store, self._computed
        if computed is not None and version == store.version + 1:
            self._computed = None
            target, touched = computed
            store.commit(target, touched, np.zeros(len(touched), np.int64))
        if version != store.version:
            raise ValueError(f"it is about version {version}, and this is {store.version}")
        if not store.readable:
            raise ValueError(f"version {version} is being overwritten, as its lead ordered")

    def _replica_at(self, version: int) -> DeltaReplica:
        """Return the delta replica, which must be at the version that an order names."""
        replica = self.replica
        if replica is None or replica.current.number != version:
            raise ValueError(f"its delta replica is not that of version {version}")
        return replica

    def _version(self, number: int, *, replica: bool) -> Version:
        """Return the version that the rule reads: one that is held, or the current one."""
        lease = self._held.get((number, replica))
        if lease is not None:
            return lease.version
        if replica or number != self.store.version:
            raise ValueError(f"version {number} is not held any more")
        return self.store.current


def _placement(order: LoadShard) -> Placement:
    whole = Layout((row[:3] for row in order.model), empty=True)
    return Placement(whole, [0, *(row[2] for row in order.shards)])
