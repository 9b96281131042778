"""Finding algorithms by name, and reading their settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from aiops.algorithms import BUILT_IN, available, find
from aiops.algorithms.asgd import ASGD
from aiops.algorithms.base import Algorithm
from aiops.algorithms.modulation import MODULATIONS
from aiops.algorithms.sasgd import SASGD
from aiops.errors import UsageError
from aiops.kernels.rule import Rule
from tests.rows import each_row


def test_every_built_in_is_found_under_its_own_name() -> None:
    for name in BUILT_IN:
        assert find(name).name == name
    assert set(BUILT_IN) <= set(available())


def test_a_class_is_found_by_its_place() -> None:
    assert find("aiops.algorithms.asgd:ASGD") is ASGD


@each_row(
    ("name", "words"),
    [
        ("fasdg", "did you mean 'fasgd'"),
        ("nowhere.at_all:Thing", "there is no module 'nowhere.at_all'"),
        ("aiops.algorithms.asgd:ASDG", "has no 'ASDG'"),
        ("aiops.errors:UsageError", "not a class derived from"),
    ],
)
def test_what_is_not_there_is_explained(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find(name)


class NoName(Algorithm):
    pass


class NoDataclass(Algorithm):
    name = "no-dataclass"
    kind: ClassVar[str] = "which is no setting"
    beta: float = 0.9


@dataclass(frozen=True, kw_only=True)
class NoDefault(Algorithm):
    name = "no-default"
    beta: float


@dataclass(frozen=True, kw_only=True)
class TextRate(Algorithm):
    name = "text-rate"
    lr: str = "0.003"  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class WholeRate(Algorithm):
    name = "whole-rate"
    lr: float = 1


@each_row(
    ("kind", "words"),
    [
        (NoName, "NoName has no name"),
        (NoDataclass, "beta would be a setting if NoDataclass were a dataclass"),
        (NoDefault, "the setting beta has no default"),
        (
            TextRate,
            "the default of lr is '0.003', and in Algorithm it is a number: write one",
        ),
    ],
)
def test_a_class_of_the_wrong_form_is_explained(kind: type[Algorithm], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find(f"{__name__}:{kind.__name__}")


@dataclass(frozen=True, kw_only=True)
class OwnBase(ASGD):
    name = "own-base"
    decay: float = 0
    cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class OwnSettings(OwnBase):
    name = "own-settings"
    decay: float = 0.9
    cap: float | None = 0.5


@each_row("kind", [WholeRate, OwnBase, OwnSettings])
def test_defaults_that_suit(kind: type[Algorithm]) -> None:
    """A base of the user's own may have a default of another type."""
    assert find(f"{__name__}:{kind.__name__}") is kind


def test_a_rule_that_no_kernel_can_do_is_refused_before_there_is_a_model() -> None:
    class Power(ASGD):
        def rule(self) -> Rule:
            return Rule(power)

    with pytest.raises(UsageError, match=r"rule 'power' .* uses a power, `g \*\* 2`"):
        Power().check(workers=None)


def power(w: Any, g: Any, step: Any) -> tuple[Any, ...]:
    return (w - step * g**2,)


def test_third_parties_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name, value = "theirs", "aiops.algorithms.asgd:ASGD"

    monkeypatch.setattr("aiops.algorithms.metadata.entry_points", lambda group: [Point])
    assert find("theirs") is ASGD
    assert "theirs" in available()


@each_row(
    ("kind", "expected"),
    [
        ("none", [1, 1, 1, 1]),
        ("inverse", [1, 1, 1 / 2, 1 / 8]),
        ("inverse-plus-one", [1, 1 / 2, 1 / 3, 1 / 9]),
        ("exponential", [1, math.exp(-0.1), math.exp(-0.2), math.exp(-0.8)]),
        ("polynomial", [1, 2**-0.5, 3**-0.5, 1 / 3]),
        ("hinge", [1, 1, 1, 1 / (0.5 * 4 + 1)]),
        ("delay-adaptive", [1, 1, 1, 4 / 8]),
    ],
)
def test_modulations(kind: str, expected: list[float]) -> None:
    algorithm = SASGD(modulate=kind)
    assert [algorithm.modulation(tau) for tau in (0, 1, 2, 8)] == pytest.approx(expected)


def test_all_modulations_start_at_one_and_never_rise() -> None:
    for kind in MODULATIONS:
        scales = [SASGD(modulate=kind).modulation(tau) for tau in range(50)]
        assert scales[0] == 1
        assert scales == sorted(scales, reverse=True)


@each_row(
    "setting", [{"modulate": "invers"}, {"rho": -1}, {"a": -1}, {"b": -0.1}, {"n": 0}, {"n": "2.5"}]
)
def test_bad_modulations_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SASGD.make(setting)


def test_settings_are_read_by_the_type_of_their_default() -> None:
    made = SASGD.make({"lr": "1e-2", "n": "3", "modulate": "hinge"})
    assert (made.lr, made.n, made.modulate) == (0.01, 3, "hinge")


def test_steps_of_plain_sgd_are_linear() -> None:
    linear = {name for name in BUILT_IN if find(name)().linear}
    assert {"asgd", "hardsync", "sasgd", "softsync"} <= linear
    assert not {"fasgd", "dcasgd", "gap-aware", "schedule-free"} & linear
    assert not ASGD(optimizer="adam").linear
    assert not ASGD(clip=1.0).linear
    assert Algorithm.plan(ASGD(), None)["recompute"] is False
