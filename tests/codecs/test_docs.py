"""The page describes the codecs there are, and its examples are what they write."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import aiops
from aiops.codecs import BUILT_IN, find, int8, onebit
from tests.codecs.cases import BACKENDS, kind_of
from tests.rows import each_row

PAGE = (Path(aiops.__file__).parents[1] / "docs" / "codecs.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(r"^\| `([^`]+)` \| ([0-9×]+) \| ([^|]+) \| `([0-9a-f ]+)` \|$", re.MULTILINE)


def elements(text: str, size: int) -> np.ndarray:
    """Read the elements of an example: all of them, or those that are not 0."""
    values = np.zeros(size, np.float32)
    for index, item in enumerate(text.split(", ")):
        place, _, value = item.rpartition(" = ")
        values[int(place.strip("[]")) if place else index] = float(value)
    return values


def test_every_codec_is_on_the_page() -> None:
    assert {line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `")} >= {
        *BUILT_IN
    }
    assert {found[0].partition(":")[0] for found in EXAMPLE.findall(PAGE)} == {*BUILT_IN}
    for codec in (int8, onebit):
        assert f"scales\nabove `{codec.LARGEST.view(np.uint32):08x}`" in PAGE or (
            f"scales above `{codec.LARGEST.view(np.uint32):08x}`" in PAGE
        )


@each_row(("spec", "shape", "text", "payload"), EXAMPLE.findall(PAGE))
@each_row("backend", BACKENDS)
def test_examples(spec: str, shape: str, text: str, payload: str, backend: str) -> None:
    axes = tuple(map(int, shape.split("×")))
    values = elements(text, int(np.prod(axes)))
    written = find(spec).encoder(axes, feedback=False, backend=backend).encode(values)
    assert bytes(written).hex(" ") == payload
    assert kind_of(spec).check(np.frombuffer(written, np.uint8), axes, backend) is None
