"""``aiops advise``: which policy, which settings, for a job that is described."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from rich.text import Text

from aiops.bandwidth.units import format_rate, parse_rate
from aiops.cli import tables
from aiops.cli.flags import Json
from aiops.common import formatting
from aiops.errors import UsageError
from aiops.launch.advice import KINDS, Advice, TrainingJob
from aiops.launch.advice import advise as advised

GUIDE = "docs/guide-policies.md"

Answer = TypeVar("Answer")

Kind = Annotated[str | None, typer.Option(help=f"What is trained: {', '.join(KINDS)}.")]
Parameters = Annotated[
    str | None,
    typer.Option(help="Their number: 840k, 25M, 1.3B; of tables, in the rows of a mini-batch too."),
]
Workers = Annotated[int | None, typer.Option("--workers", "-n", help="The number of workers.")]
Link = Annotated[
    str | None, typer.Option(help="Of each worker: 20Mbit/s; local: on the server's machine.")
]
ServerLink = Annotated[
    str | None, typer.Option(help="Of the server, which all share; default the workers'.")
]
Step = Annotated[
    float | None, typer.Option(help="Seconds that a worker computes for a mini-batch.")
]
Unequal = Annotated[
    float | None, typer.Option(help="Times as long that the slowest worker takes for one.")
]
MayVanish = Annotated[
    bool | None, typer.Option("--may-vanish/--stays", help="Machines may disappear.")
]

_NUMBER = re.compile(r"\s*(\d[\d_]*(?:\.\d*)?|\.\d+)\s*([kmbg]?)\s*", re.IGNORECASE | re.ASCII)
_TIMES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


def advise(
    kind: Kind = None,
    parameters: Parameters = None,
    workers: Workers = None,
    link: Link = None,
    server_link: ServerLink = None,
    step: Step = None,
    unequal: Unequal = None,
    may_vanish: MayVanish = None,
    as_json: Json = False,
) -> None:
    """Advise on policy, settings, codecs and overlap, and say why; asks for what is not given.

    Reasons name sections of docs/guide-policies.md, which has what was measured.
    """
    asks = sys.stdin.isatty() and not as_json
    local = Asked(asks)
    kind = local.ask("--kind", kind, f"What is trained ({', '.join(KINDS)})", "transformer", str)
    count = local.ask("--parameters", parameters, "Parameters, as 840k or 25M", None, str)
    size = 4 * number("--parameters", count)
    workers = local.ask("--workers", workers, "Workers", None, int)
    link = local.ask("--link", link, "Each worker's link, as 20Mbit/s, or local", "local", str)
    rate = None if link.lower() == "local" else float(parse_rate("--link", link))
    if rate is None and server_link is not None:
        raise UsageError("--server-link is of no use where workers are on the server's machine")
    shared = None if server_link is None else float(parse_rate("--server-link", server_link))
    step = local.ask("--step", step, "Seconds of a mini-batch", 0.1, float)
    unequal = local.ask("--unequal", unequal, "Times as long that the slowest takes", 1.0, float)
    may_vanish = local.ask("--may-vanish", may_vanish, "May machines disappear", False, bool)
    job = TrainingJob(kind, size, workers, rate, shared or rate, step, unequal, may_vanish)
    found = advised(job)
    if as_json:
        print(json.dumps(_plain(job, found), indent=1))
    else:
        _print(job, found)


class Asked:
    """The questions of a terminal; without one, defaults.

    Parameters
    ----------
    terminal
        Whether there is one.
    """

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal

    def ask(
        self,
        flag: str,
        given: Answer | None,
        text: str,
        default: Answer | None,
        kind: Callable[[Any], Answer],
    ) -> Answer:
        """Return what was given, or is answered, or the default.

        Raises
        ------
        UsageError
            When there is none of them.
        """
        if given is not None:
            return given
        if self._terminal:
            answer: Answer = typer.prompt(text, default=default, type=kind, err=True)
            return answer
        if default is None:
            raise UsageError(f"{flag} is needed where nothing can be asked (stdin is no terminal)")
        return default


def number(flag: str, text: str) -> int:
    """Return a number of parameters.

    >>> [number("--parameters", text) for text in ("840k", "1.3B", "25 M", "7000")]
    [840000, 1300000000, 25000000, 7000]

    Raises
    ------
    UsageError
        When it is none.
    """
    match = _NUMBER.fullmatch(text)
    count = int(float(match[1]) * _TIMES[match[2].lower()]) if match else 0
    if not 1 <= count < 1 << 50:
        raise UsageError(f"{flag} {text!r} is no number of parameters: write 840k, 25M or 1.3B")
    return count


def _plain(job: TrainingJob, found: Advice) -> dict[str, Any]:
    return {
        "job": dataclasses.asdict(job),
        "commands": found.commands(job),
        "server": found.flags,
        "overlap": found.overlap,
        "reasons": [
            {"text": each.text, "measured": f"{GUIDE}#{each.section}"} for each in found.reasons
        ],
        "unmeasured": list(found.unmeasured),
        "seconds_of_a_step": dict(found.steps),
    }


def _print(job: TrainingJob, found: Advice) -> None:
    out = tables.console()
    for line in found.commands(job):
        out.print(Text(line, "bold"), soft_wrap=True)
    out.print()
    for reason in found.reasons:
        out.print(Text.assemble(reason.text, (f"  {GUIDE}#{reason.section}", "dim")))
    out.print()
    if job.rate is not None:
        size, rate = formatting.nbytes(job.nbytes), format_rate(job.rate)
        out.print(Text(f"A step, of {size} at {rate}, computed and not measured:", "bold"))
        taken = {name: formatting.seconds(seconds) for name, seconds in found.steps}
        out.print(tables.facts(taken))
    if found.unmeasured:
        out.print(Text("Not measured:", "bold"))
        for text in found.unmeasured:
            out.print(Text(f"  {text}"))
