"""The states of a run's servers: which is the newest, whether there is one, whether it is free."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from aiops.errors import UsageError
from aiops.net.disk import SystemDisk
from aiops.serving.config import shard_folder
from aiops.serving.state.state_copies import shown
from aiops.state.directory import GENERATION_FILE, IDENTITY_FILE, LOCK, SHARD, GenerationFile

_AGAIN = 0.2  # seconds between two looks at whether a state is free


def generation(folder: Path | None) -> int:
    """Return the generation of the state of a server, or of shards' lead; 0: there is none."""
    if folder is None:
        return 0
    try:
        return GenerationFile.unpack((_leads(folder) / GENERATION_FILE).read_bytes()).generation
    except FileNotFoundError:
        return 0


def newest(last_served: Path | None, states: Sequence[Path | None]) -> Path | None:
    """Return that of a pair's states that has all that was acknowledged.

    Parameters
    ----------
    last_served
        The file that says whose state has served last.
    states
        Of the two; the first is returned if nothing has served yet.
    """
    named = last_served.read_text() if last_served is not None and last_served.exists() else ""
    return max(states, key=lambda state: (generation(state), str(state) == named))


def _leads(folder: Path) -> Path:
    """Return the folder of the lead's own state, if this one has those of several shards."""
    lead = folder / shard_folder(0)
    return lead if lead.exists() else folder


def check_there(state: Path, copies: str | None, name: str, host: str) -> None:
    """Check that a server that is started again has a state to go on from.

    Parameters
    ----------
    state
        Its folder.
    copies
        The store of its copies, which has been fetched from; None: there is none.
    name, host
        What errors call the server, and its node.

    Raises
    ------
    UsageError
        When there is none: it would begin a second history.
    """
    if (_leads(state) / IDENTITY_FILE).exists():
        return
    if copies is not None:
        raise UsageError(
            f"{name} was lost before there was any copy of its state in {shown(copies)}: begin the"
            " job again"
        )
    raise UsageError(
        f"{name} was started again on {host}, where {state} holds no state: name a folder that all"
        " nodes share, or have the server stay on its node (server_resources)"
    )


def wait_until_free(folder: Path, seconds: float) -> None:
    """Wait until no process has a state's folder, or that of a shard in it.

    A machine that has fallen silent is lost to Ray, and may have it still: its processes are
    stopped, or the file system has not noticed yet. Of a folder that is being written no other
    server may begin.

    Raises
    ------
    UsageError
        When one has it for that long.
    """
    disk, text, until, said = SystemDisk(), f"process {os.getpid()}", time.monotonic() + seconds, ""
    for lock in [folder / LOCK, *sorted(folder.glob(f"{SHARD}*/{LOCK}"))]:
        while lock.exists():
            held = disk.lock(lock, text)
            if not isinstance(held, str):
                held.release()
                break
            why = f"{lock.parent} is still in use by {held} of the server's last machine"
            if time.monotonic() >= until:
                raise UsageError(f"{why}, after {seconds:g} s: end that, or name another state=")
            if why != said:
                print(f"{why}: the server waits", file=sys.stderr, flush=True)
                said = why
            time.sleep(_AGAIN)
