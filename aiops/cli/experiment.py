"""``aiops experiment``: the papers' figures by name."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from aiops.cli.flags import Json
from aiops.cli.long_run import INTERRUPTED, processors, progress_bar
from aiops.common import formatting

if TYPE_CHECKING:
    from aiops.lab.experiments.experiment import Findings
    from aiops.lab.experiments.planned_run import PlannedRun
    from aiops.lab.experiments.scheduler import ExperimentScheduler

_WIDE = 200  # characters of a line that no terminal breaks

app = typer.Typer(help="Reproduce the papers' figures by name.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="An experiment; see aiops experiment list.")]
Full = Annotated[bool, typer.Option("--full/--quick", help="The paper's size, or a minute's.")]
Seeds = Annotated[int | None, typer.Option(help="Runs of each curve; default the experiment's.")]
Iterations = Annotated[int | None, typer.Option(help="Of each run, instead of the experiment's.")]
Knob = Annotated[list[str] | None, typer.Option("--with", help="A knob: key=value; see list.")]
Jobs = Annotated[int, typer.Option(help="Runs at the same time; 0: one per processor.")]
Out = Annotated[
    Path | None, typer.Option(help="Folder of the results; default out/NAME, out/NAME-full.")
]
Rerun = Annotated[bool, typer.Option("--rerun", help="Repeat runs that other versions have made.")]
From = Annotated[
    list[Path] | None,
    typer.Option("--from", help="Take runs that --out lacks from this runs.jsonl.gz; repeat."),
]
Estimate = Annotated[bool, typer.Option("--estimate", help="Only print the estimated time.")]


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the experiments, and the claims of their sources."""
    from aiops.lab.experiments.catalog import EXPERIMENTS

    rows: list[dict[str, Any]] = [
        {
            "name": e.name,
            "title": e.title,
            "source": e.source,
            "claim": e.claim,
            "knobs": {key: list(values) for key, values in e.knobs.items()},
            "note": e.note,
        }
        for e in EXPERIMENTS.values()
    ]
    if as_json:
        print(json.dumps(rows))
        return
    console = Console(highlight=False)
    for row in rows:
        console.print(f"[bold]{row['name']}[/bold]  {row['title']}")
        console.print(f"    {row['source']}: {row['claim']}", style="dim", markup=False)
        for key, values in row["knobs"].items():
            console.print(f"    --with {key}={'|'.join(values)}", style="dim", markup=False)


@app.command()
def run(
    name: Name,
    full: Full = False,
    seeds: Seeds = None,
    iterations: Iterations = None,
    knob: Knob = None,
    jobs: Jobs = 0,
    out: Out = None,
    rerun: Rerun = False,
    archive: From = None,
    estimate: Estimate = False,
    as_json: Json = False,
) -> None:
    """Run an experiment, in parallel processes; write its curves, a summary, and a figure.

    Finished runs are kept in --out and are not repeated. Ctrl-C keeps finished runs.
    """
    from aiops.lab.experiments.catalog import find
    from aiops.lab.experiments.runs import RunFolder
    from aiops.lab.experiments.scheduler import ExperimentScheduler

    experiment = find(name)
    knobs = knob or []
    scale = experiment.scale(full=full, seeds=seeds, iterations=iterations, knobs=knobs)
    jobs = processors(jobs)
    parts = [name, *(["full"] if full else []), *(item.replace("=", "-") for item in knobs)]
    place = out or Path("out", "-".join(parts))
    command = ["aiops", "experiment", "run", name, "--full" if full else "--quick"]
    for flag, value in (("--seeds", seeds), ("--iterations", iterations)):
        command += [flag, str(value)] if value is not None else []
    command += [word for item in knobs for word in ("--with", item)]
    console = Console(stderr=True, highlight=False)
    with _Screen(console) as screen:
        folder = RunFolder(place, name, rerun=rerun, archives=archive or ())
        scheduler = ExperimentScheduler(experiment, scale, folder, screen)
        if archive:
            _print_archived(scheduler, console)
        _print_foreign(scheduler, console)
        if full or estimate:
            _print_estimate(scheduler, jobs, console)
        if estimate:
            return
        status = _carry_out(scheduler, jobs, screen)
    _show(scheduler, shlex.join(command), draw=status != INTERRUPTED, as_json=as_json)
    raise typer.Exit(status)


