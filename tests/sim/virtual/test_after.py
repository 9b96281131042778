"""`Network.after`: actions between two bytes."""

from __future__ import annotations

import asyncio

import pytest

from aiops import testing
from aiops.errors import UsageError
from aiops.sim.virtual.host import Way
from tests.sim.virtual.test_network import Recorder, pair

SENT = bytes(range(100))
PLACES = sorted({*range(0, 101, 6), 7, 39, 40, 41, 98, 99, 100})
WAYS: list[Way] = ["up", "down"]


async def talking(way: Way) -> tuple[Recorder, Recorder]:
    """Return who writes and who hears: up, alice writes, and down, she hears."""
    near, far = await pair()
    return (near, far) if way == "up" else (far, near)


def say(writer: Recorder) -> None:
    """Write in batches that have nothing to do with where the marks are."""
    writer.transport.writelines([SENT[:7], SENT[7:40]])
    asyncio.get_running_loop().call_later(0.5, writer.transport.write, SENT[40:])


@pytest.mark.parametrize("pieces", [None, 7])
@pytest.mark.parametrize("way", WAYS)
def test_a_cut_at_every_byte(way: Way, pieces: int | None) -> None:
    async def main(nbytes: int) -> None:
        writer, hearer = await talking(way)
        network = testing.network()
        network.after("alice", way, nbytes, lambda: network.cut("alice"))
        say(writer)
        await asyncio.sleep(1)
        assert hearer.heard == SENT[:nbytes]
        assert writer.lost.done() == hearer.lost.done() == (nbytes < 100)
        assert len(network.host("alice").triggers) == (nbytes == 100)

    for nbytes in PLACES:
        testing.run(main(nbytes), pieces=pieces)


@pytest.mark.parametrize("way", WAYS)
def test_silence_at_every_byte(way: Way) -> None:
    """Twice: everything comes in the end, in order, and not before."""

    async def main(nbytes: int) -> None:
        writer, hearer = await talking(way)
        network = testing.network()

        def silence() -> None:
            network.silence("alice")
            network.after("alice", way, 1, lambda: network.silence("alice"))

        network.after("alice", way, nbytes, silence)
        say(writer)
        for heard in (nbytes, nbytes + 1, 100):
            await asyncio.sleep(5)
            assert hearer.heard == SENT[:heard]
            network.restore("alice")
        await asyncio.sleep(0)

    for nbytes in PLACES[:-2]:
        testing.run(main(nbytes))


@testing.virtual()
async def test_several_places() -> None:
    network, seen = testing.network(), list[str]()
    writer, hearer = await talking("up")
    places: list[tuple[str, Way, int]] = [
        ("alice", "up", 50),
        ("bob", "down", 20),
        ("alice", "up", 20),
        ("alice", "up", 0),
        ("bob", "up", 99),
        ("alice", "down", 0),
        ("bob", "down", 100),
    ]
    for name, way, nbytes in places:
        network.after(
            name,
            way,
            nbytes,
            lambda text=f"{name} {way} {nbytes}": seen.append(f"{text}: {len(hearer.heard)}"),  # type: ignore[misc]
        )
    say(writer)
    await asyncio.sleep(1)
    assert hearer.heard == SENT
    assert seen == ["alice up 0: 0", "alice up 20: 20", "bob down 20: 20", "alice up 50: 50"]
    writer.transport.write(b"!")
    await asyncio.sleep(1)
    assert seen[4:] == ["bob down 100: 100"], "it was the byte after them that brought it on"


@testing.virtual()
async def test_an_end_that_comes_after_a_mark_is_heard() -> None:
    writer, hearer = await talking("up")
    network = testing.network()
    network.after("alice", "up", 100, lambda: network.cut("alice"))
    say(writer)
    await asyncio.sleep(1)
    writer.transport.close()
    assert await hearer.lost is None
    assert hearer.heard == SENT


@testing.virtual()
async def test_what_cannot_be() -> None:
    network = testing.network()
    with pytest.raises(UsageError, match="no host is called 'alice'"):
        network.after("alice", "up", 1, lambda: None)
    network.add(testing.Host("alice"))
    with pytest.raises(UsageError, match="'up' from a host or 'down' to it, not 'left'"):
        network.after("alice", "left", 1, lambda: None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="give 0 or more"):
        network.after("alice", "up", -1, lambda: None)
