"""Figures as people read them."""

from __future__ import annotations

import doctest
import math

from aiops.common import formatting
from tests.rows import each_row


def test_the_examples() -> None:
    assert doctest.testmod(formatting).failed == 0


@each_row(
    ("values", "drawn"),
    [
        ([], ""),
        ([math.nan], ""),
        ([5.0], "▁"),
        ([1.0, 1.0, 1.0], "▁▁▁"),
        ([0.0, math.inf, 7.0], "▁ █"),
        ([float(value) for value in range(8)], "▁▂▃▄▅▆▇█"),
    ],
)
def test_sparkline(values: list[float], drawn: str) -> None:
    assert formatting.sparkline(values) == drawn


def test_a_long_line_shows_its_end() -> None:
    assert formatting.sparkline([9.0, 0.0, 1.0], width=2) == "▁█"
