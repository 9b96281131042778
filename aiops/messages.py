"""The messages that may cross the wire: frozen values, and nothing else is ever decoded.

Each class is one ``kind``. Its fields, in order, are the keys of the header map after ``kind``;
``parts`` lists the payloads that follow the header. `encode` and `decode` are exact inverses, and
`decode` accepts no missing key, no unknown key and no value of another type: what a hostile peer
can make this side build is what stands on this page. docs/wire.md says the same for readers of
other languages.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeAlias

import msgpack

from aiops.errors import RemoteProtocolError
from aiops.values import value

PROTOCOL = 1
"""The version of the wire that this package speaks; both sides must speak the same."""

REMEMBERED = 64
"""Answers to pushes that a server remembers per client: pushes that a client may have under way."""

# The annotations below name the checks in _CHECKS: the type says what the wire accepts.
UInt: TypeAlias = int  # 0 ≤ x < 2**63
Have: TypeAlias = int  # -1 ("nothing") or a UInt
Real: TypeAlias = float  # finite
OptReal: TypeAlias = float | None
Text: TypeAlias = str  # at most 4,096 characters
Nonce: TypeAlias = bytes  # 16 to 64 bytes
Blob: TypeAlias = bytes
Plain: TypeAlias = Mapping[str, Any]  # nested plain values, at most 6 deep
Offered: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]  # name, dtype, shape
Rows: TypeAlias = tuple[tuple[str, str, tuple[int, ...], int], ...]  # ... and offset in the arena
Sparse: TypeAlias = tuple[tuple[str, int, int, str, str, float, int], ...]
# name, rows, width, dtype, initialiser, scale, seed
Wants: TypeAlias = tuple[tuple[int, int, int], ...]  # first tensor, past the last, version held
Gate: TypeAlias = tuple[float, ...]  # c_push, c_fetch; or none
Members: TypeAlias = tuple[tuple[str, int, bool], ...]  # host, port, whether its model counts

MAX_TEXT = 4096
"""Longest string, in characters, except inside a map of plain values."""

MAX_AXES = 32
"""Most axes a tensor may have."""

_UNSEEN = 1024  # a header longer than this is walked through before anything is made of it


class Part(NamedTuple):
    """One payload: the bytes [start, stop) of the arena, written by a codec.

    ``version`` is the version of the tensors in it: in a push the one the gradient was computed
    at (its base), in a reply the one that is sent. All tensors of a part share it.
    """

    start: int
    stop: int
    codec: str
    nbytes: int
    version: int


Parts: TypeAlias = tuple[Part, ...]


@value
class Message:
    """What every message has: the id of the request it is or answers (0: unasked)."""

    kind: ClassVar[str] = ""
    id: UInt


# ---------------------------------------------------------------- from client to server


@value
class Hello(Message):
    """The first message: who is there."""

    kind = "hello"
    protocol: UInt
    client: Text  # chosen at random once per client; the same after a reconnect
    epoch: UInt  # 1 for the client's first connection, then rising
    name: Text  # for people
    role: Text  # "worker" or "observer"
    pongs: bool  # whether it promises to answer pings
    nonce: Nonce
    agent: Text


@value
class Prove(Message):
    """The answer to a challenge; the token itself never travels."""

    kind = "prove"
    proof: Blob


@value
class Define(Message):
    """Offer a model (tensors, whose values are the payloads, and tables, which have none).

    The first offer defines it.
    """

    kind = "define"
    tensors: Offered
    parts: Parts = ()
    tables: Sparse = ()


@value
class Describe(Message):
    """Ask for the model as it is defined."""

    kind = "describe"


@value
class Push(Message):
    """A gradient. ``seq`` rises by one per push of a client and makes it apply exactly once.

    With ``fetch`` the acknowledgement brings the parameters too, as a `Fetch` does. ``count`` is
    how many mini-batches' gradients it is made of.
    """

    kind = "push"
    seq: UInt
    fetch: bool
    have: Have
    parts: Parts = ()
    wants: Wants = ()
    coded: bool = False
    count: UInt = 1


@value
class Again(Message):
    """Apply this client's last gradient again, as stale as it is by now (B-FASGD's skipped push).

    It takes the place of a push, and is answered like one.
    """

    kind = "again"
    seq: UInt
    fetch: bool
    have: Have
    wants: Wants = ()
    coded: bool = False


@value
class Fetch(Message):
    """Ask for the tensors that have changed since ``have``, the model version held (-1: none).

    Who does not want all tensors, or does not hold all of one version, says in ``wants`` which,
    and since when; ``have`` does not count then. ``coded``: the answer may bring increments (see
    `Params`), because the client's tensors are as they were received.
    """

    kind = "fetch"
    have: Have
    wants: Wants = ()
    coded: bool = False


@value
class FetchRows(Message):
    """Ask for rows of a table. The payload holds their ids, int64, little endian."""

    kind = "fetch_rows"
    table: UInt
    parts: Parts = ()


@value
class PushRows(Message):
    """Gradients of rows of a table that were fetched at ``version``.

    The payloads are the rows' ids; the ids of rows that the answer is to bring, if any; and the
    gradients, row by row. Gradients of the same row are added up. ``seq`` as in a push.
    """

    kind = "push_rows"
    seq: UInt
    table: UInt
    version: UInt
    parts: Parts = ()


@value
class Stats(Message):
    """Ask for the server's statistics."""

    kind = "stats"


