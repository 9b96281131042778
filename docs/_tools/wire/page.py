"""The wire's pages, whose marked blocks are tables and examples made from the code."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from aiops import errors
from aiops.data.order import EpochOrder
from aiops.engine.membership import DEPARTED
from aiops.errors import Refused, Superseded, UsageError
from aiops.model.layout import MAX_PART, MAX_TENSORS
from aiops.model.tables import MAX_IDS, MAX_ROWS, MAX_ROWS_BYTES, MAX_TABLES, MAX_WIDTH
from aiops.serving.config import Config
from aiops.wire import fields, messages
from aiops.wire.connection import Limits
from aiops.wire.encoding import KINDS
from aiops.wire.fields import MAX_AXES, MAX_COUNT
from aiops.wire.messages import Message
from aiops.wire.state_machine import HANDSHAKE
from docs._tools.wire import vectors
from docs._tools.wire.examples import Conversation, Example, conversations, one_of_each
from docs._tools.wire.meanings import ANSWERS, LEGEND, MEANINGS, TYPES

_ROW = 48  # bytes per line of an example

HANDSHAKE_KINDS = ("hello", "challenge", "prove", "welcome")
MODEL_KINDS = ("define", "describe", "model")
PUSH_KINDS = ("push", "reapply", "fetch", "ack", "params")
TABLE_KINDS = ("fetch_rows", "push_rows", "rows")
OTHER_KINDS = ("stats", "report", "ping", "pong", "log", "leave", "error")
MEMORY_KINDS = ("share", "release")
SHARD_KINDS = ("shard_hello", "shard_welcome", "shard_parts")
DATA_KINDS = ("take_task", "task", "cover")
ROUND_KINDS = ("join_round", "round", "settle_round", "settled", "ring_hello", "ring_chunk")
RELAY_KINDS = ("relay_hello", "relay_ready")
SERVER_KINDS = (
    *("lead_hello", "share_secret", "load_shard", "expect_push", "run_update", "send_params"),
    "send_increments",
    *("hold_version", "finish_push", "note_history", "keep_sets", "roll_back"),
    *("count_traffic", "send_rows", "close_pushes", "send_away", "pace_clients", "shard_state"),
    *(
        "push_arrived",
        "update_done",
        "snapshot_saved",
        "traffic_counted",
        "stored_rows",
        "budget_used",
    ),
)
"""The kinds that servers send to each other, and no client ever."""

STANDBY_KINDS = ("standby_hello", "standby_welcome", "snapshot_part", "journal_rows", "rows_kept")
PROMOTION_KINDS = ("promote", "promoted", "take_place", "place_given", "fence")
"""The kinds that make another server the server of a run; no worker sends them."""

ADMIN_KINDS = ("kick", "pause", "resume", "take_snapshot", "drain", "rollback_to", "done")
"""The kinds by which an administrator directs a server."""

CLIENT_STATES = ("start", "greeted", "challenged", "proved", "open", "left")


# ---------------------------------------------------------------- tables


def _table(head: str, rows: Iterable[str]) -> str:
    columns = head.count("|") + 1
    return "\n".join([f"| {head} |", "|" + " --- |" * columns, *(f"| {row} |" for row in rows)])


def _fields(kind: str) -> list[tuple[str, str]]:
    """Return the fields of a kind besides ``id``, with their types."""
    found = dataclasses.fields(KINDS[kind])
    return [(f.name, str(f.type)) for f in found if f.name != "id"]


def _prose(text: str | None) -> str:
    """Return a docstring as one paragraph of Markdown."""
    return " ".join(re.sub("`+", "`", text or "").split())


def messages_table(kinds: Sequence[str]) -> str:
    """Return the sender, the fields, the answer and the meaning of each kind."""
    rows = []
    for kind in kinds:
        senders = [side for side in ("client", "server") if _may_send(side, kind)]
        own = ", ".join(f"`{name}`" for name, _type in _fields(kind)) or "none"
        text = _prose(KINDS[kind].__doc__)
        if kind in ANSWERS:
            text += f" Answered by {ANSWERS[kind]}."
        rows.append(f"`{kind}` | {' or '.join(senders)} | {own} | {text}")
    return _table("kind | from | fields besides `id` | meaning", rows)


def _may_send(side: str, kind: str) -> bool:
    return any(kind in allowed[side] for allowed in HANDSHAKE.values())


def fields_table(kinds: Sequence[str], known: Sequence[str] = ()) -> str:
    """Return the type and the meaning of each field of these kinds.

    ``known``: kinds whose fields the reader knows, so that they are left out.
    """
    seen = {"parts"}.union(*(_own(kind) for kind in known))
    rows = []
    for kind in kinds:
        for name, type_ in _fields(kind):
            own = f"{kind}.{name}"
            key = own if own in MEANINGS else name
            if key in seen or not MEANINGS[key]:
                continue
            seen.add(key)
            label = f"`{name}`" if key == name else f"`{name}` of `{kind}`"
            rows.append(f"{label} | {_type_named(type_)} | {MEANINGS[key]}")
    return _table("field | type | meaning", rows)


def _type_named(name: str) -> str:
    return TYPES.get(name, fields.TYPES[name])


def _own(kind: str) -> set[str]:
    names = [name for name, _type in _fields(kind)]
    return {f"{kind}.{name}" if f"{kind}.{name}" in MEANINGS else name for name in names}


def states_table(states: Sequence[str]) -> str:
    """Return what either side may send in each state."""
    rows = []
    for state in states:
        cells = []
        for side in ("client", "server"):
            by_next: dict[str, list[str]] = {}
            for kind, following in sorted(HANDSHAKE[state][side].items()):
                if kind not in _ELSEWHERE:
                    by_next.setdefault(following, []).append(f"`{kind}`")
            cells.append("; ".join(f"{', '.join(k)} → {s}" for s, k in by_next.items()) or "–")
        rows.append(f"{state} | {cells[0]} | {cells[1]}")
    return _table("state | the client may send → next state | the server may send → next", rows)


_ELSEWHERE = {
    *(*MEMORY_KINDS, *ROUND_KINDS, *RELAY_KINDS, *DATA_KINDS, *PROMOTION_KINDS, *ADMIN_KINDS),
    *("shard_hello", "lead_hello", "standby_hello"),
}
"""Kinds that the table of wire.md leaves to other pages."""


def codes_table() -> str:
    """Return the codes that an error may carry."""
    known = [getattr(errors, name) for name in errors.__all__]
    coded = (Refused, Superseded)
    refusals = [cls for cls in known if isinstance(cls, type) and issubclass(cls, coded)]
    rows = [f"`{cls.code}` | {_CODES[cls.code]}" for cls in refusals if cls.code in _CODES]
    rows.append(f"`protocol` | {_CODES['protocol']}")
    return _table("code | meaning", rows)


_CODES = {
    "bad-push": "What was pushed, offered or asked for does not fit; see below.",
    "not-ready": "The model is not defined yet: `define` it.",
    "refused": "The policy, or a setting of the server, does not allow this.",
    "standby": "The server is a standby; `details` has its `primary`. Fatal: try that, or later.",
    "superseded": "A server of a higher `generation` goes on with the run. Fatal: go to that.",
    "stale": "The policy wants the gradient computed again, on the current parameters.",
    "unauthorised": "The token is missing, wrong, over, or has not the role for it. Fatal, but to a"
    " request.",
    "kicked": "An administrator has sent this client away. Fatal: do not come back.",
    "unavailable": "The server is full (fatal), paused or shutting down: try later.",
    "protocol": "The protocol's version, the role or the first message is not for this server."
    " Fatal.",
}


def limits_table() -> str:
    """Return the limits, and the settings they come from."""
    limits, settings = Limits(), Config()
    rate = f"{settings.min_rate:,} bytes/s over {settings.stall_deadline:g} s"
    rows = [
        f"header before `welcome`, at the server | {limits.greeting:,} bytes",
        f"header after it | {limits.header:,} bytes at the server; be ready for twice that",
        f"parts of a message | {limits.parts:,}",
        f"payload | 2³² − 1 bytes; this server sends at most {MAX_PART:,}",
        f"tensors of a model; axes of a tensor | {MAX_TENSORS:,}; {MAX_AXES}",
        f"tables of a model; rows of a table; its width | {MAX_TABLES:,}; {MAX_ROWS:,};"
        f" {MAX_WIDTH:,}",
        f"rows in one message; their bytes | {MAX_IDS:,}; {MAX_ROWS_BYTES:,}",
        f"bytes of a model | {settings.max_model:,} (`--max-model`)",
        f"mini-batches that a push stands for | {MAX_COUNT:,}",
        f"connections | {settings.max_connections:,} (`--max-connections`)",
        f"time from connecting to *open* | {settings.hello_deadline:g} s (`--hello-deadline`)",
        f"slowest peer in mid-message, either way | {rate} (`--min-rate`, `--stall-deadline`)",
        "silence before the server pings |"
        f" {settings.waits.heartbeat:g} s (`--failure-timeout`); after"
        f" {settings.waits.unanswered:g} s the connection ends",
        f"answers to pushes remembered per client | {messages.REMEMBERED}",
        f"clients remembered after their connection ended | {DEPARTED:,}",
    ]
    return _table("limit | value (a setting's default)", rows)


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


def examples_block(kinds: Sequence[str]) -> str:
    """Return one example of each of these kinds, to the byte."""
    by_kind = {example.name: example for example in one_of_each()}
    return "```text\n" + "\n".join(_example(by_kind[kind]) for kind in kinds) + "\n```"


@cache
def _conversations() -> Mapping[str, Conversation]:
    return {each.title: each for each in conversations()}


def conversations_block(*titles: str) -> str:
    """Return conversations, to the byte."""
    blocks = []
    for title in titles:
        steps = "\n".join(_example(step) for step in _conversations()[title].steps)
        blocks.append(f"### {title}\n\n```text\n{steps}\n```")
    return "\n\n".join(blocks)


def steps_block(title: str, first: int, last: int) -> str:
    """Return some messages of a conversation, to the byte."""
    steps = _conversations()[title].steps[first:last]
    return "```text\n" + "\n".join(map(_example, steps)) + "\n```"


def proof_block() -> str:
    """Return the token's example."""
    rows = vectors.proofs()[:2]
    first = rows[0]
    known = [f"{k} = {first[k]}" for k in ("token", "id", "client_nonce", "server_nonce", "client")]
    proofs = [f"proof({row['side']}) = {row['proof']}" for row in rows]
    return "\n".join(["```text", *known, *proofs, "```"])


