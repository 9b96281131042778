"""The speed of the update kernels, beside that of memory: ``python -m benchmarks.kernels``.

The limit is the simplest loop that moves the same streams: it reads and writes as many arrays
as the rule does and multiplies once. Everything is measured in one run, each contender once per
round and in turn, so that what disturbs the machine disturbs all of them; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from aiops.algorithms import BUILT_IN, find
from aiops.algorithms.optimizers import OPTIMIZERS
from aiops.errors import UsageError, nearest
from aiops.kernels import Rule, Spans, build
from aiops.kernels.vocabulary import Array
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from benchmarks import plots, report
from benchmarks.compare import Cell

__all__ = ["main", "rules", "run"]

DTYPE = np.dtype(np.float32)
STEP, SCALAR = 0.005, 0.5
USUAL = ("sgd", "fasgd")
"""Those that are measured unless others are asked for."""
SMALL = 1024
"""Elements of the call that shows the overhead: 4 KiB."""


def rules() -> dict[str, Rule]:
    """Return every rule that a built-in algorithm or optimizer may update with, by its name."""
    found = [find("asgd").make({"optimizer": name}).rule() for name in OPTIMIZERS]
    found += [find(name)().rule() for name in BUILT_IN]
    found.append(find("dcasgd").make({"adaptive": True}).rule())
    found.append(find("fasgd").make({"relative": 0.01}).rule())
    return {rule.name: rule for rule in reversed(found)}


def run(size: int = 1 << 24, repeats: int = 15, names: Sequence[str] = USUAL) -> dict[str, Any]:
    """Measure rules over ``size`` float32 parameters, ``repeats`` rounds, on one core.

    ``names``: which of `rules`.

    Returns the machine's description and, per rule, ``streams`` (arrays read plus arrays
    written), ``bytes`` (of all streams), ``small_call_us`` (a fused call on 1,024 elements) and
    ``results``: contender → ``ms`` (median, min, max), ``gb_per_s``, ``of_limit`` (share of the
    limit's speed), ``times_plain`` and ``times_blocked`` (speed relative to plain and to blocked
    NumPy).
    """
    about = machine(("numpy", "numba", "llvmlite"))
    known = rules()
    for name in names:
        if name not in known:
            raise UsageError(f"no rule is called {name!r}; {nearest(name, known)}")
    measured = {name: _measure(known[name], size, repeats) for name in names}
    options = {"size": size, "repeats": repeats, "rules": list(names)}
    results = {
        "size": size,
        "dtype": DTYPE.name,
        "repeats": repeats,
        "rules": measured,
    }
    return record("benchmark", "kernels", options, results, about)


@dataclass(frozen=True)
class _Arena:
    """The arrays of one model: what a kernel is called with."""

    base: Array
    grad: Array
    target: Array
    state: tuple[Array, ...]
    reads: tuple[Array, ...]

    @classmethod
    def of(cls, rule: Rule, size: int) -> _Arena:
        random = np.random.default_rng(0)
        return cls(
            base=random.standard_normal(size, DTYPE),
            grad=random.standard_normal(size, DTYPE),
            target=np.zeros(size, DTYPE),
            state=tuple(np.full(size, value, DTYPE) for value in rule.state.values()),
            reads=tuple(random.standard_normal(size, DTYPE) for _ in rule.reads),
        )


def _spans(rule: Rule, size: int) -> Spans:
    return Spans.whole(size, STEP, [SCALAR] * len(rule.scalars))


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
    # w, g and each state read, and what else is; w and each state written
    streams = 3 + 2 * len(rule.state) + len(rule.reads)
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
    spans = _spans(rule, size)
    fused, blocked = build(rule, DTYPE, "numba"), build(rule, DTYPE, "numpy")
    in_place, out_of_place = _limit(rule, "w"), _limit(rule, "target")
    base, grad, target, state = arena.base, arena.grad, arena.target, arena.state
    reads, one = arena.reads, DTYPE.type(1.0)
    return {
        "limit, in place": lambda: in_place(base, grad, *state, *reads, one),
        "fused, in place": lambda: fused(spans, 1.0, base, grad, base, state, reads),
        "limit, out of place": lambda: out_of_place(base, target, grad, *state, *reads, one),
        "fused, out of place": lambda: fused(spans, 1.0, base, grad, target, state, reads),
        "blocked NumPy": lambda: blocked(spans, 1.0, base, grad, base, state, reads),
        "plain NumPy": lambda: _plain(rule, arena),
    }


def _plain(rule: Rule, arena: _Arena) -> tuple[Array, ...]:
    """Run the rule on whole arrays, as one would write it down; new arrays replace the old."""
    constants = {name: DTYPE.type(value) for name, value in rule.constants.items()}
    numbers = DTYPE.type(STEP), *[DTYPE.type(SCALAR)] * len(rule.scalars)
    arrays = arena.base, arena.grad, *arena.reads, *arena.state
    return rule.function(*arrays, *numbers, **constants)


def _small_call(rule: Rule, calls: int = 5_000) -> float:
    arena, spans, kernel = _Arena.of(rule, SMALL), _spans(rule, SMALL), build(rule, DTYPE)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            kernel(spans, 1.0, arena.base, arena.grad, arena.base, arena.state, arena.reads)
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / calls


def _limit(rule: Rule, target: str) -> Callable[..., None]:
    """Compile the loop that moves a rule's streams, to ``w`` itself or another ``target``."""
    import numba

    kept = [f"s{n}" for n in range(len(rule.state))]
    others = [f"r{n}" for n in range(len(rule.reads))]
    written = [] if target == "w" else [target]  # the same array under two names is no vector loop
    moved = " + ".join(f"{name}[i]" for name in ("w", "g", *others))
    lines = [
        f"def move({', '.join(('w', *written, 'g', *kept, *others, 'scale'))}):",
        " for i in range(w.size):",
        f"  {target}[i] = ({moved}) * scale",
        *(f"  {name}[i] = {name}[i] * scale" for name in kept),
    ]
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)
    compiled: Callable[..., None] = numba.njit(nogil=True)(scope["move"])
    return compiled


