"""The marked blocks of docs/wire.md: tables and examples."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from aiops import errors
from aiops.errors import Refused, UsageError
from aiops.model.layout import MAX_PART, MAX_TENSORS
from aiops.model.tables import MAX_IDS, MAX_ROWS, MAX_ROWS_BYTES, MAX_TABLES, MAX_WIDTH
from aiops.serving.config import Config
from aiops.wire import messages
from aiops.wire.connection import Limits
from aiops.wire.fields import MAX_AXES, MAX_COUNT, TYPES
from aiops.wire.messages import Message
from aiops.wire.state_machine import HANDSHAKE
from docs._tools.wire import vectors
from docs._tools.wire.examples import Example, conversations, one_of_each

_ROW = 40  # bytes per line of an example

ANSWERS = {
    "hello": "`challenge` or `welcome`",
    "prove": "`welcome`",
    "define": "`model`",
    "describe": "`model`",
    "push": "`ack`",
    "again": "`ack`",
    "fetch": "`params`",
    "fetch_rows": "`rows`",
    "push_rows": "`rows`",
    "stats": "`report`",
    "ping": "`pong`",
    "leave": "closing the connection",
    "meet": "`round`",
    "follow": "`challenge` or `attached`",
    "lead": "`challenge` or `attached`",
    "expect": "`arrived`, when it has",
    "use": "`done`",
    "count": "`counted`",
}
"""What answers each request (or else an ``error``)."""

MEANINGS = {
    "id": "The number of the request that this is or answers; chosen by the asker, rising from 1."
    " 0 in the handshake, and for what nobody asked for.",
    "protocol": f"The version of this page: {messages.PROTOCOL}.",
    "client": "The client's own id: random, chosen once, the same on all its connections.",
    "epoch": "1 on the client's first connection, one more on each that follows.",
    "name": "A name for people.",
    "role": '`"worker"` or `"observer"`.',
    "pongs": "Whether the client promises to answer a `ping` even when it has asked for nothing.",
    "nonce": "Fresh random bytes.",
    "agent": "The client's software, for people.",
    "proof": "See [The token](#the-token), for `greet` [Averaging](#averaging-models); in `welcome`"
    " empty when there is none.",
    "tensors": "The offered tensors, in any order.",
    "tables": "The sparse tables; see [Tables](#tables). Offered in any order, announced in the"
    " order of their numbers.",
    "table": "The table's number: its place, from 0, in the `tables` of `welcome` or `model`.",
    "parts": "One row per payload that follows; see [Parts](#parts).",
    "seq": "The number of this push: at least 1, higher than that of every push before.",
    "fetch": "Whether the answer is to bring the parameters.",
    "have": "The model version of which the client holds all parameters, -1 for none. The answer"
    " brings the tensors that have changed since, which may be none.",
    "wants": "Empty, or which tensors are wanted: rows of first tensor, past the last, and model"
    " version as of which they are held (-1: none), in order. Then `have` does not count.",
    "coded": "Whether increments may come; see [Parts](#parts). A client that does not read the"
    " codecs says false, and is sent values.",
    "count": "Of how many mini-batches' gradients the push is made.",
    "gate": "Empty, or c_push and c_fetch, where the server chooses them to keep to a budget.",
    "run": "Chosen at random when the server was started. If it is another one than before,"
    " versions mean nothing any more: do not push what was computed at them, and fetch anew.",
    "policy": "The server's algorithm.",
    "settings": "Its settings, for people.",
    "plan": "What a worker has to do. `routine` (string): what it pushes. Under `direct` its"
    " gradients; under any other (of `aiops.client.routines`) workers train by themselves and push"
    " something else, so a client that does not know it may fetch, but not push. Ignore other keys"
    " that you do not know. `recompute` (boolean): be ready to compute a refused gradient again."
    " `linear` (boolean): steps are proportional to their gradients. `patience` (float): seconds"
    " that an answer to a push may take because others are waited for. `seconds_per_byte` (float):"
    " under a bandwidth budget, seconds to allow in addition per byte of the model, for a push of"
    " it and a fetch. `heartbeat` (float): seconds of silence after which a client that promised"
    " pongs is pinged; after three times as long it is dropped. `average` (map, under the policy of"
    " that name): `interval`, `grace`, `stall` (floats, seconds), `warmup` (integer, steps) and"
    " `lr` (float); see"
    " [Averaging](#averaging-models).",
    "version": "The model's version: how many updates have been applied to it. In messages about"
    " rows the table's: how many pushes have been applied to it.",
    "model": "The tensors in arena order; in `welcome` empty when nobody has defined them yet.",
    "last_seq": "The highest `seq` of this client that the server has taken, 0 for none.",
    "created": "Whether this offer defined the model.",
    "current": "The model version of the parameters in this answer.",
    "used": "Whether the gradient was (or will be) part of an update; false: it was ignored.",
    "staleness": "Updates since the gradient's base version: the most over the pushed tensors. In"
    " `rows` pushes to the table since the version that was pushed, 0 without a push.",
    "mean_staleness": "The same as a mean, weighted by the tensors' bytes.",
    "vbar": "The mean of the algorithm's statistic (FASGD: v) over all parameters; nil without.",
    "vbars": "The same per tensor, float32, little endian, in arena order; empty without.",
    "report": "The statistics; keys come and go with releases.",
    "code": "See [Errors](#errors).",
    "text": "A sentence for people.",
    "details": "Its facts.",
    "fatal": "Whether the server closes the connection after this.",
    "host": "An IP address (no name) at which the other workers reach this one.",
    "port": "The port there, at most 65,535; 0 to withdraw.",
    "rounds": "How many averages this worker has taken over so far; 0 says that it is new.",
    "digest": "SHA-256 of the MessagePack of the model's tensors as `model` announces them.",
    "segment": "Its number, from 1 to 256: the sender's own choice.",
    "nbytes": "How many bytes of it may be mapped.",
    "number": "The round's number, rising from 1; 0 when there is none. In `begin` the shard's, in"
    " `use` the push's by the lead's count, 0 for none.",
    "rank": "The place in `members`, from 0: in `round` the receiver's, in `greet` the sender's.",
    "members": "The workers of the round in the order of the ring, and whether their models count.",
    "secret": "Known to the members of the round, and to nobody else.",
    "apart": "Empty, or the shards that hold the rest of the model, in its order: host (empty: the"
    " lead's own), port, and the first byte of the arena held there (0 before there is a model).",
    "request": "The request's id: its portion has the same.",
    "ranges": "Which bytes of the arena, and the version of their tensors.",
    "work": "What to do: `weights` (if the gradient is to be collected), `steps` and `scalars` (if"
    " a step is to be taken) by tensor, as float64, one number if all are equal; `touched`, int64"
    " (nil: all); `factor`; `spare` (not in place); `sent` (the version that the rule"
    " reads), `coded` (it is the shadow's); `measure` (take no step: the one sum is a float64,"
    " of the squares). Or `shadow` alone: bring the shadow up to the model, and let increments"
    " before that version go.",
    "clients": "By client: bytes in, bytes out, messages in, messages out, and two maps (in, out)"
    " by kind of: messages, bytes of overhead, bytes of payload.",
    "steps": "The first byte of a piece, the one after its last, and how many increments.",
    "shadow": "Whether it is the shadow's, and not the model's.",
    "keep": "Whether it is kept.",
    "fault": "Empty, or `code`, `text` and `details` of why the push cannot be used.",
    "sums": "One per tensor touched; empty without a statistic. Of the shadow: one per piece, the"
    " bytes of its increment, -1 if it has to be sent as it is, -2 if it is what it was.",
    "hop": "How many workers the chunk will have reached with this one, from 1.",
}
"""What each field means, whichever message it is in."""


# ---------------------------------------------------------------- tables


def _table(head: str, rows: list[str]) -> str:
    columns = head.count("|") + 1
    return "\n".join([f"| {head} |", "|" + " --- |" * columns, *(f"| {row} |" for row in rows)])


def _fields(kind: str) -> list[tuple[str, str]]:
    return [(f.name, str(f.type)) for f in dataclasses.fields(messages.KINDS[kind])]


def _prose(text: str | None) -> str:
    """Return a docstring as one paragraph of Markdown."""
    return " ".join(re.sub("`+", "`", text or "").split())


def messages_table() -> str:
    """Return who sends which kind, with which fields, and what answers it."""
    rows = []
    for kind, cls in messages.KINDS.items():
        senders = [side for side in ("client", "server") if _may_say(side, kind)]
        fields = ", ".join(f"`{name}`" for name, _type in _fields(kind))
        answered = f" Answered by {ANSWERS[kind]}." if kind in ANSWERS else ""
        rows.append(
            f"`{kind}` | {' or '.join(senders)} | {fields} | {_prose(cls.__doc__)}{answered}"
        )
    return _table("kind | from | fields besides `kind` | meaning", rows)


def _may_say(side: str, kind: str) -> bool:
    return any(kind in says[side] for says in HANDSHAKE.values())


def fields_table() -> str:
    """Return each field's type and meaning."""
    found: dict[str, tuple[str, list[str]]] = {}
    for kind in messages.KINDS:
        for name, type_ in _fields(kind):
            assert found.setdefault(name, (type_, []))[0] == type_, "one name, one type"
            found[name][1].append(kind)
    rows = []
    for name, (type_, kinds) in found.items():
        where = "all" if len(kinds) == len(messages.KINDS) else ", ".join(kinds)
        rows.append(f"`{name}` | {type_} | {where} | {MEANINGS[name]}")
    return _table("field | type | in | meaning", rows)


