"""A snapshot is read as it was written, or refused: at every truncation and every flipped bit."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiops.errors import DamagedState, UsageError
from aiops.kernels.parallel import serial_map
from aiops.model.layout import dtype_named
from aiops.state.blocks import SNAPSHOT, Read, pack_block, read_block, reader
from aiops.state.plain import DTYPES
from aiops.state.snapshot_file import (
    CHECKED,
    MAX_BUFFERS,
    PAGE,
    SnapshotFile,
    SnapshotHeader,
    SnapshotPlan,
)
from tests.rows import each_row
from tests.seeds import examples

HEADER = SnapshotHeader(
    row=18_220,
    generation=4,
    run="8c2f",
    versions=[9_110, 3],
    settings={"lr": 0.005},
    wrote={"aiops": "0.3"},
    owners={"membership": {"ever": 3, "members": [[1, "5f0c", [2, None]]]}},
)


def written(
    arrays: dict[str, Any], header: SnapshotHeader = HEADER, nbytes: int = 8 << 20
) -> bytes:
    """The bytes of a snapshot, from pieces that must follow each other."""
    plan = SnapshotPlan(header, arrays)
    data = bytearray()
    for offset, buffers in plan.pieces(nbytes):
        assert offset == len(data)
        assert len(buffers) <= MAX_BUFFERS
        assert len(buffers) == 1 or sum(map(len, buffers)) <= nbytes
        data += b"".join(buffers)
    assert len(data) == plan.length
    return bytes(data)


def opened(data: bytes) -> SnapshotFile:
    return SnapshotFile(reader(data), len(data), "snapshot-18220")


def parallel(pieces: Sequence[Any]) -> None:
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(piece) for piece in pieces]:
            done.result()


ARRAYS = {
    "params": np.arange(40, dtype=np.float32),
    "state/0/n": np.zeros(0, np.float32),
    "params@95": np.arange(6, dtype=np.int64).reshape(2, 3),
}
SMALL = written(ARRAYS)


@pytest.mark.parametrize("map_", [serial_map, parallel])
def test_what_is_written_is_read(map_: Any) -> None:
    file = opened(SMALL)
    assert file.header == HEADER
    assert list(file.arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        found = file.array(name, parallel_map=map_)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found, array)
        assert file.arrays[name].offset % PAGE == 0
    file.verify(map_)


@settings(max_examples=examples(40))
@given(
    st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(0, 3000)), max_size=6),
    st.integers(1, 1 << 14),
)
def test_any_arrays(described: list[tuple[str, int]], nbytes: int) -> None:
    rng = np.random.default_rng(len(described))
    arrays = {}
    for index, (name, size) in enumerate(described):
        dtype = dtype_named(name) if name == "bfloat16" else np.dtype(name)
        raw = rng.integers(0, 2, size * dtype.itemsize, np.uint8)
        arrays[f"{index}/{name}"] = raw.view(dtype)
    file = opened(written(arrays, nbytes=nbytes))
    for name, array in reversed(arrays.items()):
        assert file.array(name).tobytes() == array.tobytes()


@pytest.mark.parametrize("map_", [serial_map, parallel])
def test_arrays_over_several_checksums(map_: Any) -> None:
    """Edges of arrays within a MiB, at its edge, and arrays that span several."""
    sizes = [CHECKED - PAGE, PAGE, 3 * CHECKED, 5, CHECKED + 1, PAGE - 1, 2 * CHECKED + 77]
    rng = np.random.default_rng(5)
    arrays = {str(i): rng.integers(0, 256, size, np.uint8) for i, size in enumerate(sizes)}
    data = written(arrays, nbytes=CHECKED + 4096)
    assert data == written(arrays)
    file = opened(data)
    for name, array in arrays.items():
        into = np.empty(len(array), np.uint8)
        assert file.array(name, into, map_) is into
        np.testing.assert_array_equal(into, array)
    start = len(data) - 24 - 4 * len(file._sums) - file._nbytes
    for name, entry in file.arrays.items():
        for at in (entry.offset, entry.offset + entry.nbytes - 1):
            bad = bytearray(data)
            bad[start + at] ^= 4
            with pytest.raises(DamagedState, match="are not those that were written"):
                opened(bytes(bad)).array(name, None, map_)


def test_many_small_arrays() -> None:
    """More buffers than one system call takes; a MiB of them is read once."""
    arrays = {str(i): np.full(3, i, np.int32) for i in range(700)}
    data = written(arrays)
    reads = []

    def read(offset: int, into: memoryview) -> int:
        reads.append(len(into))
        return reader(data)(offset, into)

    file = SnapshotFile(read, len(data), "it")
    for name, array in arrays.items():
        np.testing.assert_array_equal(file.array(name), array)
    assert reads.count(CHECKED) <= 3


def test_no_arrays() -> None:
    file = opened(written({}))
    assert file.arrays == {}
    file.verify()


def test_every_truncation_is_refused() -> None:
    for length in range(len(SMALL)):
        with pytest.raises(DamagedState, match="snapshot-18220 is damaged"):
            opened(SMALL[:length])


def test_every_flipped_bit_is_refused() -> None:
    """Of the zeros between arrays, which are most of the file, every 53rd."""
    bits = [bit for bit in range(8 * len(SMALL)) if SMALL[bit // 8] or bit % 53 == 0]
    for bit in bits:
        data = bytearray(SMALL)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(UsageError, match=r"is damaged|was written in format"):
            opened(bytes(data)).verify()


def test_longer_than_it_says() -> None:
    with pytest.raises(DamagedState, match="not those of its arrays"):
        opened(SMALL + b"\0")


def test_the_footer_of_another_file() -> None:
    """Both have arrays of the same sizes, and the same arrays' bytes."""
    other = written(ARRAYS, SnapshotHeader(**(HEADER.plain() | {"row": 18_221})))
    assert len(other) == len(SMALL)
    with pytest.raises(DamagedState, match="its footer is not the one of its header"):
        opened(SMALL[:-28] + other[-28:])


