"""Checkpoints: a running simulation as a file, from which it continues to the same result.

A checkpoint is a snapshot file (`aiops.state.snapshot_file`) of the kind ``simulation``. It has the
engine's capture (`aiops.engine.capture`), and beside it as owners

==============  ==================================================================================
``dispatcher``  the turns taken, the selection rule
``clients``     one map for each client, of its session and its strategy
``leases``      the version of each client that reads one in the server's memory
``small``       arrays below 4 KiB by name, which would take a page of the file each
``curve``       validations so far
``seconds``     that the run took, without them
==============  ==================================================================================

and the arrays of clients, ``client/3/fresh`` for example. There are plain values and arrays and
nothing else: nothing is executed on reading.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from aiops._version import __version__
from aiops.common.load import own_modules
from aiops.engine.capture import Capture, policy_state, settings_of
from aiops.engine.capture import capture as captured
from aiops.engine.engine import Engine
from aiops.engine.events import Warm
from aiops.engine.restore import restore
from aiops.errors import AiopsError, DamagedState, UsageError
from aiops.model.layout import Array
from aiops.net.disk import SystemDisk
from aiops.serving.state.snapshot_reader import is_snapshot, opened_snapshot
from aiops.sim.turns.client_selection import rule_state
from aiops.sim.turns.dispatcher import Dispatcher
from aiops.sim.turns.result import SimulationSample
from aiops.sim.turns.task import Task
from aiops.state.plain import field, pack
from aiops.state.snapshot_file import PAGE, SnapshotFile, SnapshotHeader, SnapshotPlan

_log = logging.getLogger("aiops.sim")

KIND = "simulation"
"""The kind of the snapshot file."""

_NONSENSE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError),
    *(StopIteration, TypeError, ValueError),
)

Facts = Mapping[str, Any]


def facts_of(task: Task) -> dict[str, Any]:
    """Return the facts that identify a task: its class, its examples, its initial parameters."""
    found = hashlib.sha256()
    for name, array in task.initial(0).items():
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    kind = type(task)
    return {
        "kind": f"{kind.__module__}.{kind.__qualname__}",
        "examples": task.examples,
        "initial": found.hexdigest(),
    }


@dataclass(frozen=True, slots=True)
class KeptRun:
    """All that a checkpoint keeps: the settings, the task (by its facts), and the run's state."""

    simulation: Facts
    task: Task
    dispatcher: Dispatcher
    curve: list[SimulationSample]
    seconds: float


def save(path: Path, run: KeptRun) -> None:
    """Write a checkpoint, whole or not at all: an older file stays until the new one is complete.

    Raises
    ------
    UsageError
        When the file cannot be written, or the run has what cannot be kept.
    """
    capture = _capture(run)
    disk, half_done = SystemDisk(), path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        plan = SnapshotPlan(_header(run, capture), capture.contents)
        disk.remove(half_done)
        file = disk.create(half_done, plan.length)
        try:
            for at, buffers in plan.pieces():
                file.write(buffers, at)
            file.sync()
        finally:
            file.close()
        disk.rename(half_done, path)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"cannot write the checkpoint {path}: {why}") from None
    finally:
        capture.release()
        with contextlib.suppress(OSError):
            disk.remove(half_done)


def check(run: KeptRun) -> None:
    """See that the run has nothing that a checkpoint cannot keep, before its first turn.

    Raises
    ------
    UsageError
        When it has; the text names it.
    """
    dispatcher = run.dispatcher
    policy_state(dispatcher.engine.policy)
    rule_state(dispatcher.selection)
    client = dispatcher.workers[0]
    arrays, coding = client.arrays(), client.session.info.coding
    if coding is not None:
        arrays |= coding.planned_arrays()
    capture = Capture(0, {}, arrays=arrays)
    SnapshotPlan(_header(run, capture), capture.arrays)


def _header(run: KeptRun, capture: Capture) -> SnapshotHeader:
    dispatcher = run.dispatcher
    settings = {
        **settings_of(dispatcher.engine),
        "simulation": _as_json(run.simulation),
        "task": facts_of(run.task),
    }
    engine = dispatcher.engine
    version, wrote = engine.version, _wrote(engine.algorithm, engine.policy, run.task)
    return SnapshotHeader(
        *(dispatcher.iteration, 0, "", [version], settings, wrote, capture.owners), kind=KIND
    )


def _capture(run: KeptRun) -> Capture:
    """Capture the engine, and all beside it."""
    dispatcher = run.dispatcher
    leases = [worker.lease for worker in dispatcher.workers]
    capture = captured(dispatcher.engine, leases=[lease for lease in leases if lease is not None])
    try:
        capture.arrays |= capture.overwritten  # no update runs before it is written
        capture.overwritten = {}
        capture.copy()
        small: dict[str, Array] = {}
        for number, worker in enumerate(dispatcher.workers):
            for name, array in worker.arrays().items():
                found = small if array.nbytes < PAGE else capture.arrays
                found[f"client/{number}/{name}"] = array
        capture.owners |= {
            "dispatcher": dispatcher.state(),
            "clients": [worker.state() for worker in dispatcher.workers],
            "small": small,
            "curve": [list(astuple(sample)) for sample in run.curve],
            "seconds": run.seconds,
        }
    except BaseException:
        capture.release()
        raise
    return capture


@contextmanager
def opened(path: Path) -> Iterator[Checkpoint]:
    """Open a checkpoint, and close it at the end.

    Raises
    ------
    UsageError
        When it is none, or cannot be read.
    DamagedState
        When it is not whole.
    """
    try:
        if not is_snapshot(path):
            raise UsageError(f"{path} is no checkpoint of a simulation")
        with opened_snapshot(path) as file:
            yield Checkpoint(file, path)
    except OSError as error:
        raise UsageError(f"cannot read the checkpoint {path}: {error.strerror}") from None


