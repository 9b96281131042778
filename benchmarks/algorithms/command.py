"""The command line of the algorithms benchmark."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from aiops.errors import AiopsError, UsageError
from aiops.lab.processes import Interrupted, ProcessFailed
from aiops.lab.run_record import describe
from benchmarks import report
from benchmarks.algorithms import accuracy, idle, plots, straggler, tables
from benchmarks.algorithms.cases import AlgorithmCase, chosen, grid
from benchmarks.algorithms.problem import Bench, Problem
from benchmarks.algorithms.results import AlgorithmResults, Row, fingerprint

PARTS = ("accuracy", "idle", "straggler")


@dataclass(frozen=True)
class TrainingMeasurement:
    """One row to be measured: where it belongs, what it is of, and how to get it."""

    section: str
    name: str
    key: Mapping[str, Any]
    measure: Callable[[], Awaitable[Row]]


def plan(options: argparse.Namespace, bench: Bench) -> list[TrainingMeasurement]:
    """Return what there is to measure, in order.

    Raises
    ------
    AiopsError
        When a policy, a variant or a setting makes no sense.
    """
    only = [name.strip() for name in options.only.split(",")] if options.only else []
    parts = [part.strip() for part in options.parts.split(",")]
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"no part is called {part!r}; there are {', '.join(PARTS)}")
    found: list[TrainingMeasurement] = []
    if "accuracy" in parts:
        found += _accuracy(options, only, bench)
    if "idle" in parts and not options.tune:
        found += _rest("idle", idle, only, bench)
    if "straggler" in parts and not options.tune:
        found += _rest("straggler", straggler, only, bench)
    return found


def _accuracy(
    options: argparse.Namespace, only: list[str], bench: Bench
) -> list[TrainingMeasurement]:
    if options.tune:
        cases = [(case, 0) for case in grid(only)]
    else:
        plain, variants = chosen(only, options.set)
        seeds = options.seeds if plain else 1
        cases = [(case, seed) for case in plain for seed in range(seeds)]
        cases += [(case, seed) for case in variants for seed in range(options.variant_seeds)]
    for case, _seed in cases:
        case.check(bench.problem.workers)
    return [
        TrainingMeasurement(
            "runs",
            f"{case.name}, seed {seed}",
            accuracy.key(case, seed),
            partial(accuracy.measure, case, seed, bench),
        )
        for case, seed in cases
    ]


def _rest(section: str, part: Any, only: list[str], bench: Bench) -> list[TrainingMeasurement]:
    cases: list[AlgorithmCase] = [case for case in part.cases() if not only or case.policy in only]
    return [
        TrainingMeasurement(
            section, f"{section}: {case.name}", part.key(case), partial(part.measure, case, bench)
        )
        for case in cases
    ]


async def carry_out(
    measurements: Sequence[TrainingMeasurement],
    results: AlgorithmResults,
    console: Console,
    *,
    again: bool,
) -> list[str]:
    """Measure what is not in the results yet; return a line per run that failed."""
    failed: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("starting", total=len(measurements))
        for one in measurements:
            progress.update(bar, description=one.name)
            if again or results.find(one.section, one.key) is None:
                try:
                    row = await one.measure()
                except Interrupted:
                    raise
                except ProcessFailed as error:
                    failed.append("\n    ".join([f"{one.name}: {error}", *_details(error)]))
                    console.print(failed[-1], style="red", highlight=False, markup=False)
                else:
                    results.put(one.section, one.key, row)
                    console.print(_line(one, row), highlight=False, markup=False, soft_wrap=True)
            progress.advance(bar)
    return failed


def _details(error: AiopsError) -> list[str]:
    return [str(line) for line in error.details.get("stderr", [])][-4:]


def _line(one: TrainingMeasurement, row: Row) -> str:
    shown = {name: value for name, value in row.items() if name != "curve"}
    return f"{one.name}: " + ", ".join(f"{name} {value}" for name, value in shown.items())


def write_text(path: Path, content: Mapping[str, Any]) -> None:
    """Write the tables as text."""
    with path.open("w", encoding="utf-8") as file:
        console = Console(file=file, width=200)
        for heading, made in tables.all_of(content):
            console.print(heading, highlight=False, markup=False, soft_wrap=True)
            console.print(made)
        console.print(tables.MEANINGS, highlight=False, markup=False)
        console.print()
        console.print(describe(content["machine"]), highlight=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "aiops bench algorithms", description="What each policy learns, waits for, and loses."
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="accuracy,idle,straggler")
    parser.add_argument("--only", help="policies, or variants: asgd,fasgd or 'asgd adam'")
    parser.add_argument("--seeds", type=int, default=3, help="of each policy (default 3)")
    parser.add_argument("--variant-seeds", type=int, default=1, help="of each variant (default 1)")
    parser.add_argument("--epochs", type=float, default=10, help="of samples in all (default 10)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples (default 32)")
    parser.add_argument("--workers", type=int, default=4, help="processes (default 4)")
    parser.add_argument("--dataset", default="mnist", help="mnist, digits, synthetic, cifar10")
    parser.add_argument("--hidden", type=int, default=200, help="units (default 200)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--validate", action="store_true", help="test on training examples that are held out"
    )
    parser.add_argument(
        "--tune", action="store_true", help="search the grid from which the defaults were chosen"
    )
    parser.add_argument("--again", action="store_true", help="measure also what is there already")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every figure in FILE")
    parser.add_argument("--text", type=Path, metavar="FILE", help="write the tables to FILE")
    parser.add_argument("--plots", type=Path, metavar="STEM", help="draw STEM-accuracy.png, ...")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="all three, as FOLDER/algorithms.json, .txt and -*.png",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 1 when a run failed, 2 when an option is wrong."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.out:
        stem = options.out / ("algorithms-tuning" if options.tune else "algorithms")
        options.json, options.text = stem.with_suffix(".json"), stem.with_suffix(".txt")
        options.plots = None if options.tune else stem
    problem = Problem(
        dataset=options.dataset,
        hidden=options.hidden,
        batch_size=options.batch_size,
        epochs=options.epochs,
        workers=options.workers,
        validate=options.validate or options.tune,
    )
    try:
        with Bench(problem) as bench:
            content, failed = _measure(options, bench)
    except Interrupted:
        print("interrupted; all processes are ended", file=sys.stderr)
        raise SystemExit(130) from None
    except AiopsError as error:
        parser.error(str(error))
    for heading, made in tables.all_of(content):
        print(heading)
        report.show(made, content["machine"])
    if options.text:
        write_text(options.text, content)
    if options.plots:
        plots.save(content, options.plots)
    if failed:
        print("failed:", *failed, sep="\n  ")
        raise SystemExit(1)


def _measure(options: argparse.Namespace, bench: Bench) -> tuple[Mapping[str, Any], list[str]]:
    measurements = plan(options, bench)
    results = AlgorithmResults(options.json, bench.problem.as_json(), fingerprint())
    console = Console(stderr=True)
    running = carry_out(measurements, results, console, again=options.again)
    return results.content, asyncio.run(running)
