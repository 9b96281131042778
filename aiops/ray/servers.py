"""Servers as Ray actors: each runs an ``aiops.server`` process on its node, and dies with it.

The process is the same as on any machine: Ray moves no gradient. Ray starts an actor that has died
again, here or on another node, and the server goes on from its state. Its address may then be
another: workers are told it (`aiops.net.moved_servers`), and a lead whose follower has moved starts
again, which with a state costs no more than a pause.

A server with a standby is a pair of actors on two nodes, and each is the other's partner. Both are
restarted by Ray, and both may serve: which of them does, and that there are not two of them, is
decided so:

* The standby takes over when Ray says that its primary's node is lost, or that the primary's actor
  is lost for good. Until then its primary may be alive, however silent it is.
* An actor that Ray starts again first has its partner take over. If that serves from here on, it is
  the partner's standby; if the partner refuses, it serves from its own state.
* The standby refuses unless its primary has last said that acknowledgements mean ``replicated``:
  otherwise it may lack some that were acknowledged, which the primary's state has.
* If the partner does not answer, since both are being started, the one whose state is of the later
  generation serves, and the other asks on. With the same generation it is the first of the two.
"""

from __future__ import annotations

import asyncio
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
from aiops.serving.standby.link import ask
from aiops.state.directory import GENERATION_FILE, IDENTITY_FILE, GenerationFile
from aiops.wire.standby_messages import Promote

NAMESPACE = "aiops"
"""Ray's namespace of servers that have names."""

START = 600.0
"""Seconds that a server may take until it listens: it may have a large state to read."""

