"""The ledger: account for every byte between a client and its server, by tensor and reason.

A connection's `Traffic` counts bytes and messages as they cross, payloads apart from overhead. The
ledger attributes those payloads to tensors, and counts, by reason, the bytes that did *not* cross:

==============  ==================================================================================
pushed          gradients' bytes that crossed; ``raw``: what they would have been without a codec
reapplied       a push that was not sent, since the server applied the worker's last one again
skipped         mini-batches whose gradient was not sent by itself, but with a later one
fetched         parameters' bytes that crossed; ``raw`` as above
not_modified    tensors that were requested and not sent: they had not changed
not_wanted      tensors that were not requested
==============  ==================================================================================

Both sides keep one, of the same class: `Ledger.asked` counts each request and `Ledger.answered`
each answer. Tensors that did not cross are counted in their raw bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np

from aiops.bandwidth.tallies import Flow, Tally
from aiops.model.layout import Array, Ints, Layout
from aiops.model.parts import Part, Parts, Wants
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.fields import LONGEST
from aiops.wire.messages import (
    Ack,
    Error,
    Fetch,
    FetchedParams,
    FetchRows,
    Message,
    Push,
    PushRows,
    Reapply,
    TableRows,
)
from aiops.wire.traffic import KindTraffic, Traffic

RAW = "raw"

SHOWN = 256
"""Tensors that a report lists, those with most bytes first; a model may have thousands."""

_KINDS = 64
"""Kinds of answers, by their parts, that are counted before they are entered by tensor."""

_MODEL = ("define",)


class Ledger:
    """One client's account, kept by its server or by itself.

    Parameters
    ----------
    layout
        The model's layout; set it when it becomes known.
    own
        True if the client keeps it. A client counts what its gates hold back (`skipped_push`,
        `skipped_fetch`); a server infers that from the requests.

    Attributes
    ----------
    traffic
        The sums of all that crossed, as counted on this side; may be replaced by the `Traffic` of
        a connection in use.
    """

    traffic: Traffic
    reapplied: Tally
    skipped: Tally
    not_modified: Tally
    not_wanted: Tally

    __slots__ = (
        *(
            "_alike",
            "_batches",
            "_brought",
            "_exchanges",
            "_fetched",
            "_fetches",
            "_last",
            "_open",
            "_own",
            "_pushed",
        ),
        *("_settled", "layout", "not_modified", "not_wanted", "reapplied", "rows_fetched"),
        *("rows_pushed", "skipped", "times", "traffic"),
    )

    def __init__(self, layout: Layout | None = None, *, own: bool = False) -> None:
        self.layout = layout
        self._own = own
        self.traffic = Traffic()
        self._pushed, self._fetched = Flow(), Flow()
        self._exchanges = 0  # that the two do not contain yet, of pushes in these parts:
        self._alike: Parts = ()
        self._brought: dict[Parts, int] = {}  # and of them, those whose answers had these parts
        self.reapplied, self.skipped = Tally(), Tally()
        self.not_modified, self.not_wanted = Tally(), Tally()
        self.rows_pushed: Counter[int] = Counter()  # bytes by table
        self.rows_fetched: Counter[int] = Counter()
        self.times: Counter[str] = Counter()  # transfers that did not happen, by reason
        self._open: dict[int, Message] = {}  # requests that are not answered yet
        self._last: Parts = ()  # of the last push that was applied
        self._settled = 0  # the sequence number of the last push counted
        self._batches = self._fetches = 0  # mini-batches, and fetches, but for pairs of both

    # ------------------------------------------------------------ what crosses

    def asked(self, message: Message, taken: bool = True) -> None:
        """Note a request; ``taken``: its payloads are tensors of the model (or rows of a table)."""
        kind = type(message)
        if kind is Push:
            if taken:
                parts: Parts = message.parts  # type: ignore[attr-defined]
                layout = self.layout
                if layout is not None and len(parts) == 1 and parts[0][2:4] == (RAW, layout.nbytes):
                    self._pushed.messages += 1
                    self._pushed.sent.whole += 1
                else:
                    self._note(self._pushed, parts)
        elif kind is PushRows or kind is FetchRows:
            assert isinstance(message, PushRows | FetchRows)
            if taken:
                self.rows_pushed[message.table] += sum(part.nbytes for part in message.parts)
        elif kind is not Fetch and kind is not Reapply:
            return
        self._open[message.id] = message

    def answered(self, message: Message, taken: bool = True) -> None:
        """Note an answer; ``taken``: its payloads were received."""
        request = self._open.pop(message.id, None)
        if request is None:
            return
        if (
            (type(request) is Push and type(message) is Ack and message.used and taken)
            and (request.count == 1 and request.fetch and not request.wants)
            and request.seq > self._settled
            and (len(message.parts) == 1 and self.layout is not None)
            and message.parts[0][2:4] == (RAW, self.layout.nbytes)
        ):
            self._settled, self._last = request.seq, request.parts
            self._batches += 1
            self._fetches += request.have >= 0
            self._fetched.messages += 1
            self._fetched.sent.whole += 1
            return  # the usual exchange, a gradient for a whole model, counted in fewer calls
        if isinstance(request, PushRows | FetchRows):
            if isinstance(message, TableRows) and taken:
                self.rows_fetched[request.table] += sum(part.nbytes for part in message.parts)
            return
        assert isinstance(request, Push | Reapply | Fetch)
        if isinstance(message, Ack) and not isinstance(request, Fetch):
            self._settle_push(request, message.used)
            if not request.fetch:
                return
        elif not isinstance(message, FetchedParams):
            if isinstance(message, Error) and message.parts and taken:
                self._note(self._fetched, message.parts)
            return
        if request.wants or request.have >= 0:  # the first fetch follows no mini-batch
            self._fetches += 1
        if taken:
            self._answer(message.parts, request.wants)

    def exchanged(
        self,
        seq: int,
        fetched: bool,
        parts: Parts,
        count: int = 1,
        answer: Parts | None = None,
    ) -> None:
        """Note pushes of a whole model, and answers that brought one, as the two above do.

        Parameters
        ----------
        seq
            The sequence number of the last push.
        fetched
            Whether the client held a version before each.
        parts
            Those of each push, always the same object.
        count
            The number of pushes. Default: 1.
        answer
            The parts of each answer; None, the default: it was raw.
        """
        if parts is not self._alike:
            self.count_exchanges()
            self._alike = parts
        self._settled, self._last = seq, parts
        self._exchanges += count
        if not fetched:
            self._batches += count
        if answer is not None:
            self.brought(answer, count)

    def brought(self, parts: Parts, count: int = 1) -> None:
        """Note that the answers to the pushes that `exchanged` noted last were of other parts.

        Parameters
        ----------
        parts
            Of whatever version; with equal ones it takes no time to count them.
        count
            The number of answers. Default: 1.
        """
        self._brought[parts] = self._brought.get(parts, 0) + count
        if len(self._brought) > _KINDS:  # payloads of a codec whose lengths depend on the values
            self.count_exchanges()

    def exchanged_rows(self, table: int, pushed: int, fetched: int) -> None:
        """Note a message about rows and its answer, with the bytes of their payloads."""
        if pushed:
            self.rows_pushed[table] += pushed
        self.rows_fetched[table] += fetched

    @property
    def pushed(self) -> Flow:
        """The gradients that were sent."""
        self.count_exchanges()
        return self._pushed

    @property
    def fetched(self) -> Flow:
        """The parameters that were sent."""
        self.count_exchanges()
        return self._fetched

    def count_exchanges(self) -> None:
        """Enter the exchanges of `exchanged`, which are one number until they are asked for."""
        count, self._exchanges = self._exchanges, 0
        if not count:
            return
        brought, self._brought = self._brought, {}
        whole = count - sum(brought.values())
        self._fetched.messages += whole
        self._fetched.sent.whole += whole
        for parts, times in brought.items():
            self._answer(parts, (), times)
        self._note(self._pushed, self._alike, count)

    def disconnected(self) -> None:
        """Forget open requests: they will be sent again, or not at all."""
        self._open.clear()

    # ------------------------------------------------------------ what does not

    def skipped_push(self, tensors: Ints | None = None) -> None:
        """Note a mini-batch whose gradient was held back.

        Parameters
        ----------
        tensors
            Of which tensors, in arena order, where others are sent; None: of all.
        """
        self._leave_out(self.skipped, "skipped", tensors)

    def skipped_fetch(self, tensors: Ints | None = None) -> None:
        """Note parameters that were not requested, of some tensors or (None) of all.

        What a request leaves out by itself (its ``wants``) is noted when it is made.
        """
        self._leave_out(self.not_wanted, "not_wanted", tensors)

    def _leave_out(self, tally: Tally, reason: str, tensors: Ints | None = None) -> None:
        layout = self.layout
        if tensors is None or (layout is not None and len(tensors) == len(layout.tensors)):
            self.times[reason] += 1
            tally.whole += 1
        elif layout is not None:
            tally.room(layout, layout.nbytes)[tensors] += layout.nbytes_each[tensors]

    def _settle_push(self, request: Push | Reapply, used: bool) -> None:
        """Note, once, what the acknowledgement of a push means for its gradients."""
        if request.seq <= self._settled:
            return
        self._settled = request.seq
        self._batches += request.count if isinstance(request, Push) else 1
        if isinstance(request, Push):
            if used:
                self._last = request.parts
            if request.count > 1 and not self._own:
                self.times["skipped"] += request.count - 1
                self._add_raw(self.skipped, request.parts, request.count - 1)
        elif used:
            self.times["reapplied"] += 1
            self._add_raw(self.reapplied, self._last, 1)

    @property
    def unfetched(self) -> int:
        """The number of mini-batches without a fetch, as far as a server can tell."""
        return 0 if self._own else max(0, self._batches - self._fetches)

    # ------------------------------------------------------------ by tensor

    def _note(self, flow: Flow, parts: Parts, times: int = 1) -> None:
        flow.messages += times
        layout = self.layout
        if layout is None:
            return
        if len(parts) == 1 and parts[0][2:4] == (RAW, layout.nbytes):
            flow.sent.whole += times
            return
        before: Part | None = None
        for part in parts:
            if part.codec == RAW:
                _spread(layout, flow.sent, part, times)
            else:
                nbytes, size = times * part.nbytes, times * (part.stop - part.start)
                index = layout.tensor_at(part.start)
                flow.sent.room(layout, nbytes)[index] += nbytes
                flow.coded.room(layout, nbytes)[index] += nbytes
                if before is None or before[:2] != part[:2]:  # several increments are one tensor
                    flow.plain.room(layout, size)[index] += size
            before = part

    def _answer(self, parts: Parts, wants: Wants, times: int = 1) -> None:
        """Note what fetches brought, and what they did not."""
        layout = self.layout
        if parts:
            self._note(self._fetched, parts, times)
        else:
            self.times["not_modified"] += times
        if layout is None or (not wants and _is_whole(layout, parts)):
            return
        if not wants and not parts:
            self.not_modified.whole += times
            return
        lacking = np.full(len(layout.tensors), not wants)
        for first, last, _have in wants:
            lacking[first:last] = True
        if not lacking.all():
            self._leave_out(self.not_wanted, "", np.flatnonzero(~lacking))
        for part in parts:
            first = layout.tensor_at(part.start)
            lacking[first : layout.first_from(part.stop)] = False
        if lacking.any():
            left = np.flatnonzero(lacking)
            nbytes = times * layout.nbytes
            self.not_modified.room(layout, nbytes)[left] += times * layout.nbytes_each[left]

    def _add_raw(self, tally: Tally, parts: Parts, times: int) -> None:
        """Count the raw bytes of tensors, multiplied by ``times``."""
        if self.layout is None:
            return
        if _is_whole(self.layout, parts):
            tally.whole += times
            return
        before: Part | None = None
        for part in parts:
            if before is None or before[:2] != part[:2]:
                _spread(self.layout, tally, part, times)
            before = part

    # ------------------------------------------------------------ sums

    def _tallies(self) -> tuple[Tally, ...]:
        # In few calls: a report adds up the ledgers of thousands of clients.
        self.count_exchanges()
        pushed, fetched = self._pushed, self._fetched
        return (
            *(pushed.sent, pushed.coded, pushed.plain, fetched.sent, fetched.coded, fetched.plain),
            *(self.reapplied, self.skipped, self.not_modified, self.not_wanted),
        )

    def add(self, other: Ledger) -> None:
        """Add another client's account, but for what it has settled."""
        for mine, theirs in zip(self._tallies(), other._tallies(), strict=True):
            mine.add(theirs)
        self._pushed.messages += other._pushed.messages
        self._fetched.messages += other._fetched.messages
        unfetched = other.unfetched
        self.not_wanted.whole += unfetched
        self.times["not_wanted"] += unfetched
        self.traffic.add(other.traffic)
        if other.times:  # most ledgers have none, and there may be thousands
            self.times.update(other.times)
        if other.rows_pushed or other.rows_fetched:
            self.rows_pushed.update(other.rows_pushed)
            self.rows_fetched.update(other.rows_fetched)

    def settle(self, into: Ledger) -> None:
        """Move the bytes of single tensors to another ledger, and keep their sums."""
        self.disconnected()
        for mine, theirs in zip(self._tallies(), into._tallies(), strict=True):
            mine.settle(theirs)

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return the account as plain values, for `restore`."""
        # Few and flat lists: thousands of clients are written at once.
        return {
            "tallies": [tally.state() for tally in self._tallies()],
            "messages": [self._pushed.messages, self._fetched.messages],
            "rows": [dict(self.rows_pushed), dict(self.rows_fetched)],
            "times": dict(self.times),
            "open": [encode(request) for request in self._open.values()],
            "last": list(chain.from_iterable(self._last)),
            "seen": [self._settled, self._batches, self._fetches],
            "traffic": self.traffic.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; the layout stays as it is."""
        for tally, kept in zip(self._tallies(), state["tallies"], strict=True):
            tally.restore(kept)
        self._pushed.messages, self._fetched.messages = state["messages"]
        self.rows_pushed, self.rows_fetched = map(Counter, state["rows"])
        self.times = Counter(state["times"])
        self._open = {request.id: request for request in map(decode, state["open"])}
        last = iter(state["last"])
        self._last = tuple(Part(*part) for part in zip(*[last] * 5, strict=True))
        self._settled, self._batches, self._fetches = state["seen"]
        self.traffic = Traffic.from_state(state["traffic"])

    # ------------------------------------------------------------ reports

    def brief(self) -> dict[str, int]:
        """Return the sums in bytes, by reason; more than 2**63 - 1 is given as that."""
        found: dict[str, int] = {}
        for name, flow in (("pushed", self.pushed), ("fetched", self.fetched)):
            sent, coded, plain = (
                tally.nbytes(self.layout) for tally in (flow.sent, flow.coded, flow.plain)
            )
            found |= {name: sent, f"{name}_raw": sent - coded + plain}
        for name in ("reapplied", "skipped", "not_modified", "not_wanted"):
            found[name] = getattr(self, name).nbytes(self.layout)
        if self.layout is not None:
            found["not_wanted"] += self.unfetched * self.layout.nbytes
        return {name: min(nbytes, LONGEST) for name, nbytes in found.items()}

    def tensors(self) -> dict[str, Any]:
        """Return the sums by tensor: a list of names, and for each reason a list of bytes.

        At most `SHOWN` tensors, those with most bytes first; ``more`` is the number left out.
        """
        layout = self.layout
        if layout is None:
            return {"names": [], "more": 0}
        columns: dict[str, Array] = {"nbytes": layout.nbytes_each}
        for name, flow in (("pushed", self.pushed), ("fetched", self.fetched)):
            sent = columns[name] = flow.sent.by_tensor(layout)
            saved = flow.plain.by_tensor(layout) - flow.coded.by_tensor(layout)
            columns[f"{name}_raw"] = sent + saved
        for name in ("reapplied", "skipped", "not_modified", "not_wanted"):
            columns[name] = getattr(self, name).by_tensor(layout)
        order = np.argsort(-(columns["pushed"] + columns["fetched"]), kind="stable")[:SHOWN]
        names = [layout.tensors[index].name for index in order.tolist()]
        lists = {name: _sendable(column[order]) for name, column in columns.items()}
        return {"names": names, **lists, "more": len(layout.tensors) - len(names)}

    def report(self, *, tensors: bool = True) -> dict[str, Any]:
        """Return everything as plain values; counts are in bytes unless named otherwise.

        ``tensors``: with the sums by tensor, which take longest.
        """
        brief, times, traffic = self.brief(), self.times, self.traffic
        up, down = traffic.kinds_in, traffic.kinds_out
        nbytes = traffic.bytes_in, traffic.bytes_out
        if self._own:
            up, down, nbytes = down, up, nbytes[::-1]
        pushed = _direction(up, nbytes[0], self.pushed, brief["pushed"], self.rows_pushed)
        pushed |= {name: brief[name] for name in ("reapplied", "skipped")}
        pushed |= {"raw": brief["pushed_raw"], "coded": self._coded(self.pushed)}
        pushed["times"] = _times(times, "reapplied", "skipped")
        fetched = _direction(down, nbytes[1], self.fetched, brief["fetched"], self.rows_fetched)
        fetched |= {name: brief[name] for name in ("not_modified", "not_wanted")}
        kept = _times(times, "not_modified", "not_wanted")
        fetched |= {"raw": brief["fetched_raw"], "coded": self._coded(self.fetched), "times": kept}
        found = {"pushed": pushed, "fetched": fetched}
        return {**found, "tensors": self.tensors()} if tensors else found

    def _coded(self, flow: Flow) -> int:
        return min(flow.coded.nbytes(self.layout), LONGEST)


