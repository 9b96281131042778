"""Damaged states: moments of a simulated disk, with what a loss of power leaves of them.

A simulated cluster trains on a disk that keeps what was done to it, with crashes and losses of
power on the way. Then moments are drawn, and the disk of each is read by the code of a start: as
the end of the process leaves it, with unsynced sectors lost or torn, with flipped bits. What is
read must be the state after a row that was written before that moment, to the last bit. It must
have what was promised by then; only after a flipped bit it may be an earlier one, or be refused.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiops.algorithms import find
from aiops.durable.recorder import Recorder
from aiops.engine import statistics
from aiops.engine.digest import digest
from aiops.engine.engine import Engine
from aiops.errors import DamagedState, UsageError
from aiops.lab.torture.cluster_plan import ClusterPlan
from aiops.lab.torture.cluster_trial import ClusterTrial
from aiops.serving.config import Config
from aiops.serving.state.state_files import StateFiles
from aiops.sim.virtual.disk import VirtualDisk
from aiops.sim.virtual.loop import VirtualLoop

MOMENTS = 150
"""Damaged states of one run."""

WAYS = ("killed", "power", "power", "power", "flip", "flips")
"""The damage of a disk: the process was killed, the power was cut, and bits were flipped too."""


@dataclass(slots=True)
class StatesResult:
    """The findings of one run: the damaged states by what became of them, and what is wrong."""

    plan: ClusterPlan
    states: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Life:
    """A start of the server, on a disk whose operations begin with it or before it."""

    disk: VirtualDisk
    begins: int  # the operations before it
    row: int  # that it recovered


@dataclass(slots=True)
class _Noted:
    """The state after a row, and the number of operations when it was noted.

    ``state``: the parameters' digest; empty while an update is under way. ``report``: None for a
    steady exchange, which is noted before it is counted.
    """

    life: int
    count: int
    state: str
    report: dict[str, Any] | None


class StatesTrial(ClusterTrial):
    """A cluster whose server's states are noted, row by row.

    Parameters
    ----------
    plan
        Of the cluster.
    """

    def __init__(self, plan: ClusterPlan) -> None:
        super().__init__(plan)
        self.lives: list[_Life] = []
        self.rows: dict[int, list[_Noted]] = {}
        self.acknowledged: list[tuple[int, int, int]] = []  # life, operations, version

    def disk(self, loop: VirtualLoop) -> VirtualDisk:
        """Return a disk that keeps what was done to it."""
        return VirtualDisk(loop, self.plan.sync_seconds, history=True, inline=True)

    def note(self, recorder: Recorder, *, counted: bool) -> None:
        """Note the state after the row that was recorded last."""
        disk, row = self.machine.disk, recorder.next - 1
        if not self.lives or recorder is not self._recorder:
            self._recorder = recorder
            self.lives.append(_Life(disk, len(disk.operations), row - 1))
        engine = recorder.engine
        report = statistics.decided(engine.report()) if counted else None
        store = engine.store  # while an update is under way the parameters are neither old nor new
        state = "" if store is not None and store.busy else digest(engine)
        noted = _Noted(len(self.lives) - 1, len(disk.operations), state, report)
        self.rows.setdefault(row, []).append(noted)

    _recorder: Recorder | None = None

    def stepped(self, version: int) -> None:
        """Note that a worker knows a version: it was acknowledged."""
        self.acknowledged.append((len(self.lives) - 1, len(self.machine.disk.operations), version))


def examine(drawn: ClusterPlan) -> StatesResult:
    """Run a cluster, damage its states, and read them."""
    began = time.monotonic()
    plan = _calm(drawn)
    result, trial = StatesResult(plan), StatesTrial(plan)
    with _watched(trial):
        found = trial.run()
    if found.wrong:
        result.wrong = [f"the cluster itself: {text}" for text in found.wrong]
        return result
    rng = random.Random(f"states {plan.seed}")
    for _ in range(MOMENTS):
        life = rng.randrange(len(trial.lives))
        begins = trial.lives[life].begins
        end = len(trial.lives[life].disk.operations)
        if life + 1 < len(trial.lives) and trial.lives[life + 1].disk is trial.lives[life].disk:
            end = trial.lives[life + 1].begins
        count, way = rng.randint(begins, end), rng.choice(WAYS)
        result.states += 1
        text, outcome = _read(trial, life, count, way, rng)
        result.outcomes[f"{way}: {outcome}"] += 1
        if text:
            result.wrong.append(f"start {life + 1}, operation {count}, {way}: {text}")
    result.seconds = time.monotonic() - began
    return result


def _calm(plan: ClusterPlan) -> ClusterPlan:
    """Return a plan whose faults are those of the server alone, which loses nothing."""
    kinds = ("crash", "crash at", "stop", "power", "power at")
    faults = tuple(fault for fault in plan.faults if fault.kind in kinds)
    if plan.acks not in ("durable", "replicated"):
        faults = tuple(fault for fault in faults if not fault.kind.startswith("power"))
    acks = {"applied": "written", "replicated": "durable"}.get(plan.acks, plan.acks)
    calm = dataclasses.replace(plan, acks=acks, faults=faults, snapshot_every=0.5)
    return dataclasses.replace(calm, standby=False, shards=1, late=(), rows=False)


@contextmanager
def _watched(trial: StatesTrial) -> Iterator[None]:
    """Have a trial note the state after each row."""
    handle, exchanged = Recorder.handle, Recorder.exchange_row

    def handles(self: Recorder, event: Any) -> Any:
        before = self.next
        effects = handle(self, event)
        if self.next != before and self.recording:
            trial.note(self, counted=True)
        return effects

    def exchanges(self: Recorder, *given: Any) -> Any:
        row = exchanged(self, *given)
        trial.note(self, counted=False)
        return row

    Recorder.handle, Recorder.exchange_row = handles, exchanges  # type: ignore
    try:
        yield
    finally:
        Recorder.handle, Recorder.exchange_row = handle, exchanged  # type: ignore[method-assign]


def _read(
    trial: StatesTrial, life: int, count: int, way: str, rng: random.Random
) -> tuple[str, str]:
    """Read a damaged state; return what is wrong with it, and what became of it."""
    disk = trial.lives[life].disk
    if way == "killed":
        left = disk.after(count)
    else:
        left = disk.after_power_cut(rng, count, flips={"flip": 1, "flips": 4}.get(way, 0))
    config = Config(**_config(trial.plan))
    engine = Engine(find(config.policy).make(config.settings()), config.options())
    try:
        files = StateFiles(Path("state"), left, "a start", "", lambda: 1)
        found = files.recover(engine, config.policy)
    except DamagedState as error:
        return ("" if way.startswith("flip") else f"refused: {error}"), "refused"
    except UsageError as error:
        return f"refused, as if its settings were others: {error}", "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}", "refused"
    row = 0 if found is None else found.row
    text = _compare(trial, life, count, row, engine)
    promised = max(
        (version for when, at, version in trial.acknowledged if (when, at) <= (life, count)),
        default=0,
    )
    safe = way == "killed" or (way == "power" and trial.plan.acks == "durable")
    if not text and safe and engine.version < promised:
        text = f"version {engine.version} is read, and {promised} was acknowledged"
    return text, "read" if engine.version >= promised else "an earlier state"


def _compare(trial: StatesTrial, life: int, count: int, row: int, engine: Engine) -> str:
    """Return what is wrong with a state that was read as the one after a row."""
    if row <= 1:
        return "" if engine.training is None else f"row {row} has a model"
    state, report = digest(engine), statistics.decided(engine.report())
    candidates = [n for n in trial.rows.get(row, ()) if (n.life, n.count) <= (life, count)]
    if not candidates:
        return f"row {row} was not written by then"
    same = [n for n in candidates if n.state in (state, "")]
    if not same:
        return f"the parameters after row {row} are others"
    if all(n.report is not None and n.report != report for n in same):
        wrong = [key for key in report if report[key] != same[-1].report[key]]  # type: ignore[index]
        return f"the statistics after row {row} are others: {', '.join(wrong)}"
    return ""


def _config(plan: ClusterPlan) -> dict[str, Any]:
    found = dict(plan.settings())
    for name in ("push_codec", "fetch_codec"):
        if isinstance(found.get(name), str):
            found[name] = [found[name]]
    found["state"] = Path("state")
    return found
