"""``aiops bench``: the benchmarks of the repository."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from aiops.cli.exit_status import USAGE
from aiops.errors import UsageError

COMMANDS: Mapping[str, str] = {
    "exchange": "Measure push-and-fetch cycles over TCP, beside other systems.",
    "kernels": "Measure the update kernels against the memory's speed.",
    "gpu": "Measure updates on a GPU against its memory and its link.",
    "codecs": "Measure the speed and the compression of the codecs.",
    "link": "Measure exchanges over a slow link, raw and coded.",
    "overlap": "Measure training over a slow link, with exchanges beside computing and without.",
    "learning": "Measure what policies learn in a stated time over a slow link.",
    "links": "Measure one model on 1, 2 and 4 servers, each with a network link of its own.",
    "clock": "Measure the error of simulated times against real runs.",
    "cluster": "Measure the messages per second of a simulated cluster.",
    "tables": "Measure rows of a sparse table fetched and pushed over TCP.",
    "algorithms": "Train with every policy, and measure accuracy, idle time and losses.",
    "simulation": "Measure simulations against the gradients and updates in them.",
    "pipelining": "Measure requests over one connection, with one to sixteen of them under way.",
    "policies": "Measure the cost of a step under every policy, beside asgd.",
    "scale": "Measure throughput and latency with up to 64 workers, and with several shards.",
    "memory": "Measure a server's memory against what its parameters, versions and buffers need.",
    "hostile": "Measure honest workers and a server's memory beside a crowd that stalls.",
    "soak": "Measure the growth of a server's memory over minutes and hours of a mixed load.",
    "ray": "Measure a job on a Ray cluster whose nodes are killed, and a step's cost under Ray.",
    "all": "Run all benchmarks, one after the other; --quick runs a short form of each.",
    "plot": "Draw the figures of written reports.",
    "startup": "Measure the time from the start of a server to its first answer to a push.",
    "acks": "Measure the price of --state at each level of --acks, beside no state.",
    "coded": "Measure exchanges with codecs, beside raw ones.",
    "filter": "Measure exchanges with --filter robust beside exchanges without.",
    "snapshots": "Measure training beside the snapshots of a state, and restarts from one.",
    "scrape": "Measure scrapes of a server's metrics with up to 1,000 workers.",
    "dashboard": "Measure exchanges beside the live page, and the page in a browser.",
    "directions": "Measure directions of matrices by NumPy, by PyTorch and on a GPU.",
    "torch_steps": "Measure a step of PyTorch's by its own AdamW and through a server.",
    "trackers": "Measure steps with trackers, callbacks and traces, beside steps without.",
    "tracked_steps": "Measure a step of 5 ms at a server that tracks, beside one that does not.",
    "ddp": "Train a small GPT with nothing set, and by PyTorch's DDP with tuned AdamW.",
    "sharing": "Measure large updates and codecs shared by several threads, beside one.",
}
"""The benchmarks, and the two commands about all of them, with their lines in the help."""

_MODULES = {"all": "suite", "plot": "redraw"}  # of the others the module has the command's name


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
            raise typer.Exit(USAGE)
        return
    if context.invoked_subcommand is not None:
        raise UsageError(
            "--compare reads written reports and runs nothing: leave out"
            f" {context.invoked_subcommand}"
        )
    raise typer.Exit(_module("compare").main(*compare))


def _add(name: str, summary: str) -> None:
    @app.command(name, help=summary, context_settings=_PASS_ON)
    def run(context: typer.Context) -> None:
        _module(_MODULES.get(name, name)).main(context.args)


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


for _name, _summary in COMMANDS.items():
    _add(_name, _summary)
