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
* If both are being started, or the partner does not answer, the one whose state is of the later
  generation serves, and the other asks on. With the same generation it is the one that has served
  last, as a file beside the states says: the other may lack some updates that were acknowledged.
  Both read the same files, and only the one that serves begins a later generation, so they agree.

A server of several shards with a standby is such a pair, too: each actor runs all shards of its
side on its node, as ``aiops serve --shards N`` does, and those of a side are promoted together.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import ray

from aiops.client.sync.client import Client
from aiops.common import urls
from aiops.common.formatting import ending
from aiops.errors import AiopsError, UsageError
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.ray.server_process import START, ServerProcess
from aiops.ray.server_settings import on_node
from aiops.ray.server_states import check_there, newest, wait_until_free
from aiops.serving.config import Config
from aiops.serving.standby.link import ask
from aiops.serving.state.state_copies import fetch
from aiops.wire.standby_messages import Promote

NAMESPACE = "aiops"
"""Ray's namespace of servers that have names."""

_ANSWER = 10.0  # seconds that a running actor or server has to answer
_LOOK = 1.0  # seconds between two looks at the followers' addresses, or at the primary's promise
_PATIENCE = 2.0  # seconds for each answer in such a look, for which a promotion may wait
_PROMOTION = 90.0  # seconds that a promotion may take: shards of a model are promoted together
_WATCH = 0.2  # seconds between two looks at whether the primary's node is there
_LIVED = 1.0  # seconds after which a server that ends is started again on the same node
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
    last_served
        The file that says whose state has served last.
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
    last_served: Path | None = None


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
        self._plan, self._followers = _on_this_node(plan), list(followers)
        self._ending, self._failure = False, ""
        self._known: list[ServerAccess] = []
        self._process: ServerProcess | None = None
        self._access: ServerAccess | None = None
        self._partner: Any = None  # the other actor of the pair
        self._primary: ServerAccess | None = None  # set: this is its standby
        self._replicated = False  # the primary has last said so
        self._lock = threading.Lock()  # of a promotion
        self._is_up = threading.Event()  # it listens, or has failed
        # In a thread, so that it can tell its partner that it is starting.
        threading.Thread(target=self._start, daemon=True).start()

    def _start(self) -> None:
        try:
            self._serve()
        except Exception as error:
            self._failure = str(error) or type(error).__name__  # `access` raises it
        finally:
            self._is_up.set()

    def _serve(self) -> None:
        plan = self._plan
        if plan.state is not None and _started_again():
            if plan.config.state_copy is not None:
                fetch(plan.state, plan.config.state_copy)
            host = ray.util.get_node_ip_address()
            check_there(plan.state, plan.config.state_copy, plan.name, host)
            # As a standby it may come back late: the other one serves meanwhile.
            wait_until_free(plan.state, inf if plan.partner else START)
        self._primary = self._find_primary()
        self._known = self._addresses(START)
        self._start_process()
        if self._primary is None:
            self._note_serving()
        if self._followers:
            threading.Thread(target=self._watch_followers, daemon=True).start()
        if self._primary is not None:
            threading.Thread(target=self._watch_primary, daemon=True).start()

    def _start_process(self) -> None:
        """Start the server's process, and watch it; return when it listens."""
        plan, host = self._plan, ray.util.get_node_ip_address()
        names = [f"--followers={access.host}:{access.port}" for access in self._known]
        free = CURRENT_ENVIRONMENT.get().free_port(host, plan.port)
        flags = [*plan.flags, *names, f"--host={host}", f"--port={plan.port if free else 0}"]
        if self._primary is not None:
            flags.append(f"--standby={self._primary.url}")
        self._process = process = ServerProcess(plan.name, plan.token, flags)
        host, port = urls.parse(process.url)
        node = str(ray.get_runtime_context().get_node_id())
        self._access = ServerAccess(host, port, plan.token, node)
        threading.Thread(target=self._watch_process, args=[process], daemon=True).start()

    def access(self) -> ServerAccess:
        """Return where it is, once it listens.

        Raises
        ------
        AiopsError
            When it has not started, or has ended for good.
        """
        self._is_up.wait(START)
        if self._failure or self._access is None:
            raise AiopsError(self._failure or f"{self._plan.name} has not started in {START:g} s")
        return self._access

    def is_up(self) -> bool:
        """Return whether it has an address, or has failed; False: it is starting."""
        return self._is_up.is_set()

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
        return self._is_up.is_set() and not self._failure and self._primary is None

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
                self._note_serving()
                print(f"{access.url} serves in the place of {self._primary.url}", file=sys.stderr)
                self._primary = None
        return access

    def stop(self) -> None:
        """Have the server end in order: it writes what it has to keep."""
        self._ending = True
        if self._process is not None:
            self._process.stop()

    def _note_serving(self) -> None:
        """Write down that its state is the one that serves, which breaks a later tie."""
        plan = self._plan
        if plan.last_served is not None:
            made = plan.last_served.with_name(f"{plan.last_served.name}.{os.getpid()}")
            with made.open("w") as file:
                file.write(str(plan.state))
                file.flush()
                os.fsync(file.fileno())
            made.replace(plan.last_served)

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
            why: Exception = UsageError("both servers of the pair are starting")
            try:
                if ray.get(self._partner.is_up.remote(), timeout=3 * _ANSWER):
                    return _answer(self._partner.take_over.remote(), _PROMOTION)
            except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
                why = error
            except AiopsError as refused:
                print(f"{plan.name} serves from its state: {refused}", file=sys.stderr)
                return None
            states = [plan.state, plan.partner_state]
            if plan.state == newest(plan.last_served, states[::-1] if plan.standby else states):
                return None
            if time.monotonic() > deadline:
                raise why
            time.sleep(_WATCH)

    def _watch_primary(self) -> None:
        """Take over when the primary is lost; start again when it has another address."""
        asked, look_at, said = self._partner.access.remote(), 0.0, ""
        while not self._ending and (primary := self._primary) is not None:
            time.sleep(_WATCH)
            lost = moved = False
            # Ray may fail for a moment on a busy machine, and this thread goes on.
            with contextlib.suppress(AiopsError, ray.exceptions.RayError):
                lost = not node_is_alive(primary.node)
                if not lost and time.monotonic() >= look_at:
                    look_at = time.monotonic() + _LOOK
                    self._replicated = _is_replicated(primary)
            try:
                if ray.wait([asked], timeout=0)[0]:
                    moved = ray.get(asked) != primary
                    asked = self._partner.access.remote()
            except ray.exceptions.RayActorError:
                lost = True
            except (ray.exceptions.RayError, AiopsError) as error:
                print(f"the server fails, and its standby waits: {error}", file=sys.stderr)
                return
            try:
                if lost:
                    self.take_over()
            except (AiopsError, ray.exceptions.RayError) as error:
                if str(error) != said:  # it is tried again and again
                    said = str(error)
                    print(f"the standby does not take over: {said}", file=sys.stderr, flush=True)
            if moved and self._primary is not None and not self._ending:
                print("the server has moved: its standby starts again", file=sys.stderr, flush=True)
                os._exit(1)

    def _watch_process(self, process: ServerProcess) -> None:
        """End this actor's process when the server ends unasked: then Ray starts it again.

        One whose state is on this node alone is started here: Ray might do that elsewhere.
        """
        began = time.monotonic()
        status = process.popen.wait()
        if status == 0 or self._ending:
            return
        text = f"{self._plan.name} {ending(status)}{process.last_words}"
        if status == _SUPERSEDED and not self._plan.partner:
            self._failure = f"{text}: another server has taken over its run"
            return
        if self._plan.config.state_copy is not None and time.monotonic() > began + _LIVED:
            print(f"{text}; it is started again here", file=sys.stderr, flush=True)
            with contextlib.suppress(AiopsError):
                self._start_process()
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


