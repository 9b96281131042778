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
Policy: TypeAlias = Annotated[str, typer.Option(help="Algorithm: a name, or package.module:Class.")]
Lr: TypeAlias = Annotated[float | None, typer.Option(help="Learning rate; default the policy's.")]
Assign: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", help="A setting of the algorithm, key=value.")
]
Gate: TypeAlias = Annotated[
    str, typer.Option(help="As the server's: bfasgd:c_push=0.08, periodic, constant.")
]
PushCodec: TypeAlias = Annotated[
    list[str] | None, typer.Option(help="How gradients travel; may be repeated.")
]
FetchCodec: TypeAlias = Annotated[list[str] | None, typer.Option(help="How parameters travel.")]
DatasetName: TypeAlias = Annotated[str, typer.Option(help="mnist, digits, cifar10 or synthetic.")]
Hidden: TypeAlias = Annotated[int, typer.Option(help="Units of the hidden layer.")]
BatchSize: TypeAlias = Annotated[int, typer.Option(help="Examples in a mini-batch (µ).")]
Seed: TypeAlias = Annotated[
    int, typer.Option(help="Equal seeds give equal results, to the last bit.")
]
Plot: TypeAlias = Annotated[bool, typer.Option("--plot/--no-plot", help="Draw a plot.")]
