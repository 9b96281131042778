"""Exchanges by a mailbox of models whose parameters are lent, and gradients posted as they lie.

In the first part the server is real. In the second a test plays it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.client import AsyncClient, Client
from aiops.client.params import Leased, Params
from aiops.client.posting import Posting
from aiops.compiled.loading import COMPILED, core
from aiops.errors import BadPush, ConnectionLost, RemoteProtocolError
from aiops.wire.shared_payloads import SharedPayloads
from tests.client.sync.test_compiled_exchange import AS_IT_IS, SIZES, Change
from tests.client.sync.test_mailbox import Played, said_by
from tests.net.test_mailboxes import ANSWERED_AT, HERE, OPEN_AT, Served
from tests.peers import eventually
from tests.rows import each_row
from tests.support import PATIENCE

pytestmark = pytest.mark.skipif(
    core() is None or core().Mailboxes is None,  # type: ignore[union-attr]
    reason="compiled code has no mailboxes here",
)

LENT, RETURNED_AT, PLACE_AT = 3, 640, 768
MODEL = {"a": np.zeros((128, 128), np.float32), "b": np.zeros((128, 128), np.float32)}
LENGTH = 2 * 128 * 128
ONES = {name: np.ones_like(array) for name, array in MODEL.items()}


@pytest.fixture
def served() -> Iterator[Served]:
    with Served(set={"lr": 1.0}) as server:
        yield server


def lent(served: Served) -> list[int]:
    """Return of each connection how many answers its client holds."""
    found: list[int] = served.call(
        lambda server: [len(peer._lent) for peer in server.connections.peers.values()]
    )
    return found


def begun(served: Served, client: Client, *, views: bool = False) -> Params:
    """Return parameters that have made five steps of one, of which some went by a mailbox."""
    params = client.define(MODEL, views=views)
    client.exchange(params, ONES)
    served.warm()
    while served.served < 3:
        client.exchange(params, ONES)
    while params["a"][0, 0] > -12:
        client.exchange(params, ONES)
    return params


def opened(client: Client) -> bool:
    """Return whether a client's mailbox is open."""
    steady = client._session.steady
    return steady is not None and steady.gradient_room is not None


# ---------------------------------------------------------------- a real server


def test_views_lie_in_the_servers_memory(served: Served) -> None:
    with Client(served.url, role="worker", timeout=PATIENCE) as client:
        params = begun(served, client, views=True)
        before = served.served
        arrays = []
        for step in range(13, 20):
            client.exchange(params, ONES)
            arrays.append(params["a"])
            assert all((params[name] == -step).all() for name in MODEL)
            assert not params["a"].flags.writeable
        assert served.served == before + 7
        assert isinstance(params, Leased)
        assert params.borrowed
        assert len({array.ctypes.data for array in arrays}) == 2, "the server has two of them"
        assert lent(served)[0] in (1, 2)


def test_an_own_copy_is_given_back_at_once(served: Served) -> None:
    with Client(served.url, role="worker", timeout=PATIENCE) as client:
        params = begun(served, client)
        mine = params["a"]
        for step in range(13, 20):
            client.exchange(params, ONES)
            assert (params["a"] == -step).all()
        assert params["a"] is mine
        assert served.call(lambda server: server.engine.store.alive) <= 2


@pytest.mark.parametrize("views", [True, False])
def test_a_worker_that_writes_its_gradients_into_the_room(served: Served, views: bool) -> None:
    with aiops.Worker(served.url, MODEL, views=views) as worker:
        worker.step(ONES)
        served.warm()
        for step in range(2, 12):
            room = worker.room()
            for array in room.values():
                array[:] = 1
            worker.step(room)
            assert all((worker.params[name] == -step).all() for name in MODEL)
        assert served.served >= 6
        steady = worker._session.steady
        assert steady is not None
        assert steady.posting is not None
        assert np.shares_memory(room["a"], steady.posting._mailbox.data)
        assert worker.room()["a"] is room["a"]
        assert (room["a"] == 1).all(), "a push leaves it as it is"


def test_a_gradient_that_lies_in_the_mailbox_elsewhere(served: Served) -> None:
    """To post it would write over what is not posted yet."""
    with Client(served.url, role="worker", timeout=PATIENCE) as client:
        params = begun(served, client)
        room = client.room()
        room["a"][:], room["b"][:] = 2, 3
        client.exchange(params, {"a": room["b"], "b": room["a"]})
        assert (params["a"] == -12 - 3).all()
        assert (params["b"] == -12 - 2).all()
        client.exchange(params, {"a": room["a"], "b": room["b"]})
        assert (params["a"] == -12 - 5).all()
        assert (params["b"] == -12 - 5).all()
        client.exchange(params, {"a": room["a"], "b": room["a"]})
        assert (params["b"] == -12 - 7).all()


