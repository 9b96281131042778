"""The settings of a run's server: those that `aiops.ray.train` is given, and those that it has."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aiops.errors import ConflictError, UsageError
from aiops.serving.config import Config
from aiops.serving.embedded import config_of
from aiops.serving.shard_count import held_shards, model_size
from aiops.shards.automatic import choose_shards

AUTO = "auto"
"""In place of a number of servers: as many as seem best."""

_ON_NODES = "aiops-ray"
"""The folder of states of which there are copies, in a node's folder for temporary files."""

_OWN = ("host", "port", "token", "followers", "follower", "shards", "standby", "shard")
"""Settings of a server that `train` sets itself."""


def server_config(
    given: Mapping[str, Any], state: str | Path | None = None, standby: bool = False
) -> Config:
    """Return the config of the settings that `train` was given.

    Parameters
    ----------
    given
        Those of `aiops.serve`.
    state
        The folder that all nodes share, in which the server is to keep its state; or the URL of a
        store for copies of it, which then is in a folder of the server's node. None: it has none.
    standby
        It has a standby.

    Raises
    ------
    UsageError, ConflictError
        When one is not the caller's to set, or makes no sense.
    """
    for setting in _OWN:
        if setting in given:
            raise UsageError(
                f"aiops.ray.train sets {setting!r} of the server itself: leave it out (servers=..."
                " says how many there are)"
            )
    if standby and given.get("acks") not in (None, "replicated"):
        raise ConflictError(
            f"acks={given['acks']!r} does not wait for the standby, which then may not take over:"
            " leave it out, or drop standby=True"
        )
    if state is None or "://" not in str(state):
        return config_of({**given, "state": None if state is None else Path(state).absolute()})
    if standby:
        raise ConflictError(
            f"standby=True takes no state={state!r}: each push is on two nodes then, whose states"
            " are compared when both have ended. Give a folder that all nodes share, or drop"
            " standby=True"
        )
    name = hashlib.sha256(str(state).encode()).hexdigest()[:16]
    return config_of({**given, "state": Path(_ON_NODES, name), "state_copy": str(state)})


def on_node(config: Config, temporary: str, node: str) -> Config:
    """Return the config of a server on a node: one with a store has a folder of that node.

    Parameters
    ----------
    config
        That of `server_config`.
    temporary
        The node's folder for temporary files.
    node
        Its id: nodes of one machine share that folder.
    """
    if config.state_copy is None or config.state is None:
        return config
    return dataclasses.replace(config, state=Path(temporary, config.state, node))


def choose_servers(
    config: Config, nodes: Sequence[float], server: float, workers: float, standby: bool
) -> int:
    """Return the number of servers of a model: ``servers="auto"``.

    The rule is that of ``--shards auto`` (`aiops.shards.automatic`): on several nodes up to one
    server each, on a single one as many as it has processors and no more than 4. The first workers
    have room beside them. With a standby all servers are on one node.

    Parameters
    ----------
    config
        The settings, which say the model's size, and the state that there may be.
    nodes
        The processors of each node, as Ray counts them.
    server, workers
        The processors that each server has, and that the first workers have together.
    standby
        There are standbys, as many, on another node.

    Raises
    ------
    UsageError
        When nothing tells the model's size.
    """
    if config.state_copy is not None:
        return 1  # copies are of one server's state
    held = None if config.state is None else held_shards(config.state)
    nbytes = model_size(config.init, config.model_size)
    if held is None and nbytes is None:
        raise UsageError(
            "servers='auto' needs the size of the model before the first worker defines it: give"
            " model_size=BYTES, or init=FILE, or the number of servers"
        )
    server = max(server, 1.0)
    large = sorted((cpus for cpus in nodes if cpus >= server), reverse=True)
    room = int((sum(nodes) - workers) // (server * (1 + standby)))
    hosts = 0 if standby else max(0, min(len(large), room) - 1)
    one = large[min(int(standby), len(large) - 1)] if large else 1.0
    return choose_shards(nbytes, max(1, min(int(one // server), room)), hosts, held=held).shards


def check_same(
    name: str, given: Mapping[str, Any], running: Config, asked: int | str | None, servers: int
) -> None:
    """Check that a server which runs already has the settings that `train` was given for it.

    Parameters
    ----------
    name
        That of the detached server.
    given
        The settings that the caller named; one that was left out is the running server's.
    running
        What the server was started with.
    asked, servers
        The number of servers that the caller named (None or ``auto``: none), and that there are.

    Raises
    ------
    UsageError
        When they differ: a server that runs does not change its settings.
    """
    wanted = config_of({**given, "state": running.state})
    differences = [
        f"{setting}={getattr(running, setting)!r}, not {getattr(wanted, setting)!r}"
        for setting in given
        if getattr(running, setting) != getattr(wanted, setting)
    ]
    if asked not in (None, AUTO, servers):
        differences.append(f"servers={servers}, not {asked}")
    if differences:
        raise UsageError(
            f"the server that runs under the name {name!r} has {'; '.join(differences)}: leave such"
            " settings out to train at it as it is, end it first"
            f" (aiops.ray.server({name!r}).stop()), or take another name"
        )
