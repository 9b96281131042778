"""A follower with a state is led by a server of its run, and by no peer that merely says so."""

from __future__ import annotations

import asyncio
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiops.algorithms import find
from aiops.client import Client
from aiops.common.generations import next_term
from aiops.engine.events import Drop, Joined, Left, Options, Received, Reply
from aiops.errors import UsageError
from aiops.shards.follower import Follower
from aiops.shards.reports import PROMOTED
from aiops.state.directory import GenerationFile
from aiops.wire.handshake import generation_proof
from aiops.wire.messages import PROTOCOL, Error
from aiops.wire.server_messages import LeadHello, ShardHello, ShardState, ShardWelcome, ShareSecret
from tests.rows import each_row
from tests.serving.standby.test_fence import answers
from tests.support import PATIENCE, ServerThread

RUN, SECRET, HIGHER = "8c2f", bytes(range(32)), 1 << 40
ALGORITHM = find("asgd").make({"lr": 1.0})

WRONG = {
    "none": b"",
    "random": bytes(reversed(range(32))),
    "of a lower generation": generation_proof(SECRET, RUN, 3, lead=True),
    "of another run": generation_proof(SECRET, "another", HIGHER, lead=True),
    "of another secret": generation_proof(bytes(32), RUN, HIGHER, lead=True),
    "that clients have": generation_proof(SECRET, RUN, HIGHER),
}


def hello(
    run: str, generation: int, proof: bytes, *, standby: bool = False, settings: Any = None
) -> LeadHello:
    settings = ALGORITHM.settings() if settings is None else settings
    named = PROTOCOL, "f", 1, "lead", run, True, bytes(16), "test", "asgd", settings
    return LeadHello(0, *named, generation, standby, proof)


def follower(*, kept: bool = True) -> Follower:
    """A follower that a lead of generation 3 has told the secret."""
    found = Follower(ALGORITHM, Options(shards=1, backend="numpy", shard_bytes=1), kept=kept)
    proof = generation_proof(SECRET, RUN, 3, lead=True)
    joined(found, 1, hello(RUN, 3, proof))
    found.handle(Received(0.0, 1, ShareSecret(0, SECRET), None))
    return found


def joined(found: Follower, peer: int, greeting: LeadHello | ShardHello) -> list[Any]:
    effects = found.handle(Joined(0.0, peer, greeting))
    return [each.message if isinstance(each, Reply) else each for each in effects]


def test_a_client_that_comes_before_the_lead_tries_again() -> None:
    """The follower was started again, and its lead has not noticed it yet."""
    found = follower()
    client = ShardHello(0, PROTOCOL, "c", 1, "worker", RUN, True, bytes(16), "test", 3)
    [welcome] = joined(found, 2, client)
    assert isinstance(welcome, ShardWelcome)
    found.handle(Left(0.0, 1))
    refused, drop = joined(found, 3, client)
    assert (type(refused), refused.code, refused.fatal) == (Error, "unavailable", True)
    assert isinstance(drop, Drop)
    joined(found, 4, hello(RUN, 3, generation_proof(SECRET, RUN, 3, lead=True)))
    refused, _drop = joined(found, 5, replace(client, run="another"))
    assert (type(refused), refused.code, refused.fatal) == (Error, "protocol", True)


@each_row("standby", [False, True])
@each_row("proof", WRONG.values(), ids=WRONG)
def test_a_lead_without_the_right_proof_is_refused(proof: bytes, standby: bool) -> None:
    found = follower()
    refused, drop = joined(found, 2, hello(RUN, HIGHER, proof, standby=standby))
    assert isinstance(refused, Error)
    assert refused.fatal
    assert "without a proof of it that is right, so this follower is not led" in refused.text
    assert isinstance(drop, Drop)
    assert found.lead == 1


TERM = [next_term(0, 0), next_term(next_term(0, 0), 0)]  # the generations of two promotions


@each_row(
    ("led_by", "fed_by", "taken"),
    [
        (0, TERM[0], True),  # it was promoted, and has had no lead yet
        (TERM[1], TERM[0] + 5, True),  # its lead was promoted as well, and ended
        (TERM[0] + 7, TERM[0] + 5, False),  # the follower of the standby's own primary
        (TERM[0] + 3, TERM[0] + 5, False),
        (1, TERM[0], False),  # one that is left of the term before
    ],
)
def test_only_a_promoted_follower_is_taken_for_one(led_by: int, fed_by: int, taken: bool) -> None:
    """Another lacks what its standby would have: the group would be promoted without that."""
    found = follower()
    has: Any = SimpleNamespace(shard=1, shards=2, version=7, done=None, held=())
    found.shard, found.led_by = has, led_by
    proof = generation_proof(SECRET, RUN, fed_by, lead=True)
    said = joined(found, 2, hello(RUN, fed_by, proof, standby=True))
    if taken:
        assert isinstance(said[1], ShardState)
        assert said[1].holds[PROMOTED]
    else:
        assert isinstance(said[0], Error)
        assert "start it with --standby and --shard" in said[0].text
    assert found.lead == 1


