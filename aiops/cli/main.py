"""The ``aiops`` command: its subcommands, and its exit status after errors.

A subcommand's module is imported when it runs: ``aiops --help`` takes a fifth of a second, and all
modules together over half a second.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import typer.main

from aiops.cli.exit_status import USAGE, status_of
from aiops.cli.extras import version_text
from aiops.common.variables import JOB, unknown_variables
from aiops.errors import AiopsError

COMMANDS: Mapping[str, str] = {
    "serve": "Run a server.",
    "run": "Run a program as workers of a server, on this machine.",
    "join": "Join a job of torchrun, srun or mpirun, as a worker.",
    "doctor": "Check the surroundings: launcher, server, machine.",
    "advise": "Advise on policy and settings for a job.",
    "demo": "Train the papers' perceptron with real processes.",
    "simulate": "Simulate thousands of clients in turns, without a clock.",
    "cluster": "Simulate a cluster and its links in virtual time.",
    "stats": "Print a server's statistics.",
    "top": "Show a server and its workers, live in the terminal.",
    "ping": "Check that a server is alive.",
    "relay": "Let workers that average meet, behind NAT.",
    "promote": "Have a standby take its primary's place.",
    "kick": "Send a client away from a server.",
    "pause": "Have a server take no pushes for a while.",
    "resume": "Have it take pushes again.",
    "snapshot": "Have a snapshot of a server's state be taken now.",
    "rollback": "Have a server go back to a snapshot.",
    "drain": "Have a server end, as SIGTERM does.",
    "tls": "Make certificates: a CA, a server's, the workers'.",
    "token": "Make, list and revoke the tokens of a server.",
    "state": "Look into the directory of a server's --state.",
    "replay": "Run a recorded run again, to bit-identical parameters.",
    "policies": "List the algorithms; with a NAME, explain one.",
    "bandwidth": "Train with gates, codecs and budgets; measure bytes.",
    "bench": "Measure speed.",
    "torture": "Kill servers and workers at random; count what is lost.",
    "experiment": "Reproduce the papers' figures by name.",
}
"""The subcommands, each in the module of its name, and their lines in ``aiops --help``."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""The reasons for which a write to standard output fails, and that are no fault of the command."""

_MODULES = dict.fromkeys(("kick", "pause", "resume", "snapshot", "rollback", "drain"), "admin")
"""The modules of those that share one."""


class _LazyCommands(typer.core.TyperGroup):
    """A group that lists its subcommands from `COMMANDS` and imports only the one that runs."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for name, summary in COMMANDS.items():
            hidden = name == "bench" and not _in_a_checkout()
            self.add_command(typer.core.TyperCommand(name, help=summary, hidden=hidden))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and command(str(name)), rest


def _in_a_checkout() -> bool:
    """Return True if the benchmarks are here: they are the repository's, and not the package's."""
    return (Path(__file__).parents[2] / "benchmarks" / "suite.py").is_file()


def command(name: str) -> Any:
    """Import a subcommand, and return it as typer runs it."""
    module = importlib.import_module(f"aiops.cli.{_MODULES.get(name, name)}")
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(name)(getattr(module, name))
    found = typer.main.get_command(app)
    found.name = name
    return found


app = typer.Typer(
    name="aiops",
    cls=_LazyCommands,
    help="An asyncio-native parameter server for asynchronous SGD.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would take as long to import as all else together
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(version_text())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; an error of ours is one line on stderr, and has an exit status."""
    _tell_unknown_variables()
    sys.path.append("")  # --policy package.module:Class may lie in the current folder
    _run(app, "aiops")


def server_main() -> None:
    """Run ``python -m aiops.server``."""
    _tell_unknown_variables()
    _run(command("serve"), "python -m aiops.server")


def _tell_unknown_variables() -> None:
    """Print the variables that are named as those of aiops and are none, once in a job."""
    if JOB not in os.environ:
        for text in unknown_variables(os.environ):
            print(f"aiops: {text}", file=sys.stderr)


def _run(command: Any, name: str) -> None:
    try:
        status = command(prog_name=name, standalone_mode=False)
        sys.stdout.flush()  # here an error of it can be told; at the interpreter's end it cannot
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        raise SystemExit(0) from None  # typer's own status for it is 1
    except AiopsError as error:
        _end(str(error), status_of(error))
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(130) from None
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(0) from None
    except OSError as error:
        if error.filename is None:  # of a file that was named it is enough to say which
            if error.errno not in _FULL:
                raise
            _discard_output()
            _end(f"the output cannot be written: {error.strerror}", status_of(error))
        _end(f"{error.filename}: {error.strerror}", status_of(error))
    except Exception as error:
        format_message = getattr(error, "format_message", None)  # typer's usage errors have it
        if format_message is None:
            raise
        text = format_message()
        if text.count("\n") > 1:  # the help, which is shown where no command is given
            print(text)
            raise SystemExit(USAGE) from None
        _end(" ".join(text.split()), USAGE)
    raise SystemExit(status if isinstance(status, int) else 0)


def _discard_output() -> None:
    """Have what is left of the output go nowhere: at its end the interpreter writes it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(text: str, status: int) -> NoReturn:
    if text:  # empty when the help has been shown instead
        print(f"aiops: {text}", file=sys.stderr)
    raise SystemExit(status) from None
