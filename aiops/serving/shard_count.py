"""Settle what ``--shards auto`` means before a server starts: from its machine and its files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiops.bandwidth.units import parse_rate
from aiops.errors import ConflictError, UsageError
from aiops.net.link_rate import link_rate
from aiops.serving.config import Config, shard_folder
from aiops.shards.automatic import choose_shards
from aiops.state.directory import IDENTITY_FILE, StateIdentity

AUTO = "auto"
"""``shards`` in settings that no `Config` has been made of: the number is to be chosen."""

_DEFAULTS = {each.name: each.default for each in dataclasses.fields(Config)}


def settle_shards(settings: Mapping[str, Any], processors: int) -> tuple[dict[str, Any], str]:
    """Return settings with a number of shards, and the followers that are used; and why, for a log.

    Parameters
    ----------
    settings
        Those of a `Config`; unless ``shards`` is `AUTO`, they are returned as they are.
    processors
        Those that the servers on this machine have together.

    Raises
    ------
    UsageError
        As `choose_shards`; when a file cannot be read; when the state is of more servers than are
        named; when the server is a standby.
    ConflictError
        When it is a follower.
    """
    if settings.get("shards") != AUTO:
        return {**settings}, ""
    given = {**_DEFAULTS, **settings}
    if given["standby"] is not None:
        raise UsageError(
            "a standby's --shards is the number that its primary has, not auto: the primary's log"
            " says it, and so does aiops stats"
        )
    if given["follower"]:
        raise ConflictError("a follower has no followers of its own: give --shards to the lead")
    state, init, link = given["state"], given["init"], given["link_rate"]
    held = None if state is None else held_shards(Path(state))
    followers = settings.get("followers") or []
    named = ",".join(followers).split(",") if followers else []
    rate = link_rate(given["host"]) if link is None else parse_rate("--link-rate", link)
    size = model_size(None if init is None else Path(init), given["model_size"])
    choice = choose_shards(size, processors, len(named), held=held, link=rate)
    if named and choice.shards > 1 + len(named):
        raise UsageError(
            f"{state} holds the states of {choice.shards} shards, and --followers names"
            f" {len(named)}: name all {choice.shards - 1}, in the same order"
        )
    found = {"shards": choice.shards, "followers": named[: choice.shards - 1]}
    return {**settings, **found}, f"--shards auto: {choice.why}"


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


def model_size(init: Path | None, nbytes: int | None) -> int | None:
    """Return the bytes of the model that settings name; None: they name none.

    ``init``, ``nbytes``: the settings ``init`` and ``model_size``.

    Raises
    ------
    UsageError
        When the file of ``init`` cannot be read.
    """
    if nbytes is not None or init is None:
        return nbytes
    try:
        return init.stat().st_size
    except OSError as error:
        raise UsageError(f"--init {init}: {error.strerror}") from None
