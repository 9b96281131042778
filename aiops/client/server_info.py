"""A client's knowledge of its server: the run, the policy, the model.

A session makes one `ServerInfo` when it is made itself, and each welcome and each description of
the model adds to it. It survives connections. Requests read from it what to ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aiops.bandwidth.byte_accounting import Ledger
from aiops.client.coding import Coding
from aiops.client.known_run import KnownRun
from aiops.client.params import Params
from aiops.client.rows import Rows
from aiops.client.unsettled import Unsettled
from aiops.codecs.choice import CodecChoice
from aiops.common.failure_waits import FailureWaits
from aiops.errors import BadPush, RemoteProtocolError, UsageError
from aiops.kernels.parallel import ParallelMap
from aiops.model.layout import Layout
from aiops.model.placement import Placement
from aiops.model.row_shards import SPREAD_TABLES
from aiops.model.tables import Tables
from aiops.wire.messages import Model, Welcome

_LONGEST_WAIT = 1e9  # seconds that a server may announce


class ServerInfo:
    """The state of a server as far as a client has been told.

    Parameters
    ----------
    url
        The server's URL, for error texts.
    client
        The id of this client.
    role
        ``"worker"`` or ``"observer"``.
    ledger
        Is given the model's layout as soon as that is known.
    parallel_map
        Encodes large gradients in parallel.

    Attributes
    ----------
    connection
        This client's id and the epoch of its newest connection; epochs count from 1.
    run
        The server's run, its generation, and what is left of earlier ones.
    policy, settings, plan
        The server's algorithm, its settings, and the workers' part of it.
    suits
        Called before a model is offered to the server, which may keep it for good; it raises
        `UsageError` where the server does not suit. None: any does.
    waits
        What follows from the server's time-out of failures.
    layout
        The model's tensors; None until they are known.
    defined
        Whether the server has a model at present: it may have lost that which is known.
    rows
        The model's tables.
    placement
        The division of the model, if not all of it lies on the lead; else None.
    coding
        The encoders of pushes; None if they travel raw.
    increments
        Whether fetches ask for coded increments.
    examples
        The examples, (task, start, stop) each, of the gradients that no push has taken along yet.
    unsettled
        Those in the model of a worker that averages, and in no round yet.
    loops
        By data set: the loop of this worker over it, called for what is None once it is gone.
    """

    waits: FailureWaits
    defined: bool
    increments: bool
    client: str
    url: str
    policy: str

    def __init__(
        self, url: str, client: str, role: str, ledger: Ledger, parallel_map: ParallelMap
    ) -> None:
        self.url, self.client = url, client
        self._role, self._ledger, self._parallel_map = role, ledger, parallel_map
        self.connection: tuple[str, int] = (client, 0)
        self.run: KnownRun = KnownRun()
        self._spread = False  # the rows of tables lie on all shards
        self._welcomed = False
        self.policy = ""
        self.settings: Mapping[str, Any] = {}
        self.plan: Mapping[str, Any] = {}
        self.suits: Callable[[ServerInfo], object] | None = None
        self.waits = FailureWaits()
        self.layout: Layout | None = None
        self.defined = False
        self.rows: Rows = Rows()
        self.placement: Placement | None = None
        self.coding: Coding | None = None
        self.increments = False
        self.examples: list[tuple[int, int, int]] = []
        self.unsettled: Unsettled = Unsettled()
        self.loops: dict[str, Callable[[], object]] = {}

    @property
    def lr(self) -> float:
        """The learning rate of a gradient, as the server announced it (1 where there is none)."""
        return float(self.plan.get("inner", {}).get("lr", self.settings.get("lr", 1.0)))

    @property
    def known_layout(self) -> Layout:
        """The model's tensors.

        Raises
        ------
        UsageError
            When they are not known yet.
        """
        if self.layout is None:
            raise UsageError("the model is not known yet: fetch or define it first")
        return self.layout

    def check_held(self, params: Params) -> None:
        """Mark parameters as not held, unless the server's version of that number is the same.

        Versions that came by another client may not be, nor those from an earlier run of the
        server, nor those that were lost when it was started again.
        """
        client, epoch = params.connection
        if client != self.client or (
            epoch < self.run.last_change and self.run.lost(epoch, params.newest)
        ):
            params.version = -1

    @property
    def tasks_in_hand(self) -> set[int]:
        """The tasks of examples that were handed out, and do not count yet."""
        return {task for task, _start, _stop in self.examples} | self.unsettled.tasks

    def stepped(self) -> None:
        """Note that the model of a worker that averages has been trained on its examples."""
        self.unsettled.step(self.take_examples(), self.run.name)

    def take_examples(self) -> tuple[tuple[int, int, int], ...]:
        """Return the examples of the gradients so far, and begin with none."""
        found, self.examples = tuple(self.examples), []
        return found

    def note_examples(self, task: int, start: int, stop: int) -> None:
        """Note the examples of the gradient to come; the next push covers them."""
        last = self.examples[-1] if self.examples else None
        if last is not None and last[0] == task and last[2] == start:
            self.examples[-1] = (task, last[1], stop)
        else:
            self.examples.append((task, start, stop))

    # ------------------------------------------------------------ learning

    def welcomed(self, welcome: Welcome) -> None:
        """Learn what a welcome announces.

        Raises
        ------
        RemoteProtocolError
            When it cannot be right.
        BadPush
            When the server now has another model.
        Superseded
            When another server goes on with the run.
        """
        for key in ("patience", "heartbeat", "seconds_per_byte"):
            seconds = welcome.plan.get(key, 0.0)
            if type(seconds) not in (int, float) or not 0 <= seconds <= _LONGEST_WAIT:
                text = f"{self.url} announces a {key} of {seconds!r:.60} seconds"
                raise RemoteProtocolError(text)
        epoch = self.connection[1]
        self.run.welcomed(welcome, epoch, self.url)
        self._spread = welcome.plan.get(SPREAD_TABLES) is True
        self.defined = bool(welcome.model or welcome.tables)
        if self.defined:
            self.learn(welcome)
        if self.run.last_change == epoch:
            self.rows.forget(self.run)
        self.rows.connection = self.connection
        self._welcomed = True
        self.policy, self.settings, self.plan = welcome.policy, welcome.settings, welcome.plan
        if "heartbeat" in self.plan:
            self.waits = FailureWaits(self.plan["heartbeat"])
        if self.layout is not None and self.coding is None:
            self._plan_coding(self.layout)

    def learn(self, described: Model | Welcome) -> None:
        """Learn the server's model; once known, it may not become another one.

        Raises
        ------
        RemoteProtocolError
            When this client cannot hold it.
        BadPush
            When it is another model than before.
        """
        rows = described.model
        try:
            layout = Layout.shared((row[:3] for row in rows), empty=bool(described.tables))
            tables = Tables.from_description(described.tables, layout.index)
        except UsageError as error:
            text = f"{self.url} has a model that this client cannot hold: {error}"
            raise RemoteProtocolError(text) from None
        if [tensor.offset for tensor in layout.tensors] != [row[3] for row in rows]:
            raise RemoteProtocolError(f"{self.url} describes a model in another order of bytes")
        if [named.name for named in tables.each] != [row[0] for row in described.tables]:
            raise RemoteProtocolError(f"{self.url} describes its tables in another order")
        self.rows.shards = 1 + (len(described.shards) if self._spread else 0)
        self._learn_placement(layout, [row[2] for row in described.shards])
        self.defined = True
        if self.layout is None:
            self.layout = self._ledger.layout = layout
            self._plan_coding(layout)
            self.rows.learn(tables)
            return
        difference = layout.difference(self.layout) or tables.difference(self.rows.tables)
        if difference is None and layout is not self.layout and layout.rows != self.layout.rows:
            here, there = next(
                (a.name, b.name)
                for a, b in zip(self.layout.tensors, layout.tensors, strict=True)
                if a.name != b.name
            )
            difference = (
                f"its tensors are in another order ({there!r} stands where this worker has"
                f" {here!r}), as after --init with a file that another program wrote; start the"
                " server with a file that aiops saved, or start this worker again: it then"
                " takes the server's order"
            )
        if difference:
            raise BadPush(f"{self.url} now has another model: {difference}")

    def _learn_placement(self, layout: Layout, starts: list[int]) -> None:
        """Learn where the model lies; in another place it is coded in other pieces."""
        before, self.placement = self.placement, None
        if starts:
            try:
                placement = Placement(layout, [0, *starts])
            except UsageError as error:
                raise RemoteProtocolError(f"{self.url} describes {error}") from None
            if placement.used[1:]:  # else it is as on one server
                self.placement = placement
        edges = None if self.placement is None else self.placement.edges
        if edges != (None if before is None else before.edges):
            self.coding = None

    def _plan_coding(self, layout: Layout) -> None:
        """Take over the codecs of pushes and fetches from the server's plan."""
        if not self._welcomed:
            return
        self.coding = Coding.planned(layout, self.plan, self.placement, self._parallel_map)
        # An observer is sent the values themselves, never increments.
        increments = CodecChoice.from_announced(self.plan.get("fetch_codec", ()))
        self.increments = self._role == "worker" and bool(increments)