@value
class Ping(Message):
    """Ask whether the other side is alive (either side may)."""

    kind = "ping"


@value
class Leave(Message):
    """Say goodbye: nobody waits for this client from here on."""

    kind = "leave"


@value
class Meet(Message):
    """Be ready to average models with other workers, who reach this one at ``host`` and ``port``.

    With ``port`` 0: be ready no longer, and be waited for by nobody until the next `meet`; one
    that is unanswered is then answered with a round of nobody.
    """

    kind = "meet"
    host: Text
    port: UInt
    rounds: UInt
    digest: Blob
    nonce: Nonce


# ---------------------------------------------------------------- from server to client


@value
class Challenge(Message):
    """Ask for proof that the client knows the token."""

    kind = "challenge"
    nonce: Nonce


@value
class Welcome(Message):
    """The client is in. ``plan`` is its part of the algorithm.

    ``run`` is another one each time a server is started: versions count within a run.
    """

    kind = "welcome"
    protocol: UInt
    run: Text
    proof: Blob  # that the server knows the token too; empty without one
    policy: Text
    settings: Plain
    plan: Plain
    version: UInt
    model: Rows
    last_seq: UInt  # the highest push of this client the server has taken, 0 for none
    tables: Sparse = ()


@value
class Model(Message):
    """The model as it is defined: (name, dtype, shape, offset in the arena in bytes) each."""

    kind = "model"
    created: bool  # whether this client's offer defined it
    version: UInt
    model: Rows
    tables: Sparse = ()


@value
class Ack(Message):
    """The push was taken. ``parts`` brings parameters if they were asked for, as in `Params`.

    ``version`` is the model's after this push, and ``current`` that of the parameters: another, if
    this answers a push that was sent again, or if they are coded.
    ``used`` is false when the algorithm ignores this gradient (it is too stale, say); that is no
    error, and the worker goes on. ``staleness`` is the largest over the pushed tensors,
    ``mean_staleness`` the mean weighted by their bytes. ``vbar`` is the mean of the algorithm's
    statistic over all parameters (nil when it keeps none) and ``vbars`` the same per tensor,
    float32, little endian. ``gate``: the constants c_push and c_fetch of the bandwidth gates, where
    a budget has the server choose them.
    """

    kind = "ack"
    version: UInt
    current: UInt
    used: bool
    staleness: UInt
    mean_staleness: Real
    vbar: OptReal
    vbars: Blob
    parts: Parts = ()
    gate: Gate = ()


