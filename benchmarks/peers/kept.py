"""aiops with a state or with codecs: the settings ``state`` (a folder, empty: none) and ``acks``,
``codec`` of gradients, and ``fetch_codec`` of parameters.

The cycle is that of `benchmarks.peers.ours`. Gradients that travel raw are checked as there; what a
lossy codec makes of them is checked by counts: every push was used, and made a version.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

import aiops
from benchmarks.peers import base, ours
from benchmarks.peers.base import Job, Setting
from benchmarks.peers.ours import ENVIRONMENT, missing

__all__ = ["ENVIRONMENT", "SETTINGS", "Server", "Worker", "missing"]

RAW = "raw"
SETTINGS: Mapping[str, Setting] = {
    **ours.SETTINGS,
    "state": "",
    "acks": "written",
    "codec": RAW,
    "fetch_codec": RAW,
}


class Server(ours.Server):
    """The real server."""

    def flags(self) -> list[str]:
        """Return its command-line flags."""
        settings, flags = self._job.settings, super().flags()
        for name, flag in (("codec", "--push-codec"), ("fetch_codec", "--fetch-codec")):
            if settings[name] != RAW:
                flags += [flag, str(settings[name])]
        if settings["state"]:
            flags += ["--state", str(settings["state"]), "--acks", str(settings["acks"])]
        return flags

    def check(self, cycles: int) -> None:
        """Fail unless every push was used once, and the journal, if there is one, goes on."""
        with aiops.Client(self._url) as client:
            stats, params = client.stats(), client.fetch()
        if not stats["gradients"] == stats["version"] == cycles:
            raise ValueError(
                f"after {cycles} pushes the server has used {stats['gradients']} gradients and made"
                f" {stats['version']} versions"
            )
        if _is_raw(self._job):
            base.check_server(params["w"], cycles)
        kept = stats.get("state")
        if bool(kept) != bool(self._job.settings["state"]) or (kept and kept["ended"]):
            raise ValueError(f"the server's state is not kept as it was told to: {kept}")


class Worker(ours.Worker):
    """A blocking client that exchanges."""

    def __init__(self, job: Job, address: str, index: int) -> None:
        super().__init__(job, address, index)
        self._job = job

    def check(self, total: int) -> str:
        """Fail unless the parameters are of one version, as far as that can be told."""
        if _is_raw(self._job):
            least = total // self._job.workers  # its own cycles: all workers have as many
            return base.check_worker(self.params, least, total, whole=True)
        if not np.isfinite(self.params).all() or not self.params.any():
            raise ValueError("the worker's parameters are not finite, or have not changed")
        return "whole"


def _is_raw(job: Job) -> bool:
    """Return whether nothing is lost on the way, so that the parameters are known to the bit."""
    return job.settings["codec"] == job.settings["fetch_codec"] == RAW
