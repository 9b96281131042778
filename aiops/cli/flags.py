"""Flags that several subcommands share."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

Url: TypeAlias = Annotated[str, typer.Argument(help="The server: aiops://host:port.")]
Token: TypeAlias = Annotated[
    str | None, typer.Option("--token", envvar="AIOPS_TOKEN", help="The server's token.")
]
Timeout: TypeAlias = Annotated[
    float, typer.Option("--timeout", help="Seconds that the server has to answer.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
