"""The ``aiops`` command: its subcommands, and what becomes of errors."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from aiops._version import __version__
from aiops.cli import bench, experiment
from aiops.cli.bandwidth import bandwidth
from aiops.cli.cluster import cluster
from aiops.cli.demo import demo
from aiops.cli.ping import ping
from aiops.cli.policies import policies
from aiops.cli.replay import replay
from aiops.cli.serve import serve
from aiops.cli.simulate import simulate
from aiops.cli.stats import stats
from aiops.errors import AiopsError

app = typer.Typer(
    name="aiops",
    help="An asyncio-native parameter server for asynchronous SGD.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (serve, demo, simulate, cluster, stats, ping, replay, policies, bandwidth):
    app.command()(_command)
app.add_typer(bench.app, name="bench")
app.add_typer(experiment.app, name="experiment")


def _print_version(wanted: bool) -> None:
    if wanted:
        from aiops.wire.compiled import COMPILED

        print(f"aiops {__version__}" + (", compiled" if COMPILED else ""))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; an error of ours is one line on stderr and exit status 2."""
    sys.path.append("")  # --policy package.module:Class may lie in the current folder
    _run(app)


def server_main() -> None:
    """Run ``python -m aiops.server``."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command()(serve)
    _run(alone)


def _run(command: typer.Typer) -> None:
    try:
        status = command(standalone_mode=False)
    except AiopsError as error:
        print(f"aiops: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise SystemExit(0) from None
    except Exception as error:
        said = getattr(error, "format_message", None)  # typer's usage errors have it
        if said is None:
            raise
        if text := " ".join(said().split()):  # empty when the help has been shown instead
            print(f"aiops: {text}", file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(status if isinstance(status, int) else 0)