def cells(found: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's: the fused kernels beside their limit."""
    for rule, each in found["rules"].items():
        for contender, figures in each["results"].items():
            if contender.startswith("fused"):
                limit, ms = each["results"][_limit_of(contender)]["ms"]["median"], figures["ms"]
                shares = report.spread([limit / ms[key] for key in ("median", "min", "max")])
                yield Cell.of(f"{rule}, {contender}", "speed", shares, beside="limit")


def figure(found: Mapping[str, Any]) -> Figure:
    """Draw what each contender moves in a second, a panel for each rule."""
    places = ("in place", "out of place", "blocked NumPy", "plain NumPy")
    kinds = {"limit: a loop with as many streams": "limit, {}", "fused kernel": "fused, {}"}
    panels = []
    for name, rule in found["rules"].items():
        speeds = {
            contender: {key: rule["bytes"] / ms / 1e6 for key, ms in each["ms"].items()}
            for contender, each in rule["results"].items()
        }
        lines = [
            plots.rows(label, {row: speeds[kind.format(places[row])] for row in (0, 1)})
            for label, kind in kinds.items()
        ]
        lines.append(plots.rows("the same in NumPy", {row: speeds[places[row]] for row in (2, 3)}))
        title = f"{name}, {rule['streams']} streams"
        panels.append(Panel(title, "GB/s of all streams", "", lines, bottom=0, ticks=places))
    title = f"Updates of {found['size'] / 1e6:.0f} million {found['dtype']} parameters, one core"
    return Figure(title, panels, min(len(panels), 2))


def table(found: Mapping[str, Any]) -> Table:
    """Make the table of a report."""
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
    return report.table(title, columns, rows, text_columns=2)


def notes(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a small call takes."""
    for name, rule in found["rules"].items():
        yield f"{name}: a call on {SMALL:,} parameters takes {rule['small_call_us']:.1f} µs"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--size", type=int, default=1 << 24, help="parameters (default 16777216)")
    parser.add_argument("--repeats", type=int, default=15, help="rounds (default 15)")
    parser.add_argument(
        "--rules", default=",".join(USUAL), help=f"names, or all (default {','.join(USUAL)})"
    )

    def measure(chosen: dict[str, Any]) -> dict[str, Any]:
        names = tuple(rules()) if chosen["rules"] == ("all",) else chosen["rules"]
        return run(chosen["size"], chosen["repeats"], names)

    report.main(parser, measure, table, arguments, {"rules": str}, drawn=figure, notes=notes)


if __name__ == "__main__":
    main()
