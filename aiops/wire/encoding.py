"""Write messages as MessagePack: the inverse of `aiops.wire.decoding`, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from struct import Struct

import msgpack

from aiops.model.parts import Part
from aiops.model.placement import RAW
from aiops.wire.admin_messages import (
    Done,
    Drain,
    Kick,
    Pause,
    Resume,
    RollbackTo,
    TakeSnapshot,
)
from aiops.wire.data_messages import CoverPush, GivenTask, TakeTask
from aiops.wire.messages import (
    Ack,
    Challenge,
    Define,
    Describe,
    Error,
    Fetch,
    FetchedParams,
    FetchRows,
    Hello,
    Leave,
    Log,
    Message,
    Model,
    Ping,
    Pong,
    Prove,
    Push,
    PushRows,
    Reapply,
    Release,
    Report,
    Share,
    Stats,
    TableRows,
    Welcome,
)
from aiops.wire.ring_messages import (
    JoinRound,
    RelayHello,
    RelayReady,
    RingChunk,
    RingHello,
    Round,
    RoundSettled,
    SettleRound,
)
from aiops.wire.server_messages import (
    BudgetUsed,
    ClosePushes,
    CountTraffic,
    ExpectPush,
    FinishPush,
    HoldVersion,
    KeepSets,
    LeadHello,
    LoadShard,
    NoteHistory,
    PaceClients,
    PushArrived,
    RollBack,
    RunUpdate,
    SendAway,
    SendIncrements,
    SendParams,
    SendRows,
    ShardHello,
    ShardParts,
    ShardState,
    ShardWelcome,
    ShareSecret,
    SnapshotSaved,
    StoredRows,
    TrafficCounted,
    UpdateDone,
)
from aiops.wire.standby_messages import (
    Fence,
    JournalRows,
    PlaceGiven,
    Promote,
    Promoted,
    RowsKept,
    SnapshotPart,
    StandbyHello,
    StandbyWelcome,
    TakePlace,
)

KINDS: Mapping[str, type[Message]] = {
    cls.kind: cls
    for cls in (
        *(Hello, Challenge, Prove, Welcome),
        *(Define, Describe, Model),
        *(Push, Reapply, Ack, Fetch, FetchedParams),
        *(FetchRows, PushRows, TableRows),
        *(Stats, Report, Ping, Pong, Log, Leave, Error),
        *(Share, Release),
        *(ShardHello, ShardWelcome, ShardParts),
        *(JoinRound, Round, SettleRound, RoundSettled),
        *(RingHello, RingChunk, RelayHello, RelayReady),
        *(TakeTask, GivenTask, CoverPush),
        *(
            LeadHello,
            ShareSecret,
            LoadShard,
            ExpectPush,
            RunUpdate,
            SendParams,
            SendIncrements,
        ),
        *(
            HoldVersion,
            FinishPush,
            NoteHistory,
            KeepSets,
            RollBack,
            CountTraffic,
            SendRows,
            ClosePushes,
            PaceClients,
            SendAway,
        ),
        *(
            ShardState,
            PushArrived,
            UpdateDone,
            SnapshotSaved,
            TrafficCounted,
            StoredRows,
            BudgetUsed,
        ),
        *(StandbyHello, StandbyWelcome, SnapshotPart, JournalRows, RowsKept),
        *(Promote, Promoted, TakePlace, PlaceGiven, Fence),
        *(Kick, Pause, Resume, TakeSnapshot, Drain, RollbackTo, Done),
    )
}
"""The class of each kind, in the order of the documentation."""


def encode(message: Message) -> bytes:
    """Return the header map of a message as MessagePack bytes."""
    kind = type(message)
    names, values = _NAMES[kind]
    keys = _STEADY.get(kind)
    try:
        if keys is None:
            return _pack_map(list(zip(names, values(message), strict=False)))  # type: ignore[no-any-return]
        chunks = [_OPENING[kind]]
        for key, widened, item in zip(*keys, values(message), strict=True):
            chunks.append(key)
            if widened is _INTEGER and item >= 0:
                chunks.append(_LONGEST(0xCF, item))
            elif widened is _ROWS and len(item) < _FEW:
                chunks.append(_LISTS[len(item)])
                chunks += map(_rows_part, item)
            elif widened is _EACH and len(item) == 1:
                chunks += _PART, _pack(item[0][:-1])[1:], _LONGEST(0xCF, item[0][-1])
            elif widened is _EACH and 1 < len(item) <= _MOST:
                count = len(item)
                chunks.append(bytes([0x90 + count]) if count < 16 else _LIST(0xDC, count))
                chunks += map(_changing_part, item)
            else:
                chunks.append(_pack(item))
        return b"".join(chunks)
    except Exception:
        _packer.reset()  # else the next message would begin with what there is of this one
        raise


def _changing_part(part: Part) -> bytes:
    """Return a part whose version changes from one message to the next."""
    if part[4] < 0:
        return bytes(_pack(part))
    return b"\x95%b%b" % (_pack(part[:4])[1:], _LONGEST(0xCF, part[4]))


def _rows_part(part: Part) -> bytes:
    """Return a part of a message about rows, which begins with row 0 and is raw."""
    start, stop, codec, nbytes, version = part
    if start or codec != RAW or min(part[1], nbytes, version) < 0:
        return bytes(_pack(part))
    return _ROWS_PART(0x95, 0, 0xCF, stop, _RAW, 0xCF, nbytes, 0xCF, version)


_NAMES = {
    cls: (names, attrgetter(*names))
    for cls in KINDS.values()
    for names in [("kind", *(field.name for field in fields(cls)))]
}
_packer = msgpack.Packer()
_pack, _pack_map = _packer.pack, _packer.pack_map_pairs
_LONGEST = Struct(">BQ").pack
_LIST = Struct(">BH").pack
_RAW = bytes(_pack(RAW))
_ROWS_PART = Struct(f">BBBQ{len(_RAW)}sBQBQ").pack

# The headers of successive pushes differ in some integers, and so do those of their answers. These
# integers are written in their longest form, so that all other bytes keep their values and offsets
# (`aiops.wire.template`). Readers accept any form.
_INTEGER, _EACH, _ROWS = "integer", "each part", "parts of rows"
_PART = b"\x91\x95"  # a list of one list of five
_FEW = 4  # more parts than a message about rows has
_MOST = 256  # parts of a push or its answer that are written so
_LISTS = [bytes([0x90 + count]) for count in range(_FEW)]
_WIDENED: Mapping[type[Message], Mapping[str, str]] = {
    Push: {**dict.fromkeys(("id", "seq", "have"), _INTEGER), "parts": _EACH},
    Ack: {**dict.fromkeys(("id", "version", "current", "staleness"), _INTEGER), "parts": _EACH},
    Release: {"id": _INTEGER},
    FetchRows: {**dict.fromkeys(("id", "table"), _INTEGER), "parts": _ROWS},
    PushRows: {**dict.fromkeys(("id", "seq", "table", "version"), _INTEGER), "parts": _ROWS},
    TableRows: {**dict.fromkeys(("id", "version", "staleness"), _INTEGER), "parts": _ROWS},
}
_OPENING = {cls: bytes([0x80 + len(_NAMES[cls][0])]) for cls in _WIDENED}
_STEADY = {
    cls: (
        tuple(_pack(name) for name in _NAMES[cls][0]),
        tuple(widened.get(name, "") for name in _NAMES[cls][0]),
    )
    for cls, widened in _WIDENED.items()
}
