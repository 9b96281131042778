"""What a gate keeps back: sums, stamps and counts; what is put back; what is applied again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.algorithms import find
from aiops.bandwidth.gates import find as gate
from aiops.client.params import Params
from aiops.client.request_kinds import Receipt, Request
from aiops.client.strategies import Transfer, strategy_for
from aiops.client.strategies.gated import Gated
from aiops.errors import BadPush, UsageError
from aiops.model.layout import Layout, dtype_named
from aiops.wire import messages
from tests.rows import each_row

ACK = Receipt(1, 0, 0.0, None, {})
"""Of a push that was used."""

IGNORED = Receipt(1, 0, 0.0, None, {}, used=False)


def routine_of(spec: str, dtype: str = "float64", worker: int = 1, **sizes: int) -> Gated:
    """A gated routine on tensors (w: 2 elements, b: 1) of version 0."""
    if "combine" not in spec:  # means show what each push holds
        spec += ("," if ":" in spec else ":") + "combine=mean"
    sizes = sizes or {"w": 2, "b": 1}
    params = Params(Layout([(name, dtype, (size,)) for name, size in sizes.items()]))
    params.arena.data[:] = 0
    params.version = 0
    params.connection = ("me", 1)
    algorithm = find("fasgd").make({})
    plan = {**algorithm.plan(None), **gate(spec).plan(algorithm), "worker": worker}
    routine = strategy_for(plan, params)
    assert isinstance(routine, Gated)
    return routine


def step(routine: Gated, value: float, *names: str) -> Transfer | None:
    """Apply a gradient of equal elements, and return what is to travel."""
    given = names or tuple(routine.params)
    routine.apply({name: np.full_like(routine.params[name], value) for name in given})
    return routine.transfer()


def values(transfer: Transfer | None) -> dict[str, list[float]]:
    """What is pushed."""
    assert transfer is not None
    assert transfer.arrays is not None
    return {name: [float(x) for x in array] for name, array in transfer.arrays.items()}


def arrive(routine: Gated, version: int | None = None, *, receipt: Receipt | None = ACK) -> None:
    """Answer what is under way: the wanted tensors are then of a version."""
    transfer = routine.under_way
    assert transfer is not None
    if transfer.into is not None and version is not None:
        wanted = routine.params.layout.all if transfer.wanted is None else transfer.wanted
        routine.params.versions[wanted] = version
        routine.params.held[wanted] = version
    pushes = transfer.arrays is not None or transfer.again
    routine.arrived(receipt if pushes else None)


def news(routine: Gated, vbar: float | None, *vbars: float, gate: tuple[float, ...] = ()) -> None:
    """Answer what is under way with statistics."""
    transfer = routine.under_way
    assert transfer is not None
    request = Request()
    request.reply = messages.FetchedParams(0, 1, (), vbar, np.array(vbars, "<f4").tobytes(), gate)
    transfer.request = request
    arrive(routine)


class TestAccumulate:
    @pytest.mark.parametrize(("combine", "expected"), [("mean", 2.0), ("sum", 6.0)])
    def test_what_was_kept_back_travels_with_its_count(self, combine: str, expected: float) -> None:
        routine = routine_of(f"periodic:k_push=3,k_fetch=1000,combine={combine}")
        assert step(routine, 1) is None
        assert step(routine, 2) is None
        transfer = step(routine, 3)
        assert values(transfer) == {"w": [expected] * 2, "b": [expected]}
        assert transfer is not None
        assert (transfer.count, transfer.into) == (3, None)
        arrive(routine)
        assert [step(routine, value) for value in (5, 5)] == [None, None]
        assert values(step(routine, 5))["b"] == [5.0 if combine == "mean" else 15.0]

    def test_each_tensor_has_its_own_count(self) -> None:
        routine = routine_of("periodic:k_push=4,k_fetch=1000,combine=mean")
        for names in (("w",), ("b",), ("w",)):
            assert step(routine, 6, *names) is None
        transfer = step(routine, 3, "w")
        assert values(transfer) == {"w": [5, 5], "b": [6]}
        assert transfer is not None
        assert transfer.count == 3
        arrive(routine)
        for _ in range(3):
            step(routine, 1, "b")
        assert values(step(routine, 1, "b")) == {"b": [1]}, "w has no gradient"

    @each_row(("stamp", "expected"), [("oldest", [0, 7]), ("mean", [5, 8]), ("newest", [9, 9])])
    def test_stamps(self, stamp: str, expected: list[int]) -> None:
        """Gradients of w at versions 0, 7 and 9, of b at 7 and 9: (0+7+9)//3, (7+9)//2."""
        routine = routine_of(f"periodic:k_push=3,k_fetch=1,stamp={stamp}")
        step(routine, 1, "w")
        arrive(routine, 7)
        step(routine, 1)
        arrive(routine, 9)
        transfer = step(routine, 1)
        assert transfer is not None
        by_name = dict(zip(routine.params, transfer.at.versions.tolist(), strict=True))
        assert [by_name["w"], by_name["b"]] == expected

    def test_tensors_that_were_not_fetched_keep_their_true_version(self) -> None:
        routine = routine_of("periodic:k_push=1,k_fetch=1")
        step(routine, 1)
        arrive(routine, 3)
        b = routine.params.layout.index["b"]
        routine.params.versions[b] = 8
        transfer = step(routine, 1)
        assert transfer is not None
        assert transfer.at.versions[b] == 8
        assert transfer.at.versions[1 - b] == 3

    def test_the_stamp_does_not_move_while_it_travels(self) -> None:
        routine = routine_of("periodic:k_push=1,k_fetch=1")
        transfer = step(routine, 1)
        assert transfer is not None
        routine.params.versions[:] = 50  # the answer is being received into the same arrays
        assert transfer.at.versions.tolist() == [0, 0]

    @each_row("stamp", ["oldest", "mean", "newest"])
    @each_row("combine", ["mean", "sum"])
    def test_what_was_refused_goes_back(self, combine: str, stamp: str) -> None:
        """As if the gate had not opened."""
        pushed = []
        for refused in (False, True):
            every = 2 if refused else 4
            routine = routine_of(
                f"periodic:k_push={every},k_fetch=1,combine={combine},stamp={stamp}"
            )
            for count, value in enumerate((1, 2, 3, 6), 1):
                transfer = step(routine, value)
                if count == 4:
                    break
                if refused and count == 2:
                    assert transfer is not None
                    assert transfer.arrays is not None
                    routine.failed()
                    routine.params.versions[:] = 10 * count
                else:
                    arrive(routine, 10 * count)
            assert transfer is not None
            pushed.append((values(transfer), transfer.at.versions.tolist(), transfer.count))
        assert pushed[0] == pushed[1]
        assert pushed[0][2] == 4

    def test_a_fetch_that_fails_loses_nothing(self) -> None:
        routine = routine_of("periodic:k_push=2,k_fetch=1")
        step(routine, 4)
        routine.failed()
        assert values(step(routine, 2)) == {"w": [3, 3], "b": [3]}

    def test_a_push_that_nobody_knows_of_stays_as_it_is(self) -> None:
        """The connection was lost: the same transfer is carried again, while steps go on."""
        routine = routine_of("periodic:k_push=1,k_fetch=1")
        transfer = step(routine, 4)
        routine.apply({name: np.full_like(array, 9) for name, array in routine.params.items()})
        assert routine.under_way is transfer
        assert values(transfer) == {"w": [4, 4], "b": [4]}
        arrive(routine, 1)
        assert values(routine.transfer()) == {"w": [9, 9], "b": [9]}

    def test_the_rest_is_pushed_at_the_end(self) -> None:
        routine = routine_of("periodic:k_push=100,k_fetch=100")
        assert routine.rest() is None
        step(routine, 1)
        step(routine, 3)
        rest = routine.rest()
        assert rest is not None
        assert values(rest) == {"w": [2, 2], "b": [2]}
        assert (rest.count, rest.into) == (2, None)
        assert routine.under_way is rest
        arrive(routine)
        assert routine.rest() is None

    def test_after_a_restart_versions_are_the_new_servers(self) -> None:
        for stamp in ("oldest", "mean", "newest"):
            routine = routine_of(f"periodic:k_push=3,k_fetch=1,stamp={stamp}")
            step(routine, 1)
            arrive(routine, 100)
            step(routine, 2)
            routine.failed()
            routine.restarted()
            assert routine.refresh() is routine.under_way
            routine.params.connection = ("me", 2)
            arrive(routine, 4)
            transfer = step(routine, 3)
            assert values(transfer) == {"w": [2, 2], "b": [2]}
            assert transfer is not None
            assert transfer.at.versions.tolist() == [4, 4], stamp
            assert transfer.at.connection == ("me", 2)

    def test_a_push_refused_by_a_restart(self) -> None:
        """It goes back, and is stamped again with what is fetched next."""
        routine = routine_of("periodic:k_push=2,k_fetch=1000,combine=sum")
        step(routine, 1)
        step(routine, 2)
        routine.failed()
        routine.restarted()
        routine.refresh()
        routine.params.connection = ("me", 2)
        arrive(routine, 1)
        step(routine, 3)
        transfer = step(routine, 4)
        assert values(transfer)["w"] == [10, 10]
        assert transfer is not None
        assert (transfer.at.versions.tolist(), transfer.count) == ([1, 1], 4)

    @each_row("dtype", ["float16", "bfloat16"])
    @each_row("combine", ["mean", "sum"])
    def test_16_bits_lose_nothing(self, dtype: str, combine: str) -> None:
        """What was pushed, and what is left of it, is what was handed in."""
        rng = np.random.default_rng(3)
        routine = routine_of(f"periodic:k_push=3,k_fetch=1000,combine={combine}", dtype, w=50)
        given, pushed = np.zeros(50), np.zeros(50)
        for count in range(1, 301):
            gradient = rng.normal(size=50).astype(dtype_named(dtype))
            given += gradient.astype(np.float64)
            routine.apply({"w": gradient})
            transfer = routine.transfer()
            if transfer is not None:
                assert transfer.arrays is not None
                times = transfer.count if combine == "mean" else 1
                pushed += transfer.arrays["w"].astype(np.float64) * times
                if count % 2:
                    arrive(routine)
                else:
                    pushed -= transfer.arrays["w"].astype(np.float64) * times
                    routine.failed()
        while (transfer := routine.rest()) is not None:
            assert transfer.arrays is not None
            times = transfer.count if combine == "mean" else 1
            pushed += transfer.arrays["w"].astype(np.float64) * times
            arrive(routine)
        # One rounding is left in the sum, which the next push would take along.
        ulp = float(np.finfo(dtype_named(dtype)).eps) if dtype == "float16" else 2.0**-8
        np.testing.assert_allclose(pushed, given, atol=30 * ulp)

    def test_a_sum_beyond_float16_is_cut_and_the_rest_travels_later(self) -> None:
        routine = routine_of("periodic:k_push=2,k_fetch=1000,combine=sum", "float16")
        step(routine, 40_000)
        assert values(step(routine, 40_000))["b"] == [65_504]
        arrive(routine)
        step(routine, 0)
        assert values(step(routine, 0))["b"] == [pytest.approx(80_000 - 65_504, rel=1e-3)]

    @each_row("bad", [np.nan, np.inf, 1e18])
    def test_a_bad_gradient_spoils_no_sum_and_is_no_step(self, bad: float) -> None:
        routine = routine_of("periodic:k_push=2,k_fetch=1000")
        step(routine, 1)
        with pytest.raises(BadPush, match="no step was taken"):
            step(routine, bad)
        with pytest.raises(UsageError, match="no tensor 'x'"):
            routine.apply({"x": np.ones(2)})
        assert values(step(routine, 3)) == {"w": [2, 2], "b": [2]}


