"""Start the servers of a run as actors, find them again, and end them."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from aiops.client.sync.client import Client
from aiops.errors import AiopsError, UsageError
from aiops.ray.server_process import START
from aiops.ray.server_states import newest
from aiops.ray.servers import (
    NAMESPACE,
    ServerAccess,
    ServerActor,
    ServerPlan,
)
from aiops.serving.config import Config, shard_folder
from aiops.serving.shard_processes import FOLLOWERS_SETTINGS

_PORTS = range(20000, 30000)
"""Below those that Linux gives to connections."""

_STOP = 150.0  # seconds that an actor may take to end its server in order
_AGAIN = 0.1  # seconds between two questions which of a pair serves
_PROMPT = 5.0  # seconds that the other of a pair may take to answer when one has
NOWHERE = 1
"""The port, in workers' URLs, of a server that is not there yet: they are told its real one."""

_LAST_SERVED = "-last-served"  # the same of the file that says which of the two has served last
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
        Address and token of each of them, as they are in the URL of workers: those that they had
        first. That of one which is not there yet has the port `NOWHERE`.
    present
        Where each of them is now; for one that is not there yet, the other.
    config
        The settings that it was started with.
    """

    actors: list[Any]

    def __init__(self, actors: list[Any], standby: Any = None) -> None:
        self.actors, self._standby = actors, standby
        self.heads: list[Any] = [actors[0]] if standby is None else [actors[0], standby]
        found = self._answers(lambda head: head.access.remote(), START)
        there: ServerAccess = next(iter(found.values()))
        absent = dataclasses.replace(there, port=NOWHERE, node="")
        count = range(len(self.heads))
        self.accesses: list[ServerAccess] = [found.get(index, absent) for index in count]
        self.present: list[ServerAccess] = [found.get(index, there) for index in count]
        self.config: Config = self._agreed(lambda head: head.config.remote())
        self._place = None  # the placement group of a pair
        if standby is not None:
            self._place = self._agreed(lambda head: head.place.remote())

    @property
    def servers(self) -> int:
        """The number of servers that the model is spread over."""
        return max(len(self.actors), self.config.shards)

    @property
    def lead(self) -> Any:
        """The actor that serves: of a pair, that which is not the standby now."""
        serving = self._asked(lambda head: head.serves.remote(), _PROMPT)[0]
        return self.heads[next((index for index, serves in serving.items() if serves), 0)]

    @property
    def has_standby(self) -> bool:
        """True if there is a standby that can take over now."""
        return any(self._asked(lambda head: head.can_take_over.remote(), _PROMPT)[0].values())

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
        """Return the access of the server; of a pair, wait until one of them serves.

        The one that has just served may be lost before it says where: then the other is to serve.
        """
        deadline = time.monotonic() + START
        alone = len(self.heads) == 1
        while True:
            left = deadline - time.monotonic()
            asked = self._serving(left).access.remote()
            try:
                found: ServerAccess = ray.get(asked, timeout=left if alone else _PROMPT)
                return found
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                if alone:
                    raise

    def _serving(self, seconds: float) -> Any:
        """Return the actor that serves; of a pair, as soon as one of them does.

        Raises
        ------
        UsageError
            When none has in that time.
        """
        if len(self.heads) == 1:
            return self.heads[0]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            answers, lost = self._asked(lambda head: head.serves.remote(), _PROMPT)
            for index, serves in answers.items():
                if serves:
                    return self.heads[index]
            if _all_lost(lost, len(self.heads)):
                break
            time.sleep(_AGAIN)
        raise UsageError(f"neither the server nor its standby has served for {seconds:g} s")

    def _asked(
        self, ask: Callable[[Any], Any], seconds: float, rest: float = _PROMPT
    ) -> tuple[dict[int, Any], list[Exception]]:
        """Ask all heads at once: one of a pair may be waiting for a node, for however long.

        Returns
        -------
        tuple
            The answers by head: the first that there is within ``seconds``, the others at most
            ``rest`` seconds later. Then the errors of those that have failed.
        """
        asked = {ask(head): index for index, head in enumerate(self.heads)}
        found, lost = dict[int, Any](), list[Exception]()
        deadline = time.monotonic() + seconds
        while asked:
            left = max(0.0, deadline - time.monotonic())
            there, _ = ray.wait([*asked], num_returns=1, timeout=left)
            if not there:
                break
            index = asked.pop(there[0])
            try:
                found[index] = ray.get(there[0])
                deadline = min(deadline, time.monotonic() + rest)
            except (ray.exceptions.RayError, AiopsError) as error:
                lost.append(error)
        return found, lost

    def _answers(
        self, ask: Callable[[Any], Any], seconds: float, rest: float = _PROMPT
    ) -> dict[int, Any]:
        """Return the answers of all heads, as `_asked` does: at least one.

        Raises
        ------
        ActorDiedError
            When all of them have ended for good.
        AiopsError, RayError
            When none has answered: the reason of one that may yet come back, if one gives it.
        """
        found, lost = self._asked(ask, seconds, rest)
        if found:
            return found
        passing = [e for e in lost if not isinstance(e, ray.exceptions.ActorDiedError)]
        if _all_lost(lost, len(self.heads)) and not passing:
            raise lost[0]
        raise next(iter(passing), UsageError(f"the server has not answered in {seconds:g} s"))

    def _agreed(self, ask: Callable[[Any], Any]) -> Any:
        """Return what the heads agree on, of one that answers."""
        return next(iter(self._answers(ask, START, rest=0.0).values()))

    def stop(self) -> None:
        """End it in order: it writes what it has to keep. The lead ends first, and its shards.

        Of a pair, one that is not there is ended at once: all that it has is in its state.
        """
        with contextlib.suppress(UsageError):
            lead = self._serving(_STOP)
            up = self._asked(lambda head: head.is_up.remote(), _PROMPT)[0]
            others = [head for index, head in enumerate(self.heads) if up.get(index)]
            for actor in [lead, *self.actors[1:], *(head for head in others if head is not lead)]:
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
    restarts: int,
    detached: str | None,
    standby: bool = False,
    notify: Callable[[Any], None] = lambda actor: None,
) -> RunningServer:
    """Start the servers of a run; return when all listen.

    Parameters
    ----------
    config
        The lead's settings, without ``host``, ``port``, ``token`` and ``followers``. Its ``state``
        is a folder that all nodes share; without one, a server that ends has lost the model.
    servers
        How many the model is spread over.
    resources
        Of each, as Ray counts them.
    restarts
        How often Ray starts each again, -1: without end.
    detached
        The name of servers that outlive this program; None: they end with it.
    standby
        Start a standby too, on another node; only with a state. Several servers are then processes
        of one node, and their standbys of the other.
    notify
        Is given each actor as soon as it has been asked for.

    Raises
    ------
    AiopsError
        When one does not start; its text says why.
    """
    if standby:
        return _start_pair(config, servers, resources, restarts, detached, notify)
    token, actors, state = secrets.token_hex(16), list[Any](), config.state
    for shard in [*range(1, servers), 0]:
        flags, folder = config.flags(), state
        if shard:
            flags = [*config.flags(FOLLOWERS_SETTINGS), "--follower"]
        if state is not None and servers > 1:
            folder = state / shard_folder(shard)
            flags += [f"--state={folder}"] if shard else []  # the lead finds its own
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
    servers: int,
    resources: Mapping[str, float],
    restarts: int,
    detached: str | None,
    notify: Callable[[Any], None],
) -> RunningServer:
    """Start a server and its standby on two nodes; each of them with all of its shards."""
    state = config.state
    if state is None:
        raise UsageError("a standby needs state=FOLDER, which all nodes share")
    each = {name: amount * servers for name, amount in resources.items()}
    place = placement_group(
        [each] * 2,
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
        last_served = state.with_name(state.name + _LAST_SERVED)
        # The standby may have taken over in an earlier run.
        first = folders.index(newest(last_served, folders))
        actors: dict[int, Any] = {}
        for index in (first, 1 - first):
            own = dataclasses.replace(
                config, shards=servers, state=folders[index], acks="replicated"
            )
            plan = ServerPlan(
                config=own,
                flags=tuple(own.flags()),
                token=token,
                port=_port(),
                state=folders[index],
                name="the server" if index == first else "the standby",
                partner=names[1 - index],
                partner_state=folders[1 - index],
                standby=index != first,
                last_served=last_served,
            )
            options = _options(each, 1, state, restarts, names[index]) | {
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


def _all_lost(lost: Sequence[Exception], count: int) -> bool:
    """Return whether Ray has lost the actors of all heads."""
    errors = ray.exceptions.RayActorError
    return sum(isinstance(error, errors) for error in lost) == count


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
        "max_concurrency": 32,  # calls wait in it until the server listens
        "scheduling_strategy": "SPREAD" if servers > 1 else "DEFAULT",
    }
    if name is not None:
        found |= {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}
    return found


def find(name: str) -> RunningServer | None:
    """Return the detached server of a name, or None.

    Ray knows the name of an actor that was killed for a moment longer: one whose actors have ended
    for good is none.
    """
    actors: list[Any] = []
    with contextlib.suppress(ValueError):  # Ray's word for: there is none
        while True:
            actors.append(ray.get_actor(f"{name}/{len(actors)}", namespace=NAMESPACE))
    if not actors:
        return None
    standby = None
    with contextlib.suppress(ValueError):
        standby = ray.get_actor(f"{name}/standby", namespace=NAMESPACE)
    try:
        return RunningServer(actors, standby)
    except ray.exceptions.ActorDiedError:
        return None


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
