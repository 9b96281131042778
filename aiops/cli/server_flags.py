"""The flags of ``aiops serve`` on commands that start a server: taken, and handed on as given."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import typer.core
import typer.main

from aiops.cli import serve
from aiops.errors import UsageError
from aiops.launch.program import UserProgram
from aiops.serving.config import read_file

_FLAGS = "aiops.server_flags"

OURS = {"workers", "port"}
"""Settings of the server that have a flag of these commands' own."""

_VARIABLES = {
    "--token": "AIOPS_TOKEN",
    "--relay-token": "AIOPS_RELAY_TOKEN",
    "--trace": "AIOPS_TRACE",
}
"""Flags that travel as variables: workers read them, too, and tokens are not to be seen by all."""

_WRITES = ("save", "record", "ledger", "profile", "track")


class CommandWithServer(typer.core.TyperCommand):
    """A command that takes the flags of `aiops serve` too, and hands them on as they are."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        own = {parameter.name for parameter in self.params}
        for option in typer.main.get_command(_server()).params:
            if option.name not in own | OURS:
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


def check_program(program: UserProgram) -> None:
    """Refuse a script that is not there: each worker would say so."""
    if not program.module and not Path(program.target).is_file():
        raise UsageError(
            f"there is no script {program.target!r}; a module is run with -m: aiops run -m"
            f" {program.target} ...",
            missing=program.target,
        )


class ServerSettings:
    """The settings that a command's server is given.

    Parameters
    ----------
    context
        The command's, with the flags as they were given.
    environment
        The variables of all processes.

    Attributes
    ----------
    flags
        Those of the command, without `_VARIABLES`.
    environment
        The variables, with those.
    """

    def __init__(self, context: typer.Context, environment: Mapping[str, str]) -> None:
        self.environment: dict[str, str]
        self.flags, self.environment = _with_variables(
            context.meta.get(_FLAGS, []), dict(environment)
        )
        with contextlib.suppress(UsageError):  # the server tells it, where there is one
            trace = self._file().get("trace")
            if isinstance(trace, str):  # workers do not read the file
                self.environment.setdefault(_VARIABLES["--trace"], trace)

    @property
    def keeps_state(self) -> bool:
        """True if the server is given a folder for its state."""
        return self.has("state")

    @property
    def writes(self) -> bool:
        """True if it is given a file to write at its end."""
        return any(map(self.has, _WRITES))

    def has(self, name: str) -> bool:
        """Return whether the server has a setting, from wherever it takes its settings."""
        return (
            f"--{name}" in self._given()
            or f"AIOPS_{name.upper()}" in self.environment
            or name in self._file()
        )

    def _given(self) -> dict[str, str]:
        """Return the flags by name."""
        words = [flag.partition("=") for flag in self.flags]
        return {name: text for name, _, text in words}

    def _file(self) -> Mapping[str, object]:
        """Return the settings of the file of settings, if there is one."""
        file = self._given().get("--config") or self.environment.get("AIOPS_CONFIG")
        return read_file(Path(file)) if file else {}


def _with_variables(
    flags: Sequence[str], environment: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Move `_VARIABLES` to the environment."""
    left = []
    for flag in flags:
        name, _, text = flag.partition("=")
        if name in _VARIABLES:
            environment = {**environment, _VARIABLES[name]: text}
        else:
            left.append(flag)
    return left, environment