@value
class Params(Message):
    """The tensors asked for, of ``version``: those that the client does not have already.

    A raw part is the tensors' values. A part in another codec is one tensor's increment, which is
    to be added to what the client holds; several of one tensor follow each other. ``vbar``,
    ``vbars`` and ``gate`` as in `Ack`.
    """

    kind = "params"
    version: UInt
    parts: Parts = ()
    vbar: OptReal = None
    vbars: Blob = b""
    gate: Gate = ()


@value
class TableRows(Message):
    """The rows that were asked for, and what became of the push that they were asked for with.

    ``version`` is how many pushes the table has had, ``staleness`` how many of them came between
    the version that was pushed and the push (0 without one).
    """

    kind = "rows"
    version: UInt
    staleness: UInt
    parts: Parts = ()


@value
class Report(Message):
    """The server's statistics."""

    kind = "report"
    report: Plain


@value
class Round(Message):
    """The workers who average their models now; they go on among themselves.

    A round of one says that nobody else is ready; a round of none, that nothing is waited for.
    """

    kind = "round"
    number: UInt
    rank: UInt
    members: Members
    secret: Blob


@value
class Pong(Message):
    """The answer to a ping (either side)."""

    kind = "pong"


@value
class Error(Message):
    """A request was refused, or (``fatal``) the connection is about to be closed."""

    kind = "error"
    code: Text
    text: Text
    details: Plain
    fatal: bool
    version: UInt = 0  # the model's, so that a worker told to recompute knows what is current
    parts: Parts = ()

    def __post_init__(self) -> None:
        """Cut a text short that could not travel (it may quote long names)."""
        if len(self.text) > MAX_TEXT:
            object.__setattr__(self, "text", self.text[: MAX_TEXT - 1] + "…")


# ---------------------------------------------------------------- between the workers of a round


@value
class Greet(Message):
    """The first message between two neighbours of a round, each way: proof of the secret."""

    kind = "greet"
    number: UInt
    rank: UInt
    proof: Blob


@value
class Chunk(Message):
    """A chunk of the mean on its way round the ring, after so many hops."""

    kind = "chunk"
    hop: UInt
    parts: Parts = ()


KINDS: Mapping[str, type[Message]] = {
    cls.kind: cls
    for cls in (
        *(
            Hello,
            Prove,
            Define,
            Describe,
            Push,
            Again,
            Fetch,
            FetchRows,
            PushRows,
            Stats,
            Ping,
            Leave,
        ),
        *(Meet, Challenge, Welcome, Model, Ack, Params, TableRows, Report, Round, Pong, Error),
        *(Greet, Chunk),
    )
}


# ---------------------------------------------------------------- encode and decode


def encode(message: Message) -> bytes:
    """Return the header map of a message as MessagePack bytes."""
    names, values = _NAMES[type(message)]
    return _pack(dict(zip(names, values(message), strict=False)))  # type: ignore[no-any-return]


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Make the message that a header's bytes describe.

    Raises
    ------
    RemoteProtocolError
        Naming the path at which the header is not what the wire allows.
    """
    try:
        if len(data) > _UNSEEN:
            _walk(data)
        header = msgpack.unpackb(data, use_list=False, ext_hook=_no_ext, strict_map_key=True)
    except RemoteProtocolError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError) as err:
        why = str(err) or type(err).__name__
        raise RemoteProtocolError(f"header: not one MessagePack map: {why}") from None
    if type(header) is not dict:
        raise RemoteProtocolError(f"header: a map was expected, not {type(header).__name__}")
    kind: Any = header.get("kind")
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise RemoteProtocolError(f"header.kind: no message of kind {_short(kind)}")
    known, found = _FIELDS[cls], []
    for name, what, check in known:
        try:
            value = header[name]
        except KeyError:
            raise RemoteProtocolError(f"{kind}.{name}: missing") from None
        if check is _parts:
            value = _read_parts(kind, value)
        elif not check(value):
            raise RemoteProtocolError(f"{kind}.{name}: {what} was expected, not {_short(value)}")
        found.append(value)
    if len(header) != 1 + len(known):
        strange = next(key for key in header if key not in _NAMES[cls][0])
        raise RemoteProtocolError(f"{kind}.{_short(strange)}: no such field")
    return cls(*found)


def _walk(data: bytes | bytearray | memoryview) -> None:
    """See that every list is as long as it claims to be, without making any of them.

    A list's room is made when its length is read, so that a megabyte of lists within lists that
    each claim a million items would take gigabytes before the last of them is found missing.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    unpacker.skip()