class TestAgain:
    def test_the_first_push_is_whole_whatever_the_gate(self) -> None:
        routine = routine_of("periodic:k_push=1000,k_fetch=1000,skipped=reapply")
        transfer = step(routine, 3)
        assert values(transfer) == {"w": [3, 3], "b": [3]}
        arrive(routine)
        transfer = step(routine, 4)
        assert transfer is not None
        assert (transfer.arrays, transfer.again, transfer.into) == (None, True, None)

    def test_what_the_server_has_forgotten_is_sent_anew(self) -> None:
        routine = routine_of("periodic:k_push=1000,k_fetch=1000,skipped=reapply")
        step(routine, 1)
        arrive(routine)
        assert step(routine, 2) is not None
        arrive(routine, receipt=IGNORED)
        assert values(step(routine, 3))["b"] == [3]
        arrive(routine)
        transfer = step(routine, 4)
        assert transfer is not None
        assert transfer.again

    def test_after_a_restart_the_next_is_whole(self) -> None:
        routine = routine_of("periodic:k_push=1000,k_fetch=1000,skipped=reapply")
        step(routine, 1)
        arrive(routine)
        routine.restarted()
        routine.refresh()
        arrive(routine, 0)
        assert values(step(routine, 2))["b"] == [2]

    def test_an_open_gate_sends_the_new_one(self) -> None:
        routine = routine_of("periodic:k_push=2,k_fetch=1000,skipped=reapply")
        step(routine, 1)
        arrive(routine)
        assert values(step(routine, 2))["b"] == [2]

    def test_it_can_bring_parameters(self) -> None:
        routine = routine_of("periodic:k_push=1000,k_fetch=2,skipped=reapply")
        step(routine, 1)
        arrive(routine)
        transfer = step(routine, 2)
        assert transfer is not None
        assert transfer.again
        assert transfer.into is routine.params

    def test_nothing_is_left_at_the_end(self) -> None:
        routine = routine_of("constant:p_push=0.001,p_fetch=0.001,skipped=reapply")
        step(routine, 1)
        arrive(routine)
        assert routine.rest() is None