class Checkpoint:
    """An open checkpoint.

    Parameters
    ----------
    file, path
        The file, and its name for errors.

    Attributes
    ----------
    simulation
        The settings of its simulation.
    seconds
        That the run took, without validations.

    Raises
    ------
    UsageError, DamagedState
        As `opened`.
    """

    def __init__(self, file: SnapshotFile, path: Path) -> None:
        self._file, self._path, name = file, path, str(path)
        header = self._header = file.header
        if header.kind != KIND:
            raise UsageError(
                f"{path} is no checkpoint of a simulation, but the state of a {header.kind!s:.20}"
            )
        self.simulation: Facts = field(header.settings, "simulation", dict, name)
        self._task: Facts = field(header.settings, "task", dict, name)
        self.seconds = field(header.owners, "seconds", float, name)

    def compare(self, wanted: Facts, task: Task) -> None:
        """See that it is of a simulation with these settings, and of an equal task.

        Raises
        ------
        UsageError
            With the first fact that differs.
        """
        _compare(self.simulation, _as_json(wanted), f"{self._path} is of another simulation")
        _compare(self._task, facts_of(task), f"{self._path} is of another task")

    def restore(self, dispatcher: Dispatcher, engine: Engine) -> None:
        """Have a dispatcher continue.

        Parameters
        ----------
        dispatcher
            A fresh one: its clients have joined, and no turn was taken.
        engine
            Another fresh one; the dispatcher goes on with it.

        Raises
        ------
        DamagedState
            When the file is not as it was written.
        UsageError
            When the run's rule of turns is another one.
        """
        parts = engine.algorithm, engine.policy, dispatcher.task
        wrote = {name: value for name, value in _wrote(*parts).items() if name != "byteorder"}
        others = [name for name in wrote if self._header.wrote.get(name) != wrote[name]]
        if others:
            _log.warning(
                "%s was written with %s, and this is %s: what follows may differ",
                *(self._path, _listed(self._header.wrote, others), _listed(wrote, others)),
            )
        try:
            self._restore(dispatcher, engine)
        except UsageError:
            raise
        except (*_NONSENSE, AiopsError) as error:
            raise DamagedState(
                f"{self._path} is damaged: its values are of no such simulation"
                f" ({type(error).__name__}: {error!s:.200})",
                file=str(self._path),
            ) from None

    def curve(self) -> list[SimulationSample]:
        """Return the validations so far."""
        rows = field(self._header.owners, "curve", list, str(self._path))
        try:
            return [SimulationSample(*row) for row in rows]
        except TypeError:
            raise DamagedState(f"{self._path} is damaged: its curve is none") from None

    def _restore(self, dispatcher: Dispatcher, engine: Engine) -> None:
        owners, fresh = self._header.owners, dispatcher.engine.training
        assert fresh is not None, "the clients have joined, and so defined the model"
        described = [[row[:3] for row in fresh.store.layout.rows], fresh.tables.described]
        if pack(owners["model"]) != pack(described):
            raise ValueError("another model")  # before memory is taken for it
        leases: list[Any] = []
        effects = restore(engine, self._header, self._file.array, leases=leases)
        dispatcher.restore(owners["dispatcher"], engine)
        taken = iter(leases)
        for number, (worker, state) in enumerate(
            zip(dispatcher.workers, owners["clients"], strict=True)
        ):
            lease = next(taken) if state["leased"] else None
            worker.restore(state, lease, partial(self._array, f"client/{number}/"))
        for effect in effects:
            if isinstance(effect, Warm):
                effect.run()

    def _array(self, prefix: str, name: str, into: Array | None = None) -> Array:
        """Return a client's array, in ``into`` or a new one."""
        found = self._header.owners["small"].get(prefix + name)
        if found is None:
            return self._file.array(prefix + name, into)
        if into is None:
            return np.array(found)
        if found.dtype != into.dtype or found.shape != into.shape:
            raise ValueError(f"{prefix}{name} is {found.dtype} of shape {found.shape}")
        into[...] = found
        return into


def _wrote(*parts: object) -> dict[str, str]:
    """Return the software that writes; with the same a run continues to the same bits.

    ``parts``: of the run, of which users may have written some.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {"aiops": __version__, "numpy": np.__version__, "python": python}
    return {**versions, **_own_code(parts), "byteorder": sys.byteorder}


def _own_code(parts: Iterable[object]) -> dict[str, str]:
    """Return a digest of the modules of a user's that parts have their classes in, if any."""
    theirs, found = sorted(own_modules(parts)), hashlib.sha256()
    for name in theirs:
        with contextlib.suppress(OSError, TypeError):  # without a file there is no text
            found.update(inspect.getsource(sys.modules[name]).encode())
    return {f"the code of {', '.join(theirs)}": found.hexdigest()[:12]} if theirs else {}


def _listed(wrote: Facts, names: list[str]) -> str:
    return ", ".join(f"{name} {wrote.get(name)!s:.20}" for name in names)


def _as_json(values: Facts) -> dict[str, Any]:
    """Return settings as JSON has them: with lists for tuples."""
    found: dict[str, Any] = json.loads(json.dumps(dict(values)))
    return found


def _compare(wrote: Facts, here: Facts, what: str) -> None:
    """Raise unless all facts agree."""
    for name in here:
        if wrote.get(name) != here[name]:
            raise UsageError(
                f"{what}: its {name} is {wrote.get(name)!s:.60}, not {here[name]!s:.60}"
            )