def test_what_is_posted_is_not_lent_again_where_its_answer_comes_by_the_socket(
    served: Served,
) -> None:
    """As that does which tells of a segment: or the server would read a later push at its place."""
    model = {"a": np.zeros((256, 128), np.float32), "b": np.zeros((300, 128), np.float32)}
    with (
        Client(served.url, role="worker", timeout=PATIENCE) as one,
        Client(served.url, role="worker", timeout=PATIENCE) as other,
    ):
        both = [(client, client.define(model, views=True)) for client in (one, other)]
        total = 0

        def step(client: Client, params: Params) -> None:
            nonlocal total
            room = client.room()
            for array in room.values():
                array[:] = 1
            client.exchange(params, room)
            total += 1
            assert (params["a"] == -total).all()

        for client, params in both:
            step(client, params)
            served.warm()
            eventually(lambda client=client: bool(opened(client)), "its mailbox is open")
            for _ in range(3):
                step(client, params)
        for client, params in 6 * both:
            step(client, params)
        connections = [client._session.info.connection for client, _params in both]
        for client, params in both:
            client.exchange(params, {"a": np.full((256, 128), 7, np.float32)})
        found = one.fetch()
        assert (found["a"] == -total - 14).all()
        assert (found["b"] == -total).all()
        theirs = served.call(
            lambda server: sorted(
                [*peer.link.wire.shared._theirs] for peer in server.connections.peers.values()
            )
        )
        shown = [[*client._session.wire.shared._ours] for client, _params in both]
        assert theirs == sorted(map(sorted, shown)), "each was told of"
        assert connections == [client._session.info.connection for client, _params in both]


def test_a_room_in_which_nothing_is_answered_is_lent() -> None:
    """Where a server does not open the mailbox, gradients are read in a segment, and not copied."""
    with (
        Served(set={"lr": 1.0}, consistency="relaxed") as served,
        Client(served.url, role="worker", timeout=PATIENCE) as client,
    ):
        params = client.define(MODEL)
        for step in range(1, 12):
            room = client.room()
            for array in room.values():
                array[:] = 1
            client.exchange(params, room)
            assert (params["a"] == -step).all()
        assert served.served == 0
        assert room.arena.segment in client._session._outbox._rooms
        assert not client._session._outbox._kept


@pytest.mark.parametrize("views", [True, False])
def test_other_calls_come_between(served: Served, views: bool) -> None:
    with (
        Client(served.url, role="worker", timeout=PATIENCE) as client,
        Client(served.url, role="worker", timeout=PATIENCE) as other,
    ):
        params = begun(served, client, views=views)
        theirs = other.define(MODEL)
        before = served.served
        for step in range(13, 40, 2):
            other.exchange(theirs, ONES)
            if step % 3 == 0:
                client.fetch(params)
                assert (params["a"] == -step).all()
            if step % 5 == 0:
                bad = {name: np.full_like(array, np.nan) for name, array in MODEL.items()}
                held = params["a"].copy()
                with pytest.raises(BadPush):
                    client.exchange(params, bad)
                assert (params["a"] == held).all()
            client.exchange(params, ONES)
            assert (params["a"] == -step - 1).all()
        assert served.served > before + 5
        assert max(lent(served)) <= 3


def test_what_is_held_does_not_change(served: Served) -> None:
    """Two views of one client, held as long as they like, beside others that push."""
    with (
        Client(served.url, role="worker", timeout=PATIENCE) as client,
        Client(served.url, role="worker", timeout=PATIENCE) as other,
    ):
        first = begun(served, client, views=True)
        second = client.define(MODEL, views=True)
        theirs = other.define(MODEL)
        for turn in range(6):
            kept = first if turn % 2 else second
            used = second if turn % 2 else first
            client.fetch(kept)
            seen = kept["a"].copy()
            for _ in range(4):
                client.exchange(used, ONES)
                other.exchange(theirs, ONES)
                assert (kept["a"] == seen).all()
                assert (used["a"] == used["b"]).all()
            now = used["a"][0, 0]
            assert (used["a"] == now).all()
        total = served.call(lambda server: server.engine.version)
        client.fetch(first)
        assert (first["a"] == -total).all()


def test_own_arrays_of_views(served: Served) -> None:
    with Client(served.url, role="worker", timeout=PATIENCE) as client:
        params = begun(served, client, views=True)
        assert isinstance(params, Leased)
        params.own()
        assert not params.borrowed
        kept = params["a"]
        client.exchange(params, ONES)
        assert (kept == -12).all()
        assert (params["a"] == -13).all()
        assert params.borrowed


