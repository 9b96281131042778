"""``aiops simulate``: thousands of clients on one machine, in turns, with reproducible results."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from aiops.cli import tables
from aiops.cli.flags import (
    Assign,
    BatchSize,
    DatasetName,
    FetchCodec,
    Gate,
    Hidden,
    Json,
    Lr,
    Policy,
    PushCodec,
    Seed,
)
from aiops.cli.long_run import INTERRUPTED, interrupts, processors, progress_bar
from aiops.common import formatting
from aiops.common.jsonable import plain
from aiops.errors import UsageError

if TYPE_CHECKING:
    from aiops.sim.turns.result import SimulationResult
    from aiops.sim.turns.run import Run

Recall = Annotated[int, typer.Option(help="Bytes of gradients kept for skipped=reapply.")]
FetchLag = Annotated[int, typer.Option(help="Versions that these may be behind; 0: automatic.")]
Clients = Annotated[int, typer.Option(help="Number of clients (the papers' λ).")]
Iterations = Annotated[int, typer.Option(help="Mini-batches in all.")]
Selection = Annotated[
    str, typer.Option(help="Rule of turns: uniform, paced:times=3, softmax:add=-1, recorded:FILE.")
]
Wait = Annotated[bool, typer.Option(help="Clients wait for the answer to a push.")]
Order = Annotated[str, typer.Option(help="Mini-batches: random, or sequential as in FRED.")]
Samples = Annotated[int, typer.Option(help="Validations on the way.")]
Jobs = Annotated[int, typer.Option(help="Gradients computed at a time; 0: one per processor.")]
Kernels = Annotated[str, typer.Option(help="'numba', 'numpy' or 'auto'; all give the same bits.")]
Keep = Annotated[
    Path | None, typer.Option("--checkpoint", help="Write a checkpoint here every minute.")
]
Resume = Annotated[
    Path | None,
    typer.Option(
        help="Continue from this checkpoint to the same result; flags that are not given keep their"
        " values."
    ),
]
Turns = Annotated[
    Path | None, typer.Option(help="Record the turns; --selection recorded:FILE repeats them.")
]
Save = Annotated[Path | None, typer.Option(help="Write the final model: FILE.safetensors.")]


_EVERY = 60.0  # seconds between two checkpoints, at least
_SHARE = 20  # at most a twentieth of the time goes into checkpoints


def simulate(
    context: typer.Context,
    policy: Policy = "fasgd",
    lr: Lr = None,
    assign: Assign = None,
    gate: Gate = "",
    recall: Recall = 256 << 20,
    push_codec: PushCodec = None,
    fetch_codec: FetchCodec = None,
    fetch_lag: FetchLag = 0,
    clients: Clients = 16,
    batch_size: BatchSize = 8,
    iterations: Iterations = 2000,
    dataset: DatasetName = "mnist",
    hidden: Hidden = 200,
    selection: Selection = "uniform",
    wait: Wait = True,
    order: Order = "random",
    samples: Samples = 20,
    seed: Seed = 0,
    jobs: Jobs = 0,
    kernels: Kernels = "auto",
    checkpoint: Keep = None,
    resume: Resume = None,
    save: Save = None,
    record_turns: Turns = None,
    as_json: Json = False,
) -> None:
    """Simulate clients and a server in memory: the server's own code, deterministic, no clock.

    Each iteration one client computes the gradient of a mini-batch, pushes it, and fetches.
    Ctrl-C ends the run after the turn, prints its result so far, and writes the checkpoint; the
    exit status is then 130. A second Ctrl-C ends it at once.
    """
    from aiops.lab.workloads import PerceptronTask
    from aiops.serving.config import Config
    from aiops.serving.safetensors_io import check_writable
    from aiops.sim.turns.client_selection import RecordingSelection
    from aiops.sim.turns.run import Run
    from aiops.sim.turns.simulation import Simulation

    Config(kernels=kernels, recall=recall, fetch_lag=fetch_lag)  # raises for invalid values
    if save is not None:
        check_writable(save)
    if record_turns is not None:
        if resume is not None:
            raise UsageError("--record-turns needs a run's beginning: it cannot go with --resume")
        _check_folder("--record-turns", record_turns)
    _check_checkpoint(checkpoint, resume)
    settings: dict[str, Any] = {
        "policy": policy,
        "lr": lr,
        "set": tuple(assign or ()),
        "gate": gate,
        "recall": recall,
        "push_codec": tuple(push_codec or ()),
        "fetch_codec": tuple(fetch_codec or ()),
        "fetch_lag": fetch_lag,
        "clients": clients,
        "batch_size": batch_size,
        "iterations": iterations,
        "dataset": dataset,
        "hidden": hidden,
        "selection": selection,
        "waits": wait,
        "order": order,
        "samples": samples,
        "seed": seed,
        "kernels": kernels,
    }
    if resume is None:
        wanted = Simulation(**settings)
        wanted.engine()  # a wrong setting is told before data are downloaded
        run = Run(wanted, PerceptronTask(dataset, hidden), jobs=processors(jobs))
    else:
        wanted = Simulation(**_as_it_was(resume, settings, context))
        task = PerceptronTask(wanted.dataset, wanted.hidden)
        run = Run.load(resume, task, wanted, jobs=processors(jobs))
    noted = RecordingSelection(run.dispatcher.selection) if record_turns is not None else None
    with run:
        if noted is not None:
            run.dispatcher.selection = noted
        if checkpoint is not None:
            run.check_kept()
        outcome = _carry_out(run, checkpoint)
        if save is not None:
            _save(run, save)
    if noted is not None and record_turns is not None:
        noted.write(record_turns)
    if as_json:
        print(json.dumps(plain(outcome.report()), allow_nan=False))
    else:
        tables.console().print(_table(outcome))
    tables.warn(outcome.warnings)
    if outcome.diverged is not None:
        done = outcome.curve[-1].iteration
        raise UsageError(f"training diverged in iteration {done + 1:,}: {outcome.diverged}")
    raise typer.Exit(0 if outcome.complete else INTERRUPTED)


def _check_checkpoint(path: Path | None, resume: Path | None) -> None:
    """Check that a checkpoint can be written, and overwrites none but the one that was read."""
    if path is None:
        return
    if path.exists() and (resume is None or not path.samefile(resume)):
        raise UsageError(
            f"--checkpoint {path} is there already, and nothing is overwritten: go on from it with"
            f" --resume {path}, or give another name"
        )
    _check_folder("--checkpoint", path)


def _check_folder(flag: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {path.parent}")


def _as_it_was(path: Path, settings: Mapping[str, Any], context: typer.Context) -> dict[str, Any]:
    """Return a checkpoint's settings, changed by those of the command line."""
    from aiops.sim.turns.checkpoint import opened
    from aiops.sim.turns.simulation import Simulation

    flags = {"set": "assign", "waits": "wait"}
    with opened(path) as kept:
        found = asdict(Simulation.from_dict(kept.simulation))
    for name, value in settings.items():
        source = context.get_parameter_source(flags.get(name, name))
        if source is not None and source.name == "COMMANDLINE":
            found[name] = value
    return found