def order_block() -> str:
    """Return the first examples of some orders."""
    rows = [
        f"{n:,} | {block} | {seed} | {epoch} |"
        f" {', '.join(map(str, EpochOrder(n, block, seed).indices(epoch, 0, 12).tolist()))}"
        for n, block, seed, epoch in (
            *((12, 1, 0, 0), (12, 1, 0, 1), (12, 1, 7, 0), (60_000, 1, 0, 0)),
            *((10**12, 1, 0, 0), (12, 0, 0, 0), (14, 4, 0, 0), (60_000, 1024, 3, 2)),
        )
    ]
    return _table("examples | block | seed | epoch | positions 0 to 11", rows)


# ---------------------------------------------------------------- the files

Block = Callable[[], str]


def _section(
    kinds: Sequence[str], known: Sequence[str] = (), examples: Block | None = None
) -> Block:
    """Return the block of a section about some kinds: messages, fields, examples.

    ``known``: kinds whose fields an earlier section explains. ``examples``: default one of each.
    """
    shown = examples or partial(examples_block, kinds)
    return lambda: "\n\n".join((messages_table(kinds), fields_table(kinds, known), shown()))


_SESSION = "Define a model, push, fetch"
_BEFORE_PUSH = (*HANDSHAKE_KINDS, *MODEL_KINDS)
_BEFORE_OTHER = (*_BEFORE_PUSH, *PUSH_KINDS, *TABLE_KINDS)

