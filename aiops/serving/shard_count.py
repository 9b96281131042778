"""Settle what ``--shards auto`` means before a server starts: from its machine and its files."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from aiops.errors import UsageError
from aiops.serving.config import AUTO, Config, shard_folder
from aiops.shards.automatic import choose_shards
from aiops.state.directory import IDENTITY_FILE, StateIdentity

_log = logging.getLogger("aiops.server")


def with_shards(config: Config, processors: int) -> Config:
    """Return settings with a number of shards, and the followers that are used; it is logged, too.

    Parameters
    ----------
    config
        The settings; unless ``shards`` is `AUTO`, they are returned as they are.
    processors
        Those that the servers on this machine have together.

    Raises
    ------
    UsageError
        As `choose_shards`; when a file cannot be read; when the state is of more servers than are
        named.
    """
    if config.shards != AUTO:
        return config
    held = None if config.state is None else held_shards(config.state)
    named = ",".join(config.followers).split(",") if config.followers else []
    choice = choose_shards(model_size(config), processors, len(named), held=held)
    if named and choice.shards > 1 + len(named):
        raise UsageError(
            f"{config.state} holds the states of {choice.shards} shards, and --followers names"
            f" {len(named)}: name all {choice.shards - 1}, in the same order"
        )
    _log.info("--shards auto: %s", choice.why)
    return dataclasses.replace(config, shards=choice.shards, followers=named[: choice.shards - 1])


def held_shards(folder: Path) -> int | None:
    """Return the number of servers that a state is of; None: there is none.

    Raises
    ------
    DamagedState
        When its identity cannot be read.
    """
    if (folder / IDENTITY_FILE).exists():
        return 1
    lead = folder / shard_folder(0) / IDENTITY_FILE
    return StateIdentity.unpack(lead.read_bytes(), str(lead)).shards if lead.exists() else None


def model_size(config: Config) -> int | None:
    """Return the bytes of the model that the settings name; None: they name none.

    Raises
    ------
    UsageError
        When the file of ``init`` cannot be read.
    """
    if config.model_size is not None or config.init is None:
        return config.model_size
    try:
        return config.init.stat().st_size
    except OSError as error:
        raise UsageError(f"--init {config.init}: {error.strerror}") from None
