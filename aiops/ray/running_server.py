"""Start the servers of a run as actors, find them again, and end them."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from aiops.client.sync.client import Client
from aiops.errors import AiopsError, UsageError
from aiops.ray.servers import (
    NAMESPACE,
    START,
    ServerAccess,
    ServerActor,
    ServerPlan,
    generation,
)
from aiops.serving.config import Config, shard_folder
from aiops.serving.shard_processes import FOLLOWERS_SETTINGS

_PORTS = range(20000, 30000)
"""Below those that Linux gives to connections."""

_STOP = 150.0  # seconds that an actor may take to end its server in order
_AGAIN = 0.1  # seconds between two questions which of a pair serves
_PROMPT = 5.0  # seconds that the other of a pair may take to answer when one has
_STANDBY = "-standby"  # behind the name of the server's folder, that of the standby's


class RunningServer:
    """The server of a run, with all of its shards, or with its standby.

    Parameters
    ----------
    actors
        The lead's, then those of the followers.
    standby
        That of the standby, if there is one. It may have taken over.

    Attributes
    ----------
    heads
        The actors that workers connect to one of: the lead's, and the standby's.
    accesses
        Address and token of each of them, as they were first.
    config
        The settings that it was started with.
    """

    def __init__(self, actors: list[Any], standby: Any = None) -> None:
        self.actors, self._standby = actors, standby
        heads = [actors[0]] if standby is None else [actors[0], standby]
        answers = [actor.access.remote() for actor in heads]
        there, _ = ray.wait(answers, num_returns=1, timeout=START)
        if len(heads) > 1:  # one may be waiting for a node, for as long as that takes
            there, _ = ray.wait(answers, num_returns=2, timeout=_PROMPT)
        self.heads: list[Any] = []
        self.accesses: list[ServerAccess] = []
        lost: Exception = UsageError(f"the server has not answered in {START:g} s")
        for head, answer in zip(heads, answers, strict=True):
            if answer in there:
                try:
                    self.accesses.append(ray.get(answer))
                    self.heads.append(head)
                except (ray.exceptions.RayError, AiopsError) as error:
                    lost = error
        if not self.heads:
            raise lost
        self.config: Config = self._first_answer(lambda head: head.config.remote())
        self._place = None  # the placement group of a pair
        if standby is not None:
            self._place = self._first_answer(lambda head: head.place.remote())

    @property
    def lead(self) -> Any:
        """The actor that serves: of a pair, that which is not the standby now."""
        for head in self.heads if len(self.heads) > 1 else ():
            with contextlib.suppress(ray.exceptions.RayError, AiopsError):
                if ray.get(head.serves.remote(), timeout=_PROMPT):
                    return head
        return self.heads[0]

    @property
    def has_standby(self) -> bool:
        """True if there is a standby that can take over now."""
        if self._standby is None:
            return False
        for head in self.heads:
            with contextlib.suppress(ray.exceptions.RayError, AiopsError):
                if ray.get(head.can_take_over.remote(), timeout=_PROMPT):
                    return True
        return False

    @property
    def is_pair(self) -> bool:
        """True if the server was started with a standby."""
        return self._standby is not None

    @property
    def url(self) -> str:
        """The server's present URL, without the token."""
        return self._present().url

    @property
    def token(self) -> str:
        """The server's token."""
        return self.accesses[0].token

    def client(self, *, timeout: float = 60.0) -> Client:
        """Return a client that observes the server: to fetch the model, or for `stats`."""
        return Client(self.url, token=self.token, timeout=timeout)

    @property
    def node(self) -> str:
        """The id of the node that it is on."""
        return self._present().node

    def _present(self) -> ServerAccess:
        """Return the access of the server; of a pair, wait until one of them serves."""
        if len(self.heads) == 1:
            only: ServerAccess = ray.get(self.heads[0].access.remote(), timeout=START)
            return only
        deadline = time.monotonic() + START
        while time.monotonic() < deadline:
            for head in self.heads:
                with contextlib.suppress(ray.exceptions.RayError, AiopsError):
                    asked = [head.serves.remote(), head.access.remote()]
                    serves, access = ray.get(asked, timeout=_PROMPT)
                    if serves:
                        found: ServerAccess = access
                        return found
            time.sleep(_AGAIN)
        raise UsageError(f"neither the server nor its standby has served for {START:g} s")

    def _first_answer(self, ask: Callable[[Any], Any]) -> Any:
        """Return what the heads agree on, from the first that answers: one may be lost just now."""
        for head in self.heads[:-1]:
            with contextlib.suppress(ray.exceptions.RayError, AiopsError):
                return ray.get(ask(head), timeout=_PROMPT)
        return ray.get(ask(self.heads[-1]), timeout=START)

    def stop(self) -> None:
        """End it in order: it writes what it has to keep. The lead ends first, and its shards."""
        lead = self.lead
        for actor in [lead, *self.actors[1:], *(head for head in self.heads if head is not lead)]:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(actor.stop.remote(), timeout=_STOP)
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        for actor in [*self.actors, *filter(None, [self._standby])]:
            ray.kill(actor)
        if self._place is not None:
            remove_placement_group(self._place)


