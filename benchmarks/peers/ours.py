"""aiops itself over TCP: ``python -m aiops.server`` and the blocking `aiops.Client`.

On one machine the two share memory by themselves, so the server is told not to: ``no_shm``. The
peers `shared` and `views` let it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from aiops.lab.processes import ChildProcess, command
from aiops.lab.training_run import START_DEADLINE
from benchmarks.peers.base import LEARNING_RATE, Array, Job, Setting, gradient, lacks

if TYPE_CHECKING:
    import aiops

SETTINGS: Mapping[str, Setting] = {
    "policy": "asgd",
    "no_shm": True,
    "shards": 1,
    "device": "cpu",
    "whole": True,
}
"""``whole`` is no choice here: aiops always delivers one version."""
ENVIRONMENT: Mapping[str, str] = {}

_STOP_SECONDS = 20.0


def missing() -> str | None:
    """Say so when aiops is not installed."""
    return lacks("aiops", "pip install -e .")


def check_transport(client: aiops.Client | aiops.AsyncClient, job: Job) -> None:
    """Raise RuntimeError when client and server met otherwise than they were told to.

    They take TCP without a word where they cannot share memory, and the figures would be another
    peer's.
    """
    if client.near == bool(job.settings["no_shm"]):
        met = "shares memory with" if client.near else "reached"
        over = "" if client.near else " over TCP alone"
        raise RuntimeError(
            f"the worker {met} its server{over}, and no_shm is {job.settings['no_shm']}"
        )


class Server:
    """The real server, in a process of its own with default flags."""

    worker: type[Worker]
    """The workers that it is for."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._url = ""
        self._process: ChildProcess | None = None

    @property
    def pid(self) -> int:
        """The number of its process."""
        assert self._process is not None
        return self._process.popen.pid

    def flags(self) -> list[str]:
        """Return its command-line flags."""
        settings = self._job.settings
        flags = ["--policy", str(settings["policy"]), "--set", f"lr={LEARNING_RATE!r}"]
        flags += ["--no-shm"] if settings["no_shm"] else []
        others = {"shards": 1, "device": "cpu"}
        chosen = [name for name, default in others.items() if settings[name] != default]
        return [*flags, *(f"--{name}={settings[name]}" for name in chosen)]

    def start(self) -> str:
        """Start it; the first line of its standard output is the address."""
        words = command("aiops.server", "--port=0", *self.flags())
        self._process = ChildProcess("the server", words, lines=True)
        self._url = self._process.first_line(START_DEADLINE)
        return self._url

    def parameters(self) -> Array:
        """Exchange a gradient of zeros, which changes nothing and brings the parameters."""
        worker = self.worker(self._job, self._url, -1)
        worker.gradient["w"][:] = 0
        worker.cycle()
        worker.close()
        return worker.params

    def close(self) -> None:
        """Ask the server to end, and expect that it does so with exit code 0."""
        assert self._process is not None
        code = self._process.end(_STOP_SECONDS)
        self._process.close()
        if code:
            raise RuntimeError(
                f"aiops.server ended with exit code {code} after SIGTERM, expected 0"
            )


class Worker:
    """A blocking client that exchanges."""

    def __init__(self, job: Job, address: str, index: int, **settings: Any) -> None:
        import aiops

        self.gradient: dict[str, Array] = {"w": gradient(job.elements)}
        self._client = aiops.Client(address, role="worker", **settings)
        self._client.__enter__()
        check_transport(self._client, job)
        self._tensors = self._client.define({"w": np.zeros(job.elements, np.float32)})
        self.params: Array = self._tensors["w"]
        self._exchange = self._client.exchange

    def cycle(self) -> None:
        """Push the gradient and refresh the parameters in place, in one round trip."""
        self._exchange(self._tensors, self.gradient)

    def close(self) -> None:
        """Say goodbye."""
        self._client.__exit__(None, None, None)


Server.worker = Worker