def test_a_mailbox_that_the_server_leaves(served: Served) -> None:
    """What it has lent is released by the connection, and the next exchanges go there."""
    with Client(served.url, role="worker", timeout=PATIENCE) as client:
        params = begun(served, client, views=True)

        def leave(server: Any) -> None:
            (peer,) = server.connections.peers.values()
            server.connections.mailboxes.drop(peer.link)

        served.call(leave)
        for step in range(13, 17):
            client.exchange(params, ONES)
            assert (params["a"] == -step).all()
        assert isinstance(params, Leased)
        params.release()
        client.ping()
        assert lent(served) == [0]


def test_a_client_that_ends_leaves_what_it_read_alone(served: Served) -> None:
    with Client(served.url, role="worker", timeout=PATIENCE) as other:
        theirs = begun(served, other)
        client = Client(served.url, role="worker", timeout=PATIENCE)
        params = client.define(MODEL, views=True)
        for _ in range(6):
            client.exchange(params, ONES)
        seen, view = params["a"].copy(), params["a"]
        client._connection.hang_up()
        eventually(lambda: len(lent(served)) == 1, "it has left")
        for _ in range(10):
            other.exchange(theirs, ONES)
        assert (view == seen).all()
        client.close()


@each_row(("near", "elements"), [(True, 100), (False, 100), (False, 1 << 17)])
def test_views_of_what_is_not_lent_are_its_own(near: bool, elements: int) -> None:
    model = {"w": np.zeros(elements, np.float32)}
    with (
        Served(set={"lr": 1.0}, no_shm=not near) as served,
        Client(served.url, role="worker", timeout=PATIENCE) as client,
    ):
        params = client.define(model, views=True)
        for step in range(1, 12):
            client.exchange(params, {"w": np.ones(elements, np.float32)})
            assert (params["w"] == -step).all()
        assert client.near == near
        assert client._connection.short.steady is not None
        assert isinstance(params, Leased)
        assert not params.borrowed


@pytest.mark.parametrize("no_shm", [True, False])
async def test_views_of_an_asyncio_client(no_shm: bool) -> None:
    with Served(set={"lr": 1.0}, no_shm=no_shm) as served:
        async with AsyncClient(served.url, role="worker", timeout=PATIENCE) as client:
            params = await client.define(MODEL, views=True)
            for step in range(1, 12):
                await client.exchange(params, ONES)
                assert (params["a"] == -step).all()


@pytest.mark.parametrize("views", [True, False])
def test_a_client_notices_nothing(monkeypatch: pytest.MonkeyPatch, views: bool) -> None:
    found = []
    for compiled in ("1", "0"):
        monkeypatch.setenv(COMPILED, compiled)
        with Served(set={"lr": 0.5}, policy="fasgd") as served:
            with Client(served.url, role="worker", timeout=PATIENCE, name="w") as client:
                params, said = client.define(MODEL, views=views), list[Any]()
                for step in range(12):
                    gradient = {n: np.full_like(a, 1 + step / 8) for n, a in MODEL.items()}
                    receipt = client.exchange(params, gradient)
                    said += [repr(receipt), *(array.tobytes() for array in params.values())]
                kinds = {
                    kind: (each.messages, each.overhead, each.payload)
                    for kind, each in client.ledger.traffic.kinds_out.items()
                    if kind not in ("share", "release")
                }
            assert (served.served > 0) == (compiled == "1")
            found.append((said, kinds))
    assert found[0] == found[1]


_PUSHES = """
import sys, numpy as np, aiops
one = aiops.Client(sys.argv[1], role="worker")
params = one.define({"a": np.zeros((128, 128), np.float32),
                     "b": np.zeros((128, 128), np.float32)}, views=sys.argv[2] == "views")
room = None
for step in range(1, 1 << 30):
    room = one.room()
    for array in room.values(): array[:] = 1
    one.exchange(params, room)
    if step % 20 == 0 or step < 20:
        print(step, flush=True)
"""


@pytest.mark.parametrize("kind", ["views", "copies"])
def test_workers_killed_at_any_instant(served: Served, kind: str) -> None:
    """Each of their pushes is whole, and a survivor is served."""
    with Client(served.url, role="worker", timeout=PATIENCE) as client:
        params = begun(served, client, views=True)
        for turn in range(4):
            command = [sys.executable, "-c", _PUSHES, served.url, kind]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
                assert worker.stdout is not None
                for _ in range(15 + turn):
                    worker.stdout.readline()
                client.exchange(params, ONES)
                os.kill(worker.pid, signal.SIGKILL)
            client.exchange(params, ONES)
            assert (params["a"] == params["a"][0, 0]).all()
            assert (params["a"] == params["b"]).all()
        eventually(lambda: len(lent(served)) == 1, "they have left")
        client.exchange(params, ONES)
        assert params["a"][0, 0] == -served.call(lambda server: server.engine.version)


