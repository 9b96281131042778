"""What every algorithm must hold, whatever it is."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from aiops.algorithms import BUILT_IN, find
from aiops.algorithms.base import Policy
from aiops.algorithms.dcasgd import DCASGD
from aiops.algorithms.local_training import LocalTraining
from aiops.algorithms.model_support import tables_obstacle
from aiops.algorithms.policies import EveryNth
from aiops.cli.policy_catalog import described
from aiops.cli.policy_docstring import read, summary
from aiops.engine.digest import digest
from aiops.engine.events import Stopping
from aiops.errors import ConflictError, UsageError
from aiops.model.layout import Array, dtype_named
from aiops.store.finite_guard import FiniteGuard
from aiops.wire import messages
from tests.contract.cases import CASES, PLACES, WITHOUT_GRADIENTS, WORKERS, at_its_rate
from tests.devices import DEVICES, device_named, machine_with
from tests.engine.seeded_run import Case, Driver, Script
from tests.hands import Gradient, Hand, crew_of, train
from tests.inline import Inline
from tests.recording import Recording
from tests.rows import each_row


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return CASES[request.param]


REHEARSED = [CASES[name] for name in ("dcasgd", "dcasgd-constant", "asgd-adam")]
"""Those of which no update is proven finite, as gradients are multiplied with each other."""


def started(
    case: tuple[str, dict[str, Any]], arrays: dict[str, Array], backend: str = "numpy", **more: Any
) -> Inline:
    name, settings = case
    chosen: dict[str, Any] = {"backend": backend}
    if backend in DEVICES:
        chosen = {"machine": machine_with(device_named(backend))}
    inline = Inline(name, {**settings, **more}, workers=WORKERS, **chosen)
    inline.define(arrays)
    return inline


def joined(inline: Inline) -> Inline:
    """Have the workers join, for tests that push by hand."""
    for peer in range(1, WORKERS + 1):
        inline.join(peer)
    return inline


def quadratic(params: Mapping[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    return {
        name: (w.astype(np.float64) - 1 + rng.normal(size=w.shape) * 0.1).astype(w.dtype)
        for name, w in params.items()
    }


def reached(
    hands: list[Hand], steps: int, gradient: Gradient, near: Callable[[dict[str, Array]], bool]
) -> bool:
    """Train until the parameters are near what is sought twice in a row, or for so many steps."""
    found = False
    for begin in range(0, steps, 100):
        train(hands, 100, gradient, seed=begin)
        before, found = found, near(hands[0].inline.params())
        if before and found:
            return True
    return found


def test_converges_on_a_quadratic(case: tuple[str, dict[str, Any]]) -> None:
    """With the reference's bits, which `test_backends_agree_to_the_bit` holds for the others."""
    inline = started(case, {"w": np.full(50, 4, np.float32), "b": np.full(3, -3, np.float32)})
    hands = crew_of(inline, WORKERS)

    def near(params: dict[str, Array]) -> bool:
        return all(float(np.abs(values - 1).max()) < 0.5 for values in params.values())

    assert reached(hands, 3000, quadratic, near)
    assert inline.params()["w"].dtype == np.float32
    assert inline.engine.admission.pool.out == 0


def test_converges_on_logistic_regression(case: tuple[str, dict[str, Any]]) -> None:
    rng = np.random.default_rng(1)
    truth = rng.normal(size=5)
    x = rng.normal(size=(400, 5))
    y = (x @ truth > 0).astype(np.float64)

    def gradient(params: Mapping[str, Array], rng: np.random.Generator) -> dict[str, Array]:
        rows = rng.integers(0, 400, 16)
        p = 1 / (1 + np.exp(-(x[rows] @ params["w"] + params["b"])))
        error = p - y[rows]
        return {"w": x[rows].T @ error / 16, "b": np.array([error.mean()])}

    def near(params: dict[str, Array]) -> bool:
        return float((((x @ params["w"] + params["b"]) > 0) == y).mean()) > 0.93

    inline = started(case, {"w": np.zeros(5), "b": np.zeros(1)})
    assert reached(crew_of(inline, WORKERS), 1500, gradient, near)