def _read_parts(kind: str, value: object) -> Parts:
    if type(value) is not tuple:
        raise RemoteProtocolError(f"{kind}.parts: a list was expected, not {_short(value)}")
    if not value:
        return ()
    parts = []
    for index, item in enumerate(value):
        if type(item) is tuple and len(item) == 5 and _good_part(*item):
            parts.append(_part(item))
            continue
        if type(item) is not tuple or len(item) != 5:
            raise RemoteProtocolError(f"{kind}.parts[{index}]: five values were expected")
        part = Part(*item)
        for name, check in (
            ("start", _uint),
            ("stop", _uint),
            ("nbytes", _u32),
            ("version", _uint),
        ):
            if not check(getattr(part, name)):
                got = _short(getattr(part, name))
                raise RemoteProtocolError(
                    f"{kind}.parts[{index}].{name}: an integer in range was expected, not {got}"
                )
        if type(part.codec) is not str or len(part.codec) > 32:
            raise RemoteProtocolError(f"{kind}.parts[{index}].codec: a codec's name was expected")
        raise RemoteProtocolError(f"{kind}.parts[{index}]: start {part.start} ≥ stop {part.stop}")
    return tuple(parts)


_part = partial(tuple.__new__, Part)  # what Part(*item) does, in a third of the time


def _good_part(start: object, stop: object, codec: object, nbytes: object, version: object) -> bool:
    """Say at one go whether a part is as it must be; _read_parts says what is wrong if not."""
    return (
        type(start) is type(stop) is type(nbytes) is type(version) is int
        and type(codec) is str
        and len(codec) <= 32
        and 0 <= start < stop < 1 << 63
        and 0 <= nbytes < 1 << 32
        and 0 <= version < 1 << 63
    )


def _no_ext(code: int, data: bytes) -> object:
    raise RemoteProtocolError(f"header: extension type {code} is not part of the wire")


def _short(value: object) -> str:
    text = reprlib.repr(value)  # not repr: the value is a stranger's, and may be deep
    return text if len(text) <= 60 else text[:57] + "..."