class TestDiscard:
    def test_what_is_kept_back_is_gone(self) -> None:
        routine = routine_of("periodic:k_push=2,k_fetch=1000,skipped=discard")
        assert step(routine, 1) is None
        assert values(step(routine, 5)) == {"w": [5, 5], "b": [5]}
        arrive(routine)
        assert step(routine, 7) is None
        assert routine.rest() is None


class TestDecisions:
    def opened(self, spec: str, worker: int, steps: int = 200) -> list[tuple[bool, bool]]:
        routine = routine_of(spec, worker=worker)
        found = []
        for _ in range(steps):
            transfer = step(routine, 1)
            found.append(
                (
                    transfer is not None and transfer.arrays is not None,
                    transfer is not None and transfer.into is not None,
                )
            )
            if transfer is not None:
                arrive(routine)
        return found

    def test_each_worker_has_a_stream_of_its_own_always_the_same(self) -> None:
        spec = "constant:p_push=0.3,p_fetch=0.6"
        assert self.opened(spec, 1) == self.opened(spec, 1)
        assert self.opened(spec, 1) != self.opened(spec, 2)
        assert self.opened(spec, 1) != self.opened(f"{spec},seed=7", 1)

    def test_directions_are_drawn_apart(self) -> None:
        found = self.opened("constant:p_push=0.5,p_fetch=0.5", 1)
        assert {(push, fetch) for push, fetch in found} == {
            (a, b) for a in (False, True) for b in (False, True)
        }

    def test_as_often_as_the_chances_say(self) -> None:
        found = self.opened("constant:p_push=0.2,p_fetch=0.7", 3, steps=4000)
        pushes, fetches = np.mean(found, axis=0)
        assert pushes == pytest.approx(0.2, abs=0.03)
        assert fetches == pytest.approx(0.7, abs=0.03)

    def test_the_longest_run_of_skips(self) -> None:
        found = self.opened("constant:p_push=1e-12,p_fetch=1e-12,longest=4", 1, steps=20)
        assert [push for push, _fetch in found] == ([False] * 4 + [True]) * 4
        assert found == [(push, push) for push, _fetch in found]

    def test_the_statistic_closes_the_gate(self) -> None:
        routine = routine_of("bfasgd:c_push=1e9,c_fetch=1e9,longest=1000,share=0")
        step(routine, 1)
        arrive(routine)
        assert step(routine, 1) is not None, "an answer without news changes nothing"
        news(routine, 0.01)
        assert [step(routine, 1) for _ in range(50)] == [None] * 50

    @pytest.mark.parametrize("share", [0.05, 0.25])
    @pytest.mark.parametrize("chance", [1e-12, 0.02, 0.3])
    def test_the_least_share_of_pushes(self, share: float, chance: float) -> None:
        """Of any n in a row at least share · (n − longest), and no more than it takes."""
        spec = f"constant:p_push={chance},p_fetch=1e-12,longest=40,share={share}"
        found = self.opened(spec, 1, steps=1000)
        pushes = np.concatenate([[0], np.cumsum([push for push, _fetch in found])])
        for n in (1, 41, 60, 100, 500, 1000):
            within = pushes[n:] - pushes[:-n]
            assert within.min() >= np.floor(share * (n - 40)), n
        assert pushes[-1] / 1000 == pytest.approx(max(share, chance), rel=0.25)
        assert sum(fetch for _push, fetch in found) == 1000 // 41, "it is for pushes alone"

    def test_without_a_least_share_the_longest_run_is_the_bound(self) -> None:
        found = self.opened("constant:p_push=1e-12,p_fetch=1,longest=40", 1, steps=410)
        assert sum(push for push, _fetch in found) == 10

    @pytest.mark.parametrize("budget", [(), (1e9, 0.0)])
    def test_the_gate_of_bfasgd_starves_no_training(self, budget: tuple[float, ...]) -> None:
        """As on a model of gradients that are much smaller than those its constants are for."""
        routine, pushes = routine_of(f"bfasgd:c_push={0 if budget else 1e9},c_fetch=0"), 0
        for _ in range(1000):
            transfer = step(routine, 1)
            assert transfer is not None
            pushes += transfer.arrays is not None
            news(routine, 1e-4, gate=budget)
        assert 0.05 * (1000 - 100) <= pushes <= 60

    def test_the_level_of_the_statistic_is_followed(self) -> None:
        routine, pushes = routine_of("bfasgd:c_push=3,c_fetch=0,relative=true"), 0
        for count in range(2000):
            transfer = step(routine, 1)
            assert transfer is not None
            pushes += transfer.arrays is not None
            news(routine, max(0.9**count, 1e-6))
        assert pushes / 2000 == pytest.approx(0.25, abs=0.03)

    def test_a_budget_opens_it_again(self) -> None:
        routine = routine_of("bfasgd:c_push=1e9,c_fetch=1e9,longest=5,share=0")
        step(routine, 1)
        news(routine, 0.01)
        while step(routine, 1) is None:
            pass
        news(routine, 0.01, gate=(0.0, 0.0))
        for _ in range(10):
            transfer = step(routine, 1)
            assert transfer is not None
            assert transfer.into is not None
            news(routine, 0.01, gate=(0.0, 0.0))