def start(
    config: Config,
    *,
    servers: int,
    resources: Mapping[str, float],
    state: Path | None,
    restarts: int,
    detached: str | None,
    standby: bool = False,
    notify: Callable[[Any], None] = lambda actor: None,
) -> RunningServer:
    """Start the servers of a run; return when all listen.

    Parameters
    ----------
    config
        The lead's settings, without ``state``, ``host``, ``port``, ``token`` and ``followers``.
    servers
        How many the model is spread over.
    resources
        Of each, as Ray counts them.
    state
        The folder that all nodes share; None: a server that ends has lost the model.
    restarts
        How often Ray starts each again, -1: without end.
    detached
        The name of servers that outlive this program; None: they end with it.
    standby
        Start a standby too, on another node; only with one server, and with a state.
    notify
        Is given each actor as soon as it has been asked for.

    Raises
    ------
    AiopsError
        When one does not start; its text says why.
    """
    if standby:
        return _start_pair(config, resources, state, restarts, detached, notify)
    token, actors = secrets.token_hex(16), list[Any]()
    follower_flags = (*config.flags(FOLLOWERS_SETTINGS), "--follower")
    for shard in [*range(1, servers), 0]:
        folder = None if state is None else state
        if state is not None and servers > 1:
            folder = state / shard_folder(shard)
        flags = config.flags() if shard == 0 else list(follower_flags)
        if state is not None:
            flags.append(f"--state={state if shard == 0 else folder}")
        plan = ServerPlan(
            config=config,
            flags=tuple(flags),
            token=token,
            port=_port(),
            state=folder,
            name="the server" if servers == 1 else f"shard {shard} of {servers}",
        )
        options = _options(resources, servers, state, restarts, detached and f"{detached}/{shard}")
        actor = ray.remote(ServerActor).options(**options).remote(plan, [] if shard else [*actors])
        notify(actor)
        actors.append(actor)
    return RunningServer([actors[-1], *actors[:-1]])


def _start_pair(
    config: Config,
    resources: Mapping[str, float],
    state: Path | None,
    restarts: int,
    detached: str | None,
    notify: Callable[[Any], None],
) -> RunningServer:
    """Start a server and its standby on two nodes."""
    if state is None:
        raise UsageError("a standby needs state=FOLDER, which all nodes share")
    place = placement_group(
        [dict(resources)] * 2,
        strategy="STRICT_SPREAD",
        lifetime="detached" if detached else None,
    )
    try:
        if not place.wait(START):
            raise UsageError(
                f"no two nodes have had room for the server and its standby in {START:g} s:"
                " `ray status` shows what there is"
            )
        token, run = secrets.token_hex(16), detached or secrets.token_hex(8)
        names, folders = (
            (f"{run}/0", f"{run}/standby"),
            (state, state.with_name(state.name + _STANDBY)),
        )
        # The one whose state is the newer begins as the server: the standby may have taken over.
        first = int(generation(folders[1]) > generation(folders[0]))
        actors: dict[int, Any] = {}
        for index in (first, 1 - first):
            plan = ServerPlan(
                config=config,
                flags=(*config.flags(), f"--state={folders[index]}", "--acks=replicated"),
                token=token,
                port=_port(),
                state=folders[index],
                name="the server" if index == first else "the standby",
                partner=names[1 - index],
                partner_state=folders[1 - index],
                standby=index != first,
            )
            options = _options(resources, 1, state, restarts, names[index]) | {
                "lifetime": "detached" if detached else None,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    placement_group=place, placement_group_bundle_index=index
                ),
            }
            actors[index] = ray.remote(ServerActor).options(**options).remote(plan)
            notify(actors[index])
            ray.get(actors[index].access.remote(), timeout=START)
        return RunningServer([actors[0]], actors[1])
    except BaseException:
        remove_placement_group(place)
        raise


def _port() -> int:
    return _PORTS[secrets.randbelow(len(_PORTS))]


def _options(
    resources: Mapping[str, float],
    servers: int,
    state: Path | None,
    restarts: int,
    name: str | None,
) -> dict[str, Any]:
    custom = {key: value for key, value in resources.items() if key not in ("CPU", "GPU")}
    found: dict[str, Any] = {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": custom,
        "max_restarts": restarts if state is not None else 0,
        "max_task_retries": -1 if state is not None else 0,
        "max_concurrency": 8,
        "scheduling_strategy": "SPREAD" if servers > 1 else "DEFAULT",
    }
    if name is not None:
        found |= {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}
    return found


def find(name: str) -> RunningServer | None:
    """Return the detached server of a name, or None."""
    actors: list[Any] = []
    with contextlib.suppress(ValueError):  # Ray's word for: there is none
        while True:
            actors.append(ray.get_actor(f"{name}/{len(actors)}", namespace=NAMESPACE))
    if not actors:
        return None
    try:
        return RunningServer(actors, ray.get_actor(f"{name}/standby", namespace=NAMESPACE))
    except ValueError:
        return RunningServer(actors)


def server(name: str) -> RunningServer:
    """Return the server that `train` has left running under this name (``detached=True``).

    Raises
    ------
    UsageError
        When there is none.
    """
    found = find(name)
    if found is None:
        raise UsageError(
            f"no server runs under the name {name!r} in this cluster: aiops.ray.train(...,"
            " name=..., detached=True) leaves one"
        )
    return found
