"""Under every algorithm, tensors with other settings than the rest get exactly these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from aiops.algorithms import BUILT_IN, find
from aiops.errors import UsageError
from aiops.model.layout import Array
from tests.contract.cases import CASES, PLACES, WORKERS, at_its_rate
from tests.contract.test_algorithms import quadratic, started
from tests.hands import Gradient, crew_of, train
from tests.rows import each_row

ARRAYS = {
    "layer.weight": np.full((7, 9), 2, np.float32),
    "layer.bias": np.full(5, -1, np.float32),
    "head.weight": np.full(11, 3, np.float32),
    "head.bias": np.full(3, 0.5, np.float32),
}
STEPS, CYCLE = 20, 40  # of all workers; of easgd, whose pushes are each the tenth of one

# Clipping scales all tensors by a norm that all have a part in, so they are not independent.
INDEPENDENT = {
    name: case
    for name, case in CASES.items()
    if not (case[1].get("clip") or case[1].get("per_tensor"))
}
CLIPPING = {"clip", "inner_clip"}


def trained(
    case: tuple[str, dict[str, Any]],
    place: str,
    gradient: Gradient = quadratic,
    arrays: Mapping[str, Array] = ARRAYS,
    **settings: Any,
) -> dict[str, bytes]:
    """Return the bits of every tensor after some steps of all workers."""
    name, chosen = at_its_rate(case)
    inline = started((name, {**chosen, **settings}), dict(arrays), place)
    train(crew_of(inline, WORKERS), CYCLE if name == "easgd" else STEPS, gradient)
    assert inline.version > 0
    return {name: array.tobytes() for name, array in inline.params().items()}


def settings_to_try(*, clipping: bool) -> list[Any]:
    """Return cases with settings: of each algorithm each setting, and each case.

    What an algorithm's other settings are does not act on whose value a tensor has, so its cases
    take turns.
    """
    found, tried = [], set[tuple[str, str]]()
    for turn, (label, (name, settings)) in enumerate(INDEPENDENT.items()):
        known = [s for s in find(name).make(settings).patterned if (s in CLIPPING) is clipping]
        first = turn % len(known) if known else 0
        for place, setting in enumerate(known[first:] + known[:first]):
            if not place or (name, setting) not in tried:
                tried.add((name, setting))
                found.append(pytest.param((name, settings), setting, id=f"{label}-{setting}"))
    return found


def steep(params: Mapping[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    """Return a gradient of each tensor by itself, long or short: Adam does not see all lengths."""
    length = np.float32(rng.choice([0.2, 3]))
    return {name: length * array for name, array in params.items()}


@pytest.mark.parametrize(("case", "setting"), settings_to_try(clipping=True))
def test_a_group_is_clipped_as_if_it_were_the_model(
    case: tuple[str, dict[str, Any]], setting: str
) -> None:
    """By its own norm; tensors without a value form one group; 0 is no limit."""
    changes = case[0] in ("diloco", "fedbuff") and setting == "clip"  # they are short
    limit = 0.125 if changes else 16.0
    layer = {name: array for name, array in ARRAYS.items() if name.startswith("layer")}
    head = {name: array for name, array in ARRAYS.items() if name.startswith("head")}
    free, short, shorter = (
        trained(case, "numpy", steep, layer, **{setting: norm})
        | trained(case, "numpy", steep, head, **{setting: norm})
        for norm in (1e6, limit, limit / 2)
    )
    assert all(len({free[name], short[name], shorter[name]}) == 3 for name in ARRAYS)
    together = trained(case, "numpy", steep, **{setting: limit})
    assert together.keys() == short.keys()
    assert all(together[name] != short[name] for name in ARRAYS), "the norm is that of all tensors"
    clause = f"{setting}={limit}"
    for nth, (usual, clauses, of_layer, of_head) in enumerate(
        (
            (0, f"{clause}@layer*", short, free),
            (limit, f"{setting}=0@layer*", free, short),
            (limit, f"{setting}={limit / 2}@head*", short, shorter),
            (limit / 2, f"{setting}=9@*.bias {clause}@layer*,head*", together, together),
        )
    ):
        expected = {name: (of_head if name in head else of_layer)[name] for name in ARRAYS}
        for place in PLACES if nth == 0 else (PLACES[nth % len(PLACES)],):
            found = trained(case, place, steep, **{setting: usual}, per_tensor=clauses)
            assert found == expected, (clauses, place)


@pytest.mark.parametrize(("case", "setting"), settings_to_try(clipping=False))
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


@each_row("name", sorted(BUILT_IN))
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
