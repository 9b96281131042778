"""``aiops join``: one worker of a job that torchrun, srun or mpirun has started."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from aiops.cli.run import Arguments, Module, Seed, Steps, Target, Threads
from aiops.cli.server_flags import CommandWithServer, ServerSettings, check_program
from aiops.common.launchers import detect
from aiops.errors import ConnectionLost, Unauthorised
from aiops.launch.joining import JoinPlan, plan_to_join, threads_of_worker
from aiops.launch.program import Team, UserProgram
from aiops.launch.supervision import Supervision
from aiops.net.cpu_count import usable

Serve = Annotated[
    bool | None,
    typer.Option(
        "--serve-on-rank-0/--no-serve-on-rank-0",
        help="Rank 0 starts the server; default: if AIOPS_URL is not set.",
    ),
]
Port = Annotated[
    int | None, typer.Option(min=1, max=65535, help="The server's; default: by the job's name.")
]
Wait = Annotated[float, typer.Option(min=1, help="Seconds that the others wait for the server.")]
Linger = Annotated[
    float,
    typer.Option(min=1, help="Seconds that rank 0 waits for workers that have never joined."),
]
Grace = Annotated[
    float, typer.Option(min=0, help="Seconds that rank 0's worker has to end after a signal.")
]
MaxRestarts = Annotated[int, typer.Option(min=0, help="How often the server is started again.")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command("join", cls=CommandWithServer, context_settings={"allow_interspersed_args": False})
def join(
    context: typer.Context,
    target: Target,
    arguments: Arguments = None,
    module: Module = False,
    serve_on_rank_0: Serve = None,
    port: Port = None,
    wait: Wait = 120.0,
    linger: Linger = 60.0,
    grace: Grace = 20.0,
    max_restarts: MaxRestarts = 3,
    steps: Steps = None,
    worker_threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Run a program as one worker of a job that torchrun, srun, mpirun or the like has started.

    It stands between the launcher and the program: srun aiops join train.py. Rank, number of
    workers and the machine of rank 0 are the launcher's (`aiops doctor` shows them). Rank 0 starts
    the server, with the flags of `aiops serve` that are given here; with AIOPS_URL the server is
    elsewhere. The others wait for it, and become the program. The server ends after the last one.
    """
    program = UserProgram(target, module, tuple(arguments or ()))
    check_program(program)
    settings = ServerSettings(context, os.environ)
    flags = dict(flag.partition("=")[::2] for flag in settings.flags)
    plan = plan_to_join(
        detect(os.environ),
        serve=serve_on_rank_0,
        port=port,
        host=flags.get("--host") or os.environ.get("AIOPS_HOST"),
        token=bool(settings.environment.get("AIOPS_TOKEN")),
    )
    threads = worker_threads or threads_of_worker(os.environ, usable(), plan.local_workers)
    team = Team(plan.workers, plan.local_workers, plan.restarts, seed, threads)
    if plan.serves:
        supervision = Supervision(
            1,
            max_restarts=max_restarts,
            keeps_state=settings.keeps_state,
            writes=settings.writes,
            others=plan.workers - 1,
            linger=linger,
            grace=grace,
        )
        raise typer.Exit(_serve(plan, program, team, settings, supervision, steps))
    _await_server(plan, settings.environment.get("AIOPS_TOKEN"), wait)
    place = team.place(plan.rank, 0, plan.url, plan.local_rank)
    _become(program, place.variables(settings.environment))


def _serve(
    plan: JoinPlan,
    program: UserProgram,
    team: Team,
    settings: ServerSettings,
    supervision: Supervision,
    steps: int | None,
) -> int:
    """Run the server, and the worker of rank 0."""
    from aiops.cli.run_screen import watching
    from aiops.launch.job import Job, run_job

    assert plan.listen is not None
    host, port = plan.listen
    flags = [flag for flag in settings.flags if flag.partition("=")[0] != "--host"]
    flags += [f"--host={host}", f"--port={port}", f"--workers={plan.workers}"]
    with watching(plan.workers, steps, None, live=False) as watcher:
        return run_job(
            Job(
                *(program, team, flags, supervision, watcher),
                environment=settings.environment,
                under=True,
            )
        )


def _await_server(plan: JoinPlan, token: str | None, seconds: float) -> None:
    """Wait until the server welcomes this process."""
    from aiops.client.sync.client import Client

    name = f"aiops join of rank {plan.rank}"
    whose = "the server of rank 0" if plan.listen else "the server"
    try:
        with Client(plan.url, token=token, timeout=seconds, name=name) as client:
            client.ping()
    except Unauthorised as error:
        raise Unauthorised(
            f"rank {plan.rank} is not let in by {whose}: {error}; AIOPS_TOKEN must be the same for"
            " all processes of the job"
        ) from None
    except ConnectionLost as error:
        raise ConnectionLost(
            f"rank {plan.rank} has waited {seconds:g} s for {whose} (`aiops doctor`, started in the"
            f" same way, checks its name, its port and the token): {error}"
        ) from None


def _become(program: UserProgram, environment: Mapping[str, str]) -> None:
    """Replace this process by the program: the launcher's signals are then the program's."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    command = program.command
    os.execvpe(command[0], command, dict(environment))
