"""aiops with checksums, otherwise the peer `ours`, beside which it shows what they cost."""

from __future__ import annotations

from benchmarks.peers import ours
from benchmarks.peers.base import Job, lacks
from benchmarks.peers.ours import ENVIRONMENT, SETTINGS

__all__ = ["ENVIRONMENT", "SETTINGS", "Server", "Worker", "missing"]


def missing() -> str | None:
    """Return what is not installed that makes checksums, or None."""
    return lacks("xxhash", "pip install 'aiops-ps[server]'")


class Worker(ours.Worker):
    """A blocking client that exchanges with checksums."""

    def __init__(self, job: Job, address: str, index: int) -> None:
        super().__init__(job, address, index, checksums=True)


class Server(ours.Server):
    """The real server, which makes checksums where a client asks for them."""

    worker = Worker
