"""``aiops run``: a server and the workers of a program on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from aiops.cli.server_flags import CommandWithServer, ServerSettings, check_program
from aiops.launch.program import Team, UserProgram
from aiops.launch.supervision import Supervision
from aiops.net.cpu_count import share, usable

Workers = Annotated[
    int | None,
    typer.Option("--workers", "-n", min=1, help="Workers; default: as many as processors."),
]
Module = Annotated[bool, typer.Option("-m", help="PROGRAM is a module, as with python -m.")]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Gradients in all, for the progress bar's end.")
]
MaxRestarts = Annotated[
    int, typer.Option(min=0, help="How often each process that dies is started again.")
]
Threads = Annotated[
    int | None,
    typer.Option("--worker-threads", min=1, help="Of each worker's mathematics; default: a share."),
]
Seed = Annotated[int, typer.Option(min=0, help="AIOPS_SEED of all workers.")]
Logs = Annotated[
    Path | None, typer.Option(help="Folder: what each process prints goes to a file there.")
]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="The server's; default: any.")]
Target = Annotated[str, typer.Argument(metavar="PROGRAM", help="A script, or with -m a module.")]
Arguments = Annotated[list[str] | None, typer.Argument(help="What it is given.")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command("run", cls=CommandWithServer, context_settings={"allow_interspersed_args": False})
def run(
    context: typer.Context,
    target: Target,
    arguments: Arguments = None,
    workers: Workers = None,
    module: Module = False,
    steps: Steps = None,
    max_restarts: MaxRestarts = 3,
    worker_threads: Threads = None,
    seed: Seed = 0,
    logs: Logs = None,
    port: Port = None,
) -> None:
    """Run a program as several workers of one server, on this machine.

    PROGRAM finds its server by itself: aiops.Worker(params=...), RemoteOptimizer(model). It has
    AIOPS_URL, AIOPS_SEED, RANK, WORLD_SIZE, LOCAL_RANK, and the number of threads that is its share
    of this machine. Every flag of `aiops serve` is one of this command too: --policy, --set, --lr,
    --state. A process that dies is started again, the server if it has --state. Ctrl-C ends all.
    The exit status is 0 if every worker ended with 0.
    """
    from aiops.cli.run_screen import watching
    from aiops.launch.job import Job, run_job

    settings, count = ServerSettings(context, os.environ), workers or usable()
    settings.flags.append(f"--workers={count}")
    if port is not None:
        settings.flags.append(f"--port={port}")
    supervision = Supervision(
        count,
        max_restarts=max_restarts,
        keeps_state=settings.keeps_state,
        writes=settings.writes,
    )
    program = UserProgram(target, module, tuple(arguments or ()))
    check_program(program)
    with watching(count, steps, logs) as watcher:
        job = Job(
            program,
            Team(count, count, 0, seed, worker_threads or share(count)),
            *(settings.flags, supervision, watcher),
            environment=settings.environment,
        )
        status = run_job(job)
    raise typer.Exit(status)