def _is_whole(layout: Layout, parts: Parts) -> bool:
    """Return whether one part covers the whole model, in whatever codec."""
    return len(parts) == 1 and parts[0].start == 0 and parts[0].stop == layout.nbytes


def _spread(layout: Layout, tally: Tally, part: Part, times: int) -> None:
    """Count the bytes of a range, multiplied by ``times``, at the tensors that it covers."""
    nbytes = times * (part.stop - part.start)
    counts = tally.room(layout, nbytes)
    first = layout.tensor_at(part.start)
    last = layout.first_from(part.stop)
    if last - first == 1:
        counts[first] += nbytes
        return
    begins = layout.starts[first:last]
    ends = begins + layout.nbytes_each[first:last]
    shared = np.minimum(ends, part.stop) - np.maximum(begins, part.start)
    counts[first:last] += times * np.maximum(shared, 0).astype(counts.dtype, copy=False)


def _times(times: Counter[str], *reasons: str) -> dict[str, int]:
    return {reason: min(times[reason], LONGEST) for reason in reasons}


def _sendable(counts: Array) -> list[int]:
    """Return counts as a message can carry them."""
    found: list[int] = counts.tolist()
    return found if counts.dtype != object else [min(count, LONGEST) for count in found]


def _direction(
    kinds: Mapping[str, KindTraffic], nbytes: int, flow: Flow, sent: int, rows: Counter[int]
) -> dict[str, Any]:
    """Return the account of one direction: ``bytes`` is the sum of all the others.

    ``payload``: of the tensors. ``model``: the offer that defines it. ``rows``: of tables, with
    their ids. ``other``: payloads that were refused, or answered a request given up.
    ``unfinished``: of messages that are not complete, or never were.
    """
    overhead = {name: kind.overhead for name, kind in kinds.items()}
    payloads = {name: kind.payload for name, kind in kinds.items()}
    model = sum(payloads.get(name, 0) for name in _MODEL)
    carried = sum(payloads.values())
    in_tables = sum(rows.values())
    return {
        "bytes": nbytes,
        "messages": {name: kind.messages for name, kind in kinds.items()},
        "with_payload": flow.messages,
        "payload": sent,
        "model": model,
        "rows": in_tables,
        "other": carried - model - in_tables - sent,
        "overhead": sum(overhead.values()),
        "overhead_by_kind": overhead,
        "unfinished": nbytes - carried - sum(overhead.values()),
    }