def _print_archived(scheduler: ExperimentScheduler, console: Console) -> None:
    """Say how many runs the archives of --from have: others are of other settings."""
    wanted = {case.key for case in scheduler.wanted()}
    used = len(wanted & scheduler.folder.archived)
    text = f"--from has {used} of the {len(wanted)} runs that are wanted so far"
    if not used:
        text += ": its runs are of another experiment, or of other iterations, seeds or knobs"
    console.print(text, style="dim" if used else "yellow", markup=False, soft_wrap=True)


def _print_foreign(scheduler: ExperimentScheduler, console: Console) -> None:
    for what, count in scheduler.folder.foreign(scheduler.wanted()).items():
        text = f"kept runs made with {what}: {count} (--rerun makes them again)"
        console.print(text, style="yellow", markup=False, soft_wrap=True)


def _print_estimate(scheduler: ExperimentScheduler, jobs: int, console: Console) -> None:
    from aiops.lab.experiments import run_planning

    cases = scheduler.unfinished()
    if cases:
        run_planning.check(cases)
        took = formatting.seconds(run_planning.seconds(cases, jobs))
        console.print(f"{len(cases)} runs, about {took} with {jobs} at a time", style="dim")


class _Screen:
    """A progress bar on stderr, and above it the errors of failed runs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = progress_bar("{task.percentage:3.0f}%", console)
        self._task = self._bar.add_task("", total=None, visible=False)

    def progress(self, done: float, total: float) -> None:
        self._bar.update(self._task, completed=done, total=total, visible=True)

    def failed(self, case: PlannedRun, why: str) -> None:
        self._console.print(f"{case.name}: {why}", style="red", markup=False)

    def __enter__(self) -> _Screen:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _carry_out(scheduler: ExperimentScheduler, jobs: int, screen: _Screen) -> int:
    try:
        scheduler.run(jobs)
    except KeyboardInterrupt:
        scheduler.folder.read_again()
        return INTERRUPTED
    return 1 if scheduler.folder.runs.failed else 0


def _show(scheduler: ExperimentScheduler, command: str, *, draw: bool, as_json: bool) -> None:
    """Write and print the findings; after Ctrl-C without the figure, which takes seconds."""
    from aiops.lab.experiments import report

    experiment, scale, folder = scheduler.experiment, scheduler.scale, scheduler.folder
    if not report.finished(experiment, scale, folder.runs):
        return
    findings = experiment.judge(scale, folder.runs)
    files = report.save(experiment, scale, folder, findings, command, draw=draw)
    if as_json:
        print(json.dumps(report.summary(experiment, scale, folder, findings, command)))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    console.print(table(findings))
    console.print(f"\n{experiment.source}: {experiment.claim}", markup=False, soft_wrap=True)
    for verdict in findings.verdicts:
        console.print(f"  {verdict.word}: {verdict.text}", markup=False, soft_wrap=True)
    console.print("written: " + ", ".join(map(str, files)), style="dim", soft_wrap=True)
    missing = len(scheduler.unfinished())
    if missing:
        console.print(f"{missing} runs are missing: the same command goes on", soft_wrap=True)


def table(findings: Findings) -> Table:
    """Return the findings as a table."""
    shown = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    names = dict.fromkeys(name for row in findings.table for name in row)
    for name in names:
        shown.add_column(name, overflow="fold")
    for row in findings.table:
        shown.add_row(*(str(row.get(name, "–")) for name in names))
    return shown
