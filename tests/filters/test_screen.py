"""Filters: which gradients are used, and which workers are quarantined."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.filters.screen import LEARNT, QUARANTINE, SEEDING, UNSURE
from aiops.model.arena import aligned
from aiops.model.layout import Array
from aiops.model.parts import Part
from aiops.wire.decoding import decode
from aiops.wire.encoding import encode
from aiops.wire.fields import MAX_REASON
from aiops.wire.messages import Ack, Error, Push
from aiops.wire.shared_payloads import LentPayload
from tests.inline import Inline

WORKERS = 6


def gradient(size: float, draw: np.random.Generator | None = None) -> dict[str, Array]:
    draw = draw or np.random.default_rng(1)
    return {
        "w": (draw.standard_normal(50) * size).astype(np.float32),
        "h": (draw.standard_normal(20) * min(size, 1e3)).astype(np.float16),
    }


def running(policy: str = "asgd", filter: str = "norm:5", **options: object) -> Inline:
    inline = Inline(policy, {"lr": 0.01}, filter=filter, **options)
    inline.define({name: np.zeros_like(array) for name, array in gradient(1).items()})
    for peer in range(1, WORKERS + 1):
        inline.join(peer)
    return inline


def learnt(policy: str = "asgd", **options: object) -> Inline:
    inline = running(policy, **options)
    draw = np.random.default_rng(2)
    for number in range(SEEDING + LEARNT):
        answer = inline.push(1 + number % WORKERS, gradient(1, draw))
        assert isinstance(answer, Ack)
        assert (answer.used, answer.why[:12]) == (False, "the first 16")
    assert inline.version == 0
    return inline


class TestNorms:
    @pytest.mark.parametrize("size", [100.0, 1e6, 2e17])
    def test_a_gradient_that_is_far_too_large_is_not_used(self, size: float) -> None:
        inline = learnt()
        before = inline.params()
        answer = inline.push(3, gradient(size))
        assert isinstance(answer, Ack)
        assert not answer.used
        for name, array in inline.params().items():
            np.testing.assert_array_equal(array, before[name])
        fine = inline.push(3, gradient(2.0))
        assert isinstance(fine, Ack)
        assert fine.used
        report = inline.engine.report()["filter"]
        assert (report["refused"], report["quarantined"]) == (1, [])

    def test_the_usual_norms_are_told(self) -> None:
        inline = learnt()
        training = inline.engine.training
        assert training is not None
        assert training.screen is not None
        *norms, largest = training.screen.norms() or []
        given = gradient(1)
        for tensor, norm in zip(training.store.layout.tensors, norms, strict=True):
            assert 0.2 < norm / np.linalg.norm(given[tensor.name]) < 5
        assert 0.2 < largest / max(np.abs(each).max() for each in given.values()) < 5
        off = running("asgd", filter="off").engine.training
        assert off is not None
        assert off.screen is None or off.screen.norms() is None

    def test_one_tensor_is_enough(self) -> None:
        inline = learnt()
        bad = gradient(1) | {"h": gradient(1e3)["h"]}
        answer = inline.push(1, bad)
        assert isinstance(answer, Ack)
        assert not answer.used

    def test_a_part_of_the_model_is_compared_with_its_own_tensors(self) -> None:
        inline = learnt()
        for size, used in ((1.0, True), (50.0, False)):
            answer = inline.push(1, {"w": gradient(size)["w"]})
            assert isinstance(answer, Ack)
            assert answer.used is used

    def test_a_large_value_beside_the_sample_is_found(self) -> None:
        inline = Inline("asgd", {"lr": 0.01}, filter="norm:5")
        size = 100_000
        draw = np.random.default_rng(2)
        inline.define({"w": np.zeros(size, np.float32)})
        inline.join(1)
        for _ in range(SEEDING + LEARNT):
            inline.push(1, {"w": draw.standard_normal(size).astype(np.float32)})
        one = draw.standard_normal(size).astype(np.float32)
        for place in range(0, 10, 2):
            one[place] = 1e6
            answer = inline.push(1, {"w": one})
            assert isinstance(answer, Ack)
            assert not answer.used
            one[place] = 1
        assert inline.push(1, {"w": one}).used  # type: ignore[union-attr]

    def test_a_coded_gradient_is_measured_when_it_is_decoded(self) -> None:
        inline = learnt()
        layout = inline.engine.store.layout  # type: ignore[union-attr]
        tensor = layout.tensors[layout.index["w"]]
        for number, (size, used) in enumerate(((1.0, True), (1e3, False))):
            payload = gradient(size)["w"].astype(np.float16).tobytes()
            part = Part(tensor.offset, tensor.offset + tensor.nbytes, "fp16", len(payload), 0)
            push = Push(9000 + number, 500 + number, False, -1, (part,))
            answer = inline.receive(1, push, payload)
            assert isinstance(answer, Ack)
            assert answer.used is used


class TestReasons:
    def test_the_answer_has_the_reason_of_the_statistics(self) -> None:
        inline = learnt()
        answer = inline.push(3, gradient(1e6))
        assert isinstance(answer, Ack)
        assert answer.why == inline.engine.report()["filter"]["reasons"]["w3"]
        assert "times the usual median" in answer.why
        fine = inline.push(3, gradient(2.0))
        assert isinstance(fine, Ack)
        assert (fine.used, fine.why) == (True, "")

    def test_a_repeated_push_is_given_it_again(self) -> None:
        inline = learnt()
        answer = inline.push(3, gradient(1e6), seq=77)
        again = inline.push(3, gradient(1e6), seq=77)
        assert isinstance(answer, Ack)
        assert isinstance(again, Ack)
        assert (again.used, again.why) == (False, answer.why)

    def test_a_long_name_does_not_make_it_longer_than_a_message_may_have_it(self) -> None:
        inline = Inline("asgd", {"lr": 0.01}, filter="norm:5")
        name = "layer." * 600
        draw = np.random.default_rng(2)
        inline.define({name: np.zeros(50, np.float32), "b": np.zeros(5, np.float32)})
        inline.join(1)
        one = {name: np.ones(50, np.float32), "b": np.full(5, 1e3, np.float32)}
        for _ in range(SEEDING + LEARNT):
            one[name][:] = draw.standard_normal(50)
            inline.push(1, one)
        answer = inline.push(1, one | {name: np.full(50, 100, np.float32)})
        assert isinstance(answer, Ack)
        assert len(answer.why) == MAX_REASON
        assert "layer.layer." in answer.why
        assert decode(encode(answer)) == answer


class TestQuarantine:
    def test_a_worker_that_is_refused_again_and_again_is_named(self) -> None:
        inline = learnt()
        for _ in range(QUARANTINE):
            assert isinstance(inline.push(2, gradient(2e17)), Ack)
        assert "worker 'w2' is quarantined" in inline.notes[-1]
        refused = inline.push(2, gradient(1))
        assert isinstance(refused, Error)
        assert "quarantined" in refused.text
        assert inline.engine.report()["filter"]["quarantined"] == ["w2"]
        fine = inline.push(1, gradient(1))
        assert isinstance(fine, Ack)
        assert fine.used

    def test_a_norm_that_may_be_honest_is_refused_and_not_held_against_the_worker(self) -> None:
        inline = learnt()
        for _ in range(2 * QUARANTINE):
            answer = inline.push(2, gradient(10.0))
            assert isinstance(answer, Ack)
            assert not answer.used
        assert inline.engine.report()["filter"]["quarantined"] == []

    def test_of_such_norms_two_in_three_pushes_are_borne(self) -> None:
        inline = learnt()
        for step in range(6 * QUARANTINE):
            inline.push(2, gradient(1.0 if step % 3 == 0 else 10.0))
        report = inline.engine.report()["filter"]
        assert (report["refused"], report["quarantined"]) == (4 * QUARANTINE, [])

    def test_none_agrees_with_it_any_more(self) -> None:
        """Its norms stay: without them the median of honest ones is lower, and refuses some."""
        inline = learnt(filter="norm:5+agreement")
        for _ in range(QUARANTINE):
            inline.push(2, gradient(2e17))
        screen = inline.engine.training.screen  # type: ignore[union-attr]
        state = screen.state()  # type: ignore[union-attr]
        row = dict(state["rows"])[next(iter(screen.quarantined))]  # type: ignore[union-attr]
        norm, agreement = state["filters"]
        assert agreement["counts"][row] == 0
        assert not agreement["units"][row].any()
        assert norm["counts"][row] > QUARANTINE

    @pytest.mark.parametrize(
        ("size", "refusals"), [(2e17, QUARANTINE), (10.0, round(QUARANTINE / UNSURE))]
    )
    def test_a_barrier_goes_on_without_it(self, size: float, refusals: int) -> None:
        """Also if each of its norms alone may be an honest worker's."""
        inline = learnt("hardsync", workers=WORKERS)
        for peer in range(1, WORKERS):
            assert inline.push(peer, gradient(1)) is None
        for _ in range(refusals):
            assert inline.version == 0
            inline.push(WORKERS, gradient(size))
        assert inline.version == 1
        assert len(inline.acks(1)) > 1

    def test_a_worker_with_a_bad_batch_now_and_then_stays(self) -> None:
        inline = learnt()
        for step in range(150):
            inline.push(2, gradient(1e4 if step % 4 == 0 else 1.0))
        assert inline.engine.report()["filter"]["quarantined"] == []


