"""When to look for an answer, and when to leave the processor to others."""

from __future__ import annotations

import asyncio

import pytest

from aiops.net.busy_poll import BusyPoll, Spin


class Processor:
    """A clock that stands still but for what giving way takes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.others = 0.0  # seconds that somebody else takes when given way to
        self.cold = 0.0  # seconds more that the first yield of a wait takes
        self._warm = False
        self.given_way = 0

    def clock(self) -> float:
        return self.now

    def give_way(self) -> None:
        self.given_way += 1
        self.now += 1e-6 + self.others + (0.0 if self._warm else self.cold)
        self._warm = True

    def sleep(self) -> None:
        """Let the caches forget."""
        self._warm = False


def _wait(spin: Spin, there: int | None = None) -> int:
    """Look until something is there (after so many glances; None: never); return the glances."""
    glances = 0
    look = spin.begin()
    while look:
        glances += 1
        if glances == there:
            spin.found()
            break
        look = spin.look()
    return glances


class TestSpin:
    def setup_method(self) -> None:
        self.processor = Processor()
        self.spin = Spin(self.processor.clock, self.processor.give_way)

    def test_what_comes_soon_is_found_every_time(self) -> None:
        assert [_wait(self.spin, 20) for _ in range(5)] == [20] * 5

    def test_a_look_ends(self) -> None:
        glances = _wait(self.spin)
        assert glances * 1e-6 == pytest.approx(Spin.MOST, rel=0.01)
        assert self.processor.now <= Spin.MOST + 2e-6

    def test_who_wants_the_processor_has_it_at_once(self) -> None:
        self.processor.others = 50e-6
        assert _wait(self.spin) == 1
        assert self.processor.given_way == 1

    def test_a_first_yield_that_is_slow_because_it_is_cold_is_no_crowd(self) -> None:
        """Else a client whose polls once failed would sleep in each wait from then on."""
        self.processor.cold = 9e-6
        for _ in range(5):
            self.processor.sleep()
            assert _wait(self.spin, 20) == 20
        self.processor.cold, self.processor.others = 0.0, 9e-6
        assert _wait(self.spin, 20) == 2  # the second yield is slow too: another thread runs

    def test_looks_in_vain_grow_rare(self) -> None:
        tried = [_wait(self.spin) > 0 for _ in range(1024)]
        assert tried[0]
        assert not tried[1]
        assert 5 <= sum(tried) <= 12

    def test_and_frequent_again_when_one_succeeds(self) -> None:
        for _ in range(1024):
            _wait(self.spin)
        waits = 0
        while _wait(self.spin, 3) == 0:
            waits += 1
        assert waits <= 256
        assert [_wait(self.spin, 3) for _ in range(5)] == [3] * 5

    def test_nobody_looks_where_one_cannot_give_way(self) -> None:
        assert _wait(Spin(give_way=None)) == 0

    def test_a_wait_in_one_call_is_the_same(self) -> None:
        other = Spin(self.processor.clock, self.processor.give_way)
        for there in [3, None, 1, None, None, 2, 5, 4, None, 3, 3, 3]:
            glances = 0

            def look(_milliseconds: int, there: int | None = there) -> bool:
                nonlocal glances
                glances += 1
                return glances == there

            other.look(look)
            assert glances == pytest.approx(_wait(self.spin, there), abs=1)


class TestBusyPoll:
    def setup_method(self) -> None:
        self.processor = Processor()
        self.busy_poll = BusyPoll(Spin(self.processor.clock, self.processor.give_way), 4)

    def receive(self) -> None:
        """Tell it of a message, as the server does."""
        self.busy_poll.received = True
        if self.busy_poll.idle:
            self.busy_poll.begin()

    async def rounds(self, count: int) -> int:
        """Let the loop come round so many times; return how often it looked so far."""
        for _ in range(count):
            await asyncio.sleep(0)
        return self.processor.given_way

    async def test_a_loop_that_has_heard_something_looks_for_more_for_a_while(self) -> None:
        self.receive()
        looked = await self.rounds(1000)
        assert looked * 1e-6 == pytest.approx(Spin.MOST, rel=0.01)
        self.receive()  # the last look was in vain: this one is left out
        assert await self.rounds(10) == looked

    async def test_what_comes_while_it_looks_begins_the_while_anew(self) -> None:
        self.receive()
        early = await self.rounds(100)
        self.receive()
        looked = await self.rounds(1000)
        assert (looked - early) * 1e-6 == pytest.approx(Spin.MOST, rel=0.02)

    async def test_a_loop_with_as_many_peers_as_processors_does_not_look(self) -> None:
        self.busy_poll.serve(4)
        self.receive()
        assert await self.rounds(10) == 0
        self.busy_poll.serve(3)
        self.receive()
        assert await self.rounds(10) > 0

    async def test_a_peer_too_many_ends_the_looks(self) -> None:
        self.receive()
        looked = await self.rounds(10)
        self.busy_poll.serve(4)
        assert await self.rounds(10) == looked
        assert not self.busy_poll.idle
        self.busy_poll.serve(1)
        assert self.busy_poll.idle
