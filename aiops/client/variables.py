"""The environment's variables that a client reads where it is given nothing else.

``aiops run`` and ``aiops join`` set them for the workers that they start. Elsewhere the server's
address is concluded from what the launcher tells (`aiops.common.launchers`).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, MutableMapping
from itertools import chain

from aiops.common.launchers import LAUNCHERS, URL, WorkerPlace, detect
from aiops.common.tls_files import CA, CERT, KEY, Tls
from aiops.common.variables import JOB, unknown_variables
from aiops.errors import UsageError
from aiops.wire.checked_connection import xxh3

NAME, TOKEN, CHECKSUMS = "AIOPS_NAME", "AIOPS_TOKEN", "AIOPS_CHECKSUMS"
OVERLAP = "AIOPS_OVERLAP"
GPUS = "CUDA_VISIBLE_DEVICES"

_MOST_OVERLAP = 8
"""Exchanges under way at once, at most: each takes memory for a gradient and the parameters."""

_GROUP = (
    *("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    *("SLURM_NTASKS", "SLURM_NPROCS"),
)
"""What frameworks read beside the variables of `LAUNCHERS`: `standalone`."""

_log = logging.getLogger("aiops.client")


@functools.cache
def _warn_of_unknown() -> None:
    """Log the variables that are named as those of aiops and are none, once in this process."""
    if JOB not in os.environ:  # `aiops run` has told it
        for text in unknown_variables(os.environ):
            _log.warning("%s", text)


def server_url(given: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """Return the server's URL.

    Raises
    ------
    UsageError
        When it is neither given nor in `URL`, and no launcher tells where rank 0 is.
    """
    if environment is os.environ:
        _warn_of_unknown()
    if given is not None and not isinstance(given, str):
        raise UsageError(
            f"the server's URL is a string, not {type(given).__name__}; to take it from {URL},"
            " give the parameters by name: Worker(params=...)"
        )
    if given:
        return given
    place = detect(environment)
    if not place.url:
        raise UsageError(
            "no server is named: give its URL, start the program with `aiops run`, or set"
            f" {URL}=aiops://host:port (`aiops doctor` shows what is set)"
        )
    if place.sources["url"] != URL:
        level = logging.INFO if place.rank else logging.WARNING  # one line in a job is enough
        text = "%s is not set: the server is taken to be %s, by %s"
        _log.log(level, text, URL, place.url, place.sources["url"])
    return place.url


def checksums(given: bool | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether connections have checksums; if that is not given, by `CHECKSUMS`.

    Raises
    ------
    UsageError
        When they are to have them, and the package ``xxhash`` is missing.
    """
    wanted = environment.get(CHECKSUMS, "") not in ("", "0") if given is None else given
    if wanted:
        xxh3(0)
    return wanted


def overlap(given: bool | int | None, environment: Mapping[str, str] = os.environ) -> int:
    """Return how many exchanges may be under way beside computing; if not given, by `OVERLAP`.

    Raises
    ------
    UsageError
        When that is no such number.
    """
    text = environment.get(OVERLAP, "")
    wanted: object = given
    if given is None:
        wanted = int(text or "0") if (text or "0").isascii() and (text or "0").isdigit() else text
    if not isinstance(wanted, int) or not 0 <= wanted <= _MOST_OVERLAP:
        where = f"{OVERLAP} is" if given is None else "overlap is"
        raise UsageError(
            f"{where} {wanted!r}: give False (or 0), True (or 1: an exchange is under way while the"
            f" next gradient is computed), or how many exchanges, up to {_MOST_OVERLAP}"
        )
    return int(wanted)


def tls_files(given: Tls | None, environment: Mapping[str, str] = os.environ) -> Tls:
    """Return the files of TLS, those that are not given from the environment."""
    given = given or Tls()
    cert, key = given.cert, given.key
    if cert is None:
        cert, key = environment.get(CERT) or None, environment.get(KEY) or None
    return Tls(given.ca or environment.get(CA) or None, cert, key)


def client_name(role: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of a client that was given none; None: nothing tells."""
    return environment.get(NAME) or (detect(environment).name if role == "worker" else None)


def standalone(environment: MutableMapping[str, str] = os.environ) -> tuple[int, int]:
    """Hide the job from other frameworks, so that each worker is a job of one process to them.

    Hugging Face's Trainer and Accelerate begin ``torch.distributed`` where they find RANK and
    WORLD_SIZE: gradients would be averaged among the workers before they are pushed, and each
    worker would wait for the slowest. Call this before ``TrainingArguments`` or an ``Accelerator``
    is made, and after MPI is initialised, where the program uses that itself. The launcher's
    variables, RANK, WORLD_SIZE, MASTER_ADDR and the like, leave the environment. aiops finds the
    worker's place in its own instead, such as AIOPS_RANK, here and in the processes that this one
    starts (not in the workers of another job). May be called again.

    Returns
    -------
    The worker's number, from 0, and how many there are: to take a part of the data, or another
    seed. (0, 1) where nothing tells.

    Raises
    ------
    UsageError
        When a variable has no value that it may have, or a launcher tells the worker's number and
        not how many there are, or the other way round: a guess would give parts of the data twice.
    """
    place = detect(environment)
    _check_place(place, environment)
    kept = {
        "AIOPS_RANK": place.rank,
        "AIOPS_WORLD_SIZE": place.workers,
        "AIOPS_LOCAL_RANK": place.local_rank,
        "AIOPS_LOCAL_WORLD_SIZE": place.local_workers,
        "AIOPS_RESTARTS": place.restarts or None,
        URL: place.url,
    }
    for name, value in kept.items():
        if value is not None:
            environment[name] = str(value)
    for launcher in LAUNCHERS:
        told = (launcher.rank, launcher.workers, launcher.local_rank, launcher.local_workers)
        for name in chain(launcher.marks, *told):
            environment.pop(name, None)
    for name in _GROUP:
        environment.pop(name, None)
    rank, workers = place.rank or 0, place.workers or 1
    return rank, max(workers, rank + 1)


def see_own_gpu(count: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Leave a worker one of the GPUs that it sees, where several workers are on its machine.

    They take turns where there are fewer GPUs than workers. One that a launcher has chosen stays.

    Parameters
    ----------
    count
        How many this process sees.
    environment
        What has the worker's place, and is changed.
    """
    place = detect(environment)
    if place.local_rank is None or (place.local_workers or 1) < 2:
        return
    given = environment.get(GPUS)
    seen = [str(n) for n in range(count)] if given is None else given.split(",")
    if count > 1:
        environment[GPUS] = seen[place.local_rank % min(count, len(seen))].strip()


def _check_place(place: WorkerPlace, environment: Mapping[str, str]) -> None:
    """Check that a worker's number and how many there are are both told, or neither."""
    for fault in place.faults:
        raise UsageError(fault)
    number = environment.get("RANK", "") if place.rank is None else str(place.rank)
    if number and place.workers is None:
        raise UsageError(
            f"this worker's number is told, {number:.20}, and not how many there are: set"
            " WORLD_SIZE to that"
        )
    if not number and place.workers is not None:
        raise UsageError(
            f"there are {place.workers} workers, by {place.sources['workers']}, and the number of"
            " this one is not told: set RANK to it, from 0"
        )
