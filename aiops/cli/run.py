"""``aiops run``: a server and the workers of a program on this machine."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from aiops.cli import serve
from aiops.errors import AiopsError, UsageError
from aiops.launch.program import UserProgram
from aiops.launch.supervision import Supervision
from aiops.net.cpu_count import share, usable
from aiops.serving.config import read_file

_FLAGS = "aiops.server_flags"
_OURS = {"workers", "port"}
"""Settings of the server that have a flag of their own here."""

_WRITES = ("save", "record", "ledger", "profile")

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


class _RunCommand(typer.core.TyperCommand):
    """A command that takes the flags of `aiops serve` too, and hands them on as they are."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        own = {parameter.name for parameter in self.params}
        for option in typer.main.get_command(_server()).params:
            if option.name not in own | _OURS:
                self.params.append(_handed_on(option))


def _server() -> typer.Typer:
    app = typer.Typer(add_completion=False)
    app.command("serve")(serve.serve)
    return app


def _handed_on(option: Any) -> Any:
    """Return a flag of the server's that is noted as it was given."""
    mine = copy.copy(option)
    mine.expose_value = mine.required = mine.is_eager = False
    mine.hidden, mine.default, mine.envvar = True, None, None

    def note(context: Any, _option: Any, value: Any) -> None:
        source = context.get_parameter_source(option.name)
        if getattr(source, "name", "") == "COMMANDLINE":
            context.meta.setdefault(_FLAGS, []).extend(_words(option, value))

    mine.callback = note
    return mine


def _words(option: Any, value: Any) -> Iterator[str]:
    if option.is_flag:
        yield option.opts[0] if value else option.secondary_opts[0]
        return
    for one in value if option.multiple else [value]:
        yield f"{option.opts[0]}={one}"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command("run", cls=_RunCommand, context_settings={"allow_interspersed_args": False})
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
    from aiops.launch.job import Job

    flags = [*context.meta.get(_FLAGS, [])]
    environment = dict(os.environ)
    flags, environment = _with_token(flags, environment)
    count = workers or usable()
    flags.append(f"--workers={count}")
    if port is not None:
        flags.append(f"--port={port}")
    supervision = Supervision(
        count,
        max_restarts=max_restarts,
        keeps_state=_has("state", flags, environment),
        writes=any(_has(name, flags, environment) for name in _WRITES),
    )
    program = UserProgram(target, module, tuple(arguments or ()))
    _check(program)
    with watching(count, steps, logs) as watcher:
        job = Job(
            *(program, count, flags, supervision, watcher),
            seed=seed,
            threads=worker_threads or share(count),
            environment=environment,
        )
        try:
            status = asyncio.run(job.run())
        except OSError as error:
            raise AiopsError(f"a process cannot be started: {error.strerror or error}") from None
    raise typer.Exit(status)


def _check(program: UserProgram) -> None:
    """Refuse a script that is not there: each worker would say so."""
    if not program.module and not Path(program.target).is_file():
        raise UsageError(
            f"there is no script {program.target!r}; a module is run with -m: aiops run -m"
            f" {program.target} ..."
        )


def _with_token(
    flags: Sequence[str], environment: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Move the token to the environment, where workers find it, and other users do not see it."""
    left = []
    for flag in flags:
        name, _, text = flag.partition("=")
        if name == "--token":
            environment = {**environment, "AIOPS_TOKEN": text}
        else:
            left.append(flag)
    return left, environment


def _has(name: str, flags: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether the server has a setting that names a file or a folder."""
    given = dict[str, str]()
    for flag in flags:
        key, _, text = flag.partition("=")
        given[key] = text
    file = given.get("--config") or environment.get("AIOPS_CONFIG")
    return (
        f"--{name}" in given
        or f"AIOPS_{name.upper()}" in environment
        or bool(file and name in read_file(Path(file)))
    )
