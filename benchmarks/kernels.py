"""How close the update kernels come to the speed of memory: ``python -m benchmarks.kernels``.

The limit is the simplest loop that moves the same streams: it reads and writes as many arrays
as the rule does and multiplies once. Everything is measured in one run, each contender once per
round and in turn, so that what disturbs the machine disturbs all of them; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aiops.algorithms.fasgd import FASGD
from aiops.algorithms.optimizers import sgd
from aiops.kernels import Rule, Spans, build
from aiops.kernels.vocabulary import Array
from benchmarks import report

__all__ = ["main", "rules", "run"]

DTYPE = np.dtype(np.float32)
STEP = 0.005
SMALL = 1024
"""Elements of the call that shows the overhead: 4 KiB."""


def rules() -> dict[str, Rule]:
    """Return the rules that are measured."""
    return {"sgd": Rule(sgd), "fasgd": FASGD().rule()}


def run(size: int = 1 << 24, repeats: int = 15) -> dict[str, Any]:
    """Measure every rule over ``size`` float32 parameters, ``repeats`` rounds, on one core.

    Returns the machine's description and, per rule, ``streams`` (arrays read plus arrays
    written), ``bytes`` (of all streams), ``small_call_us`` (a fused call on 1,024 elements) and
    ``results``: contender → ``ms`` (median, min, max), ``gb_per_s``, ``of_limit`` (share of the
    limit's speed), ``times_plain`` and ``times_blocked`` (speed relative to plain and to blocked
    NumPy).
    """
    about = report.machine(("numpy", "numba", "llvmlite"))
    measured = {name: _measure(rule, size, repeats) for name, rule in rules().items()}
    return {
        "benchmark": "kernels",
        "size": size,
        "dtype": DTYPE.name,
        "repeats": repeats,
        "rules": measured,
        "machine": about,
    }


@dataclass(frozen=True)
class _Arena:
    """The arrays of one model: what a kernel is called with."""

    base: Array
    grad: Array
    target: Array
    state: tuple[Array, ...]

    @classmethod
    def of(cls, rule: Rule, size: int) -> _Arena:
        random = np.random.default_rng(0)
        return cls(
            base=random.standard_normal(size, DTYPE),
            grad=random.standard_normal(size, DTYPE),
            target=np.zeros(size, DTYPE),
            state=tuple(np.full(size, value, DTYPE) for value in rule.state.values()),
        )


def _measure(rule: Rule, size: int, repeats: int) -> dict[str, Any]:
    contenders = _contenders(rule, size)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender()  # compiles, and touches every page
    for _ in range(repeats):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender()
            times[name].append(1e3 * (time.perf_counter() - start))
    streams = 3 + 2 * len(rule.state)  # w, g and each state read; w and each state written
    moved = streams * size * DTYPE.itemsize
    median = {name: statistics.median(each) for name, each in times.items()}
    return {
        "streams": streams,
        "bytes": moved,
        "small_call_us": _small_call(rule),
        "results": {
            name: {
                "ms": report.spread(each),
                "gb_per_s": moved / median[name] / 1e6,
                "of_limit": median[_limit_of(name)] / median[name],
                "times_plain": median["plain NumPy"] / median[name],
                "times_blocked": median["blocked NumPy"] / median[name],
            }
            for name, each in times.items()
        },
    }


def _limit_of(name: str) -> str:
    return "limit, out of place" if name.endswith("out of place") else "limit, in place"


def _contenders(rule: Rule, size: int) -> dict[str, Callable[[], object]]:
    arena = _Arena.of(rule, size)
    spans = Spans.whole(size, STEP)
    fused, blocked = build(rule, DTYPE, "numba"), build(rule, DTYPE, "numpy")
    limits = _limits(len(rule.state))
    base, grad, target, state = arena.base, arena.grad, arena.target, arena.state
    one = DTYPE.type(1.0)
    return {
        "limit, in place": lambda: limits[0](base, grad, *state, one),
        "fused, in place": lambda: fused(spans, 1.0, base, grad, base, state),
        "limit, out of place": lambda: limits[1](base, target, grad, *state, one),
        "fused, out of place": lambda: fused(spans, 1.0, base, grad, target, state),
        "blocked NumPy": lambda: blocked(spans, 1.0, base, grad, base, state),
        "plain NumPy": lambda: _plain(rule, arena),
    }


def _plain(rule: Rule, arena: _Arena) -> tuple[Array, ...]:
    """Run the rule on whole arrays, as one would write it down; new arrays replace the old."""
    constants = {name: DTYPE.type(value) for name, value in rule.constants.items()}
    return rule.function(arena.base, arena.grad, *arena.state, DTYPE.type(STEP), **constants)


def _small_call(rule: Rule, calls: int = 5_000) -> float:
    arena, spans, kernel = _Arena.of(rule, SMALL), Spans.whole(SMALL, STEP), build(rule, DTYPE)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            kernel(spans, 1.0, arena.base, arena.grad, arena.base, arena.state)
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / calls


def _limits(states: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """Compile the loops that move a rule's streams, in place and out of place."""
    import numba

    loops = {0: (_move_2_in_place, _move_2), 3: (_move_5_in_place, _move_5)}[states]
    in_place, out_of_place = (numba.njit(nogil=True)(loop) for loop in loops)
    return in_place, out_of_place


def _move_2_in_place(w: Any, g: Any, scale: Any) -> None:
    for i in range(w.size):
        w[i] = (w[i] + g[i]) * scale


def _move_2(w: Any, target: Any, g: Any, scale: Any) -> None:
    for i in range(w.size):
        target[i] = (w[i] + g[i]) * scale


def _move_5_in_place(w: Any, g: Any, n: Any, b: Any, v: Any, scale: Any) -> None:
    for i in range(w.size):
        w[i] = (w[i] + g[i]) * scale
        n[i] = n[i] * scale
        b[i] = b[i] * scale
        v[i] = v[i] * scale


def _move_5(w: Any, target: Any, g: Any, n: Any, b: Any, v: Any, scale: Any) -> None:
    for i in range(w.size):
        target[i] = (w[i] + g[i]) * scale
        n[i] = n[i] * scale
        b[i] = b[i] * scale
        v[i] = v[i] * scale


def show(found: dict[str, Any]) -> None:
    """Print the report of :func:`run` as a table."""
    rows: list[Sequence[str]] = []
    for name, rule in found["rules"].items():
        if rows:
            rows.append(())
        for contender, each in rule["results"].items():
            rows.append(
                (
                    name,
                    contender,
                    f"{each['ms']['median']:.2f}",
                    f"{each['gb_per_s']:.1f}",
                    f"{each['of_limit']:.2f}",
                    f"{each['times_plain']:.1f}",
                    f"{each['times_blocked']:.1f}",
                )
            )
    title = (
        f"update of {found['size']:,} {found['dtype']} parameters on one core, "
        f"median of {found['repeats']}"
    )
    columns = ("rule", "contender", "ms", "GB/s", "of limit", "x plain", "x blocked")
    report.show(report.table(title, columns, rows, text_columns=2), found["machine"])
    for name, rule in found["rules"].items():
        print(f"{name}: a call on {SMALL:,} parameters takes {rule['small_call_us']:.1f} µs")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--size", type=int, default=1 << 24, help="parameters (default 16777216)")
    parser.add_argument("--repeats", type=int, default=15, help="rounds (default 15)")
    parser.add_argument("--json", type=Path, help="write the report to this file as well")
    options = parser.parse_args(arguments)
    found = run(options.size, options.repeats)
    show(found)
    if options.json is not None:
        report.write_json(options.json, found)


if __name__ == "__main__":
    main()
