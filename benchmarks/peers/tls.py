"""aiops over mutual TLS 1.3, otherwise the peer `ours`, beside which it shows what TLS costs."""

from __future__ import annotations

import tempfile
from pathlib import Path

from aiops.net import certificates
from benchmarks.peers import ours
from benchmarks.peers.base import Job, lacks
from benchmarks.peers.ours import ENVIRONMENT, SETTINGS

__all__ = ["ENVIRONMENT", "SETTINGS", "Server", "Worker", "missing"]


def missing() -> str | None:
    """Return what is not installed that makes certificates, or None."""
    return lacks("cryptography", "pip install 'aiops-ps[tls]'")


class Worker(ours.Worker):
    """A blocking client that exchanges, over TLS."""

    def __init__(self, job: Job, address: str, index: int) -> None:
        import aiops

        url, folder = address.split(maxsplit=1)
        held = Path(folder)
        tls = aiops.Tls(held / "ca.pem", held / "client.pem", held / "client.key")
        super().__init__(job, url, index, tls=tls)


class Server(ours.Server):
    """The real server with a certificate, which asks its clients for theirs."""

    worker = Worker

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._folder = tempfile.TemporaryDirectory(prefix="aiops-bench-")

    def flags(self) -> list[str]:
        """Return its command-line flags."""
        held = Path(self._folder.name)
        files = {"cert": "server.pem", "key": "server.key", "ca": "ca.pem"}
        return [*super().flags(), *(f"--tls-{what}={held / name}" for what, name in files.items())]

    def start(self) -> str:
        """Make the certificates, and start it; return its URL and their folder."""
        held = Path(self._folder.name)
        certificates.make_ca(held, days=1)
        certificates.issue(held, "server", 1, [certificates.SERVER], ["127.0.0.1"])
        certificates.issue(held, "client", 1, [certificates.CLIENT])
        self._url = f"{super().start()} {held}"
        return self._url

    def close(self) -> None:
        """Ask the server to end, and remove the certificates."""
        super().close()
        self._folder.cleanup()
