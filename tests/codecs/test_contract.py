"""What every codec promises, on both backends, for every shape and kind of values."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import numpy as np
import pytest

from aiops.codecs import NotFinite, find
from aiops.codecs.block_codec import CHUNK, BlockCodec
from aiops.errors import UsageError
from tests.codecs.cases import (
    BACKENDS,
    SHAPES,
    SPECS,
    decoded,
    encoded,
    kind_of,
    kinds_of_values,
    normal,
)
from tests.rows import each_row

each_spec = each_row("spec", SPECS)
each_shape = each_row("shape", SHAPES, ids=str)
each_backend = each_row("backend", BACKENDS)


def size_of(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


@each_spec
def test_a_spec_says_what_it_makes(spec: str) -> None:
    assert find(spec).spec == spec
    assert find(find(spec).spec) == find(spec)


@each_spec
@each_shape
def test_backends_write_and_read_the_same_bits(spec: str, shape: tuple[int, ...]) -> None:
    for what, values in kinds_of_values(size_of(shape)).items():
        one, two = (encoded(spec, values, shape, backend) for backend in BACKENDS)
        assert one.tobytes() == two.tobytes(), what
        first, second = (decoded(spec, one, shape, backend) for backend in BACKENDS)
        assert first.tobytes() == second.tobytes(), what
        assert len(one) <= find(spec).most(shape), what
        assert (np.abs(first) < 1e18).all(), what


@each_spec
@each_shape
def test_backends_keep_the_same_rest(spec: str, shape: tuple[int, ...]) -> None:
    for what, values in kinds_of_values(size_of(shape)).items():
        one, two = (find(spec).encoder(shape, feedback=True, backend=name) for name in BACKENDS)
        for step in range(3):
            part = values * np.float32(0.5**step)
            assert bytes(one.encode(part)) == bytes(two.encode(part)), what
            assert one.rest is not None
            assert two.rest is not None
            assert one.rest.tobytes() == two.rest.tobytes(), what


@each_spec
@each_backend
def test_adding_is_decoding_and_then_adding(spec: str, backend: str) -> None:
    shape = (70, 65)
    payload = encoded(spec, normal(shape), shape, backend)
    held = normal(shape, 1)
    wanted = held + decoded(spec, payload, shape, backend)
    kind_of(spec).decode(payload, shape, held, add=True, backend=backend)
    np.testing.assert_array_equal(held, wanted)


@each_spec
@each_backend
@each_row("offset", [1, 2, 3])
def test_a_payload_may_lie_anywhere_and_be_read_only(spec: str, backend: str, offset: int) -> None:
    shape = (129, 8, 3)
    payload = encoded(spec, normal(shape), shape, backend)
    room = np.empty(len(payload) + 8, np.uint8)
    at = offset - room.ctypes.data % 4 + 4
    moved = room[at : at + len(payload)]
    moved[:] = payload
    moved.flags.writeable = False
    wanted = decoded(spec, payload, shape, backend)
    np.testing.assert_array_equal(decoded(spec, moved, shape, backend), wanted)


@each_spec
@each_backend
def test_what_is_decoded_and_what_is_left_add_up(spec: str, backend: str) -> None:
    shape = (66, 40)
    encoder = find(spec).encoder(shape, feedback=True, backend=backend)
    total = np.zeros(size_of(shape), np.float64)
    received = np.zeros_like(total)
    for step in range(8):
        values = normal(shape, step)
        payload = np.frombuffer(bytes(encoder.encode(values)), np.uint8)
        total += values
        received += decoded(spec, payload, shape, backend)
    np.testing.assert_allclose(received + encoder.rest, total, atol=1e-4)


@each_spec
@each_backend
def test_what_was_refused_is_taken_back(spec: str, backend: str) -> None:
    shape = (66, 40)
    values = normal(shape)
    encoder = find(spec).encoder(shape, feedback=True, backend=backend)
    encoder.encode(values)
    encoder.take_back()
    assert encoder.rest is not None
    np.testing.assert_allclose(encoder.rest, values, atol=1e-6)
    kept = encoder.rest.copy()
    encoder.take_back()
    np.testing.assert_array_equal(encoder.rest, kept)
    payload = np.frombuffer(bytes(encoder.encode(values)), np.uint8)
    sent = decoded(spec, payload, shape, backend)
    np.testing.assert_allclose(sent + encoder.rest, 2 * values, atol=1e-5)


@each_spec
def test_without_feedback_there_is_nothing_to_take_back(spec: str) -> None:
    encoder = find(spec).encoder((40,), feedback=False)
    before = bytes(encoder.encode(normal((40,))))
    encoder.take_back()
    assert encoder.rest is None
    if "lowrank" not in spec:  # its Q goes from step to step
        assert bytes(encoder.encode(normal((40,)))) == before


@each_spec
@each_backend
@each_row("bad", [np.nan, -np.inf, 1e18, -3e38])
@each_row("feedback", [True, False])
def test_a_value_that_is_not_fit_is_refused(
    spec: str, backend: str, bad: float, feedback: bool
) -> None:
    shape = (CHUNK + 300,)
    encoder = find(spec).encoder(shape, feedback=feedback, backend=backend)
    values = normal(shape)
    encoder.encode(values)
    before = None if encoder.rest is None else encoder.rest.copy()
    values[CHUNK + 17] = bad
    given = values.copy()
    with pytest.raises(NotFinite, match=f"element {CHUNK + 17} of the tensor is") as caught:
        encoder.encode(values)
    assert caught.value.index == CHUNK + 17
    np.testing.assert_array_equal(values, given)
    if before is not None:
        np.testing.assert_array_equal(encoder.rest, before)


@each_spec
@each_backend
def test_values_are_left_alone(spec: str, backend: str) -> None:
    values = normal((70, 65))
    values.flags.writeable = False
    given = values.copy()
    for feedback in (True, False):
        encoder = find(spec).encoder((70, 65), feedback=feedback, backend=backend)
        encoder.encode(values)
        encoder.encode(values)
    np.testing.assert_array_equal(values, given)


@each_spec
@each_row("backend", BACKENDS)
def test_sums_that_grow_too_large_are_kept(spec: str, backend: str) -> None:
    """A rest and a value together may reach 1e18: the payload stays one that can be read."""
    shape = (8, 40)
    encoder = find(spec).encoder(shape, feedback=True, backend=backend)
    values = np.full(320, 9e17, np.float32)
    for _ in range(4):
        payload = np.frombuffer(bytes(encoder.encode(values)), np.uint8)
        assert kind_of(spec).check(payload, shape, backend) is None
        encoder.take_back()
    assert encoder.rest is not None
    np.testing.assert_allclose(encoder.rest, 4 * values, rtol=1e-5)


@each_spec
@each_row(
    "values",
    [np.zeros(9, np.float32), np.zeros(8, np.float64), np.zeros(16, np.float32)[::2]],
    ids=["size", "dtype", "strides"],
)
def test_an_array_that_does_not_fit_is_refused(spec: str, values: np.ndarray) -> None:
    encoder = find(spec).encoder((8,), feedback=False)
    with pytest.raises(UsageError, match="the encoder of 8 elements was given"):
        encoder.encode(values)


@each_spec
@each_backend
@each_row("length", [0, 1, 7, 8, 9, 100, 5000])
def test_a_payload_of_another_length_is_refused(spec: str, backend: str, length: int) -> None:
    shape = (30, 10)
    payload = encoded(spec, normal(shape), shape, backend)
    if length != len(payload):
        fault = kind_of(spec).check(np.full(length, 255, np.uint8), shape, backend)
        assert fault is not None
        assert fault.split()[0] in ("has", "ends", "goes")
    for other in (payload[:-1], np.append(payload, np.uint8(0))):
        assert kind_of(spec).check(other, shape, backend)


@each_spec
@each_backend
@each_row("feedback", [True, False], ids=["feedback", "none"])
@each_row("shape", [(), (3, 0, 2), (70, 65), (129, 8, 3)], ids=str)
def test_a_restored_encoder_writes_the_same_payloads(
    spec: str, backend: str, feedback: bool, shape: tuple[int, ...]
) -> None:
    live = find(spec).encoder(shape, feedback=feedback, backend=backend)
    for step in range(3):
        live.encode(normal(shape, step))
    restored = find(spec).encoder(shape, feedback=feedback)
    restored.restore({name: array.copy() for name, array in live.state().items()})
    for step in range(3, 6):
        assert bytes(restored.encode(normal(shape, step))) == bytes(
            live.encode(normal(shape, step))
        )


class TestEntries:
    """The loops of block codecs as C functions do what encoders and `decode` do."""

    SPECS = tuple(spec for spec in SPECS if issubclass(kind_of(spec), BlockCodec))

    @staticmethod
    def functions(spec: str) -> tuple[Any, Any]:
        entries = cast(type[BlockCodec], kind_of(spec)).enter()
        assert cast(type[BlockCodec], kind_of(spec)).entered() == entries
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        encode = ctypes.CFUNCTYPE(ctypes.c_bool, size, *[pointer] * 5)(entries.encode)
        decode = ctypes.CFUNCTYPE(ctypes.c_bool, size, *[pointer] * 3)(entries.decode)
        return encode, decode

    @staticmethod
    def increments(spec: str) -> tuple[Any, Any, Any]:
        entries = cast(type[BlockCodec], kind_of(spec)).enter()
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        check = ctypes.CFUNCTYPE(ctypes.c_bool, size, *[pointer] * 2)(entries.check)
        add = ctypes.CFUNCTYPE(None, size, *[pointer] * 3)(entries.add)
        follow = ctypes.CFUNCTYPE(size, size, *[pointer] * 5)(entries.follow)
        return check, add, follow

    @staticmethod
    def payload(spec: str, size: int) -> tuple[np.ndarray, list[int]]:
        """Return a payload at an odd address, and where its sections begin."""
        kind = cast(type[BlockCodec], kind_of(spec))
        found = np.zeros(kind.length(size) + 1, np.uint8)[1:]
        places = [section.ctypes.data for section in kind.sections(found, size)]
        return found, [*places, 0][:2]

    @each_row("spec", SPECS)
    @each_shape
    def test_they_write_and_read_the_same_bits(self, spec: str, shape: tuple[int, ...]) -> None:
        size = size_of(shape)
        encode, decode = self.functions(spec)
        for what, values in kinds_of_values(size).items():
            encoder = find(spec).encoder(shape, feedback=True)
            rest, before = np.zeros((2, size), np.float32)
            payload, places = self.payload(spec, size)
            for step in range(3):
                part = values * np.float32(0.5**step)
                wanted, held = bytes(encoder.encode(part)), rest.tobytes()
                arrays = part.ctypes.data, rest.ctypes.data, before.ctypes.data
                assert encode(size, *arrays, *places), what
                assert encoder.rest is not None
                assert payload.tobytes() == wanted, what
                assert (before.tobytes(), rest.tobytes()) == (held, encoder.rest.tobytes()), what
            out = np.full(size, np.nan, np.float32)
            assert decode(size, *places, out.ctypes.data), what
            assert out.tobytes() == decoded(spec, payload, shape, "numpy").tobytes(), what

    @each_row("spec", SPECS)
    def test_an_unfit_value_changes_nothing(self, spec: str) -> None:
        encode, _decode = self.functions(spec)
        for value in (np.nan, -np.inf, 1e18, -1e18):
            values = normal((2000,))
            values[1999] = value
            rest, before = normal((2, 2000)).reshape(2, 2000)
            kept = rest.tobytes(), before.tobytes()
            payload, places = self.payload(spec, 2000)
            arrays = values.ctypes.data, rest.ctypes.data, before.ctypes.data
            assert not encode(2000, *arrays, *places)
            assert (rest.tobytes(), before.tobytes()) == kept
            assert not payload.any()

    @each_row("spec", SPECS)
    def test_what_check_refuses_is_not_decoded(self, spec: str) -> None:
        """Of payloads in which two bytes are random."""
        _encode, decode = self.functions(spec)
        check, _add, _follow = self.increments(spec)
        draw, kind, refused = np.random.default_rng(5), kind_of(spec), 0
        out = np.empty(2000, np.float32)
        for _ in range(600):
            payload, places = self.payload(spec, 2000)
            payload[:] = encoded(spec, normal((2000,)), (2000,), "numba")
            at = draw.integers(0, 16)
            payload[at : at + 2] = draw.integers(0, 256, 2)
            good = kind.check(payload, (2000,)) is None
            assert decode(2000, *places, out.ctypes.data) == good
            assert check(2000, *places) == good
            refused += not good
        assert 0 < refused < 600

    @each_row("spec", SPECS)
    @each_shape
    def test_a_copy_follows_by_increments(self, spec: str, shape: tuple[int, ...]) -> None:
        """As by encoding the difference, and adding what that decodes to."""
        size, room = size_of(shape), np.empty(size_of(shape), np.float32)
        _check, add, follow = self.increments(spec)
        for what, values in kinds_of_values(size).items():
            encoder = find(spec).encoder(shape, feedback=False)
            held, wanted, read = np.zeros((3, size), np.float32)
            for step in range(4):
                target = values * np.float32(0.5**step) if step < 3 else held.copy()
                payload, places = self.payload(spec, size)
                given = target.ctypes.data, held.ctypes.data, room.ctypes.data
                done = follow(size, *given, *places)
                assert payload.tobytes() == bytes(encoder.encode(target - wanted)), what
                wanted += decoded(spec, payload, shape, "numpy")
                add(size, *places, read.ctypes.data)
                assert held.tobytes() == wanted.tobytes() == read.tobytes(), what
                assert done == 1 + np.array_equal(held, target), what

    @each_row("spec", SPECS)
    def test_a_copy_does_not_follow_by_an_unfit_increment(self, spec: str) -> None:
        _check, _add, follow = self.increments(spec)
        room = np.empty(2000, np.float32)
        for value in (np.nan, np.inf, 2e18):
            values, held = normal((2, 2000)).reshape(2, 2000)
            values[1999] = value
            _payload, places = self.payload(spec, 2000)
            given = values.ctypes.data, held.ctypes.data, room.ctypes.data
            assert follow(2000, *given, *places) == 0
