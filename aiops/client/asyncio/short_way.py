"""The short way of an async client's exchanges: a steady one, without messages between.

By compiled code it has two halves. The push goes from the gradient to the socket in one call. Then
the event loop has a turn, so that other tasks and the transport go on, however fast the server is.
Behind it the answer is looked for in the socket for a moment, only while that pays
(`aiops.net.busy_poll.Spin`). If it comes, the task goes on at once; the loop has neither waited nor
woken anything. Otherwise the transport brings it, in `next_buffer` and `received`. Where several
clients share a loop there is a turn each time and one look, as another's answer may have come.

Socket and transport
--------------------
The transport owns the socket, and reads and writes it only in the loop's turns. Two rules keep the
order of the bytes:

- compiled code sends only while the transport has nothing to send. What the socket does not take is
  the transport's, and so is all that follows.
- compiled code receives only between two turns, and only before the transport has received any of
  this answer. A transport holds no bytes back: each that it has read, the protocol has.

An end of the connection is the transport's to learn: it sees the same end at its next turn. After
`left` compiled code leaves the descriptor alone, whose number may soon be another file's.

Without compiled code, by TLS, and over a transport that is not known, all goes by the transport.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from time import perf_counter
from weakref import WeakKeyDictionary

from aiops.client.compiled_forms import CompiledExchange
from aiops.client.handover import process
from aiops.client.params import Params
from aiops.client.request_kinds import Receipt, Request
from aiops.client.session import Session
from aiops.client.steady import SteadyExchange
from aiops.client.sync.compiled_exchange import made
from aiops.errors import AiopsError, ConnectionLost
from aiops.model.layout import Array
from aiops.net.busy_poll import Spin

_LOOK, _NAP = 100_000, 400_000
"""Nanoseconds for which the loop may stand still to look for an answer, and to sleep for it."""

_TURN = 200e-6
"""Seconds from one turn of the event loop to the next exchange that has one, at least."""

_LONG = 100e-6
"""Seconds that a turn takes at least if other tasks run in it."""


class _Sharing:
    """The number of connections that have their short ways on one event loop."""

    count = 0


_sharing: WeakKeyDictionary[asyncio.AbstractEventLoop, _Sharing] = WeakKeyDictionary()

_PLAIN = "asyncio.selector_events", "uvloop.loop"
"""The modules of transports that read their socket only in a turn, and hold nothing back."""

BEAT = 1.0
"""Seconds after which a steady exchange takes long, at most."""


class AsyncShortWay:
    """The steady exchanges of one connection, of which one is under way at a time.

    What does not go as usual is handed over to the session, as a request.

    Parameters
    ----------
    session
        The session.
    send
        Sends what the session has to send, and tells those who wait for its progress.
    end
        Ends the connection.

    Attributes
    ----------
    steady
        Whose exchange is under way, or None.
    came
        The bytes of its answer that have come.
    looks
        Whether its answer is still to be looked for.
    full
        The transport takes no more, for the time being.
    began
        The loop's time at which the last exchange began.
    spin
        Whether it pays to look for the answer.
    nap
        Whether it pays to sleep for it outside the event loop.
    beat
        Seconds after which an exchange becomes a request, as only that has a deadline.
    """

    def __init__(
        self,
        session: Session,
        send: Callable[[], None],
        end: Callable[[AiopsError], None],
    ) -> None:
        self._session, self._send, self._end = session, send, end
        self._loop = asyncio.get_running_loop()
        self._sharing = _sharing.setdefault(self._loop, _Sharing())
        self._transport: asyncio.Transport | None = None
        self._fd = -1  # of a socket that compiled code may use
        self._compiled: CompiledExchange | None = None
        self._compiled_from: SteadyExchange | None = None  # what that was made for, or tried for
        self.steady: SteadyExchange | None = None
        self._done: asyncio.Future[Receipt | Request] | None = None  # what became of it
        self._handed: tuple[asyncio.Future[Receipt | Request] | None, Request] | None = None
        self.came, self.looks, self.full = 0, False, False
        self.began, self.beat = 0.0, BEAT
        self._watch: asyncio.TimerHandle | None = None  # the next look at whether it takes long
        self.spin, self.nap = Spin(), Spin()
        self._warming: SteadyExchange | None = None  # whose codecs' loops a thread compiles
        self._turned = 0.0  # when the loop had a turn in an exchange

    def connected(self, transport: asyncio.Transport) -> None:
        """Exchange over this transport."""
        self._transport = transport
        self._sharing.count += 1
        sock = transport.get_extra_info("socket")
        plain = type(transport).__module__ in _PLAIN
        if plain and sock is not None and transport.get_extra_info("sslcontext") is None:
            self._fd = sock.fileno()

    def left(self) -> None:
        """Leave the socket alone from here on, which is closed, or is in a fork."""
        self._fd = -1
        if self._transport is not None:
            self._sharing.count -= 1
        if self._compiled is not None:
            self._compiled.fd = -1
        self._compiled = self._transport = None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    # ------------------------------------------------------------ an exchange

    def exchange(
        self, params: Params, gradients: Mapping[str, Array]
    ) -> Receipt | asyncio.Future[Receipt | Request] | None:
        """Push gradients computed at ``params``, and bring these up to date, by a steady exchange.

        Returns
        -------
        The receipt. A future of it, or, if the exchange is handed over, of the request that is
        under way in its place: await it, or, if `looks`, await `outcome`. None: nothing has been
        done.
        """
        session, transport, steady = self._session, self._transport, self._session.steady
        if (steady is None or transport is None or self.full) or (
            self.steady is not None or not session.idle or session.info.examples
        ):  # a push that covers examples is no such exchange
            return None
        if steady is not self._compiled_from:
            self._compile(steady)
        compiled, self.came, self.looks, self._handed = self._compiled, 0, False, None
        try:
            if compiled is None or transport.get_write_buffer_size() or transport.is_closing():
                buffers = steady.begin(params, gradients)
                if buffers is None:
                    return None
                self.steady, self._done = steady, self._loop.create_future()
                transport.write(b"".join(buffers))
                return self._waited(self._done)
            fits = compiled.push_usual(steady, params, gradients)
            if fits is NotImplemented:
                fits = steady.push_by(compiled, params, gradients)
            if not fits:
                return None
            sent = compiled.sent
            self.steady, self._done = steady, self._loop.create_future()
            done = self._done
            if sent < steady.push_size:
                for view in steady.unsent(sent):
                    transport.write(bytes(view))  # which may keep it, while the gradient changes
            elif self._pays():
                alone = self._sharing.count == 1
                self.looks = not alone or perf_counter() - self._turned > _TURN
                receipt = None if self.looks else self._look(steady, compiled, params)
                if receipt is not None:
                    return receipt
            if not self.looks:
                return self._waited(done)
            self.began = self._loop.time()
            return done
        except BaseException:  # such as Ctrl-C
            self._break_off(steady, params, compiled.received if compiled is not None else 0)
            raise

    def _waited(self, done: asyncio.Future[Receipt | Request]) -> asyncio.Future[Receipt | Request]:
        """Return the future of an exchange, which is looked at after a beat: it may take long."""
        self.began = self._loop.time()
        if self._watch is None and self._transport is not None:
            self._watch = self._loop.call_later(self.beat, self._look_at_it)
        return done

    async def outcome(
        self, params: Params, done: asyncio.Future[Receipt | Request]
    ) -> Receipt | Request:
        """Let the event loop have a turn, look for the answer, and wait for it."""
        steady, compiled, began = self.steady, self._compiled, perf_counter()
        await asyncio.sleep(0)
        now = perf_counter()
        waits = now - began < _LONG and self._sharing.count == 1  # else others want the loop
        if waits:
            self._turned = now
        if (steady is not None and compiled is not None) and (
            self._done is done and not self.came  # else the transport has what has come
        ):
            receipt = self._look(steady, compiled, params, waits=waits)
            if receipt is not None:
                return receipt
        return await self._waited(done)

    def _pays(self) -> bool:
        """Return whether to wait for this answer for a moment, outside the event loop."""
        if self.spin.resting and self.nap.resting:
            self.spin.resting -= 1
            self.nap.resting -= 1
            return False
        return True

    def _look(
        self,
        steady: SteadyExchange,
        compiled: CompiledExchange,
        params: Params,
        *,
        waits: bool = True,
    ) -> Receipt | None:
        """Look for the answer in the socket, and wait for it, as far as that pays."""
        spin, nap, look, sleep = self.spin, self.nap, _LOOK, _NAP
        if not waits:
            look = sleep = 0
        elif spin.resting:
            spin.resting, look = spin.resting - 1, 0
        elif nap.resting:
            nap.resting, sleep = nap.resting - 1, 0
        try:
            found = compiled.pull_usual(steady, look, sleep)
            if found is NotImplemented:
                found = steady.pull_by(compiled, look, sleep)
            self.came = compiled.received
            if isinstance(found, Receipt):
                self.steady = self._done = None
        except BaseException:  # such as Ctrl-C
            self._break_off(steady, params, compiled.received)
            raise
        missed = compiled.missed
        if missed & 1:
            spin.missed()
        if missed & 2:
            nap.missed()
        if self.came:
            if look and not missed:
                spin.found()
            elif sleep:
                nap.found()
        if isinstance(found, Receipt):
            return found
        if self.came and (found is False or not self._goes_on(steady)):
            self.hand_over()
        return None

    def _goes_on(self, steady: SteadyExchange) -> bool:
        """Return whether what has come begins an answer, with which parameters are a mixture."""
        return steady.rest(self.came) is not None

    def give_up(self, done: asyncio.Future[Receipt | Request]) -> Request | None:
        """End an exchange whose task is cancelled; return the request that it has become, if so."""
        if self._done is done:
            return self.hand_over()
        if self._handed is not None and self._handed[0] is done:
            return self._handed[1]  # also if the future was cancelled before it could say so
        return None

    def _break_off(self, steady: SteadyExchange, params: Params, received: int) -> None:
        """End an exchange that was broken off at any place, and the connection with it."""
        if not steady.under_way:
            self.steady = self._done = None
            return
        self.steady, self.came = steady, received
        request = self.hand_over()
        if received:  # and perhaps copied
            params.now_at(-1)
        if request is not None:
            self._session.abandon(request)
        self._end(ConnectionLost("an exchange was broken off"))

    def _compile(self, steady: SteadyExchange) -> None:
        """Have exchanges of this form made by compiled code, if that may be.

        The codecs' loops are compiled on a thread, which may take seconds. Until then all is done
        in Python.
        """
        forms = steady.forms
        if self._fd >= 0 and not forms.is_ready:
            self._compiled_from = self._compiled = None
            if self._warming is not steady:
                self._warming = steady
                threading.Thread(target=forms.warm, name="aiops-codecs", daemon=True).start()
            return
        self._compiled_from = steady
        self._compiled = made(forms, self._fd) if self._fd >= 0 else None

    # ------------------------------------------------------------ what the transport brings

    def received(self, steady: SteadyExchange, nbytes: int) -> None:
        """Process what was received of an answer."""
        self.came += nbytes
        receipt = steady.finish(self.came)
        if receipt is not None:
            done, self.steady, self._done = self._done, None, None
            if done is not None and not done.done():
                done.set_result(receipt)
        elif self.came == steady.answer_size or not self._goes_on(steady):
            self.hand_over()

    def hand_over(self) -> Request | None:
        """Have an exchange that is under way go on as a request; return that."""
        steady, done, self.steady, self._done = self.steady, self._done, None, None
        if steady is None:
            return None
        request, _unsent, received = self._session.hand_over(steady, steady.push_size, self.came)
        self._handed = done, request
        if done is not None and not done.done():
            done.set_result(request)
        try:
            process(self._session, received)
        except AiopsError as error:
            self._end(error)
        else:
            self._send()
        return request

    # ------------------------------------------------------------ one that takes long

    def _look_at_it(self) -> None:
        """Hand over an exchange that takes long: only a request has a deadline."""
        self._watch = None
        if self.steady is None:
            return
        due = self.began + self.beat
        if self._loop.time() < due:
            self._watch = self._loop.call_at(due, self._look_at_it)
        else:
            self.hand_over()
