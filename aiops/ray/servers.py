"""Servers as Ray actors: each runs an ``aiops.server`` process on its node, and dies with it.

The process is the same as on any machine: Ray moves no gradient. Ray starts an actor that has died
again, here or on another node, and the server goes on from its state. Its address may then be
another: workers are told it (`aiops.net.moved_servers`), and a lead whose follower has moved starts
again, which with a state costs no more than a pause.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from aiops.client.sync.client import Client
from aiops.common import urls
from aiops.common.formatting import ending
from aiops.errors import AiopsError, UsageError
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.process_tree import Lines
from aiops.serving.config import Config
from aiops.state.directory import IDENTITY_FILE

START = 600.0
"""Seconds that a server may take until it listens: it may have a large state to read."""

_ANSWER = 10.0  # seconds that a running actor or server has to answer
_LOOK = 1.0  # seconds between two looks at the followers' addresses
_STOP = 120.0  # seconds that a server may take to write what it has to keep
_SUPERSEDED = 3  # the exit status of a server whose run another has taken over


@dataclass(frozen=True)
class ServerPlan:
    """A server that an actor is to run.

    Attributes
    ----------
    config
        The settings of the run's lead.
    flags
        Those of `aiops serve`, without address, token and followers.
    token
        What clients must know.
    port
        The one that it takes if it is free there.
    state
        The folder that it keeps its state in, or None.
    name
        What errors call it.
    """

    config: Config
    flags: tuple[str, ...]
    token: str
    port: int
    state: Path | None
    name: str


@dataclass(frozen=True)
class ServerAccess:
    """The address and the token of a running server, and the id of its node."""

    host: str
    port: int
    token: str
    node: str

    @property
    def url(self) -> str:
        """Its URL, without the token."""
        return urls.write(self.host, self.port)


class ServerActor:
    """One server of a run.

    Parameters
    ----------
    plan
        What it is to run.
    followers
        The actors of the other shards, if this is the lead; they are there already.
    """

    def __init__(self, plan: ServerPlan, followers: Sequence[Any] = ()) -> None:
        self._plan, self._followers = plan, list(followers)
        self._ending, self._failure = False, ""
        self._known: list[ServerAccess] = []
        self._process: _ServerProcess | None = None
        self._access: ServerAccess | None = None
        try:
            self._start()
        except (AiopsError, OSError, ray.exceptions.RayError) as error:
            self._failure = str(error)  # `access` raises it: Ray would only log it here

    def _start(self) -> None:
        plan = self._plan
        if plan.state is not None and _started_again():
            _check_state(plan)
        host = ray.util.get_node_ip_address()
        self._known = self._addresses(START)
        names = [f"--followers={access.host}:{access.port}" for access in self._known]
        free = CURRENT_ENVIRONMENT.get().free_port(host, plan.port)
        flags = [*plan.flags, *names, f"--host={host}", f"--port={plan.port if free else 0}"]
        self._process = process = _ServerProcess(plan, flags)
        host, port = urls.parse(process.url)
        node = str(ray.get_runtime_context().get_node_id())
        self._access = ServerAccess(host, port, plan.token, node)
        threading.Thread(target=self._watch_process, args=[process], daemon=True).start()
        if self._followers:
            threading.Thread(target=self._watch_followers, daemon=True).start()

    def access(self) -> ServerAccess:
        """Return where it is.

        Raises
        ------
        AiopsError
            When it has not started, or has ended for good.
        """
        if self._failure or self._access is None:
            raise AiopsError(self._failure)
        return self._access

    def config(self) -> Config:
        """Return the settings that the run's lead was started with."""
        return self._plan.config

    def joined(self) -> list[str]:
        """Return the names of the workers that the server has known."""
        access = self.access()
        with Client(access.url, token=access.token, timeout=_ANSWER, name="aiops ray") as client:
            report = client.stats()
        return [row["name"] for row in report["workers"] if row["role"] == "worker"]

    def stop(self) -> None:
        """Have the server end in order: it writes what it has to keep."""
        self._ending = True
        if self._process is not None:
            self._process.stop()

    def _addresses(self, seconds: float) -> list[ServerAccess]:
        asked = [follower.access.remote() for follower in self._followers]
        return list(ray.get(asked, timeout=seconds)) if asked else []

    def _watch_process(self, process: _ServerProcess) -> None:
        """End this actor's process when the server ends unasked: then Ray starts it again."""
        status = process.popen.wait()
        if status == 0 or self._ending:
            return
        text = f"{self._plan.name} {ending(status)}{process.last_words}"
        if status == _SUPERSEDED:
            self._failure = f"{text}: another server has taken over its run"
            return
        print(f"{text}; its actor ends with it", file=sys.stderr, flush=True)
        os._exit(1)

    def _watch_followers(self) -> None:
        """Start again when a follower has another address, which the server is told as a flag."""
        while not self._ending:
            time.sleep(_LOOK)
            try:
                present = self._addresses(START)
            except ray.exceptions.GetTimeoutError:
                continue
            except (ray.exceptions.RayError, AiopsError) as error:
                self._failure = f"a shard of the model is lost: {error}"
                return
            if present != self._known and not self._ending:
                print("a shard has moved: the lead starts again", file=sys.stderr, flush=True)
                os._exit(1)


class _ServerProcess:
    """An ``aiops.server`` that ends with this process; returns when it listens."""

    def __init__(self, plan: ServerPlan, flags: Sequence[str]) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AIOPS_")}
        environment["AIOPS_TOKEN"] = plan.token
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "aiops.net.child_guard", "aiops.server", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        self._words = deque[str](maxlen=1)
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()
        self.url = self._first_line(plan.name)

    @property
    def last_words(self) -> str:
        """The last line of its log, after a colon; empty: there is none."""
        self._reader.join(1.0)
        return f": {self._words[-1]}" if self._words else ""

    def stop(self) -> None:
        """Have it end; kill it if it does not."""
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(signal.SIGTERM)
        try:
            self.popen.wait(_STOP)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()

    def _first_line(self, name: str) -> str:
        pipe = self.popen.stdout
        assert pipe is not None
        there, _, _ = select.select([pipe], [], [], START)
        line = pipe.readline().decode().strip() if there else ""
        if line:
            return line
        if not there:
            self.popen.kill()
            raise UsageError(f"{name} did not begin to listen in {START:g} s")
        status = self.popen.wait()
        raise UsageError(f"{name} {ending(status)} before it listened{self.last_words}")

    def _pass_on(self) -> None:
        """Hand its log on to this actor's, which Ray shows."""
        pipe, lines = self.popen.stderr, Lines()
        assert pipe is not None
        while True:
            chunk = os.read(pipe.fileno(), 1 << 16)
            for line in lines.feed(chunk):
                self._words.append(line)
                print(line, file=sys.stderr, flush=True)
            if not chunk:
                return


def _started_again() -> bool:
    """Return whether Ray has started this actor before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own use of what it deprecates
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _check_state(plan: ServerPlan) -> None:
    assert plan.state is not None
    if not (plan.state / IDENTITY_FILE).exists():
        raise UsageError(
            f"{plan.name} was started again on {ray.util.get_node_ip_address()}, where"
            f" {plan.state} holds no state: name a folder that all nodes share, or have the server"
            " stay on its node (server_resources)"
        )
