"""What crosses the wire, as Hypothesis strategies; and how property tests are run here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from aiops.model.parts import LARGEST, Part
from aiops.wire.encoding import KINDS
from aiops.wire.fields import LONGEST, MAX_COUNT, MAX_REASON
from aiops.wire.messages import Message
from aiops.wire.state_machine import HANDSHAKE
from tests.seeds import examples

DETERMINISTIC = settings(
    max_examples=examples(50),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
"""The same examples on every run and every machine."""

uint = st.integers(0, LARGEST)
long = st.integers(0, LONGEST)
real = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(max_size=12)
plain_leaf = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | text
    | st.binary(max_size=8)
)
plain_value = st.recursive(
    plain_leaf,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
dtype = st.sampled_from(("float64", "float32", "bfloat16", "float16"))
shape = st.lists(long, max_size=3).map(tuple)


def plain_map(value: Any, depth: int = 1) -> bool:
    """Whether containers are at most six inside each other."""
    if isinstance(value, tuple):
        return depth <= 6 and all(plain_map(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return depth <= 6 and all(plain_map(item, depth + 1) for item in value.values())
    return True


@st.composite
def parts(draw: st.DrawFn, largest: int = 40) -> tuple[Part, ...]:
    """Parts as the wire allows them; what they mean is another matter."""
    found = []
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, LARGEST // 2))
        stop = draw(st.integers(start + 1, LARGEST))
        codec = draw(st.sampled_from(("raw", "", "int8")))
        found.append(Part(start, stop, codec, draw(st.integers(0, largest)), draw(uint)))
    return tuple(found)


def _runs(gaps: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Turn (gap, length, version) into runs of tensors."""
    reached = 0
    for gap, length, have in gaps:
        yield reached + gap - 1, reached + gap - 1 + length, have
        reached += gap - 1 + length


FIELDS: Mapping[str, st.SearchStrategy[Any]] = {
    "UInt": uint,
    "Have": st.integers(-1, LARGEST),
    "Batches": st.integers(1, MAX_COUNT),
    "Real": real,
    "OptReal": st.none() | real,
    "Text": text,
    "Reason": st.text(max_size=MAX_REASON),
    "bool": st.booleans(),
    "Nonce": st.binary(min_size=16, max_size=64),
    "Bytes32": st.sampled_from((b"", bytes(range(32)))),
    "Blob": st.binary(max_size=40),
    "Plain": st.dictionaries(text, plain_value, max_size=3).filter(plain_map),
    "Offered": st.lists(st.tuples(text, dtype, shape), max_size=3).map(tuple),
    "Rows": st.lists(st.tuples(text, dtype, shape, uint), max_size=3).map(tuple),
    "Sparse": st.lists(st.tuples(text, long, long, dtype, text, real, long), max_size=3).map(tuple),
    "Members": st.lists(st.tuples(text, st.integers(1, 65535), st.booleans()), max_size=3).map(
        tuple
    ),
    "Wants": st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(-1, 99)), max_size=3
    ).map(lambda runs: tuple(_runs(runs))),
    "Ranges": st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 99)), max_size=3
    ).map(lambda runs: tuple(_runs(runs))),
    "ShardTable": st.lists(st.tuples(text, st.integers(1, 65535), uint), max_size=3).map(tuple),
    "Gate": st.just(()) | st.tuples(*[st.floats(0, 1e9)] * 2),
    "Factors": st.lists(st.floats(0, 100), max_size=4).map(tuple),
    "Versions": st.lists(uint, max_size=3).map(tuple),
    "Positive": st.integers(1, LARGEST),
    "Numbers": st.lists(uint, max_size=3).map(tuple),
    "Logged": st.dictionaries(st.text(max_size=16), real, max_size=3).map(
        lambda values: tuple(values.items())
    ),
    "Examples": st.lists(
        st.tuples(uint, st.integers(0, 9), st.integers(10, LARGEST)), max_size=3
    ).map(tuple),
    "Parts": parts(),
}
"""By the names of the types of fields (`aiops.wire.fields`)."""


def of_kind(kind: str) -> st.SearchStrategy[Message]:
    """Messages of one kind."""
    cls = KINDS[kind]
    return st.builds(cls, **{f.name: FIELDS[str(f.type)] for f in dataclasses.fields(cls)})


def said_by(side: str) -> st.SearchStrategy[Message]:
    """Messages that one side may say, again and again, once the connection is open."""
    kinds = sorted(k for k, after in HANDSHAKE["open"][side].items() if after == "open")  # type: ignore[index]
    kinds.remove("share")  # which is about memory, and said within one machine only
    return st.one_of(*(of_kind(kind) for kind in kinds)).filter(
        lambda message: not getattr(message, "fatal", False)
    )


def payloads_of(message: Message) -> st.SearchStrategy[tuple[bytes, ...]]:
    """Payloads of the lengths that a message announces."""
    sizes = [part.nbytes for part in getattr(message, "parts", ())]
    return st.tuples(*(st.binary(min_size=size, max_size=size) for size in sizes))


def with_payloads(strategy: st.SearchStrategy[Message]) -> st.SearchStrategy[Any]:
    """Pairs of a message and its payloads."""
    return strategy.flatmap(lambda message: st.tuples(st.just(message), payloads_of(message)))


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """Cut bytes into chunks of these sizes, again and again."""
    chunks, at, turn = [], 0, 0
    while at < len(data):
        size = max(1, sizes[turn % len(sizes)]) if sizes else len(data)
        chunks.append(data[at : at + size])
        at, turn = at + size, turn + 1
    return chunks
