"""Mutated frames: what is changed, and that a server which breaks is found out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import msgpack
import pytest

from aiops.access.control import AccessControl
from aiops.access.tokens import TokenRole
from aiops.compiled.loading import core
from aiops.engine.engine import Engine
from aiops.errors import RemoteProtocolError
from aiops.lab.torture.attack_trial import AttackResult
from aiops.lab.torture.attack_variants import OF_FRAMES
from aiops.lab.torture.attacked import FIXED, SETTINGS, AttackPlan
from aiops.lab.torture.frame_templates import FrameTemplate, Mutator
from aiops.lab.torture.frame_trial import FrameTrial, draw_frames
from aiops.lab.torture.hostile_messages import HostileMessages
from aiops.lab.torture.seed_campaign import SeedCampaign
from aiops.shards.receive import ShardBuffers
from aiops.wire.decoding import decode
from aiops.wire.server_messages import ExpectPush
from tests.lab.torture.test_sessions import TARGET
from tests.seeds import seeds

FEW = 1000


def carried_out(seed: int, *names: str, frames: int = FEW) -> AttackResult:
    """The result of a trial of few frames."""
    plan = draw_frames(seed, names) if names else draw_frames(seed)
    return FrameTrial(replace(plan, peers=frames, token=False)).run()


@pytest.mark.parametrize("seed", seeds(2))
def test_a_server_serves_on(seed: int) -> None:
    result = carried_out(seed)
    assert result.wrong == []
    assert result.frames >= FEW
    assert 0 < result.refused < result.frames


def test_frames_get_far_enough() -> None:
    answers = carried_out(1, "asgd", frames=4000).answers
    far = ("ack", "params", "model", "task", "report", "error bad-push", "error refused")
    assert [kind for kind in far if not answers[kind]] == []


@pytest.mark.skipif(core() is None, reason="there was no C compiler")
@pytest.mark.parametrize("seed", [1, 2])
def test_frames_get_into_compiled_code(seed: int) -> None:
    result = carried_out(seed, "steady", frames=4000)
    assert result.wrong == []
    assert result.compiled > result.frames // 8
    assert {"error bad-push", "ack"} <= {*result.answers}


def test_a_server_with_a_token_is_not_changed() -> None:
    plan = replace(draw_frames(2, ("asgd",)), peers=300, token=True)
    result = FrameTrial(plan).run()
    assert result.wrong == []
    assert {"challenge", "error unauthorised"} <= {*result.answers}
    assert not {"welcome", "ack"} & {*result.answers}


def right(rng: Random) -> list[FrameTemplate]:
    """A hundred right frames."""
    return [FrameTemplate.of(HostileMessages(rng, TARGET).request()) for _ in range(100)]


class TestMutator:
    templates = right(Random(3))

    def test_each_value_of_a_header_has_its_place(self) -> None:
        for template in self.templates:
            header = msgpack.unpackb(template.header, strict_map_key=False)
            values = [template.header[start:stop] for start, stop in template.spans]
            for value in header.values():
                assert msgpack.packb(value) in values

    def test_one_thing_is_changed(self) -> None:
        mutator = Mutator(Random(5), self.templates)
        kept = Counter[str]()
        for template in self.templates * 20:
            header, payloads = mutator.mutated(template)
            assert header == template.header or payloads == template.payloads
            try:
                kept[decode(header).kind] += 1
            except RemoteProtocolError:
                kept["refused"] += 1
        assert 600 < kept["refused"] < 1600
        assert kept["push"] > 50

    def test_a_sequence_number_is_written(self) -> None:
        pushes = [template for template in self.templates if template.kind == "push"]
        for template in pushes:
            assert msgpack.unpackb(template.numbered(1 << 24).header)["seq"] == 1 << 24
            assert len(template.numbered(1 << 24).right) == len(template.right)

    def test_a_seed_decides_all(self) -> None:
        one, other = (Mutator(Random(5), self.templates) for _ in range(2))
        for template in self.templates:
            assert one.mutated(template) == other.mutated(template)


class TestFound:
    """Defects of a server that are put in by hand."""

    def wrong(self) -> str:
        return "\n".join(carried_out(1, "asgd").wrong)

    def test_none(self) -> None:
        assert self.wrong() == ""

    def test_an_exception(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Engine, "report", lambda self, *shown: 1 // 0)
        assert "ZeroDivisionError" in self.wrong()

    def test_a_buffer_that_is_not_given_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aiops.engine.receive.PushSink.free", lambda self: None)
        assert "receive buffers are not back" in self.wrong()

    def test_an_unknown_code(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aiops.errors.BadPush.code", "bad-luck")
        assert "an error with code 'bad-luck'" in self.wrong()


def test_a_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiops.lab.torture.frame_trial.FRAMES", FEW)
    monkeypatch.setattr("aiops.lab.torture.trial_series._OFTEN", -1.0)
    first = SeedCampaign("frames", FEW, None, 7, names=("asgd",), file=tmp_path / "frames.json")
    first.run()  # which is interrupted after it has written its report once
    second = SeedCampaign("frames", 2 * FEW, None, 7, names=("asgd",))
    second.resume(tmp_path / "frames.json")
    second.run()
    found = second.report()
    alone = SeedCampaign("frames", 2 * FEW, None, 7, names=("asgd",))
    alone.run()
    assert found["tried"] == alone.report()["tried"] >= 2 * FEW
    assert found["seeds"] == alone.report()["seeds"]
    assert len(found["runs"]) == 2
    assert found["answers"]["ack"] > 0


class TestVariants:
    """What else is attacked than one server, each for a few frames."""

    FAR: ClassVar[dict[str, str]] = {
        "shards": "ack",
        "filtered-shards": "ack",
        "follower": "update_done",
        "standby": "journal_rows",
        "roles": "error unauthorised",
        "checksums": "ack",
        "steady": "ack",
        "rendezvous": "round",
    }

    def plan(self, variant: str, seed: int = 1) -> AttackPlan:
        """A plan of few frames, which does not depend on what else may be drawn."""
        numbers: dict[str, Any] = {"peers": 1100, "together": 1}
        policy, *_others = FIXED.get(variant, ("asgd",))
        return AttackPlan(seed, variant, policy, **numbers, token=False, state=False, tables=True)

    @pytest.mark.parametrize("variant", FAR)
    def test_it_goes_on(self, variant: str) -> None:
        answers = Counter[str]()
        for seed in range(1, 6):
            result = FrameTrial(self.plan(variant, seed)).run()
            assert result.wrong == []
            answers += result.answers
            if answers[self.FAR[variant]]:
                return
        raise AssertionError(f"no {self.FAR[variant]!r} among {answers}")

    def test_all_are_tried(self) -> None:
        assert {*self.FAR, *SETTINGS} == {*OF_FRAMES}

    def test_a_token_that_permits_too_much_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aiops.access.control._needed", lambda hello: TokenRole.OBSERVE)
        monkeypatch.setattr(AccessControl, "forbids_request", lambda control, peer: None)
        assert FrameTrial(self.plan("roles", 2)).run().wrong != []

    def test_a_push_that_all_followers_refuse_is_found(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As they once refused the order of their lead, when a client gave two pushes one id."""

        def expect(buffers: ShardBuffers, order: ExpectPush) -> str:
            if (order.client, order.epoch, order.request) in buffers._by_key:
                raise ValueError(f"push {order.id} is expected twice")
            return expected(buffers, order)

        expected = ShardBuffers.expect
        monkeypatch.setattr(ShardBuffers, "expect", expect)
        found = (FrameTrial(self.plan("shards", seed)).run().wrong for seed in range(1, 6))
        assert any("is expected twice" in " ".join(wrong) for wrong in found)