def node_is_alive(node: str) -> bool:
    """Return whether a node is there; True if it is not known which."""
    return not node or any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())


def _answer(asked: Any, seconds: float) -> ServerAccess:
    found: ServerAccess = ray.get(asked, timeout=seconds)
    return found


def _promote(access: ServerAccess) -> None:
    env = CURRENT_ENVIRONMENT.get()
    asyncio.run(ask(env, access.url, access.token, lambda local: Promote(1), _PROMOTION))


def _is_replicated(access: ServerAccess) -> bool:
    """Return whether a server says that what it acknowledges is on a standby; or `AiopsError`."""
    with Client(access.url, token=access.token, timeout=_PATIENCE, name="aiops ray") as client:
        state = client.stats()["state"]
    shards = [state, *state.get("shards", ())]
    return state["acks"] == "replicated" and all(each.get("standbys") for each in shards)


def _started_again() -> bool:
    """Return whether Ray has started this actor before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own use of what it deprecates
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _on_this_node(plan: ServerPlan) -> ServerPlan:
    """Return the plan of a server on the node of this actor."""
    node = str(ray.get_runtime_context().get_node_id())
    config = on_node(plan.config, tempfile.gettempdir(), node)
    if config is plan.config:
        return plan
    return dataclasses.replace(plan, config=config, flags=tuple(config.flags()), state=config.state)
