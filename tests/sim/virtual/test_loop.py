"""The virtual event loop: its clock, its order, and what it refuses."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from aiops import testing
from aiops.errors import DeadlineExceeded, UsageError
from aiops.sim.virtual.loop import Deadlock, VirtualLoop, run_on
from tests.rows import each_row


class TestClock:
    def test_it_jumps_to_the_next_timer(self) -> None:
        async def main() -> list[float]:
            loop = asyncio.get_running_loop()
            seen = [loop.time()]
            for seconds in (0.0, 0.25, 86400.0):
                await asyncio.sleep(seconds)
                seen.append(loop.time())
            return seen

        assert testing.run(main(), limit=1e6) == [0.0, 0.0, 0.25, 86400.25]

    def test_who_asked_first_is_called_first(self) -> None:
        async def main() -> list[str]:
            loop, called = asyncio.get_running_loop(), list[str]()
            loop.call_later(1, called.append, "a")
            loop.call_at(1, called.append, "b")
            loop.call_soon(called.append, "now")
            loop.call_later(0.5, called.append, "earlier")
            loop.call_later(1, called.append, "c")
            await asyncio.sleep(1)
            return called

        assert testing.run(main()) == ["now", "earlier", "a", "b", "c"]

    def test_a_time_that_has_passed_is_now(self) -> None:
        async def main() -> float:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(5)
            called = asyncio.Event()
            loop.call_at(1.0, called.set)
            await called.wait()
            return loop.time()

        assert testing.run(main()) == 5.0

    def test_what_is_cancelled_is_not_called(self) -> None:
        async def main() -> list[int]:
            loop, called = asyncio.get_running_loop(), list[int]()
            timers = [loop.call_later(number % 7, called.append, number) for number in range(2000)]
            soon = loop.call_soon(called.append, -1)
            for timer in [*timers[1:], soon]:
                timer.cancel()
                timer.cancel()
                assert timer.cancelled()
            await asyncio.sleep(10)
            return called

        assert testing.run(main()) == [0]

    def test_what_comes_due_cancels_what_is_due_with_it(self) -> None:
        async def main() -> list[str]:
            loop, called = asyncio.get_running_loop(), list[str]()
            loop.call_later(1, lambda: second.cancel())
            second = loop.call_later(1, called.append, "second")
            await asyncio.sleep(2)
            return called

        assert testing.run(main()) == []

    def test_what_runs_may_cancel_itself(self) -> None:
        """Its function and arguments must live until it returns: without that Python may crash."""

        async def main() -> int:
            loop, called = asyncio.get_running_loop(), list[int]()
            for _ in range(200):
                timers = list[asyncio.TimerHandle]()

                def run(data: bytes, timers: list[asyncio.TimerHandle] = timers) -> None:
                    timers[0].cancel()
                    timers[0].cancel()
                    called.append(len(data) + len([bytes(100) for _ in range(50)]))

                timers.append(loop.call_later(0.1, run, bytes(1000)))
                del run
                await asyncio.sleep(1)
            return sum(called)

        assert testing.run(main()) == 200 * 1050

    def test_timeouts_of_asyncio_are_virtual(self) -> None:
        async def main() -> float:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(100):
                    await asyncio.sleep(1000)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), 11)
            return asyncio.get_running_loop().time()

        assert testing.run(main()) == 111.0


class TestEnds:
    def test_a_deadlock_names_who_waits_where(self) -> None:
        async def forgotten() -> None:
            await asyncio.Event().wait()

        async def main() -> None:
            await asyncio.sleep(2)
            waiting = asyncio.create_task(forgotten(), name="alice")
            await waiting

        with pytest.raises(
            Deadlock, match=r"at 2 virtual seconds .*'alice' waits in .*wait \(locks"
        ):
            testing.run(main())

    def test_a_limit(self) -> None:
        async def main() -> None:
            for _ in range(20):
                await asyncio.sleep(1)

        with pytest.raises(DeadlineExceeded, match="not over after 10 virtual seconds, its limit"):
            testing.run(main(), limit=10)

    @each_row("limit", [0, -1, float("nan")])
    def test_a_limit_that_cannot_be(self, limit: float) -> None:
        with pytest.raises(UsageError, match="give more than 0"):
            testing.run(asyncio.sleep(0), limit=limit)

    def test_an_exception_in_a_callback_ends_the_run(self) -> None:
        def fail() -> None:
            raise ArithmeticError("a callback failed")

        async def main() -> None:
            asyncio.get_running_loop().call_later(1, fail)
            await asyncio.sleep(2)

        with pytest.raises(ArithmeticError, match="a callback failed"):
            testing.run(main())

    def test_tasks_left_behind_are_cancelled_and_may_tidy_up(self) -> None:
        ended = []

        async def linger() -> None:
            try:
                await asyncio.sleep(1e4)
            finally:
                await asyncio.sleep(1)
                ended.append(asyncio.get_running_loop().time())

        async def main() -> str:
            task = asyncio.create_task(linger())
            await asyncio.sleep(3)
            assert not task.done()
            return "done"

        assert testing.run(main()) == "done"
        assert ended == [4.0]

    def test_what_will_not_end_is_given_up(self) -> None:
        async def stubborn() -> None:
            while True:
                try:
                    await asyncio.sleep(1)
                except asyncio.CancelledError:
                    continue

        async def main() -> None:
            asyncio.current_task()
            self.task = asyncio.create_task(stubborn())
            await asyncio.sleep(0)
            raise KeyError("the error that matters")

        with pytest.raises(KeyError, match="the error that matters"):
            testing.run(main())
        self.task.get_coro().close()  # type: ignore[union-attr]


class TestThreads:
    def test_to_thread_runs_at_once(self) -> None:
        async def main() -> tuple[int, float]:
            ident = await asyncio.to_thread(threading.get_ident)
            with pytest.raises(ZeroDivisionError):
                await asyncio.to_thread(lambda: 1 // 0)
            return ident, asyncio.get_running_loop().time()

        assert testing.run(main()) == (threading.get_ident(), 0.0)

    def test_an_executor_is_refused(self) -> None:
        async def main() -> None:
            with ThreadPoolExecutor(1) as pool:
                await asyncio.get_running_loop().run_in_executor(pool, int)

        with pytest.raises(UsageError, match=r"no place in virtual time: .*run_in_executor\(None"):
            testing.run(main())

    def test_a_thread_that_calls_in_is_refused(self) -> None:
        said = []

        def call(loop: asyncio.AbstractEventLoop) -> None:
            try:
                loop.call_soon_threadsafe(int)
            except UsageError as error:
                said.append(str(error))

        async def main() -> None:
            thread = threading.Thread(target=call, args=(asyncio.get_running_loop(),))
            thread.start()
            thread.join()

        testing.run(main())
        assert said == [
            "a thread called into a virtual event loop: threads have no place in virtual time, so"
            " make it a coroutine"
        ]

    def test_a_loop_without_a_network_says_so(self) -> None:
        async def main() -> None:
            await asyncio.open_connection("127.0.0.1", 1)

        with pytest.raises(UsageError, match="no network"):
            run_on(VirtualLoop(), main())
