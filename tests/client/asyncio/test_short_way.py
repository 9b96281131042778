"""An async client's steady exchange by compiled code does what the one in Python does.

Both are the short way of a connection whose socket, a real one, leads to a script. What the server
says is in the socket before the push is sent, so that a test decides after which byte a read ends.
It is received by compiled code or by the transport, whichever comes first in the loop at hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from aiops.client import AsyncClient, AsyncWorker
from aiops.client.asyncio import short_way as module
from aiops.client.asyncio.connection import AsyncConnection
from aiops.client.asyncio.short_way import AsyncShortWay
from aiops.client.coded_gradient import CodedGradient
from aiops.client.request_kinds import Receipt
from aiops.codecs.whole_gradient import WholeGradient
from aiops.compiled import COMPILED, exchange_type
from aiops.errors import AiopsError, ConnectionLost
from aiops.model.parts import LARGEST
from tests.client.sync.test_compiled_exchange import (
    AS_IT_IS,
    GIVEN,
    PING,
    SIZES,
    Change,
    changes,
    learnt,
    parts,
)
from tests.client.test_steady import MODELS, Half, teach
from tests.memory import patch_select
from tests.rows import each_row
from tests.seeds import examples
from tests.strategies import DETERMINISTIC
from tests.support import ServerThread

pytestmark = pytest.mark.skipif(exchange_type() is None, reason="there was no C compiler")

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
WAYS = ("at once", "behind a turn", "by the transport")
"""How compiled code takes an answer: without a turn of the loop, behind one, or not at all."""

_PATIENCE = 20.0


@pytest.fixture(autouse=True, scope="module")
def _select() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch_select(patch)
        patch.setattr(module, "_LONG", math.inf)  # however busy the machine is
        yield


class Adopted(AsyncConnection):
    """A connection of a session that is under way: it says no hello."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        assert self.short is not None
        self.short.connected(transport)


