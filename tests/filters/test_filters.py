"""Each filter alone: what it refuses, and that it decides the same from a kept state."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from aiops.filters import curvature
from aiops.filters.agreement import AgreementFilter
from aiops.filters.arithmetic import Values
from aiops.filters.choice import made, most_bytes
from aiops.filters.curvature import CurvatureFilter
from aiops.filters.kardam import KardamFilter
from aiops.filters.norm import NormFilter
from aiops.filters.observation import WORKERS, Filter, Observation
from aiops.filters.sample import SAMPLED, Sample
from aiops.filters.screen import LEARNT, SEEDING, PushScreen
from aiops.filters.versions import SampledVersions
from aiops.model.arena import Arena
from aiops.model.layout import Cover, Layout
from aiops.store.snapshots import Version

SIZE, PEOPLE = 200, 9
HOSTILE = 3

Attack = Callable[[Values, np.random.Generator], Values]


def pushes(attack: Attack, *, own: bool, seed: int = 1, count: int = 360) -> list[Observation]:
    """Pushes of workers in turns, of which the first three are hostile.

    Each honest worker goes down ½ (θ − its optimum)ᵀ H (θ − its optimum), with noise.
    """
    draw = np.random.default_rng(seed)
    bend = 1 / np.arange(1, SIZE + 1)
    spread = 3.0 if own else 0.1
    optima = spread * draw.standard_normal((PEOPLE, SIZE))
    theta, bases, found = draw.standard_normal(SIZE), [np.zeros(SIZE)] * PEOPLE, []
    bases = [theta] * PEOPLE
    for _ in range(count):
        worker = int(draw.integers(PEOPLE))
        base = bases[worker]
        gradient = bend * (base - optima[worker]) + 0.02 * draw.standard_normal(SIZE)
        if worker < HOSTILE:
            gradient = attack(gradient, draw)
        norm = np.array([np.linalg.norm(gradient), np.abs(gradient).max()])
        seen = Observation(worker, np.array([0, 1]), norm, gradient, None, base, theta)
        found.append(seen)
        if worker >= HOSTILE:
            theta = theta - 0.3 * gradient
        bases[worker] = theta
    return found


def refusals(filter: Filter, found: list[Observation]) -> tuple[float, float]:
    """The shares of hostile and of honest pushes that are refused, of the second half."""
    for worker in range(PEOPLE):
        filter.forget(worker)
    refused: tuple[list[bool], list[bool]] = ([], [])
    for seen in found:
        finding = filter.judge(seen)
        filter.settle(seen, finding is None)
        refused[seen.worker >= HOSTILE].append(finding is not None)
    hostile, honest = (float(np.mean(each[len(each) // 2 :])) for each in refused)
    return hostile, honest


def flipped(gradient: Values, draw: np.random.Generator) -> Values:
    return -gradient


def noise(gradient: Values, draw: np.random.Generator) -> Values:
    found = draw.standard_normal(SIZE)
    return found * np.linalg.norm(gradient) / np.linalg.norm(found)


def common(gradient: Values, draw: np.random.Generator) -> Values:
    return np.cos(np.arange(SIZE)) * np.linalg.norm(gradient) / 3


class TestUsualNorm:
    """A filter that has seen eight pushes and more of each of eight workers, of norm 1."""

    def begun(self, workers: int = 8) -> NormFilter:
        norms = NormFilter(["w"], 20.0)
        for worker in range(workers):
            norms.forget(worker)
        assert not any(self.push(norms, 1.0, workers) for _ in range(10))
        return norms

    def push(self, norms: NormFilter, norm: float, workers: int = 8) -> bool:
        """Have some workers push; return whether the last is refused."""
        for worker in range(workers):
            seen = Observation(worker, np.array([0]), np.array([norm]), None, None, None, None)
            finding = norms.judge(seen)
        return finding is not None

    @pytest.mark.parametrize("workers", [8, 40])
    def test_it_falls_by_half_in_256_pushes_of_each_worker(self, workers: int) -> None:
        """A worker whose data is unlearnt has the gradient of the start, and others have none."""
        norms = self.begun(workers)
        assert not any(self.push(norms, 1e-4, workers) for _ in range(256))
        np.testing.assert_allclose(norms.usual[0], 0.5, rtol=0.03)
        np.testing.assert_allclose(norms.median[0], 1e-4)
        assert not self.push(norms, 9.0, workers=1)
        assert self.push(norms, 11.0, workers=1)
        for _ in range(256 * 4):
            self.push(norms, 1e-4, workers)
        assert self.push(norms, 1.0, workers=1)

    def test_it_rises_slowly(self) -> None:
        """A crowd leaves little behind."""
        norms = self.begun()
        for _ in range(8):
            self.push(norms, 1e9)
        assert norms.median[0] == 1e9
        assert norms.usual[0] < 1.6
        for _ in range(8):
            self.push(norms, 1.0)
        assert self.push(norms, 40.0, workers=1)

    def test_it_stays_while_no_worker_pushes_the_tensor(self) -> None:
        norms = self.begun()
        for _ in range(300):
            for worker in range(8):
                nothing = np.array([], np.int64)
                seen = Observation(worker, nothing, np.array([]), None, None, None, None)
                norms._renew(norms._due())
                norms._note(seen)
        assert np.isnan(norms.median[0])
        assert norms.usual[0] == 1.0

    def test_where_most_have_no_gradient_at_all_none_is_too_large(self) -> None:
        norms = self.begun()
        for _ in range(2000):
            self.push(norms, 0.0)
        assert norms.usual[0] > 0
        assert not self.push(norms, 1.0, workers=1)

    def test_gradients_that_grow_are_used(self) -> None:
        norms = self.begun()
        assert not any(self.push(norms, 1.05**turn) for turn in range(300))


@pytest.mark.parametrize("own", [False, True], ids=["same-data", "own-data"])
def test_curvature_refuses_flipped_signs_whatever_data_workers_have(own: bool) -> None:
    hostile, honest = refusals(CurvatureFilter(SIZE), pushes(flipped, own=own))
    assert hostile > 0.9
    assert honest < 0.05


@pytest.mark.parametrize("kind", [CurvatureFilter, lambda size: KardamFilter(size, 0.25)])
def test_parameters_whose_squares_overflow_are_not_compared(
    kind: Callable[[int], CurvatureFilter | KardamFilter],
) -> None:
    """A float64 has room for them; NaN would stay in a worker's mean."""
    filter, draw = kind(SIZE), np.random.default_rng(1)
    for worker in range(3):
        filter.forget(worker)
    for turn, scale in enumerate([1.0] * 9 + [1e200, -1e308, 1e308] * 3 + [1.0] * 9):
        base = scale * draw.uniform(0.5, 1.0, SIZE)
        norms, theta = np.ones(2), base + draw.standard_normal(SIZE)
        filter.judge(Observation(turn % 3, np.arange(2), norms, base / scale, None, base, theta))
    for name, kept in filter.state().items():
        assert not np.isnan(kept[:3]).any(), name


