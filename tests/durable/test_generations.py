"""What a server says of its generation: the versions that survived, and that it is superseded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.algorithms import find
from aiops.durable.commit_gate import Acks, CommitGate
from aiops.durable.generations import Generations
from aiops.durable.recorder import AppendRow, Recorder, RecorderEffect, Supersede
from aiops.engine.engine import Engine
from aiops.engine.events import Joined, Options, Reply
from aiops.model.parts import LARGEST
from aiops.state.directory import MAX_HISTORY, GenerationFile, GenerationStart
from aiops.wire.handshake import generation_proof
from aiops.wire.messages import PROTOCOL, Hello, Welcome
from aiops.wire.standby_messages import Fence, StandbyHello
from tests.strategies import DETERMINISTIC

RUN, SECRET = "8c2f", bytes(range(32))


def started(*versions: Sequence[int]) -> GenerationFile:
    """Return the file after starts at these versions, from generation 1 on."""
    starts = [
        GenerationStart(number, number - 1, tuple(found))
        for number, found in enumerate(versions, 1)
    ]
    return GenerationFile(len(versions), starts[-MAX_HISTORY:], secret=SECRET)


class TestIntact:
    def intact(self, file: GenerationFile, known: int, tables: int = 0) -> tuple[int, ...]:
        return Generations(RUN, file).intact(known, tables)

    def test_the_lowest_version_since_counts(self) -> None:
        file = started([], [90, 7], [40, 9], [60, 8])
        assert self.intact(file, 4, 1) == (LARGEST, LARGEST)
        assert self.intact(file, 3, 1) == (60, 8)
        assert self.intact(file, 2, 1) == (40, 8)
        assert self.intact(file, 1, 1) == (40, 7)

    def test_nothing_is_left_if_there_was_no_model_at_a_start(self) -> None:
        assert self.intact(started([], [5], [], [3]), 1) == ()
        assert self.intact(started([], [5], [], [3]), 3) == (3,)

    def test_nothing_is_known_of_generations_before_those_remembered(self) -> None:
        file = started([], [1], *[[50]] * MAX_HISTORY)
        assert self.intact(file, 1) == ()
        assert self.intact(file, file.starts[0].generation - 1) == ()
        assert self.intact(file, file.starts[0].generation) == (50,)

    def test_a_promotion_is_a_start(self) -> None:
        file = started([], [5]).started(9, [4], promoted=True)
        assert self.intact(file, 2) == (4,)
        assert self.intact(file, file.generation) == (LARGEST,)

    @DETERMINISTIC
    @given(st.lists(st.integers(0, 99), min_size=1, max_size=80), st.integers(0, 90))
    def test_it_never_says_too_much(self, versions: list[int], known: int) -> None:
        file = started(*([version] for version in versions))
        lowest = min(versions[known:], default=LARGEST)
        found = self.intact(file, known)
        assert found == (lowest,) or (found == () and len(versions) - known >= MAX_HISTORY)


def hello(
    client: str, generation: int, acked: int, run: str = RUN, proof: bytes | None = None
) -> Hello:
    greeting = (0, PROTOCOL, client, 1, client, "worker", True, bytes(16), "test")
    if proof is None:
        proof = generation_proof(SECRET, RUN, generation)
    known = {"run": run, "generation": generation, "generation_proof": proof}
    return Hello(*greeting, **known, acked=acked)  # type: ignore[arg-type]


class Server:
    """A recorder over an engine without a model, and the sequence numbers that it has taken."""

    def __init__(self, **taken: int) -> None:
        self.engine = Engine(find("asgd").make({"lr": 1.0}), Options(run=RUN, backend="numpy"))
        self.recorder = Recorder(self.engine, CommitGate(Acks.WRITTEN), 2, started([], [5], [4]))
        self.peers = 0
        for client, last in taken.items():
            self.join(hello(client, 3, 0))
            member = self.engine.membership.find(client)
            assert member is not None
            member.last_seq = last

    def join(self, said: Hello) -> list[RecorderEffect]:
        self.peers += 1
        return self.recorder.handle(Joined(0.0, self.peers, said))

    def welcome(self, said: Hello) -> Welcome:
        [found] = [
            effect.message
            for effect in self.join(said)
            if isinstance(effect, Reply) and isinstance(effect.message, Welcome)
        ]
        return found


class TestWelcome:
    def test_it_says_what_is_left(self) -> None:
        welcome = Server(me=7).welcome(hello("me", 1, 9))
        assert (welcome.generation, welcome.intact, welcome.acks) == (3, (4,), "written")
        assert (welcome.last_seq, welcome.rolled_back) == (7, 2)

    def test_what_is_lost_counts_once(self) -> None:
        server = Server(me=7, you=2)
        for _ in range(3):  # it may not have received the answer
            server.welcome(hello("me", 2, 9))
        server.welcome(hello("you", 2, 3))
        server.welcome(hello("you", 2, 2))
        assert server.recorder.rolled_back == 3
        lines = {line["name"]: line["rolled_back"] for line in server.engine.report()["workers"]}
        assert lines == {"me": 2, "you": 1}

    @pytest.mark.parametrize("generation", [2, 3])
    def test_of_another_run_nothing_is_lost(self, generation: int) -> None:
        welcome = Server(me=7).welcome(hello("me", generation, 9, run="another"))
        assert (welcome.intact, welcome.rolled_back) == ((LARGEST,), 0)

    def test_nor_by_a_client_of_this_generation(self) -> None:
        """It has been told already, or its member was forgotten."""
        welcome = Server(me=7).welcome(hello("me", 3, 9))
        assert (welcome.intact, welcome.rolled_back) == ((LARGEST,), 0)

    def test_sums_of_any_numbers_can_be_reported(self) -> None:
        server = Server(c0=1, c1=1)
        for number in range(3):
            server.welcome(hello(f"c{number}", 1, LARGEST))
        assert server.recorder.rolled_back == LARGEST
        assert server.recorder.rolled_back_at_most == LARGEST

    def test_what_a_forgotten_client_has_lost_is_a_bound(self) -> None:
        server = Server(me=7)
        server.welcome(hello("me", 2, 9))
        for _ in range(2):
            assert server.welcome(hello("forgotten", 2, 50)).rolled_back == 50
        assert server.recorder.rolled_back == 2
        assert server.recorder.rolled_back_at_most == 52


class TestSuperseded:
    def test_by_a_higher_generation_of_its_run(self) -> None:
        server = Server(me=7)
        row = server.recorder.next
        assert server.join(hello("me", 4, 9)) == [Supersede(4)]
        assert server.recorder.next == row  # it is in no journal
        assert server.welcome(hello("me", 4, 9, run="another")).generation == 3


HIGHER = 1 << 40

WRONG = {
    "none": b"",
    "random": bytes(reversed(range(32))),
    "of a lower generation": generation_proof(SECRET, RUN, 3),
    "of another run": generation_proof(SECRET, "another", HIGHER),
    "of no secret": generation_proof(b"", RUN, HIGHER),
    "of another secret": generation_proof(bytes(32), RUN, HIGHER),
}


class TestProofs:
    """The word of a peer that there is a later server ends none: it needs that server's proof."""

    @pytest.mark.parametrize("given", WRONG.values(), ids=WRONG)
    def test_a_claim_without_the_right_one_is_refused(self, given: bytes) -> None:
        server, claims = Server(me=7), Generations(RUN, started([], [5], [4]))
        named = PROTOCOL, "f", 1, "b", True, bytes(16), "test"
        for claim in (
            hello("me", HIGHER, 9, proof=given),
            StandbyHello(0, *named, RUN, HIGHER, 5, given),
            Fence(0, RUN, HIGHER, "aiops://b", given),
        ):
            assert not claims.supersedes(claim)
            assert claims.refusal(claim).startswith(
                "this is generation 3 of run 8c2f, and generation 16.0 was claimed"
            )
        assert Supersede(HIGHER) not in server.join(hello("me", HIGHER, 9, proof=given))

    @pytest.mark.parametrize("generation", [4, HIGHER, LARGEST])
    def test_with_the_right_one_it_is_taken(self, generation: int) -> None:
        claims = Generations(RUN, started([], [5], [4]))
        assert claims.supersedes(hello("me", generation, 0))
        assert claims.refusal(hello("me", generation, 0)) == ""

    @pytest.mark.parametrize("generation", [0, 2, 3])
    def test_what_is_no_claim_needs_none(self, generation: int) -> None:
        claims = Generations(RUN, started([], [5], [4]))
        assert claims.refusal(hello("me", generation, 0, proof=b"")) == ""
        assert claims.refusal(hello("me", HIGHER, 0, run="another", proof=b"")) == ""

    def test_a_server_without_a_state_has_none(self) -> None:
        claims = Generations(RUN, GenerationFile(0))
        assert claims.proof == b""
        assert not claims.supersedes(hello("me", 1, 0, proof=generation_proof(b"", RUN, 1)))

    def test_the_one_that_a_client_is_welcomed_with_ends_earlier_servers(self) -> None:
        proof = Server().welcome(hello("me", 1, 0)).generation_proof
        assert Generations(RUN, started([], [5])).supersedes(hello("me", 3, 0, proof=proof))
        promoted = started([], [5]).started(9, [6], 77, promoted=True)
        claim = hello("me", (1 << 36) + 77, 0, proof=Generations(RUN, promoted).proof)
        assert Generations(RUN, started([], [5], [4])).supersedes(claim)

    def test_no_row_has_it(self) -> None:
        effect = Server().join(hello("me", 2, 0))[0]
        assert isinstance(effect, AppendRow)
        assert generation_proof(SECRET, RUN, 2) not in effect.row.row
        assert b"generation_proof\xc4\x00" in effect.row.row
