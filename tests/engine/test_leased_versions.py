"""Exchanges while readers hold versions: compiled code makes the next one where Python's way does.

A course is as in `tests/engine/test_steady.py`. After each thing that happens what a reader holds
is compared with what it has read first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.compiled.loading import core
from tests.engine.test_steady import (
    KERNELS,
    LEARN,
    USUAL,
    Op,
    compare,
    courses,
    journalled,
    odd,
    usual,
)

POLICIES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("asgd", {}, {}),
    ("asgd", {"optimizer": "momentum"}, {}),
    ("asgd", {"optimizer": "adam", "schedule": "warmup:4,cosine:20"}, {}),
    ("asgd", {"optimizer": "momentum", "per_tensor": "weight_decay=0.1@[wa] lr=0.005@*"}, {}),
    ("fasgd", {}, {}),
    ("fasgd", {"eps": 0.8}, {}),
    ("schedule-free", {}, {}),
    ("exponential", {"schedule": "step:0.5:3"}, {}),
    ("ringmaster", {"r": 2}, {}),
)

HOLD, BACK, GONE, LET = Op("hold"), Op("give back"), Op("abandon"), Op("let go")
HELD = [
    *LEARN,
    *(HOLD, *USUAL[:3], HOLD, *USUAL[3:6], BACK, *USUAL[6:8], LET, *USUAL[8:]),
    *(HOLD, HOLD, *USUAL[:2], BACK, *USUAL[2:4], BACK, *USUAL[4:6]),
    *(HOLD, GONE, *USUAL[:2], HOLD, *USUAL[2:4], GONE, *USUAL[4:6], HOLD, LET, *USUAL[6:8]),
]
"""Readers come and go between pushes: alone, together, and some of them are lost."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


MODELS = ["one tensor", "several", "mixed", "halves", "small", "the largest", "coded"]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("model", ["several", "mixed"])
def test_readers_come_and_go(model: str, policy: Any, folder: Path) -> None:
    seen = compare(policy, model, ["ours", "ours", "turned"], HELD, folder=folder)
    unproven = model == "mixed" and (policy[0] == "schedule-free" or "adam" in str(policy))
    assert seen.short > 24 or unproven
    if core() is not None:
        assert seen.compiled == seen.short
        assert seen.direct == (seen.compiled if model == "several" and len(KERNELS) > 1 else 0)


@pytest.mark.parametrize("model", MODELS)
def test_models_that_are_read(model: str, folder: Path) -> None:
    seen = compare(POLICIES[1], model, ["ours", "turned"], HELD, folder=folder)
    assert seen.short > 24
    if core() is not None:
        assert seen.compiled == seen.short
        narrow = model in ("mixed", "halves")  # with float32 values beside
        assert seen.direct == (seen.compiled if len(KERNELS) > 1 and not narrow else 0)


def test_versions_that_are_read_are_in_the_journal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = POLICIES[4], "several", ["ours", "turned"], HELD
    seen, _stored = journalled(*given, folder=folder, monkeypatch=monkeypatch)
    assert seen.short > 24
    assert core() is None or seen.compiled == seen.short


def test_spare_arenas_that_were_not_needed_are_let_go(folder: Path) -> None:
    """After 1,024 versions half of them: those are counted with readers and without."""
    some = [HOLD, USUAL[0], HOLD, USUAL[1], HOLD, USUAL[2], BACK, BACK, BACK]
    many = [Op("push", worker=n % 2, seed=n % 7) for n in range(1040)]
    course = [*LEARN, *some, *many, HOLD, *USUAL[:2]]
    seen = compare(POLICIES[0], "one tensor", ["ours", "ours"], course, folder=folder)
    assert seen.short > 1040


readers = st.builds(
    Op,
    what=st.sampled_from(["hold", "hold", "hold", "give back", "give back", "abandon", "let go"]),
    seed=st.integers(0, 3),
)


@pytest.mark.slow
@courses(30)
@given(
    policy=st.sampled_from(POLICIES),
    model=st.sampled_from(["one tensor", "several", "mixed", "coded"]),
    styles=st.lists(st.sampled_from(["ours", "turned", "ours", "short"]), min_size=2, max_size=3),
    course=st.lists(st.one_of(usual, usual, readers, readers, odd), min_size=12, max_size=30),
)
def test_both_ways_are_one_while_versions_are_read(
    policy: Any, model: str, styles: list[str], course: list[Op], folder: Path
) -> None:
    compare(policy, model, styles, [*LEARN, *course], folder=folder)
