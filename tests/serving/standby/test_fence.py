"""A server is ended by a later server of its run, and not by the word of a peer about one."""

from __future__ import annotations

import asyncio
import inspect
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from aiops import AsyncWorker, Worker
from aiops.cli.state import app
from aiops.errors import Superseded
from aiops.state.directory import GenerationFile
from aiops.wire.handshake import generation_proof
from aiops.wire.messages import PROTOCOL, Error, Hello, Message, Welcome
from aiops.wire.standby_messages import Fence, StandbyHello, StandbyWelcome
from tests.serving.standby.test_standby import StandbyThread, connected
from tests.serving.state.test_kept_state import PLAIN, train
from tests.support import ServerThread

HIGHER = 1 << 40
NAMED = "f", 1, "b"


def hello(run: str, generation: int, proof: bytes, role: str = "worker") -> Hello:
    known = {"run": run, "generation": generation, "generation_proof": proof}
    return Hello(0, PROTOCOL, *NAMED, role, True, bytes(16), "test", **known)  # type: ignore[arg-type]


def standby_hello(run: str, generation: int, proof: bytes) -> StandbyHello:
    return StandbyHello(0, PROTOCOL, *NAMED, True, bytes(16), "test", run, generation, 4, proof)


def held(folder: Path) -> GenerationFile:
    return GenerationFile.unpack((folder / "generation").read_bytes())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerThread]:
    with ServerThread(policy="asgd", state=tmp_path / "a", shards=1) as server:
        train(server.url, PLAIN, 1, 3)
        yield server


async def answers(url: str, *messages: Message) -> list[Message | None]:
    """Return the answers to messages of one connection, each after the one before."""
    peer = await connected(url)
    found = []
    for message in messages:
        peer.send(message)
        found.append(await peer.receive())
    peer.close()
    return found


WRONG: dict[str, Callable[[bytes, str], bytes]] = {
    "none": lambda secret, run: b"",
    "random": lambda secret, run: bytes(range(32)),
    "of a lower generation": lambda secret, run: generation_proof(secret, run, 1),
    "of another run": lambda secret, run: generation_proof(secret, "another", HIGHER),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_word_of_a_peer_ends_no_server(
    wrong: str, server: ServerThread, tmp_path: Path
) -> None:
    assert server.server is not None
    run, before = server.server.run, held(tmp_path / "a")
    proof = WRONG[wrong](before.secret, run)
    for greeting in (hello(run, HIGHER, proof), standby_hello(run, HIGHER, proof)):
        [refused] = asyncio.run(answers(server.url, greeting))
        assert isinstance(refused, Error)
        assert (refused.fatal, refused.code) == (True, "superseded")
        assert "claimed without a proof of it that is right: this server goes on" in refused.text
    fence = Fence(1, run, HIGHER, "aiops://10.0.0.6:7171", proof)
    observer = hello(run, 1, b"", "observer")
    welcome, refused = asyncio.run(answers(server.url, observer, fence))
    assert isinstance(welcome, Welcome)
    assert isinstance(refused, Error)
    assert (refused.fatal, refused.code) == (False, "refused")
    assert "generation 16.0 was claimed without a proof" in refused.text
    train(server.url, PLAIN, 2, 3)
    assert held(tmp_path / "a") == before


@pytest.mark.parametrize("kind", ["hello", "standby_hello", "fence"])
def test_the_proof_of_a_later_server_ends_it(kind: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"policy": "asgd", "shards": 1}
    with ServerThread(state=tmp_path / "a", **settings) as server:
        train(server.url, PLAIN, 1, 3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with ServerThread(state=tmp_path / "b", **settings) as later:
        assert later.server is not None
        known = hello("", 0, b"")
        [welcome] = asyncio.run(answers(later.url, known))
    with ServerThread(state=tmp_path / "b", **settings) as later:
        [welcome] = asyncio.run(answers(later.url, known))
    assert isinstance(welcome, Welcome)
    claim = welcome.run, welcome.generation, welcome.generation_proof
    said: dict[str, list[Message]] = {
        "hello": [hello(*claim)],
        "standby_hello": [standby_hello(*claim)],
        "fence": [hello("", 0, b"", "observer"), Fence(1, *claim[:2], "aiops://b", claim[2])],
    }
    server = ServerThread(state=tmp_path / "a", **settings).__enter__()
    *_before, ended = asyncio.run(answers(server.url, *said[kind]))
    assert isinstance(ended, Error)
    assert "this server was superseded by" in ended.text
    with pytest.raises(Superseded):
        server.__exit__()
    assert held(tmp_path / "a").superseded_by == (claim[1], "aiops://b" if kind == "fence" else "")


@pytest.mark.parametrize("face", [Worker, AsyncWorker])
def test_a_worker_with_a_wrong_proof_is_refused_alone(face: Any, tmp_path: Path) -> None:
    """Another server has told it of a generation of this run that there never was."""
    settings: dict[str, Any] = {"policy": "asgd", "shards": 1, "state": tmp_path / "a"}

    async def done(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    async def main() -> None:
        with ServerThread(**settings) as server:
            worker = face(server.url, PLAIN, timeout=0.2)
            await done(worker.connect() if face is AsyncWorker else None)
            port = int(server.url.rpartition(":")[2])
        run = worker._client._session.info.run
        assert len(run.proof) == 32
        run.generation = HIGHER
        with ServerThread(**settings, port=port) as server:
            gradient = {name: np.zeros_like(array) for name, array in PLAIN.items()}
            with pytest.raises(Superseded, match="claimed without a proof of it"):
                await done(worker.step(gradient))
            train(server.url, PLAIN, 2, 2)
            await done(worker.close())

    asyncio.run(main())
    assert held(tmp_path / "a").superseded_by is None


def test_all_servers_of_a_run_share_its_secret_and_no_report_has_it(
    tmp_path: Path, server: ServerThread
) -> None:
    secret = held(tmp_path / "a").secret
    assert len(secret) == 32
    assert stat.S_IMODE((tmp_path / "a" / "generation").stat().st_mode) == 0o600
    with StandbyThread(policy="asgd", state=tmp_path / "b", standby=server.url) as standby:
        standby.wait(server.call(lambda running: running.run_state.kept.newest))
        assert held(tmp_path / "b").secret == secret
        report = server.call(lambda running: running.engine.report())
    assert stat.S_IMODE((tmp_path / "b" / "generation").stat().st_mode) == 0o600
    shown = ""
    for question in ("ls", "verify", "show"):
        shown += CliRunner().invoke(app, [question, str(tmp_path / "b"), "--json"]).stdout
    assert "generation" in shown
    welcome = StandbyWelcome(0, PROTOCOL, b"", "8c2f", 1, 1, 0, {}, secret)
    for text in (shown, repr(report), repr(held(tmp_path / "a")), repr(welcome)):
        assert secret.hex() not in text
        assert repr(secret)[2:-1] not in text
