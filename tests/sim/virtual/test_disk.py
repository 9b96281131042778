"""The simulated disk: what is synced survives, what is not survives as a seed chooses."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.net.disk import DiskFile
from aiops.sim.virtual.disk import VirtualDisk
from aiops.sim.virtual.loop import VirtualLoop, run_on
from aiops.sim.virtual.threads import VirtualThread
from tests.rows import each_row

FOLDER = Path("state")


def read(disk: VirtualDisk, name: str) -> bytes:
    file = disk.open(FOLDER / name)
    data = bytearray(file.size())
    assert file.read(memoryview(data), 0) == len(data)
    return bytes(data)


def fill(disk: VirtualDisk, name: str, data: bytes, *, sync: bool = True) -> DiskFile:
    file = disk.create(FOLDER / name, 0)
    file.write([data[:2], data[2:]], 0)
    if sync:
        file.sync()
    return file


def test_it_is_a_disk() -> None:
    disk = VirtualDisk()
    file = disk.create(FOLDER / "a", 10)
    assert read(disk, "a") == bytes(10)
    file.write([b"xy", b"z"], 4)
    assert read(disk, "a") == b"\0\0\0\0xyz\0\0\0"
    file.write([b"end"], 9)
    assert file.size() == 12
    view = bytearray(5)
    assert file.read(memoryview(view), 9) == 3
    with pytest.raises(FileExistsError):
        disk.create(FOLDER / "a")
    disk.rename(FOLDER / "a", FOLDER / "b")
    assert disk.names(FOLDER) == ["b"]
    assert disk.names(Path("elsewhere")) == []
    with pytest.raises(FileNotFoundError):
        disk.open(FOLDER / "a")
    disk.remove(FOLDER / "a")
    disk.remove(FOLDER / "b")
    assert disk.names(FOLDER) == []


def test_a_lock_has_one_holder() -> None:
    disk = VirtualDisk()
    lock = disk.lock(FOLDER / "LOCK", "the first")
    assert not isinstance(lock, str)
    assert disk.lock(FOLDER / "LOCK", "the second") == "the first"
    lock.release()
    assert not isinstance(disk.lock(FOLDER / "LOCK", "the second"), str)
    assert not isinstance(disk.after().lock(FOLDER / "LOCK", "after its end"), str)


def test_a_full_disk_takes_what_needs_no_room() -> None:
    disk = VirtualDisk()
    file = disk.create(FOLDER / "a", 4)
    disk.full = True
    file.write([b"1234"], 0)
    with pytest.raises(OSError, match="No space") as caught:
        file.write([b"5"], 4)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        disk.create(FOLDER / "b")
    assert disk.free(FOLDER) == 0


@each_row("seed", range(30))
def test_what_is_synced_survives(seed: int) -> None:
    disk = VirtualDisk(history=True)
    fill(disk, "a.part", b"whole")
    disk.rename(FOLDER / "a.part", FOLDER / "a")
    count = len(disk.operations)
    fill(disk, "b", b"gone?", sync=False)
    for left in (disk.after_power_cut(Random(seed)), disk.after_power_cut(Random(seed), count)):
        assert read(left, "a") == b"whole"
    assert disk.after(count).names(FOLDER) == ["a"]
    assert read(disk.after(), "b") == b"gone?"


def test_what_is_not_synced_survives_in_every_way() -> None:
    disk = VirtualDisk()
    file = fill(disk, "a.part", b"1" * 600)
    disk.rename(FOLDER / "a.part", FOLDER / "a")
    file.write([b"2" * 1000], 100)
    disk.create(FOLDER / "b")
    disk.remove(FOLDER / "never")
    seen, names = set(), set()
    for seed in range(300):
        left = disk.after_power_cut(Random(seed))
        data = read(left, "a").ljust(1100, b"\0")
        assert data[:100] == b"1" * 100
        seen.add((chr(data[100]), chr(data[511]), chr(data[512]), chr(data[1099])))
        names.add(tuple(left.names(FOLDER)))
    assert {("1", "1", "1", "\0"), ("2", "2", "2", "2"), ("2", "2", "1", "\0")} <= seen
    assert ("1", "1", "2", "2") in seen, "sectors are written in any order"
    assert ("2", "1", "1", "\0") in seen, "a sector is torn"
    assert names == {("a",), ("a", "b")}


def test_a_cut_flips_a_bit_of_what_was_synced() -> None:
    disk = VirtualDisk()
    fill(disk, "a.part", b"whole")
    disk.rename(FOLDER / "a.part", FOLDER / "a")
    data = read(disk.after_power_cut(Random(1), flips=1), "a")
    assert sum((x ^ y).bit_count() for x, y in zip(data, b"whole", strict=True)) == 1


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2), st.binary(max_size=9))))
def test_the_disk_after_each_operation_is_what_it_was(does: list[tuple[str, int, bytes]]) -> None:
    disk = VirtualDisk(history=True)
    known: list[dict[str, bytes]] = [{}]
    for name, action, data in does:
        before = len(disk.operations)
        if action == 0 and name not in disk.names(FOLDER):
            disk.create(FOLDER / name, len(data))
        elif name in disk.names(FOLDER):
            if action == 1:
                disk.open(FOLDER / name).write([data], 3)
            elif action == 2:
                disk.remove(FOLDER / name)
        state = {each: read(disk, each) for each in disk.names(FOLDER)}
        known += [state] * (len(disk.operations) - before)
    for count, state in enumerate(known):
        left = disk.after(count)
        assert {each: read(left, each) for each in left.names(FOLDER)} == state


class TestThreads:
    def test_a_thread_takes_turns_with_the_loop(self) -> None:
        loop = VirtualLoop(100.0)
        disk, seen = VirtualDisk(loop, 2.0), list[tuple[str, float]]()

        async def main() -> None:
            work = disk.queue()

            def run() -> None:
                file = disk.create(FOLDER / "a")
                while (item := work.get()) is not None:
                    file.write([item], 0)
                    file.sync()
                    loop.call_soon_threadsafe(seen.append, (item.decode(), loop.time()))

            thread = disk.thread(run, "disk")
            loop.call_later(1.0, work.put, b"early")
            loop.call_later(1.5, work.put, b"late")
            await disk_idle(6.0)
            assert thread.is_alive()
            work.put(b"last")
            work.put(None)
            thread.join()
            assert not thread.is_alive()
            await disk_idle(0.0)

        run_on(loop, main())
        assert seen == [("early", 3.0), ("late", 5.0), ("last", 6.0)]

    @pytest.mark.parametrize("inline", [False, True])
    def test_a_disk_may_become_faster_under_it(self, inline: bool) -> None:
        loop = VirtualLoop(100.0)
        disk, seen = VirtualDisk(loop, 4.0, inline=inline), list[tuple[bytes, float]]()

        async def main() -> None:
            work, file = disk.queue(), disk.create(FOLDER / "a")

            def run() -> None:
                while (item := work.get()) is not None:
                    file.sync()
                    seen.append((item, loop.time()))

            thread = disk.thread(run, "disk")
            await disk_idle(10.0)
            work.put(b"slow")
            await disk_idle(10.0)
            disk.seconds = 0.5
            work.put(b"fast")
            await disk_idle(10.0)
            work.put(None)
            thread.join()

        run_on(loop, main())
        assert seen == [(b"slow", 14.0), (b"fast", 20.5)]

    def test_its_error_ends_the_run(self) -> None:
        loop = VirtualLoop(100.0)

        def run() -> None:
            raise ValueError("it went wrong")

        async def main() -> None:
            VirtualThread(loop, run, "wrong")
            await disk_idle(1.0)

        with pytest.raises(ValueError, match="it went wrong"):
            run_on(loop, main())

    def test_it_ends_with_the_loop(self) -> None:
        loop = VirtualLoop(100.0)
        disk, ended = VirtualDisk(loop), list[str]()

        def run() -> None:
            try:
                disk.queue().get()
            finally:
                ended.append("it")

        async def main() -> None:
            disk.thread(run, "waits")
            await disk_idle(1.0)

        run_on(loop, main())
        assert ended == ["it"]
        assert not loop.threads


async def disk_idle(seconds: float) -> None:
    await asyncio.sleep(seconds)
