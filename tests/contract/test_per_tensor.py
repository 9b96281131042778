"""Under every algorithm, tensors with other settings than the rest get exactly these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiops.algorithms import BUILT_IN, find
from aiops.errors import UsageError
from tests.contract.cases import CASES, PLACES, WORKERS
from tests.contract.test_algorithms import quadratic, started
from tests.hands import crew_of, train

ARRAYS = {
    "layer.weight": np.full((7, 9), 2, np.float32),
    "layer.bias": np.full(5, -1, np.float32),
    "head.weight": np.full(11, 3, np.float32),
    "head.bias": np.full(3, 0.5, np.float32),
}
STEPS = 60

# Clipping scales all tensors by a norm that all have a part in, so they are not independent.
INDEPENDENT = {
    name: case
    for name, case in CASES.items()
    if not (case[1].get("clip") or case[1].get("per_tensor"))
}


def trained(case: tuple[str, dict[str, Any]], place: str, **settings: Any) -> dict[str, bytes]:
    """Return the bits of every tensor after some steps of all workers."""
    name, chosen = case
    inline = started((name, {**chosen, **settings}), ARRAYS, place)
    train(crew_of(inline, WORKERS), STEPS, quadratic)
    assert inline.version > 0
    return {name: array.tobytes() for name, array in inline.params().items()}


def settings_to_try() -> list[Any]:
    return [
        pytest.param((name, settings), setting, id=f"{label}-{setting}")
        for label, (name, settings) in INDEPENDENT.items()
        for setting in find(name).make(settings).patterned
    ]


@pytest.mark.parametrize(("case", "setting"), settings_to_try())
def test_a_tensor_is_trained_as_if_its_value_were_that_of_all(
    case: tuple[str, dict[str, Any]], setting: str
) -> None:
    """Elementwise rules: a tensor's bits do not depend on the values that the others have."""
    name, settings = case
    usual = getattr(find(name).make(settings), setting) or 0.25
    other = usual / 2
    one, two = (trained(case, "numpy", **{setting: value}) for value in (usual, other))
    assert all(one[tensor] != two[tensor] for tensor in ARRAYS)
    clauses = f"{setting}={usual}@*.bias {setting}={other}@*.bias,nothing* {setting}={usual}@head*"
    with pytest.raises(ValueError, match=r"no tensor's name matches 'nothing\*'"):
        trained(case, "numpy", **{setting: usual}, per_tensor=clauses)
    clauses = clauses.replace(",nothing*", "")
    expected = {tensor: (two if tensor == "layer.bias" else one)[tensor] for tensor in ARRAYS}
    for place in PLACES:
        assert trained(case, place, **{setting: usual}, per_tensor=clauses) == expected


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_other_settings_are_the_same_for_all_tensors(name: str) -> None:
    algorithm = find(name)
    for setting in {"schedule", "momentum", "clip", "lr", "weight_decay"}:
        clause = f"{setting}=0.5@*.bias"
        if setting in algorithm().patterned:
            assert algorithm(per_tensor=clause).per_tensor == clause
        else:
            with pytest.raises(UsageError, match=f"{setting} may not differ between tensors"):
                algorithm(per_tensor=clause)


def test_a_tensor_with_the_rate_0_keeps_its_values() -> None:
    clause = {"optimizer": "adamw", "weight_decay": 0.1, "per_tensor": "lr=0@head*"}
    found = trained(("asgd", clause), "numpy")
    assert {name for name in ARRAYS if found[name] == ARRAYS[name].tobytes()} == {
        "head.weight",
        "head.bias",
    }