_ANSWER = 10.0  # seconds that a running actor or server has to answer
_LOOK = 1.0  # seconds between two looks at the followers' addresses, or at the primary's promise
_WATCH = 0.2  # seconds between two looks at whether the primary's node is there
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
    partner
        The name of the other actor of a server with a standby; empty: it has none.
    partner_state
        The folder of that one's state.
    standby
        Begin as the standby.
    """

    config: Config
    flags: tuple[str, ...]
    token: str
    port: int
    state: Path | None
    name: str
    partner: str = ""
    partner_state: Path | None = None
    standby: bool = False


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
        self._partner: Any = None  # the other actor of the pair
        self._primary: ServerAccess | None = None  # set: this is its standby
        self._replicated = False  # the primary has last said so
        self._lock = threading.Lock()  # of a promotion
        try:
            self._start()
        except (AiopsError, OSError, ray.exceptions.RayError) as error:
            self._failure = str(error)  # `access` raises it: Ray would only log it here

    def _start(self) -> None:
        plan = self._plan
        if plan.state is not None and _started_again():
            _check_state(plan)
        host = ray.util.get_node_ip_address()
        self._primary = self._find_primary()
        self._known = self._addresses(START)
        names = [f"--followers={access.host}:{access.port}" for access in self._known]
        free = CURRENT_ENVIRONMENT.get().free_port(host, plan.port)
        flags = [*plan.flags, *names, f"--host={host}", f"--port={plan.port if free else 0}"]
        if self._primary is not None:
            flags.append(f"--standby={self._primary.url}")
        self._process = process = _ServerProcess(plan, flags)
        host, port = urls.parse(process.url)
        node = str(ray.get_runtime_context().get_node_id())
        self._access = ServerAccess(host, port, plan.token, node)
        threading.Thread(target=self._watch_process, args=[process], daemon=True).start()
        if self._followers:
            threading.Thread(target=self._watch_followers, daemon=True).start()
        if self._primary is not None:
            threading.Thread(target=self._watch_primary, daemon=True).start()

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
        if self._primary is not None:
            raise AiopsError(f"{access.url} is a standby")
        with Client(access.url, token=access.token, timeout=_ANSWER, name="aiops ray") as client:
            report = client.stats()
        return [row["name"] for row in report["workers"] if row["role"] == "worker"]

    def serves(self) -> bool:
        """Return whether it is the server that workers train at, and no standby."""
        self.access()
        return self._primary is None

    def can_take_over(self) -> bool:
        """Return whether this is a standby that has all that was acknowledged."""
        return self._primary is not None and self._replicated

    def place(self) -> Any:
        """Return the placement group that it is in, or None."""
        return ray.util.get_current_placement_group()

    def take_over(self) -> ServerAccess:
        """Serve in the primary's place, if this is its standby; return where it is.

        Raises
        ------
        AiopsError
            When it may lack updates that were acknowledged, or cannot be promoted.
        """
        access = self.access()
        with self._lock:
            if self._primary is not None:
                if not self._replicated:
                    raise AiopsError("the standby may lack updates that were acknowledged")
                _promote(access)
                print(f"{access.url} serves in the place of {self._primary.url}", file=sys.stderr)
                self._primary = None
        return access

    def stop(self) -> None:
        """Have the server end in order: it writes what it has to keep."""
        self._ending = True
        if self._process is not None:
            self._process.stop()

    def _addresses(self, seconds: float) -> list[ServerAccess]:
        asked = [follower.access.remote() for follower in self._followers]
        return list(ray.get(asked, timeout=seconds)) if asked else []

    def _find_primary(self) -> ServerAccess | None:
        """Return the server that this one is to be the standby of; None: it is to serve."""
        plan = self._plan
        if not plan.partner:
            return None
        again = _started_again()
        if not again and not plan.standby:
            return None  # the other is not there yet
        self._partner = ray.get_actor(plan.partner, namespace=NAMESPACE)
        if not again:
            return _answer(self._partner.access.remote(), START)
        deadline = time.monotonic() + START
        while True:
            try:
                return _answer(self._partner.take_over.remote(), 3 * _ANSWER)
            except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
                mine, others = generation(plan.state), generation(plan.partner_state)
                if mine > others or (mine == others and not plan.standby):
                    return None
                if time.monotonic() > deadline:
                    raise
            except AiopsError as refused:
                print(f"{plan.name} serves from its state: {refused}", file=sys.stderr)
                return None

    def _watch_primary(self) -> None:
        """Take over when the primary is lost; start again when it has another address."""
        asked, look_at = self._partner.access.remote(), 0.0
        while not self._ending and (primary := self._primary) is not None:
            time.sleep(_WATCH)
            with contextlib.suppress(AiopsError):
                if not node_is_alive(primary.node):
                    self.take_over()
                elif time.monotonic() >= look_at:
                    look_at = time.monotonic() + _LOOK
                    self._replicated = _is_replicated(primary)
            if not ray.wait([asked], timeout=0)[0]:
                continue
            try:
                moved = ray.get(asked) != primary
                asked = self._partner.access.remote()
            except ray.exceptions.RayActorError:
                with contextlib.suppress(AiopsError):
                    self.take_over()
                continue
            except (ray.exceptions.RayError, AiopsError) as error:
                print(f"the server fails, and its standby waits: {error}", file=sys.stderr)
                return
            if moved and self._primary is not None and not self._ending:
                print("the server has moved: its standby starts again", file=sys.stderr, flush=True)
                os._exit(1)

    def _watch_process(self, process: _ServerProcess) -> None:
        """End this actor's process when the server ends unasked: then Ray starts it again."""
        status = process.popen.wait()
        if status == 0 or self._ending:
            return
        text = f"{self._plan.name} {ending(status)}{process.last_words}"
        if status == _SUPERSEDED and not self._plan.partner:
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


def node_is_alive(node: str) -> bool:
    """Return whether a node is there; True if it is not known which."""
    return not node or any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())


def generation(folder: Path | None) -> int:
    """Return the generation of a server's state; 0: there is none."""
    if folder is None:
        return 0
    try:
        return GenerationFile.unpack((folder / GENERATION_FILE).read_bytes()).generation
    except FileNotFoundError:
        return 0


def _answer(asked: Any, seconds: float) -> ServerAccess:
    found: ServerAccess = ray.get(asked, timeout=seconds)
    return found


def _promote(access: ServerAccess) -> None:
    env = CURRENT_ENVIRONMENT.get()
    asyncio.run(ask(env, access.url, access.token, lambda local: Promote(1), _ANSWER))


def _is_replicated(access: ServerAccess) -> bool:
    """Return whether a server says that what it acknowledges is on a standby, too.

    Raises
    ------
    AiopsError
        When it does not answer.
    """
    with Client(access.url, token=access.token, timeout=_LOOK, name="aiops ray") as client:
        state = client.stats()["state"]
    return state["acks"] == "replicated" and bool(state["standbys"])


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
