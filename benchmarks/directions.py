"""The directions benchmark: what a worker under ``schedule-free`` pays for a matrix's direction.

    python -m benchmarks.directions [--sides 256,1024] [--matrices 8] [--ways numpy,torch,cuda]
                                    [--rounds 15] [--json out.json] [--plot out.png]

Some square matrices, float32: their momenta, orthogonalised, and the directions on the
host, by `aiops.client.strategies.directions` as a worker calls it. ``numpy`` is given arrays,
``torch`` tensors of the host, ``cuda`` tensors of a GPU (left out where there is none; the time has
the copies to the host in it). They take turns, round by round; ``x numpy`` is the median ratio. The
directions are compared.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from rich.table import Table

from aiops.client.params import Params
from aiops.client.strategies.directions import Directions
from aiops.errors import UsageError, nearest
from aiops.kernels.orthogonalise import operations
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from aiops.model.layout import Array, Layout
from benchmarks import plots, report
from benchmarks.compare import Cell

_CLOSE = 1e-3  # of a direction's length

_WARM = 3
"""Rounds in which is made what is made once."""

Lift = Callable[[Array], Any]
"""What makes a gradient of an array."""


def _lifts() -> dict[str, Lift]:
    """Return the ways that there are on this machine, by name."""
    found: dict[str, Lift] = {"numpy": lambda array: array}
    if importlib.util.find_spec("torch") is not None:
        import torch

        found["torch"] = torch.from_numpy
        if torch.cuda.is_available():
            found["cuda"] = lambda array: torch.from_numpy(array).cuda()
    return found


@dataclass(frozen=True)
class Options:
    """The options of the benchmark."""

    sides: Annotated[tuple[int, ...], "of square matrices"] = (256, 1024)
    matrices: Annotated[int, "of each size, in one model"] = 8
    ways: Annotated[tuple[str, ...], "who makes them"] = ("numpy", "torch", "cuda")
    rounds: int = 15

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        if min(*self.sides, self.rounds) < 2 or self.matrices < 1:
            raise UsageError("sides and rounds are 2 or more, and there is a matrix")
        known = ("numpy", "torch", "cuda")
        for way in self.ways:
            if way not in known:
                raise UsageError(f"no way is called {way!r}; {nearest(way, known)}")
        if "numpy" not in self.ways:
            raise UsageError("--ways needs numpy: it is compared with")


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: a cell for every side and way.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    options.check()
    about, lifts, cells = machine(("numpy", "torch")), _lifts(), []
    ways = {way: lifts[way] for way in options.ways if way in lifts}
    for side in options.sides:
        log(f"measuring {options.matrices} of {side} × {side}")
        rounds = _rounds(side, ways, options)
        for way in ways:
            took = [each[way] for each in rounds]
            cells.append(
                {
                    "cell": f"{way}, {side} × {side}",
                    "way": way,
                    "side": side,
                    "rounds": [
                        {"ms": each[way], "x_numpy": each["numpy"] / each[way]} for each in rounds
                    ],
                    "ms": report.spread(took),
                    "x_numpy": report.spread([each["numpy"] / each[way] for each in rounds]),
                }
            )
    return record("benchmark", "directions", options, {"cells": cells}, about)


def _rounds(side: int, ways: Mapping[str, Lift], options: Options) -> list[dict[str, float]]:
    """Return what each way took in each round, in milliseconds."""
    rng, names = np.random.default_rng(0), [f"w{number}" for number in range(options.matrices)]
    gradient = {name: rng.standard_normal((side, side), np.float32) for name in names}
    layout = Layout([(name, "float32", (side, side)) for name in names])
    made = {way: Directions({"orthogonal": 0.7}, layout) for way in ways}
    gradients = {way: {n: lift(g) for n, g in gradient.items()} for way, lift in ways.items()}
    room = Params(layout)
    found = []
    for number in range(_WARM + options.rounds):
        took, left = {}, {}
        for way, directions in made.items():
            before = time.perf_counter()
            left[way] = directions.of(gradients[way], lambda: room)
            directions.took()
            took[way] = 1e3 * (time.perf_counter() - before)
        for way, each in left.items():
            for name, wanted in left["numpy"].items():
                if np.linalg.norm(each[name] - wanted) > _CLOSE * np.linalg.norm(wanted):
                    raise RuntimeError(f"{way} has made another direction than numpy")
        if number >= _WARM:
            found.append(took)
    return found


def table(result: Mapping[str, Any]) -> Table:
    """Make the table of a report."""
    rows, before, matrices = [], None, result["options"]["matrices"]
    for cell in result["cells"]:
        side, ms = cell["side"], cell["ms"]
        if before not in (None, side):
            rows.append([])
        head = f"{side} × {side}" if side != before else ""
        before = side
        speed = matrices * operations(side, side) / (ms["median"] / 1e3) / 1e9
        times = [f"{ms[key]:.2f}" for key in ("median", "min", "max")]
        rows.append([head, cell["way"], *times, f"{speed:,.0f}", report.times(cell, "x_numpy")])
    title = f"Directions of {matrices} matrices; medians of {result['options']['rounds']} rounds"
    columns = ("matrix", "by", "ms", "least", "most", "GFLOP/s", "x numpy")
    return report.table(title, columns, rows, text_columns=2)


def cells(result: Mapping[str, Any]) -> Sequence[Cell]:
    """Return what can be compared with another run's: ways beside NumPy."""
    return [
        Cell.of(cell["cell"], "speed", cell["x_numpy"], beside="numpy")
        for cell in result["cells"]
        if cell["way"] != "numpy"
    ]


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw the times by side."""
    sides = result["options"]["sides"]
    ways = list(dict.fromkeys(cell["way"] for cell in result["cells"]))
    lines = [
        plots.rounds(way, [cell for cell in result["cells"] if cell["way"] == way], "ms")
        for way in ways
    ]
    panel = Panel("", "side", "ms", lines, bottom=0, ticks=[str(side) for side in sides])
    return Figure(f"Directions of {result['options']['matrices']} matrices", [panel], 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
