"""A follower is lost, and its standby takes its place alone, over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import aiops
from aiops.common import urls
from aiops.common.generations import next_term
from aiops.errors import Refused
from aiops.model.parts import LARGEST
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.serving.standby.link import observer
from aiops.shards.reports import OWN_GENERATION
from aiops.state.directory import GenerationFile, TakenPlace
from aiops.wire.handshake import place_proof
from aiops.wire.messages import Error, Message
from aiops.wire.standby_messages import Promoted, TakePlace
from tests.serving.standby.test_fence import answers
from tests.serving.standby.test_shards import ONES, ZEROS, Run, cut_off, promote
from tests.support import PATIENCE

FIRST = next_term(0, 0)
"""The number of the first place that is taken."""


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def make(**settings: Any) -> Run:
        runs.append(Run(tmp_path, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def lose(run: Run, number: int) -> str:
    """End a follower, and wait until its lead has lost it; return its address."""
    follower = run.followers[number - 1]
    follower.stop()
    lost(run, number)
    return str(follower.url.removeprefix("aiops://"))


def lost(run: Run, number: int) -> None:
    """Wait until the lead has lost a follower."""
    for _ in range(int(PATIENCE / 0.02)):
        if run.lead.call(lambda running: running.coordinator.report()[number]["gone"]):
            return
        threading.Event().wait(0.02)
    raise AssertionError("the lead has its follower still")


def held(folder: Path) -> tuple[TakenPlace, ...]:
    return tuple(GenerationFile.unpack((folder / "generation").read_bytes()).places)


def test_a_worker_goes_on_with_the_standby_of_one_follower(made: Any, tmp_path: Path) -> None:
    """The lead and the other follower are the servers that they were; each step counts once."""
    run = made(shards=3, acks="replicated")
    generation = run.lead.call(lambda running: running.run_state.generation)
    with aiops.Worker(run.lead.url, ZEROS, timeout=30) as worker:
        for step in range(1, 13):
            if step == 7:
                lose(run, 1)
                found = promote(run.copies[0].url)
                assert isinstance(found, Promoted)
                assert found.version in (6, 7)
            receipt = worker.step(ONES)
            assert receipt.used
            assert receipt.version == step
            assert (worker.params["w"] == -step).all()
        lines = worker.stats()["shards"]
        assert [line["version"] for line in lines] == [12] * 3
        host, port = urls.parse(run.copies[0].url)
        assert (lines[1]["host"], lines[1]["port"]) == (host, port)
    assert run.lead.call(lambda running: running.run_state.generation) == generation
    assert held(tmp_path / "a" / "shard-0") == (TakenPlace(1, FIRST, host, port),)
    assert held(tmp_path / "b" / "shard-1") == (TakenPlace(1, FIRST),)


def moved(run: Run, tmp_path: Path) -> tuple[TakenPlace, ...]:
    """Have the standby of follower 1 take its place, and return what the lead has noted."""
    lose(run, 1)
    assert isinstance(promote(run.copies[0].url), Promoted)
    return held(tmp_path / "a" / "shard-0")


def test_a_standby_that_lacks_what_was_acknowledged_does_not_take_the_place(made: Any) -> None:
    """The lead says so, the model waits, and the follower that comes back goes on."""
    run = made(acks="written")
    with aiops.Worker(run.lead.url, ZEROS, timeout=30) as worker:
        worker.step(ONES)
        run.caught_up()
        run.copies[0].call(cut_off)
        for _ in range(3):
            worker.step(ONES)
        old = lose(run, 1)
        run.copies[0].call(lambda standby: setattr(standby, "_primaries", [run.lead.url]))
        with pytest.raises(Refused, match=r"has not got all that shard 1 of 2 .* had told"):
            promote(run.copies[0].url)
        assert run.copies[0].call(lambda standby: standby.server) is None
        run.followers = [run.follower("a", 1, urls.parse("aiops://" + old)[1])]
        assert worker.step(ONES).version == 5
        assert worker.rolled_back == 0


def test_the_place_of_a_follower_that_is_there_is_not_given(made: Any) -> None:
    """The standby is fed on, and has the place when the follower is lost."""
    run = made(acks="replicated")
    with aiops.Worker(run.lead.url, ZEROS, timeout=30) as worker:
        worker.step(ONES)
        with pytest.raises(Refused, match="is there: a standby takes the place of a server that"):
            promote(run.copies[0].url)
        with aiops.Client(run.copies[0].url, timeout=PATIENCE) as client:
            assert client.stats()["state"]["standby_of"] == run.followers[0].url
        assert worker.step(ONES).version == 2
        lose(run, 1)
        assert isinstance(promote(run.copies[0].url), Promoted)
        assert worker.step(ONES).version == 3


def test_the_old_follower_is_not_led_again_and_comes_back_as_a_standby(
    made: Any, tmp_path: Path
) -> None:
    """It has its old address and flags; then it is a standby, which takes the place back."""
    run = made(acks="replicated")
    with aiops.Worker(run.lead.url, ZEROS, timeout=30) as worker:
        worker.step(ONES)
        old = lose(run, 1)
        port = urls.parse("aiops://" + old)[1]
        assert isinstance(promote(run.copies[0].url), Promoted)
        [place] = held(tmp_path / "a" / "shard-0")
        returned = run.follower("a", 1, port)
        run.lead.call(lambda running: running.follower_moved(1, port))
        assert worker.step(ONES).version == 2
        assert not returned.call(lambda running: running.coordinator.led)
        line = run.until(lambda state: True)["shards"][1]
        assert line["port"] == place.port
        returned.stop()
        [new], run.copies = run.copies, [run.follower_standby("a", 1, port)]
        run.copies[0].wait(new.call(lambda running: running.server.run_state.kept.newest))
        for step in (3, 4):
            assert worker.step(ONES).version == step
        new.stop()
        run.followers = []
        lost(run, 1)
        assert isinstance(promote(run.copies[0].url), Promoted)
        assert worker.step(ONES).version == 5
        assert (worker.params["w"] == -5).all()
    assert held(tmp_path / "a" / "shard-0") == (TakenPlace(1, 2 * FIRST),)  # where the settings say


def test_a_lead_that_is_started_again_leads_the_server_that_has_the_place(
    made: Any, tmp_path: Path
) -> None:
    """That one was started again, too, with the flags of a standby: it is the follower again."""
    run = made(acks="durable")
    with aiops.Worker(run.lead.url, ZEROS, timeout=30) as worker:
        worker.step(ONES)
        run.caught_up()
        [place] = moved(run, tmp_path)
        assert worker.step(ONES).version == 2
    lead = urls.parse(run.lead.url)[1]
    run.copies[0].stop()
    run.lead.stop()
    run.copies = [run.follower_standby("b", 1, place.port)]
    run.lead = run.leading("a", run.followers, port=lead)
    with aiops.Worker(run.lead.url, ZEROS, timeout=30) as worker:
        assert worker.step(ONES).version == 3
        assert (worker.params["w"] == -3).all()
    served = run.copies[0].call(lambda standby: standby.server)
    assert served is not None
    assert served.coordinator.led


def test_the_standby_of_the_lead_is_promoted_with_the_server_that_has_the_place(
    made: Any, tmp_path: Path
) -> None:
    """The others' standbys are promoted as well; the old follower is none of them."""
    run = made(shards=3, acks="replicated")
    with aiops.Worker(run.both, ZEROS, timeout=30) as worker:
        worker.step(ONES)
        moved(run, tmp_path)
        assert worker.step(ONES).version == 2
        run.until(lambda state: not any(each["gone"] for each in state["shards"]), run.standby.url)
        # As if it were killed.
        run.lead.call(lambda running: running._leading.links.end(leave=False))
        for server in (run.lead, run.followers[1]):
            server.stop()
        found = run.promote()
        assert isinstance(found, Promoted)
        for step in (3, 4):
            assert worker.step(ONES).version == step
            assert (worker.params["w"] == -step).all()
    assert held(tmp_path / "b" / "shard-0") == ()


