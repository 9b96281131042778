"""Everything of a server that exists once its model is defined, and the requests about the model.

The engine makes a `Training` from the first model that a worker offers (or that the server is given
at its start). Its methods need no check for a missing model.
"""

from __future__ import annotations

from functools import partial

from aiops.algorithms.base import Algorithm, Policy
from aiops.bandwidth.gate_controller import GateController
from aiops.engine import validation
from aiops.engine.admission import Admission
from aiops.engine.client_plan import ClientPlan
from aiops.engine.compiled_answers import enter_kernels
from aiops.engine.copy_request import CopyRequest
from aiops.engine.data_sets import DataSets
from aiops.engine.delta_replies import DeltaReplies
from aiops.engine.evaluation_replies import EvaluationReplies
from aiops.engine.events import DistributeModel, Effect, Options, Received, Warm
from aiops.engine.held_pushes import HeldPushes
from aiops.engine.membership import Member, Membership
from aiops.engine.push_closure import PushClosure
from aiops.engine.receive import CopiedIncoming, PushSink
from aiops.engine.registration import Definition, table_stores
from aiops.engine.replies import Replies
from aiops.engine.run_warnings import RunWarnings
from aiops.engine.steady import Shortcut, shortcut
from aiops.engine.steady_rows import RowsShortcut
from aiops.engine.table_requests import TableRequests, TableWork
from aiops.engine.update_queue import UpdateQueue
from aiops.errors import BadPush, Refused
from aiops.filters.screen import PushScreen
from aiops.model.arena import Arena, aligned
from aiops.model.layout import Array
from aiops.model.placement import Placement
from aiops.store.delta_replica import DeltaReplica
from aiops.store.evaluation import Evaluation
from aiops.store.parameters import Store
from aiops.store.resources import Resources
from aiops.store.snapshots import Version
from aiops.wire.messages import Fetch, PushRows


