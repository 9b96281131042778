"""Start the servers of a run as actors, find them again, and end them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray

from aiops.client.sync.client import Client
from aiops.errors import UsageError
from aiops.ray.servers import START, ServerAccess, ServerActor, ServerPlan
from aiops.serving.config import Config, shard_folder
from aiops.serving.shard_processes import FOLLOWERS_SETTINGS

NAMESPACE = "aiops"
"""Ray's namespace of detached servers."""

_PORTS = range(20000, 30000)
"""Below those that Linux gives to connections."""

_STOP = 150.0  # seconds that an actor may take to end its server in order


class RunningServer:
    """The server of a run, with all of its shards.

    Parameters
    ----------
    actors
        The lead's, then those of the followers.

    Attributes
    ----------
    access
        Address and token of the lead, as they were first.
    config
        The settings that it was started with.
    """

    def __init__(self, actors: list[Any]) -> None:
        self.actors = actors
        self.access: ServerAccess = ray.get(self.lead.access.remote(), timeout=START)
        self.config: Config = ray.get(self.lead.config.remote(), timeout=START)

    @property
    def lead(self) -> Any:
        """The actor that workers connect to."""
        return self.actors[0]

    @property
    def url(self) -> str:
        """The server's present URL, without the token."""
        return self._present().url

    @property
    def token(self) -> str:
        """The server's token."""
        return self.access.token

    def client(self, *, timeout: float = 60.0) -> Client:
        """Return a client that observes the server: to fetch the model, or for `stats`."""
        return Client(self.url, token=self.token, timeout=timeout)

    @property
    def node(self) -> str:
        """The id of the node that it is on."""
        return self._present().node

    def _present(self) -> ServerAccess:
        found: ServerAccess = ray.get(self.lead.access.remote(), timeout=START)
        return found

    def stop(self) -> None:
        """End it in order: it writes what it has to keep. The lead ends first, and its shards."""
        for actor in self.actors:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(actor.stop.remote(), timeout=_STOP)
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        for actor in self.actors:
            ray.kill(actor)


def start(
    config: Config,
    *,
    servers: int,
    resources: Mapping[str, float],
    state: Path | None,
    restarts: int,
    detached: str | None,
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
    notify
        Is given each actor as soon as it has been asked for.

    Raises
    ------
    AiopsError
        When one does not start; its text says why.
    """
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
            port=_PORTS[secrets.randbelow(len(_PORTS))],
            state=folder,
            name="the server" if servers == 1 else f"shard {shard} of {servers}",
        )
        options = _options(resources, servers, state, restarts, detached and f"{detached}/{shard}")
        actor = ray.remote(ServerActor).options(**options).remote(plan, [] if shard else [*actors])
        notify(actor)
        actors.append(actor)
    return RunningServer([actors[-1], *actors[:-1]])


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
    return RunningServer(actors) if actors else None


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