def types_table() -> str:
    """Return what each type of field accepts."""
    return _table("type | what is accepted", [f"{k} | {v}" for k, v in TYPES.items()])


def states_table() -> str:
    """Return the handshake's table: what either side may say in each state."""
    rows = []
    for state, says in HANDSHAKE.items():
        cells = []
        for side in ("client", "server"):
            by_next: dict[str, list[str]] = {}
            for kind, following in sorted(says[side].items()):
                by_next.setdefault(following, []).append(f"`{kind}`")
            cells.append(
                "; ".join(f"{', '.join(k)} → {s}" for s, k in by_next.items()) or "nothing"
            )
        rows.append(f"{state} | {cells[0]} | {cells[1]}")
    return _table("state | the client may say → next state | the server may say → next state", rows)


def codes_table() -> str:
    """Return the codes that an error may carry."""
    known = [getattr(errors, name) for name in errors.__all__]
    refusals = [cls for cls in known if isinstance(cls, type) and issubclass(cls, Refused)]
    rows = [f"`{cls.code}` | {_prose(cls.__doc__)}" for cls in refusals]
    rows.append("`protocol` | Only fatal: the greeting's version or role is none the server knows.")
    return _table("code | meaning", rows)


def limits_table() -> str:
    """Return the limits, and the settings they come from."""
    limits, settings = Limits(), Config()
    minute = f"{settings.min_rate:,} bytes/s over {settings.stall_deadline:g} s"
    rows = [
        f"header before `welcome`, at the server | {limits.greeting:,} bytes",
        f"header after it | {limits.header:,} bytes at the server; be ready for twice that",
        f"parts of a message | {limits.parts:,}",
        f"payload | 2³²−1 bytes; this implementation sends at most {MAX_PART:,}",
        f"tensors of a model; axes of a tensor | {MAX_TENSORS:,}; {MAX_AXES}",
        f"tables of a model; rows of a table; its width | {MAX_TABLES:,}; {MAX_ROWS:,};"
        f" {MAX_WIDTH:,}",
        f"rows in one message; their bytes | {MAX_IDS:,}; {MAX_ROWS_BYTES:,}",
        f"bytes of a model | {settings.max_model:,} (`--max-model`)",
        f"mini-batches that a push stands for | {MAX_COUNT:,}",
        f"connections | {settings.max_connections:,} (`--max-connections`)",
        f"time to get to `open` | {settings.hello_deadline:g} s (`--hello-deadline`)",
        f"slowest peer in mid-message, either way | {minute} (`--min-rate`, `--stall-deadline`)",
        f"silence before the server pings | {settings.heartbeat:g} s (`--heartbeat`);"
        f" after {3 * settings.heartbeat:g} s the connection ends",
        f"answers to pushes remembered per client | {messages.REMEMBERED}",
    ]
    return _table("what | limit (a setting's default)", rows)