class TestByTensor:
    SPEC = "bfasgd:by=tensor,longest=1000,share=0,c_push=0.1,c_fetch=0.1,eps=1e-12"

    def with_statistics(self, *vbars: float) -> Gated:
        """A routine that has learned its tensors' statistics (w, b)."""
        routine = routine_of(self.SPEC)
        order = list(routine.params)
        assert step(routine, 0) is not None
        by_name = dict(zip(("w", "b"), vbars, strict=True))
        news(routine, 1.0, *(by_name[name] for name in order))
        return routine

    def test_only_tensors_that_pass_travel(self) -> None:
        routine = self.with_statistics(1e12, 0.0)  # w always, b never
        w = [routine.params.layout.index["w"]]
        for count in range(1, 10):
            transfer = step(routine, count)
            assert values(transfer) == {"w": [count, count]}
            assert transfer is not None
            assert transfer.wanted is not None
            assert (transfer.wanted.tolist(), transfer.count) == (w, 1)
            arrive(routine, count)
        rest = routine.rest()
        assert values(rest) == {"b": [5]}
        assert rest is not None
        assert rest.count == 9

    def test_each_tensor_has_its_own_least_share(self) -> None:
        routine = routine_of("bfasgd:by=tensor,c_push=0.1,c_fetch=0.1,eps=1e-12,share=0.1")
        order, pushed, last = list(routine.params), dict.fromkeys(("w", "b"), 0), (1e12, 0.0)
        for _ in range(400):
            transfer = step(routine, 1)
            assert transfer is not None
            for name in transfer.arrays or {}:
                pushed[name] += 1
            by_name = dict(zip(("w", "b"), last, strict=True))
            news(routine, 1.0, *(by_name[name] for name in order))
        assert pushed["w"] == 400
        assert 0.1 * (400 - 100) <= pushed["b"] <= 45

    def test_each_tensor_has_its_own_stamp(self) -> None:
        routine = self.with_statistics(1e12, 0.0)
        for count in range(1, 5):
            transfer = step(routine, 1)
            arrive(routine, 10 * count)
        rest = routine.rest()
        assert rest is not None
        assert transfer is not None
        index = routine.params.layout.index
        assert transfer.at.versions[index["w"]] == 30
        assert rest.at.versions[index["b"]] == 0

    def test_a_model_that_keeps_none_per_tensor_has_one_for_all(self) -> None:
        routine = routine_of(self.SPEC)
        step(routine, 1)
        news(routine, 0.0)
        assert [step(routine, 1) for _ in range(20)] == [None] * 20

    def test_when_all_pass_all_are_asked_for(self) -> None:
        transfer = step(routine_of("constant:by=tensor"), 1)
        assert transfer is not None
        assert transfer.wanted is None
        assert transfer.into is not None

    def test_tensors_without_elements_never_travel_alone(self) -> None:
        """A push of them would hold nothing, and be refused."""
        routine = routine_of("constant:by=tensor,p_push=0.3,p_fetch=0.3", w=2, e=0, b=1)
        empty = routine.params.layout.index["e"]
        for _ in range(200):
            transfer = step(routine, 1)
            if transfer is None:
                continue
            for names in (transfer.arrays, transfer.into):
                assert names is None or set(names) != {"e"}
            if transfer.into is not None and transfer.wanted is not None:
                assert empty not in transfer.wanted
            arrive(routine, 1)

    def test_dropped_tensors(self) -> None:
        routine = routine_of(f"{self.SPEC},skipped=discard")
        order = list(routine.params)
        step(routine, 0)
        news(routine, 1.0, *(1e12 if name == "b" else 0.0 for name in order))
        for _ in range(5):
            assert values(step(routine, 2)) == {"b": [2]}
            arrive(routine, 1)