PAGES: Mapping[str, Mapping[str, Block]] = {
    "wire.md": {
        "types": lambda: LEGEND,
        "states": partial(states_table, CLIENT_STATES),
        "handshake": _section(HANDSHAKE_KINDS),
        "proof": proof_block,
        "model": _section(MODEL_KINDS, HANDSHAKE_KINDS, partial(steps_block, _SESSION, 2, 4)),
        "push": _section(PUSH_KINDS, _BEFORE_PUSH, partial(steps_block, _SESSION, 4, 10)),
        "other": _section(
            OTHER_KINDS, _BEFORE_OTHER, partial(examples_block, ("ping", "pong", "error"))
        ),
        "codes": codes_table,
        "limits": limits_table,
    },
    "wire-tables.md": {"tables": _section(TABLE_KINDS, (*_BEFORE_PUSH, *PUSH_KINDS))},
    "wire-shared-memory.md": {
        "memory": _section(MEMORY_KINDS),
        "conversation": partial(conversations_block, "A gradient and parameters in shared memory"),
    },
    "wire-shards.md": {
        "states": partial(
            states_table, ("shard greeted", "shard challenged", "shard proved", "shard open")
        ),
        "shards": _section(SHARD_KINDS, HANDSHAKE_KINDS),
        "conversation": partial(
            conversations_block,
            "Two shards: the client and the lead",
            "Two shards: the client and the follower",
        ),
    },
    "wire-data.md": {
        "data": _section(DATA_KINDS, (*_BEFORE_OTHER, *OTHER_KINDS)),
        "conversation": partial(
            conversations_block, "A data set: a task, a push that covers it, and no more"
        ),
        "order": order_block,
    },
    "wire-averaging.md": {
        "averaging": _section(ROUND_KINDS, HANDSHAKE_KINDS),
        "conversation": partial(
            conversations_block,
            "Ready to average, and no other worker is there",
            "Two workers of a round",
        ),
        "relay": _section(
            RELAY_KINDS,
            (*HANDSHAKE_KINDS, *ROUND_KINDS),
            partial(conversations_block, "Two workers of a round, through a relay"),
        ),
    },
    "wire-admin.md": {"requests": _section(ADMIN_KINDS, (*_BEFORE_OTHER, *OTHER_KINDS))},
    "wire-servers.md": {
        "states": partial(
            states_table,
            ("lead greeted", "lead challenged", "lead proved", "lead open", "lead left"),
        ),
        "servers": _section(SERVER_KINDS, (*_BEFORE_OTHER, *OTHER_KINDS, *SHARD_KINDS)),
        "conversation": partial(
            conversations_block, "Two shards: the lead, as a client, and the follower"
        ),
    },
    "wire-standby.md": {
        "states": partial(
            states_table,
            ("standby greeted", "standby challenged", "standby proved", "standby open"),
        ),
        "feed": _section(STANDBY_KINDS, (*_BEFORE_OTHER, *OTHER_KINDS)),
        "conversation": partial(conversations_block, "A new standby is fed"),
        "promotion": _section(
            PROMOTION_KINDS,
            (*_BEFORE_OTHER, *OTHER_KINDS, *STANDBY_KINDS),
            partial(
                conversations_block,
                "A standby is promoted",
                "A standby takes the place of a follower",
                "A server is told that another has its run",
            ),
        ),
    },
}
"""The pages and, by name, the marked blocks of each."""


def rewritten(page: str, blocks: Mapping[str, Block]) -> str:
    """Return a page with its marked blocks made again.

    Raises
    ------
    UsageError
        When the page lacks a block's marks.
    """
    for name, block in blocks.items():
        begin, end = f"<!-- {name}: generated -->", f"<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _old, ended, after = rest.partition(end)
        if not (found and ended):
            raise UsageError(f"the page lacks the marks {begin!r} and {end!r}")
        page = f"{before}{begin}\n{block()}\n{end}{after}"
    return page


def update(path: Path) -> None:
    """Rewrite the marked blocks of all pages, and the file of vectors beside them.

    ``path`` is where wire.md is; the others lie beside it.
    """
    for name, blocks in PAGES.items():
        file = path.with_name(name)
        file.write_text(rewritten(file.read_text(encoding="utf-8"), blocks), encoding="utf-8")
    path.with_name(vectors.NAME).write_text(vectors.text(), encoding="utf-8")