# ---------------------------------------------------------------- examples


def _shown(message: Message) -> str:
    """Return a message's fields as a person reads them; bytes are h'...'."""
    text = json.dumps(vectors.fields(message), ensure_ascii=False)
    return re.sub(r'{"bytes": "([0-9a-f]*)"}', r"h'\1'", text)


def _hex(example: Example) -> Iterator[str]:
    """Yield a frame's bytes in lines: the length and the header, then each payload."""
    head = b"\xce" + len(example.header).to_bytes(4, "big"), example.header
    rest = [(b"\xc6" + len(data).to_bytes(4, "big"), data) for data in example.payloads]
    if example.places:  # each a list of two integers in their longest form
        rest = [
            (b"\xdd" + (2).to_bytes(4, "big"), b"".join(b"\xcf" + n.to_bytes(8, "big") for n in at))
            for at in example.places
        ]
    for prefix, data in (head, *rest):
        rows = [data[i : i + _ROW].hex() for i in range(0, len(data), _ROW)]
        yield f"{prefix.hex()} {rows[0]}" if rows else prefix.hex()
        yield from (f"{'':10} {row}" for row in rows[1:])


def _example(example: Example) -> str:
    return "\n".join([f"{example.sender}: {_shown(example.message)}", *_hex(example)])


