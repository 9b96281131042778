"""``aiops demo``: train a real model with real processes, and watch it live."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from aiops.cli.flags import Assign, DatasetName, Plot, Policy
from aiops.errors import AiopsError, UsageError

if TYPE_CHECKING:
    from aiops.lab.demo.record import DemoRecord
    from aiops.lab.demo.settings import DemoSettings
    from aiops.lab.workloads import Dataset

Workers = Annotated[int, typer.Option(help="Number of workers.")]
Steps = Annotated[int | None, typer.Option(help="Mini-batches in all; default by data set.")]
BatchSize = Annotated[int | None, typer.Option(help="Examples each; default by data set.")]
Lr = Annotated[float | None, typer.Option(help="Learning rate; default by data set and policy.")]
Seed = Annotated[int, typer.Option(help="Of the initial parameters and the mini-batches.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, the rest on stderr.")
]
Out = Annotated[Path, typer.Option(help="Folder or file (.png, .svg, .pdf) of the plot.")]


def demo(
    policy: Policy = "fasgd",
    workers: Workers = 4,
    dataset: DatasetName = "digits",
    steps: Steps = None,
    batch_size: BatchSize = None,
    lr: Lr = None,
    assign: Assign = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    out: Out = Path("out"),
    plot: Plot = True,
) -> None:
    """Train the papers' perceptron: one server and several workers, real processes.

    Shows a live table and saves a plot. Ctrl-C stops it and prints the results so far. The exit
    status is 0 when training came to its end, 1 when a process failed, 130 after Ctrl-C.
    """
    from aiops.lab.demo import plot as figure
    from aiops.lab.demo.settings import DemoSettings
    from aiops.lab.workloads import load

    settings = DemoSettings.make(
        policy=policy,
        workers=workers,
        dataset=dataset,
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        set=tuple(assign or ()),
        seed=seed,
    )
    place = figure.place(out) if plot else None
    with Console(stderr=True).status(f"loading {dataset}"):  # it may have to be downloaded
        data = load(dataset).flat()
    raise typer.Exit(_run(settings, data, place, as_json=as_json))


def _run(settings: DemoSettings, data: Dataset, plot: Path | None, *, as_json: bool) -> int:
    """Run the demo, and return the exit status."""
    from aiops.lab.demo.display import display_for, print_summary
    from aiops.lab.demo.record import DemoRecord
    from aiops.lab.demo.run import run
    from aiops.lab.processes import Interrupted

    console = Console(stderr=as_json, highlight=False)
    record, status = DemoRecord(settings), 0
    try:
        with display_for(console) as display:
            asyncio.run(run(record, data, display))
    except Interrupted as stopped:
        status, plot = 128 + stopped.details["signal"], None
    except AiopsError as failed:
        _report(failed)
        return 1
    drawn = _draw(record, plot) if plot is not None else None
    print_summary(console, record, complete=not status, plot=drawn)
    if as_json:
        print(json.dumps(record.summary(complete=not status, plot=drawn)))
    return status


def _report(failed: AiopsError) -> None:
    """Print the error, and the last lines of stderr of the process that failed."""
    for line in failed.details.get("stderr", ()):
        print(f"  | {line}", file=sys.stderr)
    print(f"aiops: {failed}", file=sys.stderr)


def _draw(record: DemoRecord, path: Path) -> str | None:
    """Save the plot; a failure to do so is reported and does not end the command."""
    from aiops.lab.demo.plot import save

    try:
        save(record, path)
    except UsageError as error:
        print(f"aiops: no plot: {error}", file=sys.stderr)
        return None
    return str(path)
