"""``aiops tls``: make the certificates of a server and its workers, with a CA of one's own."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from aiops.errors import UsageError
from aiops.net.certificates import CLIENT, SERVER, issue, make_ca, need_cryptography

app = typer.Typer(
    help="Make certificates: a CA, a server's, and one for each worker.", no_args_is_help=True
)

Folder = Annotated[Path, typer.Argument(help="The folder of the CA and its certificates.")]
Hosts = Annotated[
    list[str] | None,
    typer.Option("--host", help="A name or IP address at which clients reach it; repeat."),
]
Days = Annotated[int, typer.Option(min=1, max=36500, help="Days for which it is valid.")]

_LOCAL = ("localhost", "127.0.0.1", "::1")
_BOTH = (SERVER, CLIENT)  # servers of one run connect to each other, and workers that average, too


@app.command()
def init(folder: Folder, host: Hosts = None, days: Days = 825) -> None:
    """Make a CA in a new folder, and a server's and a client's certificate of it.

    The server's is for this machine's name, localhost, and each --host.
    """
    need_cryptography()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_absent(folder, "ca", "server", "client")
    make_ca(folder)
    _issue_server(folder, "server", host, days)
    issue(folder, "client", days, _BOTH)
    print(
        f"{folder}/ca.pem       for servers (--tls-ca) and clients (AIOPS_TLS_CA)\n"
        f"{folder}/ca.key       signs certificates: keep it where neither of them runs\n"
        f"{folder}/server.pem   aiops serve --tls-cert {folder}/server.pem --tls-key"
        f" {folder}/server.key --tls-ca {folder}/ca.pem\n"
        f"{folder}/client.pem   AIOPS_TLS_CERT={folder}/client.pem"
        f" AIOPS_TLS_KEY={folder}/client.key AIOPS_TLS_CA={folder}/ca.pem"
    )


@app.command()
def server(
    folder: Folder,
    name: Annotated[str, typer.Argument()] = "server",
    host: Hosts = None,
    days: Days = 825,
) -> None:
    """Make another server's certificate: FOLDER/NAME.pem and FOLDER/NAME.key.

    Of the name "server" it takes the place of the one that is there; SIGHUP has a server read it.
    """
    if name != "server":
        _check_absent(folder, name)
    _issue_server(folder, name, host, days)
    print(f"{folder / name}.pem")


@app.command()
def client(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="The worker's, such as its user's.")],
    days: Days = 825,
) -> None:
    """Make a client's certificate: FOLDER/NAME.pem and FOLDER/NAME.key."""
    _check_absent(folder, name)
    issue(folder, name, days, _BOTH)
    print(f"{folder / name}.pem")


def _issue_server(folder: Path, name: str, hosts: list[str] | None, days: int) -> None:
    names = dict.fromkeys([*_LOCAL, socket.gethostname(), *(hosts or ())])
    # A server connects to others of its run, too: followers, and its primary.
    issue(folder, name, days, _BOTH, names)


def _check_absent(folder: Path, *names: str) -> None:
    for path in (folder / f"{name}{suffix}" for name in names for suffix in (".pem", ".key")):
        if path.exists():
            raise UsageError(
                f"{path} is there already, and others may rely on it: name another, or move it away"
            )