def kinds_block() -> str:
    """Return one example of each kind."""
    return "```text\n" + "\n\n".join(_example(e) for e in one_of_each()) + "\n```"


def conversations_block() -> str:
    """Return the conversations."""
    blocks = []
    for talk in conversations():
        steps = "\n\n".join(_example(step) for step in talk.steps)
        blocks.append(f"### {talk.title}\n\n```text\n{steps}\n```")
    return "\n\n".join(blocks)


def proof_block() -> str:
    """Return the token's example."""
    rows = vectors.proofs()[:2]
    first = rows[0]
    said = [f"{k} = {first[k]}" for k in ("token", "client_nonce", "server_nonce", "client")]
    proofs = [f"proof({row['side']}) = {row['proof']}" for row in rows]
    return "\n".join(["```text", *said, *proofs, "```"])


# ---------------------------------------------------------------- the files


BLOCKS: Mapping[str, Callable[[], str]] = {
    "messages": messages_table,
    "fields": fields_table,
    "types": types_table,
    "states": states_table,
    "codes": codes_table,
    "limits": limits_table,
    "proof": proof_block,
    "kinds": kinds_block,
    "conversations": conversations_block,
}
"""The marked blocks of the page."""


def rewritten(page: str) -> str:
    """Return the page with its marked blocks made anew.

    Raises
    ------
    UsageError
        When the page lacks a block's marks.
    """
    for name, block in BLOCKS.items():
        begin, end = f"<!-- {name}: generated -->\n", f"\n<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _old, ended, after = rest.partition(end)
        if not (found and ended):
            raise UsageError(f"the page lacks the marks {begin.strip()!r} and {end.strip()!r}")
        page = f"{before}{begin}\n{block()}\n{end}{after}"
    return page


def update(page: Path) -> None:
    """Rewrite the page's marked blocks, and the file of vectors beside it."""
    text = rewritten(page.read_text(encoding="utf-8"))
    page.write_text(text, encoding="utf-8")
    page.with_name(vectors.NAME).write_text(vectors.text(), encoding="utf-8")
