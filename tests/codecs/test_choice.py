"""The codecs of a model's tensors, chosen by patterns of their names."""

from __future__ import annotations

import numpy as np
import pytest

import aiops
from aiops.codecs.choice import CodecChoice
from aiops.errors import BadPush
from tests.rows import each_row
from tests.support import ServerThread

NAMES = ["embed.table", "head.weight", "head.bias"]


@each_row(
    ("specs", "why"),
    [
        (["int8"], None),
        (["int8", "raw@*.bias", "topk:0.1@[eh]*.[tw]*"], None),
        (["int8@haed.weight"], "'haed.weight' of int8@haed.weight; did you mean 'head.weight'?"),
        (["int8", "raw@*.bais"], "'*.bais' of raw@*.bais; did you mean 'head.bias'?"),
        (["raw@heda*"], "'heda*' of raw@heda*; did you mean 'head.weight'?"),
    ],
)
def test_a_pattern_that_matches_nothing_is_named(specs: list[str], why: str | None) -> None:
    found = CodecChoice.of(specs).unmatched(NAMES)
    assert (
        found is None
        if why is None
        else (found or "").startswith(f"no tensor's name matches {why}")
    )


def test_no_pattern_is_needed_where_there_are_no_tensors() -> None:
    """A model of tables alone."""
    assert CodecChoice.of(["int8"]).unmatched([]) is None


@pytest.mark.parametrize("way", ["push_codec", "fetch_codec"])
def test_a_model_without_such_a_tensor_is_refused(way: str) -> None:
    """Or a run would be told to be coded, and is raw."""
    settings = {"policy": "asgd", way: ["int8@nosuch*"]}
    with (
        ServerThread(**settings) as server,
        pytest.raises(BadPush, match=r"for another model: no tensor's name matches 'nosuch\*'"),
    ):
        aiops.Worker(server.url, {"w": np.zeros(600, np.float32)})