class Scripted:
    """A client that has learnt the steady exchange, and whose socket a test reads and writes."""

    connection: Adopted
    short: AsyncShortWay

    def __init__(self, compiled: bool, model: str, policy: str = "asgd") -> None:
        self.half, self._compiled, self.told = Half(True, model, policy), compiled, 0
        teach(self.half)
        self.session = self.half.client._session
        assert self.session.steady is not None
        if compiled:  # as it is once a thread has compiled the loops
            self.session.steady.forms.warm()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.socket = socket.create_connection(listener.getsockname())
            self.peer, _address = listener.accept()
        self.peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def __aenter__(self) -> Scripted:
        loop = asyncio.get_running_loop()
        self.socket.setblocking(False)
        _transport, self.connection = await loop.create_connection(
            lambda: Adopted(self.session), sock=self.socket
        )
        assert self.connection.short is not None
        self.short = self.connection.short
        self.short.beat = 1000.0
        if not self._compiled:
            self.short._fd = -1
        return self

    async def __aexit__(self, *exc: object) -> None:
        if not self.connection.ended.done():
            self.connection.end(ConnectionLost("over"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.peer.close()
        self.session.lost()
        self.half.__exit__()

    def go(self, way: str) -> None:
        """Have compiled code take the next answer in this way."""
        rests = 1 << 30 if way == "by the transport" else 0
        self.short.spin.resting = self.short.nap.resting = rests
        self.short._turned = math.inf if way == "at once" else -math.inf

    def tell(self, data: bytes) -> None:
        """Say this, and wait until it is all there."""
        self.peer.sendall(data)
        self.told += len(data)
        with socket.socket(fileno=os.dup(self.fd)) as sock:
            poll, deadline = select.poll(), time.monotonic() + _PATIENCE
            poll.register(sock, select.POLLIN)
            while self.told and poll.poll(1000 * _PATIENCE):
                if len(sock.recv(self.told, socket.MSG_PEEK)) == self.told:
                    break
                assert time.monotonic() < deadline

    @property
    def fd(self) -> int:
        assert self.connection.transport is not None
        found: int = self.connection.transport.get_extra_info("socket").fileno()
        return found

    def end(self, how: str) -> None:
        """Close the connection from the server's side, and wait until that is known."""
        poll = select.poll()
        poll.register(self.fd, select.POLLRDHUP | select.POLLHUP)
        if how == "reset":
            self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.peer.close()
        else:
            self.peer.shutdown(socket.SHUT_WR)
        assert poll.poll(10_000)

    def begin(self) -> Any:
        """Begin an exchange; return what `AsyncShortWay.exchange` does."""
        return self.short.exchange(self.half.params, self.half.gradient)

    def task(self, done: asyncio.Future[Any]) -> asyncio.Task[Any]:
        """Return a task that waits for what becomes of it, as a client's does."""

        async def wait() -> Any:
            short = self.short
            try:
                return await (short.outcome(self.half.params, done) if short.looks else done)
            except BaseException:
                request = short.give_up(done)
                if request is not None:
                    self.session.abandon(request)
                raise

        return asyncio.ensure_future(wait())

    async def finish(self, found: Any, rest: bytes = b"") -> Any:
        """Have the exchange go on, and the server say the rest and no more; return its result."""
        if found is None or isinstance(found, Receipt):
            return repr(found)
        task = self.task(found)
        for _ in range(3):
            await asyncio.sleep(0)
        with contextlib.suppress(OSError):
            self.peer.sendall(rest)
            self.peer.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(_PATIENCE):
            request = await task
            if isinstance(request, Receipt):
                return repr(request)
            while not request.done and not self.connection.ended.done():
                self.connection.progress.clear()
                await self.connection.progress.wait()
        if request.done:
            try:
                return repr(request.value())
            except AiopsError as error:
                return type(error), str(error)
        self.session.abandon(request)
        return type(self.connection.ended.result())

    def sent(self) -> bytes:
        """Return the bytes that have been sent on the socket."""
        found = b""
        with contextlib.suppress(OSError):
            while data := self.peer.recv(1 << 20, socket.MSG_DONTWAIT):
                found += data
        return found


def run(loop: str, main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine function on a loop of this kind."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(asyncio.wait_for(main(), 2 * _PATIENCE))


def both(loop: str, main: Callable[[bool], Coroutine[Any, Any, Any]]) -> Any:
    """Run it with compiled code and without; return what both come to."""
    short, long = (
        run(loop, lambda compiled=compiled: main(compiled)) for compiled in (True, False)
    )
    assert short == long
    return short


def outcome(
    loop: str,
    way: str,
    model: str,
    policy: str,
    change: Change,
    cut: int,
    end: str,
    increments: int = 1,
) -> dict[str, Any]:
    """Return all that can be seen of one exchange, which is the same with compiled code.

    The server says ``cut`` bytes of the changed answer; then it ends the connection, or says the
    rest when the client has waited for a while.
    """
    push, answer, slots = learnt(model, policy, increments)
    said = change.of(answer, slots)

    async def main(compiled: bool) -> dict[str, Any]:
        async with Scripted(compiled, model, policy) as one:
            one.go(way)
            at = min(cut, len(said))
            one.tell(said[:at])
            if end:
                one.end(end)
            one.short._compile(one.session.steady)
            assert compiled == (one.short._compiled is not None)
            found = one.begin()
            result = await one.finish(found, said[at:])
            sent = b"" if end == "reset" else one.sent()
            assert sent.startswith(push) or end == "reset"
            state = one.half.state()
        return {"result": result, "sent": sent, **state}

    found: dict[str, Any] = both(loop, main)
    return found


everything = (
    st.sampled_from(sorted(LOOPS)),
    st.sampled_from(WAYS),
    st.sampled_from(["small", "coded", "large", "large coded"]),
    st.sampled_from(["asgd", "fasgd"]),
    changes,
    st.integers(0, 400) | st.sampled_from([40_000, 80_000, 1 << 20]),
    st.sampled_from(["", "", "end", "reset"]),
)


@settings(DETERMINISTIC, max_examples=examples(60))
@given(*everything)
def test_both_are_one(
    loop: str, way: str, model: str, policy: str, change: Change, cut: int, end: str
) -> None:
    outcome(loop, way, model, policy, change, cut, end)


@each_row("loop", LOOPS)
@each_row("way", WAYS)
@each_row("model", MODELS)
def test_each_place_at_which_an_answer_may_break(loop: str, way: str, model: str) -> None:
    _push, answer, _slots = learnt(model, "asgd")
    head = len(answer) - SIZES[model]
    for cut in (0, 1, head - 1, head, head + 1, len(answer) - 1, len(answer)):
        found = outcome(loop, way, model, "asgd", AS_IT_IS, cut, "")
        assert "Receipt(version=3, staleness=0" in found["result"]
        assert found["version"][0] == 3
    found = outcome(loop, way, model, "asgd", AS_IT_IS, head + 1, "end")
    assert found["result"] is ConnectionLost
    assert found["version"][0] == -1, "it was handed over, and is a mixture there"


def test_a_part_of_an_answer_leaves_a_mixture_that_is_known() -> None:
    """Other tasks may look at the parameters before the rest comes."""
    answer = learnt("large", "asgd")[1]

    async def main() -> None:
        async with Scripted(True, "large") as one:
            one.go("at once")
            one.tell(answer[: len(answer) - SIZES["large"] // 2])
            before = one.half.params.arena.data.copy()
            found = one.begin()
            assert (one.half.params.arena.data != before).any()
            assert one.half.params.version == -1
            one.peer.sendall(answer[len(answer) - SIZES["large"] // 2 :])
            assert (await found).version == one.half.params.version == 3

    run("asyncio", main)


@each_row("number", range(6))
def test_each_number_out_of_its_bounds(number: int) -> None:
    value = math.nan if number == 5 else 1 << 7 if number == 0 else LARGEST + 1
    for loop in LOOPS:
        outcome(loop, "at once", "small", "asgd", Change(number, value), 1 << 20, "end")


@each_row("loop", LOOPS)
def test_a_ping_before_the_answer(loop: str) -> None:
    found = outcome(loop, "at once", "small", "asgd", Change(before=PING), 1 << 20, "")
    assert "Receipt(version=3" in found["result"]
    assert len(found["sent"]) > len(learnt("small", "asgd")[0]), "a pong"


@each_row("name", GIVEN)
def test_the_same_gradients_fit(name: str) -> None:
    async def main(compiled: bool) -> Any:
        async with Scripted(compiled, "small") as one:
            one.go("at once")
            one.tell(learnt("small", "asgd")[1])
            one.half.gradient = GIVEN[name](one.half)
            found = await one.finish(one.begin())
            assert one.short.steady is None
            return found, one.sent()

    found, sent = both("asyncio", main)
    assert (found != "None") == (sent != b"")


@each_row("shift", ["connection", "level", "age"])
def test_parameters_that_do_not_fit(shift: str) -> None:
    async def main(compiled: bool) -> Any:
        async with Scripted(compiled, "small") as one:
            setattr(one.half.params, shift, ("another", 1) if shift == "connection" else None)
            return one.begin(), one.sent()

    assert both("asyncio", main) == (None, b"")


# ---------------------------------------------------------------- socket and transport


@each_row("loop", LOOPS)
@each_row("room", [False, True])
def test_what_the_socket_does_not_take_goes_by_the_transport(loop: str, room: bool) -> None:
    push, answer, _slots = learnt("large", "asgd")

    async def main() -> None:
        async with Scripted(True, "large") as one:
            one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            one.peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            if room:
                for name, array in one.half.room.items():
                    array[...] = one.half.gradient[name]
                one.half.gradient = one.half.room
            task = one.task(one.begin())
            compiled: Any = one.short._compiled
            assert compiled.sent > 0
            assert compiled.sent < len(push)
            assert not one.short.looks, "the answer cannot be there"
            came = b""
            while len(came) < len(push):
                await asyncio.sleep(0)
                came += one.sent()
            assert came == push
            one.peer.sendall(answer)
            async with asyncio.timeout(_PATIENCE):
                assert (await task).version == 3

    run(loop, main)


@each_row("model", ["small", "large", "coded"])
def test_all_goes_by_the_transport_if_the_socket_takes_nothing(model: str) -> None:
    push, answer, _slots = learnt(model, "asgd")

    async def main() -> None:
        async with Scripted(True, model) as one:
            one.short._compile(one.session.steady)
            compiled: Any = one.short._compiled
            full, other = socket.socketpair()
            full.setblocking(False)
            with full, other:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        full.send(bytes(1 << 16))
                compiled.fd = full.fileno()
                task = one.task(one.begin())
                compiled.fd = one.socket.fileno()
            assert compiled.sent == 0
            came = b""
            async with asyncio.timeout(_PATIENCE):
                while len(came) < len(push):
                    await asyncio.sleep(0)
                    came += one.sent()
            assert came == push
            one.peer.sendall(answer)
            async with asyncio.timeout(_PATIENCE):
                assert (await task).version == 3

    run("asyncio", main)


@each_row("loop", LOOPS)
def test_what_waits_in_the_transport_goes_first(loop: str) -> None:
    push, answer, _slots = learnt("small", "asgd")

    async def main() -> None:
        async with Scripted(True, "small") as one:
            transport: Any = one.connection.transport
            before = bytes(8 << 20)
            transport.write(before)
            assert transport.get_write_buffer_size()
            one.short.full = False  # as if its mark were higher
            came = one.sent()  # and so the socket takes the push
            task = one.task(one.begin())
            while len(came) < len(before) + len(push):
                await asyncio.sleep(0)
                came += one.sent()
            assert came == before + push
            one.peer.sendall(answer)
            async with asyncio.timeout(_PATIENCE):
                assert (await task).version == 3

    run(loop, main)


@each_row("loop", LOOPS)
def test_none_begins_while_the_transport_is_full(loop: str) -> None:
    async def main() -> None:
        async with Scripted(True, "small") as one:
            transport: Any = one.connection.transport
            transport.set_write_buffer_limits(high=1000)
            transport.write(bytes(8 << 20))
            for _ in range(3):
                await asyncio.sleep(0)
            assert one.short.full
            assert one.begin() is None
            one.connection.resume_writing()
            assert one.begin() is not None

    run(loop, main)


def test_a_socket_that_is_closed_is_left_alone() -> None:
    """Its descriptor may be another file's by now."""

    async def main() -> None:
        async with Scripted(True, "small") as one:
            one.go("behind a turn")
            task = one.task(one.begin())
            compiled: Any = one.short._compiled
            one.connection.end(ConnectionLost("it is gone"))
            assert (compiled.fd, one.short._fd, one.short._compiled) == (-1, -1, None)
            request = await task
            assert not request.done
            assert compiled.received == 0
            assert one.begin() is None
            one.session.abandon(request)
        for leave in ("forked", "_leave_socket"):
            async with Scripted(True, "small") as one:
                one.go("behind a turn")
                task = one.task(one.begin())
                compiled = one.short._compiled
                with socket.socket() as spare:
                    number = os.dup(one.fd)
                    getattr(one.connection, leave)()
                    assert compiled.fd == -1
                    os.dup2(number, one.fd)
                    os.close(number)
                    spare.close()
                assert one.begin() is None
                task.cancel()
                await asyncio.wait([task])

    run("asyncio", main)


@each_row("loop", LOOPS)
@each_row("how", ["end", "reset"])
def test_a_connection_that_ends_meanwhile(loop: str, how: str) -> None:
    """The transport learns of it, however compiled code has looked at the socket before."""

    async def main() -> None:
        for way in WAYS:
            async with Scripted(True, "small") as one:
                one.go(way)
                one.end(how)
                assert await one.finish(one.begin()) is ConnectionLost
                assert one.short._fd == -1

    run(loop, main)


@each_row(
    "info", [{"sslcontext": 1}, {"socket": None}, {}], ids=["tls", "no socket", "another transport"]
)
def test_other_transports_bring_all(info: dict[str, Any]) -> None:
    class Transport(asyncio.Transport):
        __module__ = "asyncio.selector_events" if info else "another"

        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return {"socket": sock, "sslcontext": None, **info}[name]

    async def main() -> int:
        short = AsyncShortWay(half.client._session, lambda: None, lambda error: None)
        short.connected(Transport())
        return short._fd

    with socket.socket() as sock, Half(True) as half:
        assert run("asyncio", main) == -1
        info["sslcontext"], info["socket"] = None, sock
        Transport.__module__ = "uvloop.loop"
        assert run("asyncio", main) == sock.fileno()


# ---------------------------------------------------------------- tasks


@each_row("loop", LOOPS)
@each_row("way", WAYS[1:])
@each_row("model", ["small", "large"])
def test_a_cancelled_one_goes_on_as_a_request(loop: str, way: str, model: str) -> None:
    """Its answer is thrown away, and the next exchange is another push."""
    answer = learnt(model, "asgd")[1]
    head = len(answer) - SIZES[model]

    async def main(compiled: bool) -> Any:
        found = []
        for cut, turns in itertools.product((0, head + 1), (1, 2, 4)):
            async with Scripted(compiled, model) as one:
                one.go(way)
                one.tell(answer[:cut])
                assert one.session.steady is not None
                seq = one.session.steady.seq
                task = one.task(one.begin())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
                assert one.session.pending.seq == seq + 1
                assert one.session.pending.by_id == {}
                assert one.short.steady is None
                found.append((one.sent(), one.half.params.version))
        return found

    run(loop, lambda: main(True))
    run(loop, lambda: main(False))


@each_row("loop", LOOPS)
@each_row("way", WAYS[1:])
@each_row("compiled", [True, False])
def test_one_that_is_handed_over_before_its_task_is_told(
    loop: str, way: str, compiled: bool
) -> None:
    """As by a timeout that is due in the turn in which the exchange takes long."""
    answer = learnt("small", "asgd")[1]

    async def main() -> None:
        async with Scripted(compiled, "small") as one:
            one.go(way)
            task = one.task(one.begin())
            for _ in range(4):
                await asyncio.sleep(0)
            task.cancel()
            one.short.hand_over()
            await asyncio.wait([task])
            assert task.cancelled()
            assert one.session.pending.by_id == {}
            values = one.half.params.arena.data.copy()
            one.peer.sendall(answer)
            for _ in range(8):
                await asyncio.sleep(0)
            assert (one.half.params.arena.data == values).all()

    run(loop, main)


@each_row("loop", LOOPS)
def test_loops_of_codecs_are_compiled_beside_the_event_loop(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until they are, exchanges go by Python."""
    push, answer, _slots = learnt("coded", "asgd")
    real, ready = CodedGradient.compiled, threading.Event()
    threads = []

    def compiled(self: CodedGradient) -> Any:
        threads.append(threading.current_thread())
        ready.set()
        return real(self)

    async def main() -> None:
        async with Scripted(True, "coded") as one:
            threads.clear()
            one.tell(answer)
            task = one.task(one.begin())
            assert one.short._compiled is None
            async with asyncio.timeout(_PATIENCE):
                assert (await task).version == 3
            assert one.sent() == push
            one.short._compile(one.session.steady)
            assert one.short._compiled is None
            monkeypatch.undo()
            one.short._compile(one.session.steady)
            assert one.short._compiled is not None

    monkeypatch.setattr(CodedGradient, "compiled", compiled)
    monkeypatch.setattr(WholeGradient, "is_ready", lambda *_given: False)
    run(loop, main)
    assert ready.wait(_PATIENCE)
    assert threads != [threading.main_thread()]
    assert len(threads) == 1


@each_row("way", WAYS[:2])
@each_row("call", ["push_usual", "pull_usual"])
@each_row("before", [False, True])
def test_ctrl_c_uses_up_the_number(way: str, call: str, before: bool) -> None:
    """A push may be part of the model when it comes: the next is another one."""

    async def main() -> None:
        async with Scripted(True, "small") as one:
            one.go(way)
            one.short._compile(one.session.steady)
            compiled: Any = one.short._compiled
            one.short._compiled = breaking(compiled, call, before)  # type: ignore[assignment]
            one.tell(learnt("small", "asgd")[1])
            assert one.session.steady is not None
            seq, values = one.session.steady.seq, one.half.params.arena.data.copy()

            async def exchange() -> None:
                await one.short.outcome(one.half.params, one.begin())

            with pytest.raises(KeyboardInterrupt):
                await exchange()
            nothing = before and call == "push_usual"
            finished = not before and call == "pull_usual"
            assert one.session.answered == 4 + finished  # and all is settled
            assert one.session.pending.seq == seq + (not nothing)
            assert one.session.pending.by_id == {}
            assert one.short.steady is None
            assert one.connection.ended.done() is not (nothing or finished)
            assert (one.half.params.arena.data != values).any() == finished
            assert one.half.params.version == 2 + finished

    run("asyncio", main)


def breaking(compiled: Any, call: str, before: bool) -> Any:
    """Return it, with a call that Ctrl-C breaks into."""

    class Broken:
        fd = -1

        def __getattr__(self, name: str) -> Any:
            real = getattr(compiled, name)
            if name != call:
                return real

            def broken(*given: Any) -> Any:
                if not before:
                    real(*given)
                raise KeyboardInterrupt

            return broken

    return Broken()


@each_row("loop", LOOPS)
@each_row("compiled", [True, False])
async def test_one_that_is_overtaken(
    loop: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks exchange at once, over and over: each gets its own receipt."""
    if not compiled:
        monkeypatch.setenv(COMPILED, "0")

    async def main(url: str) -> None:
        async with AsyncClient(url, role="worker") as client:
            first = await client.define({"w": np.zeros(9, np.float32)})
            several = [first, first.copy(), first.copy()]
            gradient = {"w": np.ones(9, np.float32)}
            versions = []

            async def push(params: Any) -> None:
                for _ in range(40):
                    receipt = await client.exchange(params, gradient)
                    versions.append(receipt.version)

            await asyncio.gather(*map(push, several))
            assert sorted(versions) == list(range(1, 121))
            assert (await client.fetch()).version == 120

    with ServerThread(policy="asgd") as server:
        await asyncio.to_thread(run, loop, lambda: main(server.url))


@each_row("loop", LOOPS)
def test_other_tasks_have_turns(loop: str) -> None:
    async def main(url: str) -> None:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with AsyncWorker(url, {"w": np.zeros(9, np.float32)}) as worker:
            counting = asyncio.create_task(count())
            for _ in range(300):
                await worker.step({"w": np.ones(9, np.float32)})
            counting.cancel()
            assert turns >= 10

    with ServerThread(policy="asgd") as server:
        run(loop, lambda: main(server.url))


@each_row("loop", LOOPS)
def test_several_on_one_loop(loop: str) -> None:
    """All push at once, and none holds the loop up."""
    model = {"w": np.zeros(9, np.float32)}
    ones = {"w": np.ones(9, np.float32)}

    async def main(url: str) -> None:
        async with AsyncWorker(url, model) as first:
            connection = first._client._connection
            assert connection is not None
            assert connection.short is not None
            sharing = connection.short._sharing
            assert sharing.count == 1
            async with AsyncWorker(url, model) as second:
                assert sharing.count == 2

                async def push(worker: AsyncWorker) -> None:
                    for _ in range(60):
                        await worker.step(ones)

                await asyncio.gather(push(first), push(second))
                assert (await first.stats())["version"] == 120
            assert sharing.count == 1
        assert sharing.count == 0

    with ServerThread(policy="asgd") as server:
        run(loop, lambda: main(server.url))


# ---------------------------------------------------------------- whether to wait


class Watched:
    """A compiled exchange whose calls are noted."""

    def __init__(self, compiled: Any) -> None:
        self._compiled, self.pulled = compiled, []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def pull_usual(self, steady: Any, look: int, nap: int) -> Any:
        self.pulled.append((look, nap))
        return self._compiled.pull_usual(steady, look, nap)


async def waiting(
    answered: bool,
    spin: int = 0,
    nap: int = 0,
    turned: float = 0.0,
    long: float = math.inf,
    others: int = 0,
) -> tuple[Any, bool, list[Any], tuple[int, int]]:
    """Return what came of one exchange, its waits, and the waits that are left out next."""
    async with Scripted(True, "small") as one:
        one.short.spin.resting, one.short.nap.resting = spin, nap
        one.short._turned = turned
        one.short._sharing.count += others
        one.short._compile(one.session.steady)
        watched: Any = Watched(one.short._compiled)
        one.short._compiled = watched
        if answered:
            one.tell(learnt("small", "asgd")[1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_LONG", long)
            found = one.begin()
            looks = one.short.looks
            if looks and answered:
                found = await one.short.outcome(one.half.params, found)
            elif looks:
                task = one.task(found)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                task.cancel()
        watched.fd = -1
        rests = one.short.spin.resting, one.short.nap.resting
        return type(found), looks, watched.pulled, rests


LOOK, NAP = module._LOOK, module._NAP


@each_row(
    ("given", "found"),
    [
        ((True,), (True, [(LOOK, NAP)], (0, 0))),
        ((False,), (True, [(LOOK, NAP)], (1, 1))),
        ((False, 5), (True, [(0, NAP)], (4, 1))),
        ((False, 0, 5), (True, [(LOOK, 0)], (1, 4))),
        ((False, 5, 5), (False, [], (4, 4))),
        ((True, 5, 5), (False, [], (4, 4))),
        ((True, 5), (True, [(0, NAP)], (4, 0))),
        ((True, 0, 0, math.inf), (False, [(LOOK, NAP)], (0, 0))),
        ((False, 0, 0, math.inf), (False, [(LOOK, NAP)], (1, 1))),
        ((True, 0, 0, 0.0, -1.0), (True, [(0, 0)], (0, 0))),
        ((False, 0, 0, 0.0, -1.0), (True, [(0, 0)], (0, 0))),
        ((True, 0, 0, 0.0, math.inf, 1), (True, [(0, 0)], (0, 0))),
        ((False, 0, 0, math.inf, math.inf, 1), (True, [(0, 0)], (0, 0))),
    ],
    ids=str,
)
def test_waiting_is_decided_by_busy_poll(given: tuple[Any, ...], found: Any) -> None:
    kind, *rest = run("asyncio", lambda: waiting(*given))
    assert tuple(rest) == found
    over = given[0] and rest[1] != []
    assert (kind is Receipt) == over


def test_an_answer_is_not_looked_for_by_another_exchange() -> None:
    """In the turn of the loop the first may end, and another one begin."""

    async def main() -> None:
        async with Scripted(True, "small") as one:
            one.go("behind a turn")
            one.short._compile(one.session.steady)
            watched: Any = Watched(one.short._compiled)
            one.short._compiled = watched
            task = one.task(one.begin())
            await asyncio.sleep(0)
            one.short._done = asyncio.get_running_loop().create_future()
            await asyncio.sleep(0)
            assert watched.pulled == []
            task.cancel()
            await asyncio.wait([task])

    run("asyncio", main)


@each_row(("spin", "found"), [(0, (1, 8)), (5, (8, 1))])
def test_a_wait_that_pays_is_repeated(spin: int, found: tuple[int, int]) -> None:
    async def main() -> tuple[int, int]:
        async with Scripted(True, "small") as one:
            one.go("at once")
            one.short.spin._rest = one.short.nap._rest = 8
            one.short.spin.resting = spin
            one.tell(learnt("small", "asgd")[1])
            assert isinstance(one.begin(), Receipt)
            one.short.spin.missed()
            one.short.nap.missed()
            return one.short.spin.resting, one.short.nap.resting

    assert run("asyncio", main) == found


# ---------------------------------------------------------------- calls


@each_row(
    ("given", "error"),
    [
        ((1, 1, 1), RuntimeError),
        ((1, 1, 1, -1), ValueError),
        ((1, 1 << 64, 1, 1), OverflowError),
        ((1, "1", 1, 1), TypeError),
    ],
    ids=map(str, range(4)),
)
def test_a_push_that_makes_no_sense(given: tuple[Any, ...], error: type[Exception]) -> None:
    exchange = exchange_type()
    assert exchange is not None
    with pytest.raises(error):
        exchange(*parts()).push({"w": np.zeros(1, np.float32)}, *given)


@each_row(
    ("given", "error"),
    [
        ((np.zeros(4, np.uint8), 1, 1), RuntimeError),
        ((np.zeros(4, np.uint8), 1, 1, -1), ValueError),
        ((np.zeros(4, np.uint8), -1, 1, 1), ValueError),
        ((np.zeros(5, np.uint8), 1, 1, 1), ValueError),
        ((b"read", 1, 1, 1), BufferError),
    ],
    ids=map(str, range(5)),
)
def test_a_pull_that_makes_no_sense(given: tuple[Any, ...], error: type[Exception]) -> None:
    exchange = exchange_type()
    assert exchange is not None
    with pytest.raises(error):
        exchange(*parts()).pull(*given)


def test_what_is_no_steady_exchange_is_not_made() -> None:
    exchange = exchange_type()
    assert exchange is not None
    one: Any = exchange(*parts())
    assert one.push_usual(None, None, {}) is NotImplemented
    assert one.pull_usual(None, 0, 0) is NotImplemented
    for call in (one.push_usual, one.pull_usual):
        with pytest.raises(TypeError, match="2 arguments"):
            call(None)