def rebuilt(found: dict[str, Any], data: bytes = SMALL) -> bytes:
    """A file with another header, whose checksums are right."""
    _found, end, _crc = read_block(reader(data), len(data), SNAPSHOT, "it")
    area = data[end + -end % PAGE :]
    block = pack_block(SNAPSHOT, found)
    start = block + bytes(-len(block) % PAGE)
    rest = area[:-24] + (len(start) + len(area)).to_bytes(8, "little") + area[-16:-12]
    count = int.from_bytes(area[-16:-12], "little")
    crc = zlib.crc32(rest[-12 - 4 * count :], zlib.crc32(block[-4:]))
    return start + rest + crc.to_bytes(4, "little") + area[-8:]


def head_of(data: bytes = SMALL) -> dict[str, Any]:
    found: dict[str, Any] = read_block(reader(data), len(data), SNAPSHOT, "it")[0]
    return found


def test_rebuilding_changes_nothing() -> None:
    assert rebuilt(head_of()) == SMALL
    opened(rebuilt(head_of() | {"added": 1})).verify()


LARGE = 1 << 62


@each_row(
    ("row", "why"),
    [
        (["a", "float32", [LARGE], 0, LARGE], "no memory holds"),
        (["a", "float32", [1 << 40], 0, 4 << 40], "is not where it should be"),
        (["a", "float32", [40], 4096, 160], "is not where it should be"),
        (["a", "float32", [40], 0, 161], "is not where it should be"),
        (["a", "float32", [-40], 0, -160], "sizes from 0"),
        (["a", "float32", [40], -4096, 160], "is not where it should be"),
        (["a", "object", [20], 0, 160], "no array has the dtype 'object'"),
        (["a", "float32", [[40]], 0, 160], "sizes from 0"),
        (["a", "float32", [40], 0.0, 160], "an array is"),
        (["a", "float32", [40], 0], "an array is"),
        ("a", "an array is"),
    ],
)
def test_hostile_entries_allocate_nothing(row: Any, why: str) -> None:
    found = head_of()
    found["arrays"][0] = row
    data = rebuilt(found)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedState, match=f"snapshot-18220 is damaged: .*{why}"):
            opened(data)
        _now, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 20


@each_row(
    ("change", "why"),
    [
        ({"row": "1"}, "'row' should be int"),
        ({"row": -1}, "a negative number"),
        ({"versions": [1, None]}, "a negative number"),
        ({"versions": {}}, "'versions' should be list"),
        ({"owners": []}, "'owners' should be dict"),
        ({"arrays": None}, "'arrays' should be list"),
        ({"kind": 1}, "'kind' should be str"),
    ],
)
def test_headers_of_other_types(change: dict[str, Any], why: str) -> None:
    with pytest.raises(DamagedState, match=why):
        opened(rebuilt(head_of() | change))


def test_a_header_that_is_no_map() -> None:
    with pytest.raises(DamagedState, match="its header is no map"):
        SnapshotHeader.of([], "it")


def test_two_arrays_of_one_name() -> None:
    found = head_of()
    found["arrays"][1][0] = "params"
    with pytest.raises(DamagedState, match="'params' is not where it should be"):
        opened(rebuilt(found))


def test_what_does_not_fit() -> None:
    file = opened(SMALL)
    with pytest.raises(DamagedState, match="it has no array 'sum/0'"):
        file.array("sum/0")
    with pytest.raises(UsageError, match="does not fit into float64 of 160"):
        file.array("params", np.empty(20))
    with pytest.raises(UsageError, match="an array with gaps"):
        file.array("params", np.empty((40, 2), np.float32)[:, 0])
    flat = np.empty(6, np.int64)
    file.array("params@95", flat)
    assert flat.tolist() == list(range(6))


def test_what_cannot_be_written() -> None:
    for array in (np.array([None]), np.ones((4, 4))[:, ::2], np.ones(3, ">f8")):
        with pytest.raises(UsageError, match="the state's array 'a' cannot be written"):
            SnapshotPlan(HEADER, {"a": array})
    with pytest.raises(UsageError, match=r"\['owners'\]\['x'\] is a object, which is not plain"):
        SnapshotPlan(SnapshotHeader(**(HEADER.plain() | {"owners": {"x": object()}})), {})


def test_a_file_that_shrinks_while_it_is_read() -> None:
    read: Read = reader(SMALL)

    def short(offset: int, into: memoryview) -> int:
        return 100 if offset == 4096 else read(offset, into)

    file = SnapshotFile(short, len(SMALL), "it")
    with pytest.raises(DamagedState, match="it ends before byte"):
        file.verify()
