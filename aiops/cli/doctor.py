"""``aiops doctor``: what a worker or a server would find here, what is wrong, and what to do."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from aiops.cli.flags import Json, Timeout, Token
from aiops.common import urls
from aiops.common.launchers import WorkerPlace, detect
from aiops.errors import UsageError
from aiops.launch.findings import (
    BROKEN,
    GOOD,
    NOTE,
    Finding,
    judge_machine,
    judge_place,
    judge_reach,
    judge_state,
)
from aiops.launch.security_findings import (
    CertificateSeen,
    TokensSeen,
    judge_certificate,
    judge_encryption,
    judge_tokens,
)
from aiops.serving.token_file import read_tokens

ServerUrl = Annotated[
    str | None, typer.Argument(help="The server; default: AIOPS_URL, or what the launcher tells.")
]
State = Annotated[
    Path | None, typer.Option(help="The folder that a server is to keep its state in.")
]
Tokens = Annotated[
    Path | None, typer.Option(envvar="AIOPS_TOKENS", help="The file of a server's --tokens.")
]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="The port of a server here.")]
Workers = Annotated[
    int | None, typer.Option("--workers", "-n", min=1, help="Workers on this machine.")
]

_STYLES = {GOOD: "green", NOTE: "yellow", BROKEN: "bold red"}
_FACTS = {
    "rank": "rank",
    "workers": "workers",
    "local_rank": "rank on this machine",
    "local_workers": "workers on this machine",
    "host": "machine of rank 0",
    "url": "server",
    "job": "job",
    "restarts": "restarts",
}


def doctor(
    url: ServerUrl = None,
    token: Token = None,
    state: State = None,
    tokens: Tokens = None,
    port: Port = None,
    workers: Workers = None,
    as_json: Json = False,
    timeout: Timeout = 5.0,
) -> None:
    """Examine the surroundings of this process, as a worker or a server finds them.

    Start it as you start workers: srun aiops doctor. It shows what the launcher tells, reaches the
    server stage by stage, and looks at this machine. The exit status is 1 if something is broken.
    """
    from aiops.launch import measuring

    place = detect(os.environ)
    where = url or place.url
    findings = list(judge_place(place if url is None else detect({**os.environ, "AIOPS_URL": url})))
    here = measuring.machine(os.environ, token, port)
    model, reached = 0, []
    seen: list[CertificateSeen | None] = [*measuring.certificates(os.environ)]
    for server in urls.parse_all(where) if where else ():
        found = measuring.reach(server, token, timeout)
        reached.append(found)
        findings += [*judge_reach(found, place, here), *judge_encryption(found)]
        if found.ip is not None and server.tls:
            seen.append(measuring.served_certificate(server, found.ip, timeout))
        model = max(model, 4 * int((found.report or {}).get("parameters", 0)))
    if len(reached) > 1 and any(not found.error for found in reached):
        findings = [_softened(each) for each in findings]
    count = workers or place.local_workers or 1
    findings += judge_machine(here, count, model)
    if state is not None:
        findings += judge_state(measuring.state_disk(state), model)
    findings += [judge_certificate(each, time.time()) for each in seen if each is not None]
    if tokens is not None:
        findings += judge_tokens(tokens_seen(tokens), time.time())
    if as_json:
        print(json.dumps(_plain(place, findings), indent=1))
    else:
        _print(place, findings)
    raise typer.Exit(1 if any(each.state == BROKEN for each in findings) else 0)


def tokens_seen(path: Path) -> TokensSeen:
    """Return the facts of a file of tokens."""
    try:
        table = read_tokens(path)
    except UsageError as error:
        return TokensSeen(str(error))
    return TokensSeen("", tuple((token.name, token.expires) for token in table))


def _softened(finding: Finding) -> Finding:
    """Return a finding about one of several servers, of which one is enough."""
    if finding.what == "server" and finding.state == BROKEN:
        return Finding("server", NOTE, finding.text, "another one answers: it may be a standby")
    return finding


def _plain(place: WorkerPlace, findings: Sequence[Finding]) -> Mapping[str, Any]:
    facts = {
        name: {"value": getattr(place, name), "from": place.sources.get(name)} for name in _FACTS
    }
    rows = [
        {"what": each.what, "state": each.state, "text": each.text, "advice": each.advice}
        for each in findings
    ]
    return {"launcher": place.launcher, "place": facts, "findings": rows}


def _print(place: WorkerPlace, findings: Sequence[Finding]) -> None:
    from aiops.cli.tables import console

    out = console()
    out.print(Text(f"launcher: {place.launcher or 'none'}", "bold"))
    out.print(_place_table(place))
    out.print()
    shown = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("", "examined", "found"):
        shown.add_column(name, overflow="fold")
    for each in findings:
        text = Text(each.text)
        if each.advice:
            text.append(f"\n→ {each.advice}", "italic")
        shown.add_row(Text(each.state, _STYLES[each.state]), each.what, text)
    out.print(shown)


def _place_table(place: WorkerPlace) -> Table:
    shown = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for style in ("dim", None, "dim"):
        shown.add_column(style=style, overflow="fold")
    for name, text in _FACTS.items():
        found = getattr(place, name)
        source = place.sources.get(name)
        if name in ("job", "restarts") and not source:
            continue
        shown.add_row(
            text, "–" if found in (None, "") else str(found), f"from {source}" if source else ""
        )
    return shown
