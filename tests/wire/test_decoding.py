"""The decoder: headers that are messages, and how all other bytes are refused."""

from __future__ import annotations

import dataclasses
import random
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.errors import RemoteProtocolError
from aiops.wire.decoding import decode
from aiops.wire.encoding import KINDS, encode
from aiops.wire.fields import TYPES
from aiops.wire.messages import Message, Ping
from tests.headers import BAD, header
from tests.rows import each_row
from tests.strategies import DETERMINISTIC, of_kind


def refusal(data: bytes) -> str:
    """The error that these bytes are refused with."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode(data)
    return str(caught.value)


def fields_of(*types: str) -> list[tuple[str, str, str]]:
    return [
        (kind, field.name, str(field.type))
        for kind, cls in KINDS.items()
        for field in dataclasses.fields(cls)
        if str(field.type) in types
    ]


class TestGoodHeaders:
    @each_row("kind", KINDS)
    def test_the_good_header_is_good(self, kind: str) -> None:
        """Everything that is refused below is refused for what was changed."""
        message = decode(msgpack.packb(header(kind)))
        assert message.kind == kind

    @DETERMINISTIC
    @given(st.randoms(use_true_random=False), of_kind("push"))
    def test_neither_the_order_of_keys_nor_the_width_of_integers_matters(
        self, rng: random.Random, push: Message
    ) -> None:
        fields = list(msgpack.unpackb(encode(push), strict_map_key=False).items())
        rng.shuffle(fields)
        wide = b"\xdf" + len(fields).to_bytes(4, "big")
        for key, value in fields:
            wide += b"\xdb" + len(key).to_bytes(4, "big") + key.encode()
            plain = type(value) is int and value >= 0
            wide += b"\xcf" + value.to_bytes(8, "big") if plain else msgpack.packb(value)
        assert decode(wide) == push


class TestWrongFields:
    @each_row("type_", BAD)
    def test_a_wrong_value_is_refused_by_its_path(self, type_: str) -> None:
        for kind, name, _type in fields_of(type_):
            for value in BAD[type_]:
                text = refusal(msgpack.packb(header(kind, **{name: value})))
                assert text.startswith(f"{kind}.{name}: {TYPES[type_]} was expected, not "), text
                assert len(text) < 200

    @each_row("kind", KINDS)
    def test_a_missing_field_is_refused_by_its_path(self, kind: str) -> None:
        for field in dataclasses.fields(KINDS[kind]):
            fields = header(kind)
            del fields[field.name]
            assert refusal(msgpack.packb(fields)) == f"{kind}.{field.name}: missing"

    @each_row("kind", KINDS)
    def test_an_unknown_field_is_refused_by_its_path(self, kind: str) -> None:
        assert refusal(msgpack.packb(header(kind, colour=1))) == f"{kind}.'colour': no such field"

    @each_row("kind", ["helo", "", "Hello", 1, None, b"hello", ("hello",), {"a": 1}])
    def test_an_unknown_kind_is_refused(self, kind: Any) -> None:
        text = refusal(msgpack.packb({"kind": kind, "id": 1}))
        assert text.startswith("header.kind: no message of kind ")

    def test_a_header_without_a_kind_is_refused(self) -> None:
        assert refusal(msgpack.packb({"id": 1})) == "header.kind: no message of kind None"

    @each_row(
        ("row", "path"),
        [
            (None, "push.parts[1]: five values"),
            ((0, 8, "raw", 8), "push.parts[1]: five values"),
            ((0, 8, "raw", 8, 1, 1), "push.parts[1]: five values"),
            ((-1, 8, "raw", 8, 1), "push.parts[1].start: "),
            ((0, 2**53, "raw", 8, 1), "push.parts[1].stop: an integer from 0 to 9007199254740991"),
            ((0, 8.0, "raw", 8, 1), "push.parts[1].stop: "),
            ((0, True, "raw", 8, 1), "push.parts[1].stop: "),
            ((0, 8, b"raw", 8, 1), "push.parts[1].codec: "),
            ((0, 8, "r" * 33, 8, 1), "push.parts[1].codec: "),
            ((0, 8, "raw", 2**32, 1), "push.parts[1].nbytes: an integer from 0 to 4294967295"),
            ((0, 8, "raw", None, 1), "push.parts[1].nbytes: "),
            ((0, 8, "raw", 8, -1), "push.parts[1].version: "),
            ((0, 8, "raw", 8, 2**53), "push.parts[1].version: "),
            ((8, 8, "raw", 8, 1), "push.parts[1]: start 8 ≥ stop 8"),
            ((9, 8, "raw", 8, 1), "push.parts[1]: start 9 ≥ stop 8"),
        ],
    )
    def test_a_wrong_part_is_refused_by_its_path(self, row: Any, path: str) -> None:
        parts = ((0, 8, "raw", 8, 1), row)
        assert refusal(msgpack.packb(header("push", parts=parts))).startswith(path)

    @each_row("parts", [None, {}, 1, "raw", b""])
    def test_parts_that_are_no_list_are_refused(self, parts: Any) -> None:
        text = refusal(msgpack.packb(header("push", parts=parts)))
        assert text.startswith("push.parts: a list was expected, not ")


class TestNotOneMap:
    @each_row(
        "data",
        [
            b"",
            b"\x90",
            b"\xc0",
            b"\x01",
            b"\xa4ping",
            b"\xc1",
            encode(Ping(1))[:-1],
            encode(Ping(1)) + b"\xc0",
            encode(Ping(1)) * 2,
            b"\x81\x01\x02",
            b"\x81\x80\x02",
            b"\x81\xc0\x02",
            b"\x81\xa4kind\xa2\xff\xfe",
            b"\x81\xa4kind\xa3\xed\xa0\x80",
            b"\xdf\xff\xff\xff\xff",
            b"\xdd\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
        ],
    )
    def test_what_is_not_one_map_is_refused(self, data: bytes) -> None:
        assert refusal(data).startswith("header")

    @each_row(
        "value", [msgpack.ExtType(1, b"x"), msgpack.ExtType(127, b""), msgpack.Timestamp(1, 2)]
    )
    def test_extension_types_are_refused(self, value: Any) -> None:
        assert refusal(msgpack.packb({"kind": "ping", "id": value}))
        assert refusal(msgpack.packb({"kind": value, "id": 1}))
        assert refusal(msgpack.packb(header("report", report={"a": (1, value)})))

    def test_a_key_that_is_no_string_is_refused(self) -> None:
        assert refusal(msgpack.packb(header("ping") | {b"id": 1})) == "ping.b'id': no such field"
        assert refusal(msgpack.packb(header("report", report={b"a": 1}))).startswith(
            "report.report"
        )

    @each_row("depth", [7, 100, 511, 990, 1010, 1022, 5000])
    @each_row("opening", [b"\x91", b"\x81\xa1k"])
    def test_deep_nesting_is_refused_wherever_it_is(self, depth: int, opening: bytes) -> None:
        deep = opening * depth + b"\xc0"
        assert refusal(b"\x81\xa4kind" + deep).startswith("header")
        assert refusal(b"\x82\xa4kind\xa4ping\xa2id" + deep)
        assert refusal(b"\x83\xa4kind\xa6report\xa2id\x01\xa6report" + deep)
        assert refusal(b"\x83\xa4kind\xa4ping\xa2id\x01\xa1x" + deep)

    @pytest.mark.parametrize("claim", [b"\xdd\x00\x01\x00\x00", b"\xdc\xff\xff"])
    def test_a_list_must_be_as_long_as_it_claims(self, claim: bytes) -> None:
        """Memory for a list is made when its length is read, and nothing but its items pays for it.

        Nine hundred lists inside each other, each claiming 64 Ki items, would take 450 MB.
        """
        data = b"\x81\xa4kind" + claim * 900 + b"\xc0" * (1 << 16)
        tracemalloc.start()
        try:
            refusal(data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 16 * len(data)

    @DETERMINISTIC
    @given(st.binary(max_size=200))
    def test_any_bytes_are_a_message_or_refused(self, data: bytes) -> None:
        try:
            message = decode(data)
        except RemoteProtocolError:
            return
        assert decode(encode(message)) == message

    @each_row("kind", KINDS)
    def test_any_change_of_a_byte_is_a_message_or_refused(self, kind: str) -> None:
        good = msgpack.packb(header(kind))
        for at in range(len(good)):
            for value in (0x00, 0x7F, 0x80, 0x91, 0xA0, 0xC0, 0xC1, 0xC7, 0xCB, 0xDD, 0xDF, 0xFF):
                changed = good[:at] + bytes([value]) + good[at + 1 :]
                try:
                    message = decode(changed)
                except RemoteProtocolError:
                    continue
                assert decode(encode(message)) == message