class Training:
    """One model's parameters, updates and answers.

    Parameters
    ----------
    definition
        The model.
    algorithm, policy, options
        Those of the engine.
    plan
        It has the codecs, and the bytes of gradients to keep.
    membership, admission, budget
        Parts of the engine that do not depend on the model.
    machine
        Memory, threads and the device that the store uses.
    warnings, closure
        The engine's.

    Attributes
    ----------
    store
        Parameters, versions, leases, optimiser state.
    tables
        The model's tables, as they were defined.
    delta_replies
        Answers coded fetches, if they are enabled.
    evaluation
        Answers fetches for evaluation, if the model is evaluated elsewhere than it is trained.
    copied
        Hands out the model to be copied.
    replies
        Answers everything else.
    updates
        The pushes, and the outstanding update.
    table_requests
        Work on rows.
    data_sets
        The examples that workers are given.
    shortcut
        The shared part of steady exchanges; None: the settings rule them out.
    rows_shortcut
        The same for messages about rows.
    begun
        The effects of the beginning: the model for followers, and kernels to compile.

    Raises
    ------
    BadPush
        When the model does not fit this server's memory.
    """

    def __init__(
        self,
        definition: Definition,
        algorithm: Algorithm,
        policy: Policy,
        options: Options,
        plan: ClientPlan,
        membership: Membership,
        admission: Admission,
        budget: GateController | None,
        machine: Resources,
        warnings: RunWarnings,
        closure: PushClosure,
    ) -> None:
        layout, workers = definition.layout, options.workers
        self.tables = definition.tables
        spread_over = options.table_shards
        stores = table_stores(self.tables, algorithm.rule(), options.backend, machine, spread_over)
        # Of several shards, this one decides about the whole layout but holds its first part only.
        placement, held, data = None, layout, definition.data
        if options.shards > 1:
            placement = Placement.even(layout, options.shards, options.shard_bytes)
            held = placement.layouts[0]
            if len(data) > held.nbytes:  # a restored model's other parts are not here
                data = aligned(held.nbytes)
                data[:] = definition.data[: held.nbytes]
        try:
            self.store = store = Store(
                layout,
                algorithm.rule(),
                backend=options.backend,
                live=options.live_of(held.nbytes),
                relaxed=options.relaxed,
                arena=machine.memory.holding(held, data),
                machine=machine,
                held=held,
                trim=algorithm.trimming(options.workers),
                momentum=algorithm.sum_momentum(options.workers),
            )
        except MemoryError as error:
            raise BadPush(
                f"the model of {held.nbytes} bytes, its rule's state and room for gradients do not"
                f" fit this server's memory: {error}"
            ) from None
        store.read_packed(plan.codecs())
        self.delta_replies: DeltaReplies | None = None
        if plan.fetched:
            replica = DeltaReplica(
                *(store.current, plan.fetched, options.backend, options.fetch_lag),
                live=options.live_of(held.nbytes),
                placement=placement,
                parallel_map=machine.parallel_map,
            )
            self.delta_replies = DeltaReplies(store, replica)
        self.evaluation: EvaluationReplies | None = None
        if store.rule.offset is not None:
            self.evaluation = EvaluationReplies(store, Evaluation(store), self.left_out, closure)
        copies = self.delta_replies, self.evaluation
        self.replies = Replies(store, self.tables.described, membership, budget, *copies)
        self.screen: PushScreen | None = None
        if options.filter != "off":
            self.screen = PushScreen(options.filter, layout, options.backend, held)
            # What is lent may change between the filters and the update: workers are not trusted.
            admission.incoming = CopiedIncoming
        self.copied = CopyRequest(store, self.evaluation)
        self.updates = UpdateQueue(
            *(algorithm, workers, policy, store, self.replies),
            HeldPushes(policy, store, membership, self.replies, closure),
            *(warnings, self.copied, [each for each in copies if each is not None]),
            *(plan, closure, self.screen),
        )
        self.data_sets = DataSets(membership, options.worker_deadline, closure)
        self.shortcut: Shortcut | None = None
        whole = not options.relaxed and placement is None and machine.device is None
        if whole and budget is None:
            self.shortcut = shortcut(
                *(store, self.updates, admission.surveyors(layout), machine, self.delta_replies)
            )
        admission.defined(held, self.tables)
        spread = admission.tables if options.spread_tables else None
        if stores and spread is not None and self.updates.maker.position is not None:
            raise BadPush(
                "rows of tables on several servers have no common clock: this server cannot spread"
                f" them with a schedule in {algorithm.schedule_unit} (--set schedule_unit=updates)"
            )
        self.table_requests = TableRequests(
            *(algorithm, workers, stores, membership, self.updates.maker.position, spread)
        )
        self.rows_shortcut: RowsShortcut | None = None
        if stores and budget is None and self.delta_replies is None:
            self.rows_shortcut = RowsShortcut(
                *(self.table_requests, self.updates, membership, options.backend, machine)
            )
        membership.defined(layout)
        warming = [*store.warming(), *(table.warm for table in stores)]
        if self.shortcut is not None:
            warming.append(partial(enter_kernels, store.updater))
        if self.screen is not None:
            warming.append(self.screen.warm)
        self.begun: list[Effect] = []
        if placement is not None:
            self.begun.append(DistributeModel(placement, definition.data))
        self.begun.append(Warm(warming))

    # ------------------------------------------------------------ requests

    def fetch(self, event: Received, member: Member | None) -> list[Effect]:
        """Send parameters, as soon as they can be read."""
        assert isinstance(event.message, Fetch)
        effects = self.replies.fetch(event.peer, event.message, member)
        return effects + self.updates.advance(event.time)  # of a copy, if its work is due

    def fetch_rows(self, event: Received) -> list[Effect]:
        """Send rows of a table, when their turn comes."""
        event = self.table_requests.with_sink(event)
        return self.updates.work(self.table_requests.fetch(event), event.time)

    def push_rows(self, event: Received, member: Member) -> list[Effect]:
        """Queue a push of rows.

        One that has come before is answered from memory, and one that does not fit is refused.
        """
        event = self.table_requests.with_sink(event)
        message, sink = event.message, event.sink
        assert isinstance(message, PushRows)
        if message.seq <= member.last_seq:
            found = self.table_requests.repeat(event, member)
            if isinstance(found, TableWork):
                return self.updates.work(found, event.time)
            return [] if found is None else [found]
        barred = bool(member.covers) and member.bars(message.seq)
        fault = validation.fault(member, self.store, message, sink, self.updates.closure.why)
        fault = fault or self.table_requests.fault(sink, message)
        if barred and fault is None:
            fault = Refused("its examples were given to another worker: go on with a new task")
        if fault is None:
            member.last_seq = message.seq
            return self.updates.work(self.table_requests.push(event, member), event.time)
        if isinstance(sink, PushSink):
            sink.free()
        return self.replies.refuse_new(event, member, fault)

    def left(self, peer: int) -> None:
        """Send a connection that ended nothing more: its number may be another's some day."""
        self.replies.left(peer)
        self.table_requests.left(peer)

    def abandon(self) -> None:
        """Send nothing more to any connection that there has been."""
        self.replies.abandon()
        self.table_requests.abandon()
        self.copied.abandon()

    # ------------------------------------------------------------ versions

    def copy(self, now: float) -> list[Effect]:
        """Hand out the model, as it is where it is evaluated, to be copied."""
        self.copied.ask()
        return self.updates.advance(now)

    def go_on(self) -> None:
        """Take pushes again: a server that was ending ends no more, or another start goes on.

        That one may have been restored from a capture that was taken at the end.
        """
        if self.evaluation is not None:
            self.evaluation.captured()

    def evaluated(self) -> Arena:
        """Return the parameters where the model is evaluated, while no update is outstanding.

        They are those that are held here. Unless the rule has an offset, they are the current ones.
        """
        return self.store.current.arena if self.evaluation is None else self.evaluation.now()

    def left_out(self) -> Array:
        """Return what is left out of each tensor's offset where the model is evaluated."""
        return self.updates.maker.numbers.offset_left_out(self.store.current)

    def held_versions(self, membership: Membership) -> set[tuple[int, bool]]:
        """Return the versions that the rule compares gradients with, now or later.

        Each is a number, and whether it is a version of the delta replica.
        """
        held = [member.sent.version for member in membership if member.sent is not None]
        reads = self.updates.maker.reads
        held += [] if reads is None else [reads]
        return {(version.number, self.of_replica(version)) for version in held}

    @property
    def readers_cut(self) -> int:
        """The number of slow readers of parameters that were cut off."""
        return self.store.cut + (0 if self.evaluation is None else self.evaluation.evaluation.cut)

    def of_evaluation(self, version: Version) -> bool:
        """Return whether a version is one for evaluation."""
        return self.evaluation is not None and self.evaluation.evaluation.owns(version)

    def of_replica(self, version: Version) -> bool:
        """Return whether a version is one of the delta replica."""
        return self.delta_replies is not None and self.delta_replies.replica.owns(version)
