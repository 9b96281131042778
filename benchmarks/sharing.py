"""The sharing benchmark: what large work takes that several threads share, beside one alone.

    python -m benchmarks.sharing [--sizes 16MiB,64MiB] [--threads N] [--rounds 7] [--json out.json]
                                 [--plot out.png]

Copies, updates, updates that read payloads (of a model of sixteen tensors, for a tensor is not cut
there), and what codecs do, by the functions that server and client call. Each is done by one thread
and by several in turn, round by round; ``x alone`` is the median ratio. What both leave behind is
compared to the last bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from rich.table import Table

from aiops.algorithms import find as find_policy
from aiops.codecs import find
from aiops.errors import UsageError
from aiops.kernels import PACKED, Spans, build
from aiops.kernels.parallel import ParallelMap, copy, serial_map, update
from aiops.kernels.vocabulary import Array
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from aiops.net.thread_pool import DEFAULT_POOL, pool_of
from benchmarks import plots, report
from benchmarks.compare import Cell
from benchmarks.sizes import MIB, format_size, parse_size, short_size

_CODECS = ("fp16", "bf16", "int8", "onebit", "topk", "lowrank")
_RULE = "fasgd"
_TENSORS = 16
_ROWS = 1024

Task = tuple[Callable[[ParallelMap], object], Callable[[], Array]]
"""What is done, by whom; and what returns what that has left behind, and begins anew."""


@dataclass(frozen=True)
class Options:
    """The options of the benchmark; sizes are bytes of float32."""

    sizes: Annotated[tuple[int, ...], "bytes of float32", parse_size] = (16 * MIB, 64 * MIB)
    threads: Annotated[int, "threads of a server"] = DEFAULT_POOL.count
    rounds: int = 7

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        if min(self.threads, self.rounds) < 1:
            raise UsageError("threads and rounds are positive")
        if any(size % (4 * _ROWS) for size in self.sizes):
            raise UsageError(f"sizes are multiples of {4 * _ROWS} bytes: {_ROWS} rows")


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: a cell for every size and piece of work.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    options.check()
    about, cells = machine(("numpy", "numba")), []
    for size in options.sizes:
        for name, task in _tasks(size // 4).items():
            log(f"measuring {name}, {format_size(size)}")
            rounds = _rounds(task, options)
            cells.append(
                {
                    "cell": f"{name}, {format_size(size)}",
                    "work": name,
                    "size": size,
                    "rounds": rounds,
                    **{key: report.spread([one[key] for one in rounds]) for key in rounds[0]},
                }
            )
    return record("benchmark", "sharing", options, {"cells": cells}, about)


def _rounds(task: Task, options: Options) -> list[dict[str, float]]:
    do, left = task
    ways = {"alone_ms": serial_map, "shared_ms": pool_of(options.threads).all}
    for parallel_map in ways.values():
        do(parallel_map)  # compiles, and touches every page
        left()
    found = []
    for _ in range(options.rounds):
        took, made = {}, []
        for way, parallel_map in ways.items():
            before = time.perf_counter()
            do(parallel_map)
            took[way] = 1e3 * (time.perf_counter() - before)
            made.append(left())
        if not np.array_equal(made[0], made[1]):
            raise RuntimeError("several threads have left something else behind than one")
        found.append({**took, "x_alone": took["alone_ms"] / took["shared_ms"]})
    return found


def _tasks(elements: int) -> dict[str, Task]:
    tensor = np.random.default_rng(0).standard_normal(elements, np.float32)
    other = np.empty_like(tensor)
    tasks: dict[str, Task] = {
        "copy": (
            lambda parallel_map: copy(other.view(np.uint8), tensor.view(np.uint8), parallel_map),
            lambda: other[::4096].copy(),
        ),
        f"{_RULE} of float32": _updating(tensor, None),
    }
    for name in sorted(PACKED):
        tasks[f"{_RULE} of {name}"] = _updating(tensor, name)
    for name in _CODECS:
        tasks[f"{name}, encode"] = _encoding(name, tensor, feedback=False)
        tasks[f"{name}, with feedback"] = _encoding(name, tensor, feedback=True)
        tasks[f"{name}, decode"] = _decoding(name, tensor)
    return tasks


def _updating(tensor: Array, codec: str | None) -> Task:
    """Make an update that begins with the same parameters each time."""
    rule, each = find_policy(_RULE).make({}).rule(), tensor.size // _TENSORS
    kernel = build(rule, np.float32, grad=codec)
    lo = np.arange(_TENSORS) * each
    if codec is None:
        grad, source = tensor, lo
    else:
        encoder = find(codec).encoder((each,), feedback=False)
        payloads = [bytes(encoder.encode(tensor[at : at + each])) for at in lo]
        grad = np.frombuffer(b"".join(payloads), np.uint8)
        source = np.arange(_TENSORS) * len(payloads[0])
    spans = Spans(lo, lo + each, source, np.full(_TENSORS, 0.005))
    base, target = np.ones_like(tensor), np.empty_like(tensor)
    state = [np.full(tensor.size, value, np.float32) for value in rule.state.values()]
    first = [array[::4096].copy() for array in state]

    def do(parallel_map: ParallelMap) -> None:
        operands = 1.0, base, grad, target, state, ()
        update(kernel, parallel_map, spans, operands, whole=codec is not None)

    def left() -> Array:
        found = target[::4096].copy()
        for array, begun in zip(state, first, strict=True):
            array[::4096] = begun
        return found

    return do, left


def _encoding(name: str, tensor: Array, *, feedback: bool) -> Task:
    # Each has an encoder to itself: what some write depends on what they wrote before.
    mine, theirs = (find(name).encoder(_shape(tensor), feedback=feedback) for _ in range(2))
    made = memoryview(b"")

    def do(parallel_map: ParallelMap) -> None:
        nonlocal made
        encoder = mine if parallel_map is serial_map else theirs
        encoder.parallel_map = parallel_map
        made = encoder.encode(tensor)

    def left() -> Array:
        return np.frombuffer(bytes(made), np.uint8)

    return do, left


def _decoding(name: str, tensor: Array) -> Task:
    shape, out, codec = _shape(tensor), np.empty_like(tensor), find(name)
    encoded = bytes(codec.encoder(shape, feedback=False).encode(tensor))
    payload = np.frombuffer(encoded, np.uint8)
    return (
        lambda parallel_map: parallel_map(codec.pieces(payload, shape, out)),
        lambda: out[::4096].copy(),
    )


def _shape(tensor: Array) -> tuple[int, int]:
    """Return what a tensor is taken for: a matrix, which is what ``lowrank`` wants."""
    return _ROWS, tensor.size // _ROWS


def table(result: Mapping[str, Any]) -> Table:
    """Make the table of a report."""
    rows: list[list[str]] = []
    size = None
    for cell in result["cells"]:
        if size not in (None, cell["size"]):
            rows.append([])
        head = format_size(cell["size"]) if cell["size"] != size else ""
        size = cell["size"]
        took = [f"{cell[key]['median']:.1f}" for key in ("alone_ms", "shared_ms")]
        rows.append([head, cell["work"], *took, report.times(cell, "x_alone")])
    options = result["options"]
    title = f"Work shared by {options['threads']} threads; medians of {options['rounds']} rounds"
    columns = ("size", "work", "alone, ms", "shared, ms", "x alone")
    return report.table(title, columns, rows, text_columns=2)


def cells(result: Mapping[str, Any]) -> Sequence[Cell]:
    """Return what can be compared with another run's: what is shared beside what is not."""
    return [
        Cell.of(cell["cell"], "speed", cell["x_alone"], beside="alone") for cell in result["cells"]
    ]


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw the ratios by size."""
    sizes, threads = result["options"]["sizes"], result["options"]["threads"]
    works = list(dict.fromkeys(cell["work"] for cell in result["cells"]))
    panels = []
    for title in ("updates and a copy", "codecs"):
        lines = [
            plots.rounds(work, [c for c in result["cells"] if c["work"] == work], "x_alone")
            for work in works
            if ("," in work) == (title == "codecs")
        ]
        ticks = [short_size(size) for size in sizes]
        panels.append(Panel(title, "size", "x alone", lines, bottom=0, ticks=ticks))
    return Figure(f"Work shared by {threads} threads", panels, len(panels))


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