def asks(run: Run, /, **changes: Any) -> Message:
    """Return the answer to a request for the place of follower 1, right but for these fields."""
    copy = run.copies[0].call(lambda standby: standby._made)
    state, generation, secret = run.copies[0].call(lambda standby: copy.state())
    where = {"host": "127.0.0.1", "port": 7171, **changes}
    proof = place_proof(secret, state.run, state.shard, where["host"], where["port"])
    message = TakePlace(
        id=1,
        run=state.run,
        shard=state.shard,
        shards=state.shards,
        host="127.0.0.1",
        port=7171,
        generation=generation,
        version=state.version,
        update=state.update,
        measured=state.measured,
        holds=state.holds,
        place_proof=proof,
    )
    _welcome, answer = asyncio.run(
        answers(run.lead.url, observer(CURRENT_ENVIRONMENT.get(), "a"), replace(message, **changes))
    )
    assert answer is not None
    return answer


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"place_proof": bytes(32)}, "without a proof of that run that is right"),
        ({"place_proof": b""}, "without a proof of that run that is right"),
        ({"run": "8c2f"}, "without a proof of that run that is right"),
        ({"shard": 2}, "without a proof of that run that is right"),
        ({"port": 0}, "127.0.0.1:0 is no address"),
        ({"port": 1 << 16}, "127.0.0.1:65536 is no address"),
        ({"host": "h" * 256}, f"{'h' * 40}:7171 is no address"),
        ({"generation": LARGEST}, "is followed by none"),
        ({"version": 7}, "has not got all that shard 1 of 2"),
        ({"shards": 3}, "is to be shard 1 of 2"),
    ],
    ids=str,
)
def test_what_is_no_standby_of_the_follower_is_not_given_its_place(
    changes: dict[str, Any], text: str, made: Any, tmp_path: Path
) -> None:
    run = made(acks="replicated")
    with aiops.Worker(run.lead.url, ZEROS, timeout=30) as worker:
        worker.step(ONES)
        run.caught_up()
        lose(run, 1)
        answer = asks(run, **changes)
        assert isinstance(answer, Error)
        assert text in answer.text
        assert not answer.fatal
        assert held(tmp_path / "a" / "shard-0") == ()
        assert isinstance(promote(run.copies[0].url), Promoted)
        assert worker.step(ONES).version == 2


def test_a_follower_that_claimed_the_last_generation_has_no_successor(made: Any) -> None:
    """The next number would be none that a message, or the folder of the state, can have."""
    run = made(acks="replicated")
    with aiops.Worker(run.lead.url, ZEROS, timeout=30) as worker:
        worker.step(ONES)
        run.caught_up()
        lose(run, 1)
        claimed = {OWN_GENERATION: LARGEST}
        run.lead.call(lambda running: running.coordinator.followers.note(1, claimed))
        answer = asks(run)
        assert isinstance(answer, Error)
        assert "is followed by none" in answer.text