class TestPlans:
    @each_row(
        ("plan", "words"),
        [
            ({}, "does not say which"),
            ({"gate": 5}, "does not say which"),
            ({"gate": {"kind": "turnstile"}}, "upgrade aiops here"),
            ({"gate": {"kind": "constant"}, "worker": -1}, "worker"),
            ({"gate": {"kind": "constant"}, "worker": "first"}, "worker"),
        ],
    )
    def test_that_cannot_be(self, plan: dict[str, Any], words: str) -> None:
        params = Params(Layout([("w", "float32", (2,))]))
        with pytest.raises(UsageError, match=words):
            strategy_for({"routine": "gated", **plan}, params)


class TestLocal:
    def test_gradients_are_steps_of_its_own_until_it_fetches(self) -> None:
        routine = routine_of("periodic:k_push=2,k_fetch=3,local=0.5", "float32")
        assert step(routine, 1.0) is None
        assert routine.params["w"].tolist() == [-0.5, -0.5]
        transfer = step(routine, 2.0, "w")
        assert transfer is not None
        assert transfer.into is None
        assert routine.params["w"].tolist() == [-1.5, -1.5]
        assert routine.params["b"].tolist() == [-0.5]
        arrive(routine)
        transfer = step(routine, 1.0)
        assert transfer is not None
        assert transfer.into is not None
        assert transfer.into is not routine.params, "what is received must stay as it was received"
        transfer.into["w"][:] = 7
        transfer.into.version = 5
        transfer.into.versions[:] = 5
        routine.arrived(None)
        assert routine.params["w"].tolist() == [7, 7]
        assert (routine.params.version, routine.params.versions.tolist()) == (5, [5, 5])

    def test_only_the_tensors_that_were_fetched_change(self) -> None:
        routine = routine_of("bfasgd:by=tensor,local=0.5", "float32")
        step(routine, 0.0)
        news(routine, 1.0, 1.0, 0.0, gate=(0.0, 1e30))
        tensors = {t.name: n for n, t in enumerate(routine.params.layout.tensors)}
        transfer = step(routine, 2.0)
        assert transfer is not None
        assert transfer.into is None, "the gate lets no fetch pass"
        arrive(routine)
        routine._passed[1, tensors["w"]] = 1000
        transfer = step(routine, 2.0)
        assert transfer is not None
        assert transfer.wanted is not None
        assert transfer.wanted.tolist() == [tensors["w"]]
        assert transfer.into is not None
        transfer.into["w"][:] = 9
        arrive(routine)
        assert routine.params["w"].tolist() == [9, 9]
        assert routine.params["b"].tolist() == [-2]

    def test_16_bits_keep_small_steps(self) -> None:
        routine = routine_of("periodic:k_push=100,k_fetch=100,local=0.0001", "bfloat16")
        for _ in range(50):
            step(routine, 1.0)
        assert float(routine.params["w"][0]) == pytest.approx(-0.005, rel=0.01)
