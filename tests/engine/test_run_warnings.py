"""Warnings of a run: said once, when they are due, by a restored engine too."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from aiops.algorithms import BUILT_IN, find
from aiops.bandwidth.gates import LEAST_SHARE
from aiops.engine.capture import capture
from aiops.engine.engine import Engine
from aiops.engine.events import Options
from aiops.engine.restore import restore
from tests.inline import Inline
from tests.rows import each_row

MODEL = {"w": np.zeros(6, np.float32), "a": np.zeros(2, np.float32)}


def started(settings: dict[str, Any] | None = None, **options: Any) -> Inline:
    """Return an engine of fasgd with a model and a worker."""
    inline = Inline("fasgd", settings or {}, backend="numpy", **options)
    inline.join(1)
    inline.define(MODEL)
    return inline


def push(inline: Inline, steps: int, scale: float = 1e-5, scale_of_a: float | None = None) -> None:
    """Push gradients of a scale, far below FASGD's floor by default."""
    rng = np.random.default_rng(inline.version)
    for _ in range(steps):
        g = {name: scale * rng.normal(size=w.shape) for name, w in MODEL.items()}
        if scale_of_a is not None:
            g["a"] *= scale_of_a / scale
        inline.push(1, {name: value.astype(np.float32) for name, value in g.items()})


def warned(inline: Inline) -> list[str]:
    """Return the report's warnings, which are the log's."""
    found: list[str] = inline.engine.report()["warnings"]
    assert found == inline.notes
    return found


class TestFloor:
    def test_it_is_said_once_when_the_statistic_is_near(self) -> None:
        inline = started()
        while (inline.engine.defined_store.vbar() or 0) > 0.011:
            assert not warned(inline)
            push(inline, 1)
        near = inline.version
        push(inline, 200)
        [text] = warned(inline)
        assert text.startswith(f"at version {near}: v̄ is 0.0109, within 10 % of its floor")
        assert "sasgd at the learning rate lr/sqrt(eps) = 0.5" in text
        assert "--set relative=0.01" in text

    @pytest.mark.parametrize("settings", [{"relative": 0.01}, {"eps": 1e-14}])
    def test_it_is_not_said_where_the_deviation_counts(self, settings: dict[str, Any]) -> None:
        inline = started(settings)
        push(inline, 300)
        assert not warned(inline)
        assert 1e-6 < (inline.engine.defined_store.vbar() or 0) < 1e-4

    def test_nor_of_large_gradients(self) -> None:
        inline = started()
        push(inline, 300, scale=1.0)
        assert not warned(inline)

    def test_nor_by_an_algorithm_without_a_statistic(self) -> None:
        inline = Inline("asgd", {}, backend="numpy")
        inline.join(1)
        inline.define(MODEL)
        push(inline, 5)
        assert not warned(inline)

    @pytest.mark.parametrize("steps", [30, 65, 66, 100])
    def test_a_restored_engine_says_it_when_the_first_would_have(self, steps: int) -> None:
        """Captured long before, right before, and after it was said."""
        inline, again = started(), Inline("fasgd", {}, backend="numpy")
        push(inline, steps)
        before = inline.engine.report()["warnings"]
        found = capture(inline.engine)
        found.copy()
        restore(again.engine, found, found.array)
        found.release()
        again.seqs = dict(inline.seqs)
        for each in (inline, again):
            push(each, 60)
        assert again.engine.report()["warnings"] == inline.engine.report()["warnings"]
        assert len(inline.notes) == 1
        assert len(again.notes) == 1 - len(before)


class TestCrowd:
    """Workers whose gradients schedule-free would collect, had it been told of them."""

    def test_it_is_said_once_when_so_many_are_there(self) -> None:
        inline = Inline("schedule-free", {}, backend="numpy")
        for peer in range(1, 40):
            assert len(warned(inline)) == (peer > 32)
            inline.join(peer)
        [text] = warned(inline)
        assert text.startswith("32 workers are there, and each gradient is an update of its own")
        assert "--workers 32" in text
        again = Inline("schedule-free", {}, backend="numpy")
        inline.define(MODEL)
        found = capture(inline.engine)
        found.copy()
        restore(again.engine, found, found.array)
        found.release()
        again.join(50)
        assert again.engine.report()["warnings"] == [text]
        assert not again.notes

    @each_row(
        ("policy", "settings", "options"),
        [
            ("schedule-free", {}, {"workers": 50}),
            ("schedule-free", {"collect": 1}, {}),
            ("asgd", {}, {}),
        ],
    )
    def test_it_is_not_said_where_it_is_meant_so(
        self, policy: str, settings: dict[str, Any], options: dict[str, Any]
    ) -> None:
        inline = Inline(policy, settings, backend="numpy", **options)
        for peer in range(1, 40):
            inline.join(peer)
        assert not warned(inline)


