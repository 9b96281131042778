"""``aiops bandwidth``: train with gates, codecs and budgets, and measure what a byte buys."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from aiops.cli import tables
from aiops.cli.flags import Assign, Json, Lr, Plot
from aiops.cli.long_run import INTERRUPTED, progress_bar
from aiops.common import formatting, ledger_sums
from aiops.errors import AiopsError, UsageError, nearest

if TYPE_CHECKING:
    from aiops.lab.experiments.bandwidth.case import BandwidthCase
    from aiops.lab.experiments.bandwidth.results import BandwidthResults, Row

Preset = Annotated[
    str | None, typer.Option(help="quick, pareto, figures, budget, link or transformer.")
]
Policy = Annotated[str | None, typer.Option(help="Algorithm: a name, or package.module:Class.")]
Gate = Annotated[list[str] | None, typer.Option(help="As the server's; repeat to sweep; 'none'.")]
PushCodec = Annotated[list[str] | None, typer.Option(help="As the server's, ; between several.")]
FetchCodec = Annotated[list[str] | None, typer.Option(help="The same; repeat to sweep; 'none'.")]
Budget = Annotated[
    list[str] | None, typer.Option("--bandwidth-budget", help="2MB/s; repeat to sweep; 'none'.")
]
Workers = Annotated[int | None, typer.Option(help="Number of workers; default 4.")]
PerProcess = Annotated[int | None, typer.Option(help="Workers in each process.")]
Network = Annotated[str | None, typer.Option(help="perceptron (default) or transformer.")]
DatasetName = Annotated[str | None, typer.Option(help="mnist, digits, cifar10 or synthetic.")]
Hidden = Annotated[int | None, typer.Option(help="Units of the hidden layer.")]
BatchSize = Annotated[int | None, typer.Option(help="Examples in a mini-batch.")]
Gradients = Annotated[int | None, typer.Option(help="Mini-batches in all, shared equally.")]
Seed = Annotated[list[int] | None, typer.Option(help="Repeat for several runs of each.")]
Link = Annotated[str | None, typer.Option(help="A slow link to the server, such as 20Mbit/s.")]
Delay = Annotated[float | None, typer.Option(help="Delay of the link in seconds.")]
Samples = Annotated[int | None, typer.Option(help="Tests of the parameters while it trains.")]
Again = Annotated[bool, typer.Option("--again", help="Repeat cases that have been run already.")]
Out = Annotated[Path, typer.Option(help="Results: FILE.json; tables and plots go beside it.")]


def bandwidth(
    preset: Preset = None,
    policy: Policy = None,
    lr: Lr = None,
    assign: Assign = None,
    gate: Gate = None,
    push_codec: PushCodec = None,
    fetch_codec: FetchCodec = None,
    budget: Budget = None,
    workers: Workers = None,
    per_process: PerProcess = None,
    network: Network = None,
    dataset: DatasetName = None,
    hidden: Hidden = None,
    batch_size: BatchSize = None,
    gradients: Gradients = None,
    seed: Seed = None,
    link: Link = None,
    delay: Delay = None,
    samples: Samples = None,
    again: Again = False,
    out: Out = Path("out/bandwidth.json"),
    plot: Plot = True,
    as_json: Json = False,
) -> None:
    """Train with real processes over TCP, and measure what a byte buys.

    Flags that may be repeated are swept: every combination of their values is run. Other flags
    hold for every run, including those of a preset. Results are kept in --out, and finished runs
    are not repeated. Ctrl-C keeps finished runs.
    """
    fixed = {
        "policy": policy,
        "lr": lr,
        "workers": workers,
        "per_process": per_process,
        "network": network,
        "dataset": dataset,
        "hidden": hidden,
        "batch_size": batch_size,
        "gradients": gradients,
        "link": link,
        "delay": delay,
        "samples": samples,
        "set": tuple(assign) if assign else None,
    }
    swept: dict[str, list[Any] | None] = {
        "gate": _none(gate),
        "push_codec": _codecs(push_codec),
        "fetch_codec": _codecs(fetch_codec),
        "budget": _none(budget),
        "seed": list(seed) if seed else None,
    }
    raise typer.Exit(_run(_cases(preset, fixed, swept), out, plot, again=again, as_json=as_json))


def _none(values: list[str] | None) -> list[str] | None:
    return ["" if value == "none" else value for value in values] if values else None


def _codecs(values: list[str] | None) -> list[tuple[str, ...]] | None:
    plain = _none(values)
    return [tuple(filter(None, value.split(";"))) for value in plain] if plain else None


def _cases(
    preset: str | None, fixed: dict[str, Any], swept: dict[str, list[Any] | None]
) -> list[BandwidthCase]:
    """Return the cases to run, checked."""
    from dataclasses import replace
    from itertools import product

    from aiops.lab.experiments.bandwidth.case import BandwidthCase
    from aiops.lab.experiments.bandwidth.presets import PRESETS

    if preset is not None and preset not in PRESETS:
        raise UsageError(f"no preset is called {preset!r}; {nearest(preset, PRESETS)}")
    bases = PRESETS[preset] if preset is not None else (BandwidthCase(),)
    chosen = {name: value for name, value in fixed.items() if value is not None}
    names = [name for name, values in swept.items() if values is not None]
    grid = list(product(*(swept[name] or [] for name in names)))
    cases = [
        replace(base, **chosen, **dict(zip(names, values, strict=True)))
        for base in bases
        for values in grid
    ]
    for case in cases:
        case.check()
    return list(dict.fromkeys(cases))


def _run(cases: list[BandwidthCase], out: Path, plot: bool, *, again: bool, as_json: bool) -> int:
    """Run the cases that have no result yet; show all; return the exit status."""
    from aiops.lab.experiments.bandwidth import plots
    from aiops.lab.experiments.bandwidth.results import BandwidthResults, write_csv

    if out.suffix != ".json":
        raise UsageError(f"--out {out}: name a .json file")
    results, status = BandwidthResults(out), 0
    todo = [case for case in cases if again or results.find(case) is None]
    console = Console(stderr=True, highlight=False)
    try:
        status = _carry_out(todo, results, console)
    except KeyboardInterrupt:
        status = INTERRUPTED
    rows = results.of(cases)
    if not rows:
        return status or 1
    files = [out, *write_csv(rows, out.with_suffix(""))]
    if plot:
        try:
            files += plots.save(rows, out.with_suffix(""))
        except UsageError as error:
            print(f"aiops: no plot: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps(rows))
    else:
        shown = Console(highlight=False)
        shown.print(table(rows))
        shown.print("written: " + ", ".join(map(str, files)), style="dim", soft_wrap=True)
    return status


def _carry_out(cases: Sequence[BandwidthCase], results: BandwidthResults, console: Console) -> int:
    from aiops.lab.experiments.bandwidth.networks import material
    from aiops.lab.experiments.bandwidth.results import row_of
    from aiops.lab.experiments.bandwidth.run import carry_out
    from aiops.lab.processes import Interrupted

    status = 0
    with progress_bar("{task.description:.50} {task.percentage:3.0f}%", console) as progress:
        whole = progress.add_task("starting", total=sum(case.gradients for case in cases))
        before = 0
        for learnt, group in groupby(cases, lambda case: (case.network, case.dataset, case.hidden)):
            with material(*learnt) as files:
                for case in group:
                    progress.update(whole, description=case.name, completed=before)

                    def on_progress(done: int, before: int = before) -> None:
                        progress.update(whole, completed=before + done)

                    try:
                        outcome = asyncio.run(carry_out(case, files, on_progress))
                    except Interrupted as stopped:
                        return 128 + int(stopped.details["signal"])
                    except AiopsError as error:
                        status = 1
                        _print_error(console, case, error)
                    else:
                        results.put(case, row_of(case, outcome))
                    before += case.gradients
        progress.update(whole, completed=before)
    return status


def _print_error(console: Console, case: BandwidthCase, error: AiopsError) -> None:
    """Print the error of a run; the others go on."""
    lines = [f"{case.name}: {error}", *map(str, error.details.get("stderr", ())[-4:])]
    console.print("\n    ".join(lines), style="red", markup=False)


def table(rows: Sequence[Row]) -> Table:
    """Return a table of the runs, with the factor by which each sent less than the first."""
    from aiops.lab.experiments.bandwidth.results import total

    shown = tables.table(
        "run", "error", "nats", "pushed", "fetched", "less", "saved", "time", "waited"
    )
    for row in rows:
        shown.add_row(
            row["name"],
            formatting.percent(row["error"]),
            f"{row['loss']:.3f}",
            formatting.nbytes(row["pushed"]),
            formatting.nbytes(row["fetched"]),
            f"÷{total(rows[0]) / max(total(row), 1):.1f}",
            formatting.nbytes(ledger_sums.saved(row["ledger"])),
            formatting.seconds(row["seconds"]),
            formatting.percent(row["idle"]),
        )
    return shown