def test_what_cannot_be_is_refused_with_a_sentence() -> None:
    with pytest.raises(UsageError, match=r"must be off, robust, or filters.*did you mean 'norm'"):
        Inline("asgd", filter="nrom")
    with pytest.raises(UsageError, match="'norm' is named twice"):
        Inline("asgd", filter="norm+norm:3")
    with pytest.raises(UsageError, match="curvature has no setting"):
        Inline("asgd", filter="curvature:3")
    with pytest.raises(UsageError, match=r"kardam:0\.6 must be kardam:SHARE"):
        Inline("asgd", filter="kardam:0.6")
    with pytest.raises(UsageError, match="more than 1"):
        Inline("asgd", filter="norm:0.5")


class TestLent:
    @pytest.mark.parametrize("filter", ["off", "norm:5"])
    def test_what_a_worker_lends_is_copied_before_it_is_looked_at(self, filter: str) -> None:
        inline = Inline("asgd", {"lr": 0.01}, filter=filter)
        inline.define({"w": np.zeros(50, np.float32)})
        inline.join(1)
        push = Push(1, 1, False, -1, (Part(0, 200, "raw", 200, 0),), (), False, 1)
        sink = inline.engine.admission.sink_for(push)
        assert sink is not None
        lent = LentPayload(aligned(200), lambda: None)
        assert sink.adopt(lent) == (filter == "off"), "a worker that is trusted changes nothing"
