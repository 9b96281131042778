"""The messages: values, which encode and decode carry unchanged."""

from __future__ import annotations

import pytest
from hypothesis import given

from aiops.model.parts import MAX_TEXT
from aiops.wire.decoding import decode
from aiops.wire.encoding import KINDS, encode
from aiops.wire.messages import Error, Message, Ping
from tests.strategies import DETERMINISTIC, of_kind


@pytest.mark.parametrize("kind", KINDS)
def test_encode_and_decode_are_inverses(kind: str) -> None:
    @DETERMINISTIC
    @given(of_kind(kind))
    def check(message: Message) -> None:
        again = decode(encode(message))
        assert again == message
        assert type(again) is type(message)
        assert encode(again) == encode(message)

    check()


def test_messages_are_values() -> None:
    assert Ping(1) == Ping(1) != Ping(2)
    assert hash(Ping(1)) == hash(Ping(1))
    assert not hasattr(Ping(1), "__dict__")


def test_a_text_too_long_to_travel_is_cut() -> None:
    error = Error(1, "refused", "x" * 5000, {}, False)
    assert len(error.text) == MAX_TEXT
    assert error.text.endswith("x…")
    assert decode(encode(error)) == error