def _carry_out(run: Run, checkpoint: Path | None) -> SimulationResult:
    """Run it to its end, or until Ctrl-C; show its progress on stderr."""
    due = time.monotonic() + _EVERY
    bar = progress_bar("{task.completed:,} of {task.total:,} iterations")
    with bar as progress, interrupts(run.stop):
        shown = progress.add_task("", total=run.simulation.iterations, completed=run.iteration)

        def on_progress(done: int) -> None:
            nonlocal due
            progress.update(shown, completed=done)
            began = time.monotonic()
            if checkpoint is not None and began >= due:
                run.save(checkpoint)
                now = time.monotonic()
                due = now + max(_EVERY, _SHARE * (now - began))

        try:
            outcome = run.execute(on_progress)
        except UsageError:  # between two turns: no client can be selected
            if checkpoint is not None:
                run.save(checkpoint)
            raise
        progress.update(shown, completed=run.iteration)
        if checkpoint is not None and outcome.diverged is None:  # it would diverge again
            run.save(checkpoint)
    return outcome


def _save(run: Run, path: Path) -> None:
    from aiops.serving.safetensors_io import write_model

    version = run.engine.defined_store.version
    write_model(path, run.dispatcher.evaluated, version)


def _table(outcome: SimulationResult) -> Table:
    run, last = outcome.simulation, outcome.curve[-1]
    cells = {
        "run": f"{run.policy}, {run.clients} clients, batches of {run.batch_size}, seed {run.seed}",
        "iterations": f"{last.iteration:,} in {formatting.seconds(outcome.seconds)},"
        f" {outcome.iterations_per_second:,.0f} a second",
        "validation": f"error {formatting.percent(last.error)}, cost {last.cost:.4f}",
        "staleness": f"{outcome.mean_staleness:.2f} on average",
        "pushed": f"{last.pushes:,} gradients, {formatting.nbytes(last.pushed)}",
        "fetched": f"{last.fetches:,} times, {formatting.nbytes(last.fetched)}",
        "digest": outcome.digest,
    }
    return tables.facts(cells)