def test_updates_are_proven_finite_many_at_a_time(
    case: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof looks at all that is stored: one for each update takes longer than the update."""
    proofs_are_rare(case, monkeypatch, rehearsed=case in REHEARSED)


def test_so_they_are_with_weights_that_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then what is proven is so for the numbers of now alone: most updates are rehearsed."""
    proofs_are_rare(("schedule-free", {"weight_decay": 0.1}), monkeypatch, rehearsed=False)


def proofs_are_rare(
    case: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, *, rehearsed: bool
) -> None:
    sought, try_one = list[bool](), FiniteGuard._try

    def counted(self: FiniteGuard, *arguments: Any) -> bool:
        sought.append(try_one(self, *arguments))
        return sought[-1]

    inline = started(case, {"a": np.full((7, 9), 2, np.float32), "b": np.full(5, -1, np.float32)})
    hands = crew_of(inline, WORKERS)
    monkeypatch.setattr(FiniteGuard, "_try", counted)
    train(hands, 120, quadratic)
    assert any(sought) != rehearsed, "all updates are rehearsed"
    sought.clear()
    train(hands, 120, quadratic, seed=1)
    assert sum(sought) <= 120 / 8


def test_backends_agree_to_the_bit(case: tuple[str, dict[str, Any]]) -> None:
    arrays = {"a": np.full((7, 9), 2, np.float32), "b": np.full(5, -1, np.float32)}
    results = []
    for backend in PLACES:
        inline = started(case, arrays, backend)
        store = inline.engine.store
        assert store is not None
        store.warm()  # else NumPy does Numba's work until it is there
        train(crew_of(inline, WORKERS), 72, quadratic)
        assert store.backend == ("cuda" if backend in DEVICES else backend)
        state = [[array.tobytes() for array in arrays] for arrays in store.state]
        params = {name: array.tobytes() for name, array in inline.params().items()}
        results.append((inline.version, store.vbar(), params, state))
    assert all(result == results[0] for result in results)


@each_row("dtype", ["float64", "float16", "bfloat16"])
def test_keeps_dtypes(case: tuple[str, dict[str, Any]], dtype: str) -> None:
    inline = started(case, {name: np.full(6, 3, dtype_named(dtype)) for name in ("w", "b")})
    train(crew_of(inline, WORKERS), 44, quadratic)
    assert inline.params()["w"].dtype == dtype_named(dtype)
    assert inline.version > 0
    assert float(inline.params()["w"].astype(np.float64).mean()) < 3


def test_a_factor_of_the_learning_rate_is_that_rate(case: tuple[str, dict[str, Any]]) -> None:
    """To the bit: of a worker's own rate too, where it takes steps of its own."""
    name, settings = case = at_its_rate(case)
    algorithm = find(name).make(settings)
    rate = "inner_lr" if hasattr(algorithm, "inner_lr") else "lr"
    own_rates = "lr=" in str(settings.get("per_tensor", ""))
    if name in (*WITHOUT_GRADIENTS, "gap-aware") or own_rates:  # it counts gaps by the server's
        return
    arrays = {"a": np.full((7, 9), 2, np.float32), "b": np.full(5, -1, np.float32)}
    found = []
    for factor in (0.25, None):
        smaller = {} if factor else {rate: getattr(algorithm, rate) / 4}
        inline = started(case, arrays, **smaller)
        hands = crew_of(inline, WORKERS)
        for hand in hands:
            hand.lr_factors = factor
        train(hands, 60, quadratic)
        found.append({name: array.tobytes() for name, array in inline.params().items()})
    assert found[0] == found[1]
    assert found[0] != {name: array.tobytes() for name, array in arrays.items()}


def test_every_gradient_is_counted(case: tuple[str, dict[str, Any]]) -> None:
    inline = started(case, {name: np.zeros(3, np.float32) for name in ("w", "b")})
    hands = crew_of(inline, WORKERS)
    train(hands, 120, quadratic)
    report = inline.engine.report()
    refused = sum(report["refused"].values())
    assert report["gradients"] + refused + report["ignored"] == sum(h.pushes for h in hands)
    assert report["wasted"] == refused + report["ignored"]
    assert sum(not ack.used for hand in hands for ack in hand.acks) == report["ignored"]
    assert sum(member["pushes"] for member in report["workers"]) <= report["gradients"]


def test_a_worker_may_leave_and_another_join(case: tuple[str, dict[str, Any]]) -> None:
    inline = started(case, {name: np.full(4, 3, np.float32) for name in ("w", "b")})
    hands = crew_of(inline, WORKERS)
    train(hands, 81, quadratic)
    inline.leave(2)
    hands[1] = Hand(inline, 5, client="another")
    before = inline.version
    train(hands, 250, quadratic, seed=1)
    assert inline.version > before + 10
    assert hands[1].pushes > 0


def test_the_rest_go_on_when_workers_leave(case: tuple[str, dict[str, Any]]) -> None:
    """Nobody waits for ever: with three of four gone, the one left still gets its answers."""
    inline = started(case, {name: np.full(4, 3, np.float32) for name in ("w", "b")})
    hands = crew_of(inline, WORKERS)
    train(hands, 30, quadratic)
    for peer in (2, 3, 4):
        inline.leave(peer)
    before = inline.version
    train(hands[:1], 100, quadratic)
    assert inline.version > before


def test_a_worker_that_falls_silent_is_not_waited_for(case: tuple[str, dict[str, Any]]) -> None:
    """It neither pushes nor leaves: the others go on without it after the deadline."""
    inline = started(case, {name: np.full(4, 3, np.float32) for name in ("w", "b")})
    hands = crew_of(inline, WORKERS)
    rng = np.random.default_rng(0)
    for _ in range(60):
        free = [hand for hand in hands[1:] if not hand.waits]
        for hand in free:
            hand.step(quadratic, rng)
        if not free:
            inline.wait(1000.0)
    assert min(hand.steps for hand in hands[1:]) >= 20


def test_a_record_replays_to_the_same_bits(case: tuple[str, dict[str, Any]]) -> None:
    """So the same events are the same bits."""
    inline = started(case, {name: np.full(9, 2, np.float32) for name in ("w", "b")})
    journal = Recording(case[0], inline.engine)
    for event in inline.log:
        journal.note(event)
    inline.on_event = journal.note
    train(crew_of(inline, WORKERS), 80, quadratic, seed=5)
    journal.end(inline.now)
    again = journal.replay()
    assert again.complete
    assert again.engine.report()["version"] == inline.version > 0
    assert digest(again.engine) == digest(inline.engine)


def test_no_news_is_lost_by_a_push_cut_midway(case: tuple[str, dict[str, Any]]) -> None:
    """A worker dies in the middle of a push: its half gradient touches nothing."""
    inline = started(case, {name: np.full(40, 2, np.float32) for name in ("w", "b")})
    hands = crew_of(inline, WORKERS)
    train(hands, 40, quadratic)
    store = inline.engine.store
    assert store is not None
    before = inline.params()
    part = store.layout.parts(store.current.tensor_versions)
    sink = inline.engine.admission.sink_for(messages.Push(99, 99, True, -1, part))
    assert sink is not None
    sink.view(0, 0)[:16] = b"\x7f" * 16
    sink.abandoned()
    inline.leave(1)
    assert all(np.array_equal(inline.params()[name], before[name]) for name in before) or (
        inline.version > 0  # those who waited for it went on
    )
    assert inline.engine.admission.pool.out == 0 or any(h.waits for h in hands[1:])
    train(hands[1:], 60, quadratic)
    assert all(np.isfinite(values).all() for values in inline.params().values())


def test_settings_survive_the_wire(case: tuple[str, dict[str, Any]]) -> None:
    name, settings = case
    algorithm = find(name).make(settings)
    assert find(name).make(algorithm.settings()) == algorithm
    as_text = {key: str(value) for key, value in algorithm.settings().items()}
    assert find(name).make(as_text) == algorithm


@each_row("name", sorted(BUILT_IN))
def test_bad_settings_are_refused(name: str) -> None:
    algorithm = find(name)
    for settings, words in (
        ({"lr": 0}, "lr must be a positive"),
        ({"lr": "nan"}, "lr must be"),
        ({"lr": "fast"}, "lr must be a number"),
        ({"lrr": 1}, "did you mean 'lr'"),
    ):
        with pytest.raises(UsageError, match=words):
            algorithm.make(settings)


@each_row("name", sorted(BUILT_IN))
def test_its_page(name: str) -> None:
    """Equations, settings, source and an example that runs."""
    algorithm = find(name)
    page = algorithm.__doc__ or ""
    for heading in ("Settings", "Source", "Example", "math::"):
        assert heading in page
    meanings = described(algorithm)
    assert list(meanings) == list(algorithm().settings())
    assert all(meanings.values())
    module = importlib.import_module(algorithm.__module__)
    assert doctest.testmod(module).failed == 0
    assert summary(algorithm).endswith(".")


class TestExactness:
    def test_hardsync_equals_sgd_on_the_whole_batch(self) -> None:
        """λ workers with batch µ are SGD with batch λµ."""
        rng = np.random.default_rng(0)
        x, w = rng.normal(size=(40, WORKERS * 8, 5)), np.zeros(5)
        y = x @ np.arange(5.0)
        inline = joined(started(("hardsync", {"lr": 0.05}), {"w": w}))
        for batch, target in zip(x, y, strict=True):
            w = w - 0.05 * batch.T @ (batch @ w - target) / len(batch)
            now = inline.params()["w"]
            for peer in range(WORKERS):
                rows = slice(8 * peer, 8 * peer + 8)
                gradient = batch[rows].T @ (batch[rows] @ now - target[rows]) / 8
                inline.push(peer + 1, {"w": gradient})
        np.testing.assert_allclose(inline.params()["w"], w, rtol=1e-12)

    def test_softsync_with_one_group_equals_hardsync_in_turns(self) -> None:
        results = []
        cases = (("softsync", {"n": 1, "modulate": "none", "lr": 0.1}), ("hardsync", {"lr": 0.1}))
        for case in cases:
            inline = joined(started(case, {"w": np.full(9, 5, np.float32)}))
            rng = np.random.default_rng(3)
            for _ in range(30):
                now, version = inline.params(), inline.version
                for peer in range(1, WORKERS + 1):
                    inline.push(peer, quadratic(now, rng), version)
            results.append(inline.params()["w"].tobytes())
        assert results[0] == results[1]

    def test_softsync_with_n_workers_equals_sasgd(self) -> None:
        results = []
        for case in (("softsync", {"n": WORKERS, "lr": 0.1}), ("sasgd", {"lr": 0.1})):
            inline = started(case, {"w": np.full(9, 5, np.float32)})
            train(crew_of(inline, WORKERS), 100, quadratic, seed=2)
            results.append(inline.params()["w"].tobytes())
        assert results[0] == results[1]

    def test_asgd_with_one_worker_equals_sgd(self) -> None:
        inline = joined(started(("asgd", {"lr": 0.1}), {"w": np.full(4, 2.0)}))
        w = np.full(4, 2.0)
        for _ in range(20):
            w = w - 0.1 * (w - 1)
            inline.push(1, {"w": inline.params()["w"] - 1})
        np.testing.assert_array_equal(inline.params()["w"], w)

    def test_fasgd_follows_its_equations(self) -> None:
        rng = np.random.default_rng(0)
        inline = joined(started(("fasgd", {}), {"w": np.zeros(6)}))
        w, n, b, v = np.zeros(6), np.zeros(6), np.zeros(6), np.ones(6)
        for step in range(50):
            g, base = rng.normal(size=6), max(0, step - step % 4)
            n, b = 0.95 * n + 0.05 * g**2, 0.95 * b + 0.05 * g
            v = 0.9 * v + 0.1 * np.sqrt(np.maximum(n - b**2, 0) + 1e-4)
            w = w - 0.005 / (v * max(step - base, 1)) * g
            inline.push(1, {"w": g}, base)
        np.testing.assert_allclose(inline.params()["w"], w, rtol=1e-12)
        assert inline.engine.store is not None
        assert inline.engine.store.vbar() == pytest.approx(v.mean(), rel=1e-6)

    def test_fasgd_with_a_relative_floor_follows_its_equations(self) -> None:
        rng = np.random.default_rng(0)
        inline = joined(started(("fasgd", {"relative": 0.01}), {"w": np.zeros(6)}))
        w, n, b, v = np.zeros(6), np.zeros(6), np.zeros(6), np.ones(6)
        for _ in range(50):
            g = rng.normal(size=6) + 3
            n, b = 0.95 * n + 0.05 * g**2, 0.95 * b + 0.05 * g
            v = 0.9 * v + 0.1 * np.sqrt(np.maximum(n - b**2, 0) + (0.01 * n + 1e-16))
            w = w - 0.005 / v * g
            inline.push(1, {"w": g}, inline.version)
        np.testing.assert_allclose(inline.params()["w"], w, rtol=1e-12)

    @pytest.mark.parametrize(("relative", "alike"), [(0.01, True), (0.0, False)])
    def test_steps_of_fasgd_with_a_relative_floor_do_not_depend_on_the_gradients_scale(
        self, relative: float, alike: bool
    ) -> None:
        moved = []
        for scale in (1.0, 1e-4):
            rng = np.random.default_rng(0)
            inline = joined(started(("fasgd", {"relative": relative}), {"w": np.zeros(20)}))
            for count in range(400):
                if count == 300:  # by then v has forgotten that it began at 1
                    before = inline.params()["w"].copy()
                inline.push(1, {"w": scale * (rng.normal(size=20) + 1)}, inline.version)
            moved.append(inline.params()["w"] - before)
        assert np.allclose(moved[0], moved[1], rtol=1e-3) is alike

    def test_no_delay_alone_without_lead_equals_sgd(self) -> None:
        inline = started(("no-delay", {"lr": 0.1, "tau_max": 1}), {"w": np.full(5, 4.0)})
        inline.engine.membership.expected = 1
        hand = Hand(inline, 1)
        w, rng, other = np.full(5, 4.0), np.random.default_rng(3), np.random.default_rng(3)
        for _ in range(50):
            w = w - 0.1 * quadratic({"w": w}, rng)["w"]
            hand.step(quadratic, other)
        np.testing.assert_allclose(inline.params()["w"], w, rtol=1e-12)
        assert inline.version == 50

    @pytest.mark.parametrize("variant", [1, 2])
    def test_no_delay_counts_every_step_once(self, variant: int) -> None:
        """With gradients that do not depend on where they are taken, the sum is plain."""
        settings = {"lr": 1.0, "tau_max": 4, "variant": variant}
        inline = started(("no-delay", settings), {"w": np.zeros(3)})
        hands, rng = crew_of(inline, WORKERS), np.random.default_rng(4)
        for _ in range(41):
            for index in rng.permutation(WORKERS):
                hands[index].step(lambda params, rng: {"w": np.full(3, -1.0)}, rng)
        for hand in hands:
            hand.finish()
        np.testing.assert_allclose(inline.params()["w"], 41.0, rtol=1e-12)

    def test_diloco_of_one_plain_step_averages_the_models(self) -> None:
        settings = {"local_steps": 1, "inner": "sgd", "inner_lr": 0.3, "optimizer": "sgd", "lr": 1}
        inline = started(("diloco", settings), {"w": np.full(5, 4.0)})
        hands, rng = crew_of(inline, WORKERS), np.random.default_rng(0)
        for _ in range(10):
            models = []
            before = inline.params()["w"]
            for hand in hands:
                gradient = quadratic(hand.params, rng)
                models.append(before - 0.3 * gradient["w"])
                hand.step(lambda params, rng, found=gradient: found, rng)  # type: ignore[misc]
            np.testing.assert_allclose(inline.params()["w"], np.mean(models, axis=0), rtol=1e-12)

    def test_elastic_moves_conserve_the_sum(self) -> None:
        """What the worker gives up is what the centre gets."""
        inline = started(("easgd", {"p": 1, "kappa": 0.2, "lr": 0.5}), {"w": np.zeros(4)})
        hand, rng = Hand(inline, 1), np.random.default_rng(0)
        for _ in range(20):
            x, centre = hand.params["w"].copy(), inline.params()["w"]
            gradient = rng.normal(size=4)
            hand.step(lambda params, rng, g=gradient: {"w": g}, rng)  # type: ignore[misc]
            moved = 0.2 * (x - 0.5 * gradient - centre)
            np.testing.assert_allclose(inline.params()["w"], centre + moved, rtol=1e-12)
            np.testing.assert_allclose(hand.params["w"], x - 0.5 * gradient - moved, rtol=1e-12)

    def test_dcasgd_follows_its_equations(self) -> None:
        rng = np.random.default_rng(0)
        inline = started(("dcasgd", {"adaptive": False, "lam": 0.5, "lr": 0.1}), {"w": np.zeros(4)})
        hands = crew_of(inline, 3)
        sent = [np.zeros(4)] * 3
        w = np.zeros(4)
        for step in range(30):
            which = int(rng.integers(3))
            g = rng.normal(size=4)
            w = w - 0.1 * (g + 0.5 * g * g * (w - sent[which]))
            hands[which].step(lambda params, rng, g=g: {"w": g}, rng)  # type: ignore[misc]
            sent[which] = w
            np.testing.assert_allclose(inline.params()["w"], w, rtol=1e-10, err_msg=str(step))

    def test_an_optimiser_under_softsync_modulates_the_step(self) -> None:
        """Adam sees the plain mean; the mean modulation multiplies its step."""
        settings = {"n": 1, "optimizer": "adam", "lr": 0.1, "modulate": "inverse"}
        moves = []
        for stale in (0, 4):
            inline = joined(started(("softsync", settings), {"w": np.zeros(3)}))
            for _ in range(stale):
                for peer in range(1, WORKERS + 1):
                    inline.push(peer, {"w": np.zeros(3)})
            before = inline.params()["w"]
            for peer in range(1, WORKERS + 1):
                inline.push(peer, {"w": np.ones(3)}, 0)
            moves.append(float((before - inline.params()["w"])[0]))
        t, beta1, beta2 = 5, 0.9, 0.999  # the fifth update of moments that were 0 until now
        unbiased = (1 - beta1) / (1 - beta1**t) / np.sqrt((1 - beta2) / (1 - beta2**t))
        assert moves[0] == pytest.approx(0.1, rel=1e-6)
        assert moves[1] == pytest.approx(0.1 / 4 * unbiased, rel=1e-6)

    def test_clipping_limits_the_norm_of_what_is_applied(self) -> None:
        settings = {"lr": 1.0, "clip": 2.0}
        inline = joined(started(("asgd", settings), {"w": np.zeros(4), "b": np.zeros(2)}))
        inline.push(1, {"w": np.full(4, 30.0), "b": np.full(2, -40.0)})
        moved = np.concatenate(list(inline.params().values()))
        assert np.linalg.norm(moved) == pytest.approx(2.0)
        before = inline.params()["w"]
        inline.push(1, {"w": np.full(4, 0.1)})
        np.testing.assert_allclose(before - inline.params()["w"], 0.1)

    def test_the_schedule_follows_the_version(self) -> None:
        settings = {"lr": 0.5, "schedule": "warmup:2,linear:8", "scale_lr": True}
        inline = joined(started(("asgd", settings), {"w": np.zeros(1)}))
        rates = []
        for _ in range(9):
            before = float(inline.params()["w"][0])
            inline.push(1, {"w": np.full(1, -1.0)})
            rates.append(float(inline.params()["w"][0]) - before)
        warm = [0.25 + 0.75 / 2, 1.0]
        expected = [0.5 * WORKERS * (warm[i] if i < 2 else 1) * (1 - i / 8) for i in range(9)]
        np.testing.assert_allclose(rates, expected, atol=1e-12)


class TestBounds:
    @pytest.mark.parametrize("settings", [{"s": 0}, {"s": 2}, {"s": 2, "get_model_frequency": 4}])
    def test_ssp_keeps_clocks_together(self, settings: dict[str, Any]) -> None:
        inline = started(("ssp", settings), {"w": np.zeros(3)})
        hands, rng = crew_of(inline, WORKERS), np.random.default_rng(7)
        furthest = 0
        for _ in range(400):
            free = [hand for hand in hands if not hand.waits]
            eager = max(free, key=lambda hand: hand.steps)  # the fastest goes as far as it may
            (eager if rng.random() < 0.8 else free[0]).step(quadratic, rng)
            steps = [hand.steps for hand in hands]
            furthest = max(furthest, max(steps) - min(steps))
        assert furthest == settings["s"] + 1  # while it computes, before it is held

    def test_ssp_starts_newcomers_at_the_slowest(self) -> None:
        inline = started(("ssp", {"s": 1}), {"w": np.zeros(3)})
        inline.engine.membership.expected = None
        hands = [Hand(inline, peer) for peer in (1, 2)]
        train(hands, 60, quadratic)
        newcomer = Hand(inline, 3)
        train([*hands, newcomer], 60, quadratic)
        assert newcomer.steps > 15

    def test_ringmaster_uses_nothing_too_stale(self) -> None:
        inline = started(("ringmaster", {"r": 3}), {"w": np.zeros(3)})
        train(crew_of(inline, WORKERS), 300, quadratic)
        report = inline.engine.report()
        assert max(map(int, report["staleness"])) < 3
        assert report["ignored"] > 0

    def test_rennala_uses_the_current_point_only(self) -> None:
        inline = started(("rennala", {"b": 3}), {"w": np.zeros(3)})
        train(crew_of(inline, WORKERS), 300, quadratic)
        report = inline.engine.report()
        assert set(report["staleness"]) == {"0"}
        assert report["gradients"] // 3 == inline.version

    @each_row(("variant", "tau_max"), [(1, 1), (1, 4), (2, 4)])
    def test_no_delay_bounds_the_lead(self, variant: int, tau_max: int) -> None:
        """With the slowest at rest, everybody else stops after τ_max steps."""
        settings = {"variant": variant, "tau_max": tau_max}
        inline = started(("no-delay", settings), {"w": np.zeros(3)})
        hands, rng = crew_of(inline, WORKERS), np.random.default_rng(7)
        for hand in hands[1:]:
            while not hand.waits:
                hand.step(quadratic, rng)
            assert hand.steps == tau_max

    def test_ssp_does_not_punish_who_comes_back(self) -> None:
        """The clocks of an empty crew are not 0, and an old clock is not kept."""
        inline = started(("ssp", {"s": 1}), {"w": np.zeros(3)})
        inline.engine.membership.expected = None
        first = Hand(inline, 1)
        train([first], 50, quadratic)
        inline.leave(1)
        second = Hand(inline, 2)
        train([second], 3, quadratic)
        inline.join(1, client="client-1", epoch=2)
        hands = [first, second]
        train(hands, 20, quadratic)
        assert first.steps > 50 + 5


class TestEnds:
    """What becomes of those who wait, or come late."""

    def test_hardsync_ignores_who_comes_after_the_step(self) -> None:
        inline = joined(started(("hardsync", {"lr": 1.0}), {"w": np.zeros(3)}))
        for peer in (1, 2, 3):
            inline.push(peer, {"w": np.ones(3)}, 0)
        inline.wait(1000.0)  # the fourth is given up
        np.testing.assert_array_equal(inline.params()["w"], -1)
        late = inline.push(4, {"w": np.full(3, 100.0)}, 0)
        assert isinstance(late, messages.Ack)
        assert not late.used
        np.testing.assert_array_equal(inline.params()["w"], -1)
        assert inline.engine.report()["wasted"] == 1
        for peer in (1, 2, 3, 4):  # it is back
            inline.push(peer, {"w": np.ones(3)}, 1)
        assert inline.version == 2

    def test_ssp_tells_the_held_at_the_end_that_their_steps_were_made(self) -> None:
        inline = joined(started(("ssp", {"s": 0, "lr": 1.0}), {"w": np.zeros(3)}))
        assert inline.push(1, {"w": np.ones(3)}) is None  # held: it is ahead
        inline.post(Stopping(inline.now))
        assert [ack.used for ack in inline.acks(1)] == [True]
        assert not inline.errors(1)

    def test_hardsync_tells_the_held_at_the_end_that_the_step_was_not_made(self) -> None:
        inline = joined(started(("hardsync", {}), {"w": np.zeros(3)}))
        assert inline.push(1, {"w": np.ones(3)}) is None
        inline.post(Stopping(inline.now))
        assert [error.code for error in inline.errors(1)] == ["unavailable"]

    def test_a_rule_that_reads_cannot_collect(self) -> None:
        class Collecting(DCASGD):
            name = "collecting"

            def policy(self, workers: int | None) -> Policy:
                return EveryNth(2)

        inline = Inline(Collecting())
        inline.define({"w": np.zeros(3)})
        inline.join(1)
        answer = inline.push(1, {"w": np.ones(3)})
        assert isinstance(answer, messages.Error)
        assert "must take a step with each gradient alone" in answer.text

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_gaps_are_not_made_of_rounding(self, dtype: str) -> None:
        """A fresh gradient moves a 16-bit model as far as one of 32 bits."""
        rng = np.random.default_rng(0)
        start = rng.normal(size=200)
        moved = []
        for name in ("float32", dtype):
            arrays = {"w": start.astype(dtype_named(name))}
            inline = started(("gap-aware", {"lr": 0.001}), arrays)
            hand = Hand(inline, 1)
            before = inline.engine.store
            assert before is not None
            for _ in range(100):
                gradient = {"w": np.full(200, 0.1, dtype_named(name))}
                hand.step(lambda params, rng, g=gradient: g, rng)  # type: ignore[misc]
            master = before.masters[0]
            now = before.current.arena.sections[0] if master is None else master
            moved.append(float(np.abs(now - arrays["w"].astype(np.float32)).mean()))
        assert moved[1] == pytest.approx(moved[0], rel=0.02)

    def test_eamsgd_follows_its_equations(self) -> None:
        """The spring is tied to x, and gradients are taken ahead of it."""
        rng = np.random.default_rng(0)
        settings = {"p": 2, "kappa": 0.3, "delta": 0.9, "lr": 0.1}
        inline = started(("eamsgd", settings), {"w": np.full(3, 2.0)})
        hand = Hand(inline, 1)
        x, v, centre = np.full(3, 2.0), np.zeros(3), np.full(3, 2.0)
        for step in range(1, 13):
            np.testing.assert_allclose(hand.params["w"], x + 0.9 * v, rtol=1e-10)
            g = rng.normal(size=3)
            hand.step(lambda params, rng, g=g: {"w": g}, rng)  # type: ignore[misc]
            v = 0.9 * v - 0.1 * g
            x = x + v
            if step % 2 == 0:
                d = 0.3 * (x - centre)
                x, centre = x - d, centre + d
                np.testing.assert_allclose(inline.params()["w"], centre, rtol=1e-10)


class TestSteps:
    """The numbers that the pages state under Steps."""

    @each_row("name", BUILT_IN)
    def test_the_page_says_what_a_step_is(self, name: str) -> None:
        [paragraph] = read(find(name).__doc__).sections["Steps"]
        for word in ("tep of a worker is ", "schedule``", "version", "mini-batch of µ examples"):
            assert word in paragraph.text, word
        local = issubclass(find(name), LocalTraining)
        assert ("inner_lr" in paragraph.text) is local

    @each_row(
        ("name", "settings", "versions"),
        [
            *((name, {}, 4 * 24) for name in ("asgd", "sasgd", "exponential", "fasgd", "ssp")),
            *((name, {}, 4 * 24) for name in ("dcasgd", "gap-aware", "ringmaster")),
            ("hardsync", {}, 24),
            ("softsync", {"n": 1}, 24),
            ("softsync", {"n": 2}, 48),
            ("downpour", {"n_push": 4, "n_fetch": 4}, 4 * 6),
            ("easgd", {"p": 4}, 4 * 6),
            ("eamsgd", {"p": 4}, 4 * 6),
            ("no-delay", {"tau_max": 1}, 24),
            ("no-delay", {"tau_max": 8, "variant": 2}, 24 // 4),
            ("diloco", {"local_steps": 4}, 6),
            ("diloco", {"local_steps": 4, "fragments": 2}, 2 * 6),
            ("diloco", {"local_steps": 4, "mode": "async"}, 4 * 6),
            ("fedbuff", {"local_steps": 4, "k": 3}, 4 * 6 // 3),
        ],
    )
    def test_updates_of_24_steps_of_each_of_4_workers(
        self, name: str, settings: dict[str, Any], versions: int
    ) -> None:
        inline = started((name, settings), {"w": np.ones(4), "b": np.ones(3)})
        hands, rng = crew_of(inline, 4), np.random.default_rng(0)
        for _ in range(24):
            for hand in hands:
                assert not hand.waits
                hand.step(quadratic, rng)
        assert inline.version == versions

    def test_updates_of_rennala_are_of_gradients_at_one_point(self) -> None:
        """Of eight gradients at version 0 the first four are used; four of each round are late."""
        inline = joined(started(("rennala", {"b": 4}), {"w": np.ones(4)}))
        for count in range(8):
            inline.push(count % 4 + 1, {"w": np.ones(4)}, 0)
        assert inline.version == 1

    @each_row(
        ("name", "settings", "own"),
        [
            ("easgd", {"p": 4}, True),
            ("no-delay", {"tau_max": 8, "variant": 2}, True),
            ("downpour", {"n_push": 4, "n_fetch": 4}, False),
        ],
    )
    def test_schedules_of_local_steps_count_the_workers_or_the_updates(
        self, name: str, settings: dict[str, Any], own: bool
    ) -> None:
        """With a rate of 0 after 10 of what is counted, a worker moves for 10 steps, or longer."""
        chosen = {**settings, "schedule": "step:1e-30:10", "lr": 0.5}
        inline = started((name, chosen), {"w": np.ones(4)})
        inline.engine.membership.expected = 1
        hand, rng, moved = Hand(inline, 1), np.random.default_rng(0), 0
        for step in range(1, 25):
            before = hand.params["w"].copy()
            hand.step(lambda params, rng: {"w": np.ones(4)}, rng)
            if step % 4 and not np.array_equal(before, hand.params["w"]):  # not the server's move
                moved = step
        assert moved == (10 if own else 23)


class TestSettings:
    @each_row(
        ("name", "settings", "words"),
        [
            ("gap-aware", {"scale_lr": True}, "cannot be scaled"),
            ("asgd", {"scale_lr": True}, "say how many with --workers"),
            ("easgd", {}, "the moving rate is 0.9 divided by"),
            ("diloco", {}, "waits for a known number of workers"),
            ("softsync", {}, "waits for a known number of workers"),
        ],
    )
    def test_conflicts_with_the_servers(
        self, name: str, settings: dict[str, Any], words: str
    ) -> None:
        algorithm = find(name).make(settings)
        with pytest.raises(ConflictError, match=words):
            algorithm.check(WORKERS if name == "gap-aware" else None)

    def test_relaxed_reads_have_no_whole_versions(self) -> None:
        with pytest.raises(ConflictError, match="no whole versions"):
            find("dcasgd").make({}).check(None, relaxed=True)

    @each_row(
        ("name", "settings", "words"),
        [
            ("no-delay", {"clip": 1}, "workers take the steps"),
            ("easgd", {"clip": 1}, "workers take the steps"),
            ("no-delay", {"variant": 2, "tau_max": 5}, "must be even"),
            ("diloco", {"local_steps": 10, "fragments": 4}, "make local_steps a multiple"),
            ("diloco", {"mode": "async", "weight_decay": 0.1}, "has no weight_decay"),
            ("diloco", {"mode": "async", "optimizer": "adam"}, "has no optimizer"),
            ("ssp", {"s": 0, "get_model_frequency": 2}, "1 or more"),
            ("asgd", {"optimizer": "adma"}, "did you mean 'adam'"),
            ("asgd", {"schedule": "cosin:5"}, "did you mean 'cosine'"),
            ("asgd", {"schedule": "cosine"}, "must have the form cosine:N"),
            ("diloco", {"local_steps": 10**20}, "must be (a whole number|below)"),
            ("asgd", {"lr": 1e39}, "outside the range of float32"),
            ("dcasgd", {"eps": 1e-50}, "outside the range of float32"),
            ("fasgd", {"optimizer": "adam"}, "has no setting 'optimizer'"),
            ("fasgd", {"relative": -0.1}, "relative must be from 0"),
            ("fasgd", {"relative": 0.1, "eps": 1e-6}, "leave one of them out"),
        ],
    )
    def test_what_cannot_work_is_refused(
        self, name: str, settings: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(UsageError, match=words):
            find(name).make(settings)


def test_tables_come_to_the_same_on_both_backends(case: tuple[str, dict[str, Any]]) -> None:
    """And to what the script saw, so a run with tables replays; or the reason names a way out."""
    name, settings = case
    why = tables_obstacle(find(name).make(settings))
    if why is not None:
        assert find(name).make(settings).name in why
        assert "choose" in why.lower() or "set clip to 0" in why
        return
    seeded = Case(name, tuple(settings.items()), tables=True)
    script, driver = Script(seeded, 6).run(100), Driver(seeded.engine(backend="numba"))
    for row, step in enumerate(script.steps, 1):
        assert driver.take(step, row) == script.effects[row - 1]
    assert digest(driver.engine) == digest(script.engine)
    assert all(table.version for table in driver.engine.tables)