@pytest.mark.parametrize("replayed", [False, True])
def test_a_follower_without_a_part_was_promoted_if_it_had_one_before(replayed: bool) -> None:
    """With ``applied``, the servers that are promoted may all have gone back to the beginning."""
    found = Follower(ALGORITHM, Options(shards=1, backend="numpy", shard_bytes=1), kept=True)
    if replayed:
        found.replaying(RUN)
        found.replayed()
    *_, said = joined(found, 1, hello(RUN, TERM[0], b"", standby=True))
    assert isinstance(said, ShardState if replayed else Drop)


@each_row("generation", [3, 4, HIGHER])
def test_a_lead_with_the_right_one_is_taken(generation: int) -> None:
    found = follower()
    proof = generation_proof(SECRET, RUN, generation, lead=True)
    kinds = [*map(type, joined(found, 2, hello(RUN, generation, proof)))]
    assert {ShardWelcome, ShardState} <= {*kinds}
    assert found.lead == 2


def test_it_begins_with_any_lead_and_keeps_to_its_run_while_that_is_there() -> None:
    found = follower()
    refused, _drop = joined(found, 2, hello("another", HIGHER, b""))
    assert "has its lead already" in refused.text
    found.handle(Left(0.0, 1))
    joined(found, 3, hello("another", 1, b""))  # it has no part of a model yet
    assert (found.lead, found.run, found.secret) == (3, "another", b"")


def test_a_second_secret_is_refused() -> None:
    found = follower()
    effects = found.handle(Received(0.0, 1, ShareSecret(0, bytes(32)), None))
    refused = [each for each in effects if isinstance(each, Reply)][-1].message
    assert isinstance(refused, Error)
    assert "knows another secret" in refused.text
    assert found.secret == SECRET


def test_an_earlier_start_of_its_lead_is_refused_after_a_restart(tmp_path: Path) -> None:
    """As by a copy of the lead's folder that was put back, or a host that had been cut off."""
    settings: dict[str, Any] = {"policy": "asgd", "lr": 1.0, "kernels": "numpy"}
    kept = {**settings, "shards": 1, "follower": True, "state": tmp_path / "follower"}
    lead, copied = tmp_path / "lead", tmp_path / "copied"

    def start(folder: Path, follower: ServerThread) -> ServerThread:
        urls = [follower.url.removeprefix("aiops://")]
        return ServerThread(
            **settings, shards=2, followers=urls, shard_bytes=1, state=folder, hello_deadline=5.0
        )

    with (
        ServerThread(**kept) as follower,
        start(lead, follower) as server,
        Client(server.url, role="worker") as client,
    ):
        params = client.define({"w": np.zeros(8, np.float32)})
        client.exchange(params, {"w": np.ones(8, np.float32)})
    shutil.copytree(lead, copied)
    for _ in range(2):
        with ServerThread(**kept) as follower, start(lead, follower):
            pass
    with ServerThread(**kept) as follower:
        with pytest.raises(UsageError, match="a later start of this lead"), start(copied, follower):
            pass
        with start(lead, follower) as server, Client(server.url, role="worker") as client:
            assert client.fetch().version == 1


def test_no_stranger_leads_a_real_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    model = {"w": np.zeros(8, np.float32)}
    settings: dict[str, Any] = {"policy": "asgd", "lr": 1.0, "kernels": "numpy"}

    def secret(name: str) -> bytes:
        return GenerationFile.unpack((tmp_path / name / "generation").read_bytes()).secret

    for start in range(2):
        kept = {**settings, "state": tmp_path / "follower"}
        with ServerThread(**kept, shards=1, follower=True) as other:
            urls = [other.url.removeprefix("aiops://")]
            given = {**settings, "shards": 2, "followers": urls, "shard_bytes": 1}
            with (
                ServerThread(**given, state=tmp_path / "lead") as lead,
                Client(lead.url, role="worker", timeout=PATIENCE) as client,
            ):
                params = client.fetch() if start else client.define(model)
                client.exchange(params, {"w": np.ones(8, np.float32)})
                assert secret("follower") == secret("lead/shard-0") != b""
                run = lead.call(lambda server: server.run)
                stranger = hello(run, HIGHER, generation_proof(secret("lead/shard-0"), run, HIGHER))
                [refused] = asyncio.run(answers(other.url, stranger))
                assert isinstance(refused, Error)
                assert "this follower is not led by it" in refused.text
                receipt = client.exchange(params, {"w": np.ones(8, np.float32)})
                assert receipt.version == 2 * start + 2
    assert secret("lead/shard-0").hex() not in caplog.text