def rounds(seed: int, count: int = 150) -> list[Observation]:
    """Pushes in a barrier: all workers compute on one version, and the sum of all moves it.

    Each has data of its own, and the noise of a gradient is larger than what a step changes.
    """
    draw = np.random.default_rng(seed)
    bend = 1 / np.sqrt(np.arange(1, SIZE + 1))
    optima = 3.0 * draw.standard_normal((PEOPLE, SIZE))
    theta, found = draw.standard_normal(SIZE), []
    for _ in range(count):
        total = np.zeros(SIZE)
        for worker in range(PEOPLE):
            gradient = bend * (theta - optima[worker]) + 0.1 * draw.standard_normal(SIZE)
            if worker < HOSTILE:
                gradient = -gradient
            norm = np.array([np.linalg.norm(gradient), np.abs(gradient).max()])
            found.append(Observation(worker, np.array([0, 1]), norm, gradient, None, theta, theta))
            total += gradient
        theta = theta - 0.01 * total
    return found


@pytest.mark.parametrize("seed", range(3))
def test_curvature_refuses_flipped_signs_in_a_barrier(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients eight steps apart are compared: over one, a worker's own noise hides it."""
    found = rounds(seed)
    hostile, honest = refusals(CurvatureFilter(SIZE), found)
    assert hostile > 0.95
    assert honest < 0.05
    monkeypatch.setattr(curvature, "SPAN", 1)
    hostile, _honest = refusals(CurvatureFilter(SIZE), found)
    assert hostile < 0.1


@pytest.mark.parametrize("attack", [flipped, noise, common])
def test_agreement_refuses_what_does_not_go_the_common_way(attack: Attack) -> None:
    found = pushes(attack, own=False, count=120)
    hostile, honest = refusals(AgreementFilter(SIZE, 1), found)
    assert hostile > 0.9
    assert honest < 0.05


def test_agreement_refuses_nothing_where_there_is_no_common_way_but_copies() -> None:
    hostile, honest = refusals(AgreementFilter(SIZE, 1), pushes(flipped, own=True))
    assert (hostile, honest) == (0, 0)
    hostile, honest = refusals(AgreementFilter(SIZE, 1), pushes(common, own=True))
    assert hostile > 0.9
    assert honest == 0


def test_agreement_waits_for_most_workers() -> None:
    """Hostile workers that push first, and the same, are no majority: honest ones pass."""
    draw, agreement = np.random.default_rng(1), AgreementFilter(SIZE, 1)
    turns = [worker for worker in range(4) for _ in range(6)]  # hostile, before all others
    turns += [worker for _ in range(6) for worker in range(4, 12)]
    refused: set[int] = set()
    for worker in range(12):
        agreement.forget(worker)
    # Two of each at first, which are too few to be compared; and in the end the hostile ones again.
    for worker in [*range(12)] * 2 + turns + [*range(4)]:
        gradient = np.ones(SIZE) if worker < 4 else draw.standard_normal(SIZE)
        seen = Observation(worker, np.empty(0, int), np.empty(0), gradient, None, None, None)
        if agreement.judge(seen) is not None:
            refused.add(worker)
    assert refused == {0, 1, 2, 3}


def test_kardam_has_no_sign_and_refuses_half_of_all() -> None:
    hostile, honest = refusals(KardamFilter(SIZE, 1 / 3), pushes(flipped, own=False))
    assert abs(hostile - honest) < 0.15
    assert 0.3 < honest < 0.7


FILTERS: dict[str, Callable[[], Filter]] = {
    "norm": lambda: NormFilter(["w"], 1.5),
    "curvature": lambda: CurvatureFilter(SIZE),
    "agreement": lambda: AgreementFilter(SIZE, 1),
    "kardam": lambda: KardamFilter(SIZE, 1 / 3),
}


@pytest.mark.parametrize("name", FILTERS)
def test_what_is_kept_decides_the_same(name: str) -> None:
    one, other = FILTERS[name](), FILTERS[name]()
    found = pushes(flipped, own=True, count=200)
    refusals(one, found[:100])
    other.restore(one.state())
    decided = []
    for filter in (one, other):
        said = []
        for seen in found[100:]:
            finding = filter.judge(seen)
            filter.settle(seen, finding is None)
            said.append(finding)
        decided.append(said)
    assert decided[0] == decided[1]
    assert any(decided[0]) or name == "agreement"


class TestSample:
    LAYOUT = Layout(
        [("w", "float32", (300, 400)), ("b", "float64", (7,)), ("h", "float16", (50, 50)),
         ("none", "float32", (0,))]
    )  # fmt: skip

    def gradient(self) -> np.ndarray:
        arena = Arena(self.LAYOUT)
        draw = np.random.default_rng(3)
        for array in arena.sections:
            array[:] = draw.standard_normal(array.size)
        return arena.data

    def test_it_estimates_norms_and_reads_small_tensors_whole(self) -> None:
        sample, data = Sample(self.LAYOUT, 5), self.gradient()
        assert SAMPLED / 2 < sample.size < 2 * SAMPLED
        norms = sample.norms(sample.read(data), 1.0)
        views = {tensor.name: norms[at] for at, tensor in enumerate(self.LAYOUT.tensors)}
        assert views["b"] == pytest.approx(np.linalg.norm(data[: 7 * 8].view(np.float64)))
        assert views["w"] == pytest.approx(np.sqrt(120_000), rel=0.1)
        assert views["none"] == 0

    def test_a_part_is_read_as_it_is_of_the_whole(self) -> None:
        sample, data, layout = Sample(self.LAYOUT, 5), self.gradient(), self.LAYOUT
        chosen = np.array([layout.index["b"], layout.index["h"]])
        pieces = [data[layout.starts[k] : layout.starts[k] + layout.nbytes_each[k]] for k in chosen]
        cover = Cover(chosen, np.array([0, len(pieces[0])]), False, 0, None)
        part = sample.read_part(np.concatenate(pieces), cover)
        expected = np.where(sample.covered(cover), sample.read(data), 0)
        np.testing.assert_array_equal(part, expected)

    def test_another_seed_reads_other_places(self) -> None:
        data = self.gradient()
        one, other, same = (Sample(self.LAYOUT, seed).read(data) for seed in (1, 2, 1))
        assert (one != other).any()
        np.testing.assert_array_equal(one, same)


def test_more_workers_than_rows_take_those_of_the_workers_seen_least() -> None:
    layout = Layout([("w", "float32", (30,))])
    screen, version = PushScreen("robust", layout), Version(0, Arena(layout), np.zeros(1, int), 0)
    data = np.random.default_rng(1).standard_normal(30).astype(np.float32).view(np.uint8)
    cover = Cover(layout.all, layout.starts, True, 0, None)
    for worker in range(SEEDING + LEARNT + WORKERS + 5):
        screen.judge(worker, data, cover, 1.0, None, version)
    rows = dict(screen.state()["rows"])
    assert len(rows) == len(set(rows.values())) == WORKERS
    assert max(rows.values()) == WORKERS - 1
    assert SEEDING + LEARNT not in rows


def test_filters_are_made_in_the_order_of_their_names() -> None:
    layout = Layout([("w", "float32", (30,))])
    found = made("kardam+norm:3", ["w"], Sample(layout, 1), 1)
    assert [type(each) for each in found] == [KardamFilter, NormFilter]


def test_as_many_versions_are_kept_as_workers_are_compared() -> None:
    versions = SampledVersions(3)
    for number in range(300):
        versions.keep(number, np.full(3, number))
    assert versions.find(299 - WORKERS) is None
    for number in (299, 300 - WORKERS):
        np.testing.assert_array_equal(versions.find(number), np.full(3, number))
    again = SampledVersions(3)
    again.restore(versions.state())
    np.testing.assert_array_equal(again.values, versions.values)
    np.testing.assert_array_equal(again.numbers, versions.numbers)


@pytest.mark.parametrize("text", ["robust", "norm+kardam", "agreement"])
def test_filters_keep_no_more_than_they_say(text: str) -> None:
    """Of more workers than are compared, and of more versions than are kept."""
    layout = Layout([("w", "float32", (700,)), ("b", "float16", (9,))])
    screen, draw = PushScreen(text, layout), np.random.default_rng(1)
    arena, gradient = Arena(layout), Arena(layout)
    for each in (arena, gradient):
        for array in each.sections:
            array[:] = draw.standard_normal(array.size)
    for turn in range(SEEDING + LEARNT + WORKERS + 20):
        cover = Cover(layout.all, layout.starts, True, turn, None)
        version = Version(turn, arena, None, turn)
        screen.judge(turn, gradient.data, cover, 3.0, None, version)
    state = screen.state()
    found = [each for kept in state["filters"] for each in kept.values()]
    nbytes = sum(each.nbytes for each in [*found, *state["versions"][1]] if hasattr(each, "nbytes"))
    assert 0.95 * most_bytes(text, layout) < nbytes < 1.01 * most_bytes(text, layout)