def _uint(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _u32(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _have(value: object) -> bool:
    return type(value) is int and -1 <= value < 1 << 63


def _real(value: object) -> bool:
    return type(value) is float and math.isfinite(value)


def _opt_real(value: object) -> bool:
    return value is None or _real(value)


def _text(value: object) -> bool:
    return type(value) is str and len(value) <= MAX_TEXT


def _bool(value: object) -> bool:
    return type(value) is bool


def _nonce(value: object) -> bool:
    return type(value) is bytes and 16 <= len(value) <= 64


def _blob(value: object) -> bool:
    return type(value) is bytes


def _plain(value: object) -> bool:
    return type(value) is dict and _plain_value(value, 6)


def _plain_value(value: object, depth: int) -> bool:
    if value is None or type(value) in (bool, int, float, str, bytes):
        return True
    if depth == 0:
        return False
    if type(value) is tuple:
        return all(_plain_value(item, depth - 1) for item in value)
    if type(value) is dict:
        return all(type(k) is str and _plain_value(v, depth - 1) for k, v in value.items())
    return False


def _offered(value: object) -> bool:
    """Check rows of (name, dtype, shape); what they mean is checked by the layout."""
    return type(value) is tuple and all(
        type(row) is tuple and len(row) == 3 and _described(row) for row in value
    )


def _rows(value: object) -> bool:
    """Check rows of (name, dtype, shape, offset)."""
    return type(value) is tuple and all(
        type(row) is tuple and len(row) == 4 and _described(row) and _uint(row[3]) for row in value
    )


def _sparse(value: object) -> bool:
    """Check rows of (name, rows, width, dtype, initialiser, scale, seed)."""
    return type(value) is tuple and all(
        type(row) is tuple and len(row) == 7 and _sparse_row(*row) for row in value
    )


def _sparse_row(
    name: object, rows: object, width: object, dtype: object, init: object, *rest: object
) -> bool:
    return (
        (_text(name) and _text(dtype) and _text(init))
        and (_uint(rows) and _uint(width))
        and (_real(rest[0]) and _uint(rest[1]))
    )


def _described(row: tuple[Any, ...]) -> bool:
    name, dtype, shape = row[:3]
    if not (_text(name) and _text(dtype) and type(shape) is tuple and len(shape) <= MAX_AXES):
        return False
    return all(_uint(size) for size in shape)


def _members(value: object) -> bool:
    """Check rows of (host, port, whether its model counts)."""
    return type(value) is tuple and all(
        type(row) is tuple
        and len(row) == 3
        and _text(row[0])
        and _uint(row[1])
        and 0 < row[1] < 1 << 16
        and _bool(row[2])
        for row in value
    )


def _wants(value: object) -> bool:
    """Check runs of (first tensor, past the last, version held), in order."""
    if type(value) is not tuple:
        return False
    reached = 0
    for run in value:
        if type(run) is not tuple or len(run) != 3 or not all(map(_have, run)):
            return False
        if not reached <= run[0] < run[1]:
            return False
        reached = run[1]
    return True


def _gate(value: object) -> bool:
    """Check the two constants of a gate, or none."""
    return value == () or (
        type(value) is tuple and len(value) == 2 and all(_real(c) and c >= 0 for c in value)
    )


def _parts(value: object) -> bool:  # a marker: parts are read by _read_parts
    return False  # pragma: no cover


_CHECKS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "UInt": ("an integer from 0 to 2**63-1", _uint),
    "Have": ("an integer from -1 to 2**63-1", _have),
    "Real": ("a finite float", _real),
    "OptReal": ("a finite float or nil", _opt_real),
    "Text": (f"a string of at most {MAX_TEXT:,} characters", _text),
    "bool": ("a boolean", _bool),
    "Nonce": ("16 to 64 bytes", _nonce),
    "Blob": ("bytes", _blob),
    "Plain": ("a map of plain values", _plain),
    "Offered": ("a list of [name, dtype, shape]", _offered),
    "Rows": ("a list of [name, dtype, shape, offset]", _rows),
    "Sparse": ("a list of [name, rows, width, dtype, initialiser, scale, seed]", _sparse),
    "Wants": ("a list of [first tensor, past the last, version held]", _wants),
    "Gate": ("a list of two constants ≥ 0, or none", _gate),
    "Members": ("a list of [host, port, boolean]", _members),
    "Parts": ("a list of parts", _parts),
}

TYPES: Mapping[str, str] = {name: what for name, (what, _check) in _CHECKS.items()}
"""What the wire accepts for each type of field, in words."""


def _fields(cls: type[Message]) -> tuple[tuple[str, str], ...]:
    """Return the name and the type of each field."""
    return tuple((field.name, str(field.type)) for field in fields(cls))


_FIELDS = {
    cls: tuple((name, *_CHECKS[kind]) for name, kind in _fields(cls)) for cls in KINDS.values()
}
_NAMES = {
    cls: (names, attrgetter(*names))
    for cls in KINDS.values()
    for names in [("kind", *(name for name, _kind in _fields(cls)))]
}
_pack = msgpack.Packer().pack
