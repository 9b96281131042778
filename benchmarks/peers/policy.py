"""aiops through its public `aiops.Worker`, under any policy: the setting ``policy``.

A cycle is one `aiops.Worker.step`. Policies that would not push and fetch in every step are set so
that they do (`EVERY_STEP`), and barriers are told that there are as many workers as there are. What
a step computes is each policy's own, so the check is one of counts: with one worker every gradient
makes a version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from aiops.algorithms import available
from benchmarks.peers import ours
from benchmarks.peers.base import Array, Job, Setting, gradient
from benchmarks.peers.ours import ENVIRONMENT, check_transport, missing

__all__ = ["ENVIRONMENT", "EVERY_STEP", "LEFT_OUT", "SETTINGS", "Server", "Worker", "missing"]

SETTINGS: Mapping[str, Setting] = ours.SETTINGS

EVERY_STEP: Mapping[str, Sequence[str]] = {
    "diloco": ("local_steps=1",),
    "downpour": ("n_push=1", "n_fetch=1"),
    "eamsgd": ("p=1",),
    "easgd": ("p=1",),
    "fedbuff": ("local_steps=1", "k=1"),
    "no-delay": ("tau_max=1",),
    "rennala": ("b=1",),
}
"""The settings with which every step is a push, an update and a fetch."""
LEFT_OUT: Mapping[str, str] = {
    "average": "its server takes no gradients: workers average their models with each other"
}
"""The policies that no worker can drive alone, and why."""


def policies() -> list[str]:
    """Return those that can be measured, `asgd` first: the others are compared with it."""
    others = sorted(available().keys() - LEFT_OUT.keys() - {"asgd"})
    return ["asgd", *others]


class Server(ours.Server):
    """The real server."""

    def flags(self) -> list[str]:
        """Return its command-line flags."""
        settings = self._job.settings
        policy = str(settings["policy"])
        flags = ["--policy", policy, "--workers", str(self._job.workers)]
        flags += ["--no-shm"] if settings["no_shm"] else []
        for setting in EVERY_STEP.get(policy, ()):
            flags += ["--set", setting]
        return flags

    def check(self, cycles: int) -> None:
        """Fail unless every gradient was used, and made a version."""
        import aiops

        with aiops.Client(self._url) as client:
            stats = client.stats()
        if not stats["gradients"] == stats["version"] == cycles:
            used, made = stats["gradients"], stats["version"]
            raise ValueError(
                f"after {cycles} steps {stats['policy']} has used {used} gradients and made {made}"
                " versions: with its settings not every step is a push and an update"
            )


class Worker:
    """The client that a program that trains would use; its gradient takes no time to compute."""

    def __init__(self, job: Job, address: str, index: int) -> None:
        import aiops

        self._gradients = {"w": gradient(job.elements)}
        self._worker = aiops.Worker(address, {"w": np.zeros(job.elements, np.float32)})
        check_transport(self._worker._client, job)
        self.params: Array = self._worker.params["w"]

    def cycle(self) -> None:
        """Hand in the gradient, and have the parameters brought up to date."""
        self._worker.step(lambda params: self._gradients)

    def check(self, cycles: int) -> str:
        """Fail unless the last step brought the last version, and finite parameters."""
        if self._worker.params["w"] is not self.params:
            raise ValueError("the parameters moved to another array")
        if self._worker.version != cycles or not np.isfinite(self.params).all():
            raise ValueError(
                f"after {cycles} steps the worker's parameters are of version"
                f" {self._worker.version}, or not finite"
            )
        return "whole"

    def close(self) -> None:
        """Say goodbye."""
        self._worker.close()