class TestGate:
    def test_it_is_said_once_when_few_pushes_pass(self) -> None:
        inline = started({"eps": 1e-14}, gate="bfasgd:c_push=0.19")
        while (inline.engine.defined_store.vbar() or 0) >= 0.01 - 1e-4:
            assert not warned(inline)
            push(inline, 1)
        push(inline, 100)
        [text] = warned(inline)
        assert "the gate bfasgd lets 4." in text
        assert "share=0.05 keeps it at 5%" in text
        assert "relative=true" in text

    @pytest.mark.parametrize(
        "gate",
        ["bfasgd:c_push=1e-3,eps=1e-3", "bfasgd:c_push=7,relative=true", "constant:p_push=0.06"],
    )
    def test_it_is_not_said_where_enough_pass(self, gate: str) -> None:
        inline = started({"eps": 1e-14}, gate=gate)
        push(inline, 200)
        assert not warned(inline)

    def test_the_floor_that_is_subtracted_counts(self) -> None:
        inline = started({"eps": 1e-2}, gate="bfasgd:c_push=1,floor_free=true")
        push(inline, 200, scale=1e-3)
        floor, gate = warned(inline)[::-1]
        assert "within 10 %" in floor or "within 10 %" in gate
        assert any("gate bfasgd" in text for text in (floor, gate))

    def test_a_tensor_whose_pushes_are_kept_back_is_named(self) -> None:
        gate = "bfasgd:c_push=0.019,by=tensor"
        inline = started({"eps": 1e-14}, gate=gate)
        push(inline, 200, scale=1.0, scale_of_a=1e-4)
        [text] = warned(inline)
        assert "of 'a', at its v̄ =" in text

    @each_row(
        ("gate", "words"),
        [
            ("constant:p_push=0.01", "lets 1.0% of the pushes pass, under 5%"),
            ("periodic:k_push=50", "lets 2.0% of the pushes pass"),
            ("bfasgd:c_push=20,relative=true", "lets 4.8% of the pushes pass"),
        ],
    )
    def test_a_share_that_settings_alone_decide_is_said_at_the_start(
        self, gate: str, words: str
    ) -> None:
        engine = Engine(find("fasgd").make({}), Options(gate=gate))
        [text] = engine.warnings.given
        assert engine.warnings.cautions == (text,)
        assert words in text

    def test_under_a_budget_it_is_the_budgets(self) -> None:
        inline = started({"eps": 1e-14}, budget=100_000)
        budget = inline.engine.budget
        assert budget is not None
        push(inline, 3, scale=1.0)
        assert not warned(inline)
        budget.depth = 5.0  # e⁵: one push in 148
        push(inline, 3, scale=1.0)
        [text] = warned(inline)
        assert "the bandwidth budget has room for 0.7% of the pushes" in text

    def test_the_bound_of_the_gate_is_where_its_share_is_5_percent(self) -> None:
        for gate in ("bfasgd:c_push=0.3", "bfasgd:c_push=2,floor=0.01,eps=0.01"):
            engine = Engine(find("fasgd").make({}), Options(gate=gate))
            made = engine.warnings._gate
            assert made is not None
            below = made.starves_below(())
            found = np.asarray(made.own_share(np.array([below]), ()))
            assert found == pytest.approx(LEAST_SHARE)


class TestSettings:
    @each_row(
        ("policy", "settings", "options", "words"),
        [
            ("diloco", {"lr": 3e-4}, {}, r"lr=0.0003 is the outer .* --set inner_lr=0.0003"),
            ("diloco", {"lr": 1.5}, {}, r"lr=1.5 is the outer .* overshoots"),
            ("diloco", {"inner_lr": 0.7}, {}, r"inner_lr=0.7 is the .* own adamw steps"),
            ("fedbuff", {"lr": 0.04}, {}, r"fedbuff: lr=0.04 is the outer learning rate"),
            ("asgd", {"optimizer": "adam"}, {}, r"lr=0.04 is a rate for plain SGD: a step of adam"),
            ("fasgd", {}, {"push_codec": ("topk:0.01",)}, r"fasgd divides by second moments"),
            ("asgd", {"momentum": 0.5}, {}, r"momentum=0.5 has no effect with optimizer=sgd"),
            ("sasgd", {"rho": 0.7}, {}, r"rho=0.7 has no effect with modulate=inverse"),
            (
                "diloco",
                {"inner": "sgd", "inner_momentum": 0.5},
                {},
                r"0.5 has no effect with",
            ),
            ("fedbuff", {"inner_beta1": 0.5}, {}, r"inner_beta1=0.5 has no effect with inner=sgd"),
            (
                "schedule-free",
                {"orthogonal": False, "momentum": 0.3},
                {},
                r"momentum=0.3 has no",
            ),
            (
                "hardsync",
                {"optimizer": "adamw", "lr": 0.001},
                {"push_codec": ("int8", "topk@w")},
                r"hardsync divides by second moments, and topk",
            ),
        ],
    )
    def test_what_is_unlikely_to_be_meant(
        self, policy: str, settings: dict[str, Any], options: dict[str, Any], words: str
    ) -> None:
        engine = Engine(find(policy).make(settings), Options(workers=2, **options))
        [text] = engine.report()["warnings"]
        assert re.search(words, text)

    @each_row(
        ("policy", "settings", "options"),
        [
            ("diloco", {}, {"push_codec": ("topk:0.01",)}),  # its outer optimiser has none
            ("diloco", {"lr": 1.0, "optimizer": "sgd"}, {}),
            ("asgd", {"optimizer": "nesterov", "momentum": 0.5}, {}),
            ("softsync", {"modulate": "hinge", "a": 0.2, "b": 2.0, "n": 2}, {}),
            ("fedbuff", {"lr": 0.5}, {}),
            ("asgd", {"optimizer": "adam", "lr": 0.001}, {"push_codec": ("int8",)}),
            ("sasgd", {}, {"push_codec": ("topk:0.01",)}),
            ("fasgd", {}, {"fetch_codec": ("topk:0.05",)}),
        ],
    )
    def test_what_is_not_warned_of(
        self, policy: str, settings: dict[str, Any], options: dict[str, Any]
    ) -> None:
        engine = Engine(find(policy).make(settings), Options(workers=2, **options))
        assert engine.report()["warnings"] == []

    def test_defaults_need_no_warning(self) -> None:
        for name in BUILT_IN:
            assert find(name).make({}).cautions() == (), name
