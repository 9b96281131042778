"""Clients on the server's machine: found by themselves, memory shared, versions whole."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import uvloop

import aiops
from aiops.client import AsyncWorker, Client, Worker
from aiops.common import urls
from aiops.compiled.loading import core
from aiops.errors import BadPush, ConnectionLost, DeadlineExceeded, UsageError
from aiops.model.layout import Array
from aiops.model.shared_memory import Segment
from aiops.net import unix_socket
from tests.adapter import Adapter
from tests.model.test_shared_memory import descriptors, held
from tests.net.test_socket_poller import answered
from tests.peers import eventually
from tests.support import PATIENCE, ServerThread, server_process

COUNT = 1 << 15
MODEL = {"w": np.zeros(COUNT, np.float32), "b": np.zeros(64, np.float32)}
ONES = {name: np.ones_like(array) for name, array in MODEL.items()}
SIZE = 4 * (COUNT + 64)

Make = Callable[..., Any]


@pytest.fixture(params=["blocking", "asyncio", "uvloop"])
def worker(request: pytest.FixtureRequest) -> Make:
    if request.param == "blocking":
        return Worker
    new_loop = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop
    return lambda *args, **named: Adapter(new_loop, *args, of=AsyncWorker, **named)


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with ServerThread(policy="asgd", set={"lr": 1}, kernels="numpy") as running:
        yield running


def near(server: ServerThread) -> list[bool]:
    """Of each connection whether it is within the machine."""
    return list(
        server.call(
            lambda s: [p.link.wire.shared is not None for p in s.connections.peers.values()]
        )
    )


def lent(server: ServerThread) -> int:
    """How many answers have lent parameters that are not back."""
    return int(server.call(lambda s: sum(len(p._lent) for p in s.connections.peers.values())))


def room_of(one: Any) -> Any:
    return (one.client if isinstance(one, Adapter) else one).room()


def whole(params: Any) -> float:
    """The value that all parameters have, for they have taken the same steps."""
    values = {float(array.flat[0]) for array in params.values()}
    values |= {float(array.max()) for array in params.values()}
    values |= {float(array.min()) for array in params.values()}
    [value] = values
    return value


class TestMeeting:
    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
    def test_they_find_each_other(self, worker: Make, host: str) -> None:
        with (
            ServerThread(policy="asgd", host=host) as server,
            worker(server.url, MODEL) as one,
        ):
            assert near(server) == [True]
            assert one.near
            one.step(ONES)

    def test_a_server_on_all_addresses_is_found_at_each(self) -> None:
        with ServerThread(policy="asgd", host="0.0.0.0", token="s3cret") as server:
            _host, port = urls.parse(server.url)
            for host in ("127.0.0.1", "127.0.0.7"):
                with Client(urls.write(host, port), token="s3cret"):
                    assert near(server)[-1]

    def test_the_token_is_asked_for_all_the_same(self) -> None:
        with (
            ServerThread(policy="asgd", token="s3cret") as server,
            pytest.raises(aiops.errors.Unauthorised),
        ):
            Client(server.url, token="guess")

    @pytest.mark.parametrize("settings", [{"no_shm": True}, {"worker_budget": "1GB/s"}])
    def test_a_server_may_not_want_it(self, worker: Make, settings: dict[str, Any]) -> None:
        with ServerThread(policy="asgd", **settings) as server, worker(server.url, MODEL) as one:
            assert near(server) == [False]
            assert not one.near
            one.step(ONES)

    def test_a_client_may_not_want_it(
        self, server: ServerThread, worker: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AIOPS_NO_SHM", "yes")
        with worker(server.url, MODEL) as one:
            assert near(server) == [False]
            one.step(ONES)

    def test_another_user_or_container_with_the_name_is_not_talked_to(
        self, worker: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with ServerThread(policy="asgd", no_shm=True) as server:
            impostor = unix_socket.listen(*urls.parse(server.url))
            assert impostor is not None
            monkeypatch.setattr(unix_socket, "difference", lambda sock: "runs as user 7, not 8")
            with impostor, worker(server.url, MODEL):
                assert near(server) == [False]

    def test_another_user_or_container_is_not_let_in_and_uses_tcp(
        self,
        server: ServerThread,
        worker: Make,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level("INFO", "aiops.server")
        monkeypatch.setattr(
            "aiops.serving.unix_listener.difference", lambda sock: "runs in another container"
        )
        with unix_socket.reach(*urls.parse(server.url)) as sock:  # type: ignore[union-attr]
            sock.settimeout(PATIENCE)
            assert sock.recv(1) == b""
        assert f"process {os.getpid()} runs in another container: it uses TCP" in caplog.text
        with worker(server.url, MODEL) as one:
            assert near(server) == [False]
            one.step(ONES)

    def test_the_log_names_the_process(
        self, server: ServerThread, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "aiops.server")
        with Client(server.url, name="me"):
            pass
        assert f"joined from process {os.getpid()} on this machine" in caplog.text


class TestVersions:
    """Nobody reads a torn version, or has one overwritten under it."""

    @pytest.mark.parametrize("views", [False, True])
    @pytest.mark.parametrize("live", [2, 8])
    def test_what_is_read_is_whole(self, worker: Make, views: bool, live: int) -> None:
        with ServerThread(policy="asgd", lr=1, live_versions=live) as server:
            failures: list[BaseException] = []

            def train(rank: int) -> None:
                try:
                    with worker(server.url, MODEL, views=views) as one:
                        for _ in range(30):
                            before = {name: one.params[name] for name in one.params}
                            value = whole(before)
                            one.step(ONES)
                            if views:
                                one.refresh()
                                assert whole(one.params) <= value
                            assert whole(one.params) < value
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=train, args=(rank,)) for rank in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(3 * PATIENCE)
            assert not failures
            with Client(server.url) as client:
                assert whole(client.fetch()) == -120, "and every push counts once"
                assert client.stats()["versions_alive"] == 1

    def test_views_are_the_servers_memory(self, server: ServerThread, worker: Make) -> None:
        with worker(server.url, MODEL, views=True) as one:
            assert not one.params["w"].flags.writeable
            first = one.params["w"]
            assert lent(server) == 1
            one.step(ONES)
            assert whole(one.params) == -1
            assert one.params["w"] is not first
            eventually(lambda: lent(server) == 1, "what was read before is given back")

    def test_copies_are_given_back_at_once(self, server: ServerThread, worker: Make) -> None:
        with worker(server.url, MODEL) as one:
            held_before = one.params["w"]
            for step in range(1, 4):
                one.step(ONES)
                assert one.params["w"] is held_before, "the same arrays all the time"
                assert whole(one.params) == -step
                eventually(lambda: lent(server) == 0, "nothing is lent")

    def test_over_a_network_views_are_read_only_too(
        self, worker: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with (
            ServerThread(policy="asgd", lr=1, no_shm=True) as server,
            worker(server.url, MODEL, views=True) as one,
        ):
            one.step(ONES)
            assert whole(one.params) == -1
            assert not one.params["w"].flags.writeable

    @pytest.mark.parametrize(
        ("policy", "settings"),
        [("downpour", {"n_push": 2}), ("easgd", {}), ("diloco", {"local_steps": 2})],
    )
    def test_workers_with_local_steps_need_arrays_of_their_own(
        self, worker: Make, policy: str, settings: dict[str, Any]
    ) -> None:
        with (
            ServerThread(policy=policy, set=settings, workers=1) as server,
            pytest.raises(UsageError, match=f"under {policy} .* leave out views=True"),
        ):
            worker(server.url, MODEL, views=True)

    def test_who_holds_versions_for_ever_costs_a_bounded_number(self) -> None:
        with (
            ServerThread(policy="asgd", lr=1, live_versions=2) as server,
            Worker(server.url, MODEL) as trainer,
            Client(server.url) as reader,
        ):
            kept = []
            for _ in range(8):
                kept.append(reader.fetch(reader._do(reader._calls._room(views=True))))
                trainer.step(ONES)
            assert [whole(params) for params in kept] == [-n for n in range(8)]
            assert [params.borrowed for params in kept] == [True] * 4 + [False] * 4
            assert trainer.stats()["versions_alive"] == 5

    def test_readers_over_a_network_are_bounded_as_ever(self) -> None:
        """Versions that are lent do not count among those that may be alive."""
        with (
            ServerThread(policy="asgd", lr=1, live_versions=1) as server,
            Worker(server.url, MODEL) as trainer,
            Client(server.url) as reader,
        ):
            params = reader.fetch(reader._do(reader._calls._room(views=True)))
            for _ in range(3):
                trainer.step(ONES)
            assert whole(params) == 0
            assert trainer.stats()["readers_cut"] == 0


class TestCoded:
    @pytest.mark.parametrize("codec", ["raw", "int8"])
    def test_exchanges_go_the_short_way(self, worker: Make, codec: str, none_pending: None) -> None:
        """Nothing of them is lent: what is coded is short."""
        pytest.importorskip("numba")
        settings = {"push_codec": codec, "fetch_codec": "int8", "fetch_lag": 1}
        with (
            ServerThread(policy="asgd", kernels="numba", **settings) as server,
            worker(server.url, MODEL) as one,
        ):
            eventually(lambda: server.call(lambda s: s.warm), "its kernels are ready")
            for _ in range(12):
                one.step(ONES)
            assert near(server) == [True]
            held = server.call(lambda s: s.engine.replica.current.arena.data.tobytes())
            assert one.params.arena.data.tobytes() == held
            if core() is not None:
                assert server.call(answered) >= 8


class TestLost:
    def test_what_a_lost_client_may_read_is_never_written_again(self, server: ServerThread) -> None:
        reader = Worker(server.url, MODEL, views=True)
        view = reader.params["w"]
        reader._client._connection.hang_up()
        eventually(lambda: near(server) == [], "the server has noticed")
        with Worker(server.url, MODEL) as other:
            for _ in range(12):  # more than there are spare arenas
                other.step(ONES)
            assert not view.any()
            assert whole(other.params) == -12
        reader.step(ONES)  # it connects again
        assert whole(reader.params) == -13
        reader.close()

    def test_views_outlive_the_worker(self, server: ServerThread, worker: Make) -> None:
        with worker(server.url, MODEL, views=True) as one:
            one.step(ONES)
            view = one.params["w"]
        with worker(server.url, MODEL) as other:
            for _ in range(8):
                other.step(ONES)
        assert (view == -1).all()

    def test_views_outlive_the_server(self) -> None:
        with server_process("--policy", "asgd", "--lr", "1") as process:
            one = Worker(process.url, MODEL, views=True)
            one.step(ONES)
            one._client.timeout = 1.0
            process.kill()
            assert whole(one.params) == -1
            with pytest.raises((ConnectionLost, DeadlineExceeded)):
                one.step(ONES)
            assert whole(one.params) == -1
            one.abandon()

    def test_a_push_is_applied_once_whatever_happens_to_its_connection(
        self, server: ServerThread
    ) -> None:
        with Worker(server.url, MODEL) as one:
            for step in range(1, 6):
                grads = one.room()
                for array in grads.values():
                    array[...] = 1
                one._client._connection.hang_up()
                one.step(grads)
                assert whole(one.params) == -step
                assert one.stats()["workers"][0]["pushes"] == step

    def test_nothing_is_left_of_those_who_are_gone(self, server: ServerThread) -> None:
        with Worker(server.url, MODEL) as first:
            first.step(ONES)
        gc.collect()
        eventually(lambda: near(server) == [], "it is gone")
        before = descriptors(), held()
        for views in (False, True):
            for _ in range(3):
                with Worker(server.url, MODEL, views=views) as one:
                    for _ in range(3):
                        one.step(ONES)
                del one
        eventually(lambda: near(server) == [], "they are gone")

        def back() -> bool:
            gc.collect()
            return descriptors() <= before[0] + 8 and held() <= before[1] + 8 * SIZE

        eventually(back, "their memory is gone, too")

    def test_a_server_lets_their_memory_go_at_once(self, server: ServerThread) -> None:
        """Not when the collector of cycles comes round to it: a room is as large as the model."""

        def rooms(running: Any) -> list[weakref.ref[Any]]:
            wires = [peer.link.wire for peer in running.connections.peers.values()]
            return [weakref.ref(room) for wire in wires for room in wire.shared._theirs.values()]

        gc.collect()
        gc.disable()
        try:
            with Worker(server.url, MODEL) as worker:
                worker.step(ONES)
                seen = server.call(rooms)
                assert seen
                assert all(room() is not None for room in seen)
            eventually(lambda: all(room() is None for room in seen), "they are unmapped")
        finally:
            gc.enable()

    def test_a_killed_worker_leaves_nothing(self) -> None:
        code = (
            "import sys, os, signal, numpy as np, aiops\n"
            "one = aiops.Worker(sys.argv[1], {'w': np.zeros(1 << 15, np.float32)}, views=True)\n"
            "grads = one.room(); grads['w'][...] = 1; one.step(grads)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        with ServerThread(policy="asgd", lr=1) as server:
            for _ in range(3):
                done = subprocess.run([sys.executable, "-c", code, server.url], check=False)
                assert done.returncode == -signal.SIGKILL
            eventually(lambda: near(server) == [], "the server has noticed")
            with Client(server.url) as client:
                assert whole(client.fetch()) == -3


class TestRoom:
    def test_it_is_the_same_until_it_may_not_be(self, server: ServerThread, worker: Make) -> None:
        with worker(server.url, MODEL) as one:
            room = room_of(one)
            assert set(room) == set(MODEL)
            assert isinstance(room.arena.segment, Segment)
            for array in room.values():
                array[...] = 2
            one.step(room)
            assert whole(one.params) == -2
            again = room_of(one)
            assert again.arena is room.arena, "the same memory"

    def test_who_has_it_keeps_no_copy_of_the_model_that_was_offered(
        self, server: ServerThread
    ) -> None:
        with Worker(server.url, MODEL, views=True) as worker:
            room = worker.room()
            for array in room.values():
                array[...] = 1
            worker.step(room)
            worker.step(room)
            mapped = server.call(
                lambda running: [
                    len(segment)
                    for peer in running.connections.peers.values()
                    for segment in peer.link.wire.shared._theirs.values()
                ]
            )
            assert len(mapped) == 1, "the room, and nothing else that is the worker's"

    def test_a_gradient_that_was_given_up_is_left_alone(self) -> None:
        with (
            ServerThread(policy="hardsync", workers=2, worker_deadline=0.2) as server,
            Worker(server.url, MODEL) as one,
        ):
            one._client.timeout = 0.2
            room = one.room()
            server.call(lambda s: s.engine.membership.__setattr__("deadline", 1e9))
            with pytest.raises(DeadlineExceeded):
                one.step(room)
            assert one.room().arena is not room.arena, "the server may be reading that"
            one.abandon()

    def test_there_is_room_over_a_network_too(self) -> None:
        with (
            ServerThread(policy="asgd", lr=1, no_shm=True) as server,
            Worker(server.url, MODEL) as one,
        ):
            room = one.room()
            assert room.arena.segment is None
            for array in room.values():
                array[...] = 1
            one.step(room)
            assert whole(one.params) == -1

    def test_a_bad_value_in_it_is_refused(self, server: ServerThread, worker: Make) -> None:
        with worker(server.url, MODEL) as one:
            room = room_of(one)
            room["w"][7] = np.inf
            with pytest.raises(BadPush, match=r"'w' holds inf at \[7\]"):
                one.step(room)
            assert whole(one.params) == 0
            room["w"][7] = 0
            one.step(room)

    def test_parts_of_it_and_other_arrays(self, server: ServerThread) -> None:
        """What does not lie in a room is copied; what is small is sent."""
        with Client(server.url, role="worker") as client:
            params = client.define(MODEL)
            room = client.room()
            room["w"][...] = 1
            gradients: dict[str, Array] = {"w": room["w"], "b": np.ones(64, np.float32)}
            client.exchange(params, gradients)
            assert whole(params) == -1
            client.exchange(params, {"b": np.ones(64, np.float32)})
            assert (params["b"] == -2).all()
            assert (params["w"] == -1).all()


class TestHostile:
    def near(self, server: ServerThread) -> tuple[socket.socket, unix_socket.UnixSide]:
        sock = unix_socket.reach(*urls.parse(server.url))
        assert sock is not None
        sock.settimeout(PATIENCE)
        return sock, unix_socket.welcomed(sock)

    def test_descriptors_that_no_message_is_about(self, server: ServerThread) -> None:
        """They wait in the side channel, and are gone with it; who sends too many is not heard."""
        gc.collect()
        before = descriptors()
        sock, side = self.near(server)
        segment = Segment(4096)
        with sock:
            while side.pass_on(segment):
                pass
        side.close()
        del segment
        eventually(lambda: near(server) == [], "the server has noticed")
        eventually(lambda: descriptors() <= before, "all of them are closed")

    def test_several_descriptors_at_once(self, server: ServerThread) -> None:
        before = descriptors()
        with Client(server.url) as client:
            segments = [Segment(4096) for _ in range(3)]
            side = client._connection._near
            assert side is not None
            socket.send_fds(side._sock, [b"!"], [segment.fd for segment in segments])
            self.say(client, aiops.wire.messages.Share(0, 1, 4096))
            assert client.stats()["versions_alive"] == 0, "the first is taken"
        del segments
        eventually(lambda: near(server) == [], "it is gone")
        gc.collect()
        assert descriptors() <= before

    def test_a_share_without_a_descriptor(self, server: ServerThread) -> None:
        with Client(server.url) as client:
            self.say(client, aiops.wire.messages.Share(0, 1, 4096))
            assert client._connection.short.socket is not None
            assert client._connection.short.socket.recv(1) == b""
        with Client(server.url) as client:
            client.stats()

    def say(self, client: Client, message: aiops.wire.messages.Message) -> None:
        assert client._connection.short.socket is not None
        for buffer in client._session.wire.send(message):
            client._connection.short.socket.sendall(buffer)

    @pytest.mark.parametrize("speech", ["silence", "nothing", "no descriptor", "a file"])
    def test_a_server_that_is_none(self, worker: Make, speech: str) -> None:
        """Whoever listens there as this user, and is no server: an error within its time."""
        with socket.create_server(("127.0.0.1", 0)) as tcp:
            host, port = tcp.getsockname()
            impostor = unix_socket.listen(host, port)
            assert impostor is not None
            impostor.setblocking(True)
            with impostor:
                thread = threading.Thread(target=self.speak, args=(impostor, speech), daemon=True)
                thread.start()
                url = urls.write(host, port)
                with pytest.raises((ConnectionLost, DeadlineExceeded)):
                    worker(url, MODEL, timeout=1.0)
                impostor.shutdown(socket.SHUT_RDWR)
                thread.join(PATIENCE)
                assert not thread.is_alive()

    def speak(self, listener: socket.socket, speech: str) -> None:
        kept = []
        while True:
            try:
                sock, _address = listener.accept()
            except OSError:
                break
            kept.append(sock)
            with contextlib.suppress(OSError):  # the client may have given up before
                if speech == "nothing":
                    sock.close()
                elif speech == "no descriptor":
                    sock.sendall(b"\0")
                elif speech == "a file":
                    with open(__file__, "rb") as file:
                        socket.send_fds(sock, [b"\0"], [file.fileno()])
        for sock in kept:
            sock.close()
