"""The settings of a run's server: those that `aiops.ray.train` is given, and those that it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiops.errors import UsageError
from aiops.serving.config import Config
from aiops.serving.embedded import config_of

_OWN = ("host", "port", "token", "followers", "follower", "shards", "standby", "shard")
"""Settings of a server that `train` sets itself."""


def server_config(given: Mapping[str, Any]) -> Config:
    """Return the config of the settings that `train` was given.

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
    return config_of(given)


def check_same(
    name: str, given: Mapping[str, Any], running: Config, asked: int | None, servers: int
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
        The number of servers that the caller named (None: none), and that there are.

    Raises
    ------
    UsageError
        When they differ: a server that runs does not change its settings.
    """
    wanted = config_of(given)
    differences = [
        f"{setting}={getattr(running, setting)!r}, not {getattr(wanted, setting)!r}"
        for setting in given
        if getattr(running, setting) != getattr(wanted, setting)
    ]
    if asked is not None and asked != servers:
        differences.append(f"servers={servers}, not {asked}")
    if differences:
        raise UsageError(
            f"the server that runs under the name {name!r} has {'; '.join(differences)}: leave such"
            " settings out to train at it as it is, end it first"
            f" (aiops.ray.server({name!r}).stop()), or take another name"
        )