# ---------------------------------------------------------------- a server that a test plays


class Lender(Played):
    """One that has shown a segment, in which parameters lie."""

    def __init__(self) -> None:
        super().__init__("large", alone=True)
        self.segment = np.zeros(2 * self.nbytes, np.uint8)
        self.released: list[int] = []
        shared = SharedPayloads(lambda nbytes: self.segment)
        shared.map(SimpleNamespace(segment=5, nbytes=len(self.segment)))  # type: ignore[arg-type]
        steady = self.connection.short.steady
        assert steady is not None
        layout = self.scripted.client._session.info.known_layout
        shared.give_back = self.released.append
        steady.lends, steady.posting = True, Posting(self.compiled, self.made, layout, shared)

    def lend(self, change: Change = AS_IT_IS, segment: int = 5, offset: int = 64) -> bytes:
        """Leave an answer that names a place; return the parameters there."""
        said = said_by(change, "large", "asgd")
        self.answer(said[: -self.nbytes] + bytes(self.nbytes), LENT)
        place = np.array([segment, offset], np.uint64).view(np.uint8)
        self.mailbox.data[PLACE_AT : PLACE_AT + 16] = place
        parameters = said[-self.nbytes :]
        self.segment[64 : 64 + self.nbytes] = np.frombuffer(parameters, np.uint8)
        return parameters


def test_parameters_are_read_where_the_answer_says() -> None:
    with Lender() as lender:
        expected = lender.lend()
        assert "Receipt" in lender.scripted.exchange()
        assert lender.scripted.half.params.arena.data.tobytes() == expected
        assert lender.word(RETURNED_AT) == 1
        assert lender.released == []


def test_an_answer_in_a_mailbox_that_is_left_is_released_by_the_connection() -> None:
    with Lender() as lender:
        expected = lender.lend()
        thread = lender.when_posted(lambda: lender.write(OPEN_AT, 0))
        steady = lender.connection.short.steady
        assert steady is not None
        assert steady.posting is not None
        bring = steady.posting.bring

        def after(params: Params, id: int) -> None:
            thread.join()
            bring(params, id)

        steady.posting.bring = after  # type: ignore[method-assign]
        assert "Receipt" in lender.scripted.exchange()
        assert lender.scripted.half.params.arena.data.tobytes() == expected
        assert lender.released == [steady._id]


@each_row(("segment", "offset"), [(4, 0), (5, 1 << 63), (0, 0), (5, 1 << 20), (1 << 63, 0)])
def test_a_place_that_there_is_not_ends_the_connection(segment: int, offset: int) -> None:
    with Lender() as lender:
        lender.lend(segment=segment, offset=offset)
        one = lender.scripted
        with pytest.raises(RemoteProtocolError, match="segment"):
            one.connection.short.exchange(one.half.params, one.half.gradient)
        assert one.connection.short.socket is None
        assert lender.word(RETURNED_AT) == 0


def test_an_answer_that_is_none_is_a_lost_connection() -> None:
    with Lender() as lender:
        before = lender.scripted.half.params.arena.data.tobytes()
        lender.lend(Change(bit=80))
        assert lender.scripted.exchange()[2] is ConnectionLost
        assert lender.scripted.half.params.arena.data.tobytes() == before
        assert lender.word(RETURNED_AT) == 0


def test_a_model_that_is_not_lent_has_no_such_answer() -> None:
    """The word is as if nothing were there."""
    with Played("small") as played:
        played.answer(said_by(AS_IT_IS, "small", "asgd"), LENT)

        def then() -> None:
            played.write(ANSWERED_AT, 1 << 2 | HERE)

        thread = played.when_posted(then)
        assert "Receipt" in played.scripted.exchange()
        thread.join()
        assert (
            played.scripted.half.params.arena.data.tobytes()
            == (said_by(AS_IT_IS, "small", "asgd")[-SIZES["small"] :])
        )


def test_numbers_are_given_back_as_they_are_counted() -> None:
    with Lender() as lender:
        assert lender.compiled.give_back((1 << 30) + 7)
        assert lender.word(RETURNED_AT) == 7
        lender.write(OPEN_AT, 0)
        assert not lender.compiled.give_back(8)
        assert lender.word(RETURNED_AT) == 8
        lender.compiled.fd = -1
        assert lender.compiled.give_back(9), "with the connection all is given back"
        assert lender.word(RETURNED_AT) == 8
        with pytest.raises((TypeError, OverflowError)):
            lender.compiled.give_back(-1)
