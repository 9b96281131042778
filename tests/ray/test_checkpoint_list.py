"""The choice of the checkpoints that are kept, without Ray."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest

from aiops.errors import UsageError
from aiops.ray.checkpoint_list import CheckpointList, KeptCheckpoint


def dropped(found: CheckpointList, scores: list[Any]) -> list[str]:
    return [
        path
        for number, score in enumerate(scores)
        for path in found.add(KeptCheckpoint(str(number), {"loss": score}))
    ]


@pytest.mark.parametrize(
    ("found", "scores", "gone"),
    [
        (CheckpointList(), [1, 2, 3], []),
        (CheckpointList(2), [3, 2, 1, 0], ["0", "1"]),
        (CheckpointList(2, "loss", largest=False), [1, 3, 2, 4], ["1", "2"]),
        (CheckpointList(2, "loss"), [1, 3, 2, 0], ["0", "2"]),
        (CheckpointList(2, "loss"), [1, nan, "x", 2], ["1", "2"]),
        (CheckpointList(1, "loss"), [5, 1], ["0"]),
    ],
)
def test_the_best_and_the_newest_are_kept(
    found: CheckpointList, scores: list[Any], gone: list[str]
) -> None:
    assert found.newest is None
    assert dropped(found, scores) == gone
    assert found.newest is not None
    assert found.newest.path == str(len(scores) - 1)


def test_none_to_keep_is_refused() -> None:
    with pytest.raises(UsageError, match="num_to_keep must be 1 or more"):
        CheckpointList(0)
