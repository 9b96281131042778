"""``aiops bench``: the benchmarks of the repository."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from aiops.errors import UsageError

app = typer.Typer(
    help="Measure speed (needs a checkout of the repository). Flags are the benchmark's own.",
    invoke_without_command=True,
)
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        "--compare",
        metavar="OLD NEW",
        help="Show regressions between two reports of one benchmark, or two folders of reports"
        " (exit status 1: there are some).",
    ),
]


@app.callback()
def _group(context: typer.Context, compare: Compare = None) -> None:
    if compare is None:
        if context.invoked_subcommand is None:
            print(context.get_help())
            raise typer.Exit(2)
        return
    if context.invoked_subcommand is not None:
        raise UsageError(
            "--compare reads written reports and runs nothing: leave out"
            f" {context.invoked_subcommand}"
        )
    raise typer.Exit(_module("compare").main(*compare))


@app.command(context_settings=_PASS_ON)
def exchange(context: typer.Context) -> None:
    """Measure push-and-fetch cycles over TCP, beside other systems."""
    _run("exchange", context.args)


@app.command(context_settings=_PASS_ON)
def kernels(context: typer.Context) -> None:
    """Measure the update kernels against the memory's speed."""
    _run("kernels", context.args)


@app.command(context_settings=_PASS_ON)
def gpu(context: typer.Context) -> None:
    """Measure updates on a GPU against its memory and its link."""
    _run("gpu", context.args)


@app.command(context_settings=_PASS_ON)
def codecs(context: typer.Context) -> None:
    """Measure the speed and the compression of the codecs."""
    _run("codecs", context.args)


@app.command(context_settings=_PASS_ON)
def link(context: typer.Context) -> None:
    """Measure exchanges over a slow link, raw and coded."""
    _run("link", context.args)


@app.command(context_settings=_PASS_ON)
def clock(context: typer.Context) -> None:
    """Measure the error of simulated times against real runs."""
    _run("clock", context.args)


@app.command(context_settings=_PASS_ON)
def cluster(context: typer.Context) -> None:
    """Measure the messages per second of a simulated cluster."""
    _run("cluster", context.args)


@app.command(context_settings=_PASS_ON)
def tables(context: typer.Context) -> None:
    """Measure rows of a sparse table fetched and pushed over TCP."""
    _run("tables", context.args)


@app.command(context_settings=_PASS_ON)
def algorithms(context: typer.Context) -> None:
    """Train with every policy, and measure accuracy, idle time and losses."""
    _run("algorithms", context.args)


@app.command(context_settings=_PASS_ON)
def simulation(context: typer.Context) -> None:
    """Measure simulations against the gradients and updates in them."""
    _run("simulation", context.args)


@app.command(context_settings=_PASS_ON)
def pipelining(context: typer.Context) -> None:
    """Measure requests over one connection, with one to sixteen of them under way."""
    _run("pipelining", context.args)


@app.command(context_settings=_PASS_ON)
def policies(context: typer.Context) -> None:
    """Measure the cost of a step under every policy, beside asgd."""
    _run("policies", context.args)


@app.command(context_settings=_PASS_ON)
def scale(context: typer.Context) -> None:
    """Measure throughput and latency with up to 64 workers, and with several shards."""
    _run("scale", context.args)


@app.command(context_settings=_PASS_ON)
def memory(context: typer.Context) -> None:
    """Measure a server's memory against what its parameters, versions and buffers need."""
    _run("memory", context.args)


@app.command(context_settings=_PASS_ON)
def soak(context: typer.Context) -> None:
    """Measure the growth of a server's memory over minutes and hours of a mixed load."""
    _run("soak", context.args)


@app.command(name="all", context_settings=_PASS_ON)
def everything(context: typer.Context) -> None:
    """Run all benchmarks, one after the other; --quick runs a short form of each."""
    _run("suite", context.args)


@app.command(context_settings=_PASS_ON)
def plot(context: typer.Context) -> None:
    """Draw the figures of written reports."""
    _run("redraw", context.args)


@app.command(context_settings=_PASS_ON)
def startup(context: typer.Context) -> None:
    """Measure the time from the start of a server to its first answer to a push."""
    _run("startup", context.args)


@app.command(context_settings=_PASS_ON)
def sharing(context: typer.Context) -> None:
    """Measure large updates and codecs shared by several threads, beside one."""
    _run("sharing", context.args)


def _run(name: str, arguments: list[str]) -> None:
    _module(name).main(arguments)


def _module(name: str) -> Any:
    module = f"benchmarks.{name}"
    root = str(Path(__file__).parents[2])  # of the checkout, when this file is in one
    if root not in sys.path:
        sys.path.append(root)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise UsageError(f"{module} needs the package {error.name!r}: install it") from None
        raise UsageError(
            f"{module} is not here: the benchmarks come with the repository, not with the package;"
            " run this in a checkout of it"
        ) from None
