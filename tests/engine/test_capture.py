"""A capture after any event, restored into a fresh engine, goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
import os
import random
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import pytest

from aiops.algorithms import find
from aiops.algorithms.model_support import tables_obstacle
from aiops.engine import membership
from aiops.engine.capture import Capture, capture
from aiops.engine.digest import digest
from aiops.engine.engine import Engine
from aiops.engine.events import Apply, Received, Resumed, Stopping
from aiops.engine.restore import restore
from aiops.engine.statistics import decided
from aiops.errors import ConflictError, UsageError
from aiops.state.plain import pack, unpack
from aiops.state.snapshot_file import SnapshotFile, SnapshotHeader, SnapshotPlan
from aiops.store.capture_job import CaptureJob
from aiops.store.parameters import UpdateJob
from aiops.store.resources import Resources
from tests.contract.cases import CASES as POLICY_CASES
from tests.devices import DEVICES, device_named, machine_with
from tests.engine.seeded_run import Case, Driver, Script, Step, event_of
from tests.engine.test_engine import G, running
from tests.inline import Inline
from tests.seeds import seeds


def taken(driver: Driver) -> Capture | None:
    """A complete capture of an engine, if one may be taken now; later updates do not change it."""
    outstanding = driver.outstanding
    if outstanding is not None and not isinstance(outstanding.job, CaptureJob):
        return None
    found = capture(driver.engine, 7)
    found.copy()
    found.read_rows()
    found.arrays = {name: array.copy() for name, array in found.arrays.items()}
    found.release()
    found.owners = unpack(pack(found.owners), "owners")
    found.settings = unpack(pack(found.settings), "settings")
    return found


def restored(found: Capture, engine: Engine, driver: Driver, steps: list[Step]) -> Driver:
    """A fresh engine with the state of a capture; ``driver``: of the engine captured."""

    def queued(row: int) -> Received:
        event = event_of(engine, steps[row - 1], row)
        assert isinstance(event, Received)
        return event

    again = Driver(engine)
    for effect in restore(engine, found, found.array, queued):
        if isinstance(effect, Apply):
            again.outstanding = effect
    assert (again.outstanding is None) == (driver.outstanding is None)
    return again


Place = tuple[Resources | None, str]
HERE: Place = (None, "numpy")


def check(case: Case, seed: int, steps: int = 24, live: Place = HERE, other: Place = HERE) -> int:
    """Capture after every event of a run; go on from each with the events that followed it."""
    script = Script(case, seed, live[0]).run(steps)
    driver = Driver(case.engine(*live))
    runs: list[tuple[int, Driver]] = []
    for row, step in enumerate(script.steps, 1):
        assert driver.take(step, row) == script.effects[row - 1], row
        found = taken(driver)
        if found is not None:
            runs.append((row, restored(found, case.engine(*other), driver, script.steps)))
    last = taken(driver)
    for first, again in runs:
        for row in range(first + 1, len(script.steps) + 1):
            step = script.steps[row - 1]
            assert again.take(step, row) == script.effects[row - 1], (first, row, step.kind)
        assert digest(again.engine) == digest(driver.engine), first
        assert decided(again.engine.report()) == decided(driver.engine.report()), first
        if last is not None:
            same_capture(taken(again), last)
    return len(runs)


def same_capture(one: Capture | None, other: Capture) -> None:
    """Compare two captures to the last bit."""
    assert one is not None
    for name, owner in other.owners.items():
        assert pack(one.owners[name]) == pack(owner), name
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in other.arrays.items():
        if not name.startswith("sum/"):  # where no sum has begun, it holds anything
            assert one.arrays[name].tobytes() == array.tobytes(), name


FACTORS: Mapping[str, Sequence[Any]] = {
    "push": ("raw", "int8", "topk:0.1", "lowrank:rank=2"),
    "fetch": ("", "int8", "lowrank:rank=2", "topk:0.05"),
    "gate": ("", "reapply", "bfasgd"),
    "recall": (True, False),
    "budget": (False, True),
    "tables": (False, True),
    "float32": (False, True),
    "live": (8, 2),
    "filter": ("off", "norm:1.1+curvature+agreement+kardam"),
}

GATES = {
    "": "",
    "reapply": "constant:p_push=0.5,p_fetch=1,skipped=reapply",
    "bfasgd": "bfasgd:c_push=0.1,c_fetch=0.02",
}


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows in which any two values of two factors come together once at least."""
    rng = random.Random(1)
    names = list(factors)
    wanted = {
        ((a, x), (b, y)) for a, b in combinations(names, 2) for x in factors[a] for y in factors[b]
    }
    rows = []
    while wanted:
        tries = [{name: rng.choice(factors[name]) for name in names} for _ in range(30)]
        best = max(tries, key=lambda row: len(wanted & set(combinations(row.items(), 2))))
        if wanted & set(combinations(best.items(), 2)):
            rows.append(best)
            wanted -= set(combinations(best.items(), 2))
    return rows


def possible(policy: str, settings: Mapping[str, Any], row: Mapping[str, Any]) -> Case:
    """The case of a row, without what its algorithm cannot have."""
    values = {**row, "gate": GATES[row["gate"]]}
    algorithm = find(policy).make(dict(settings))
    if row["tables"] and tables_obstacle(algorithm):
        values["tables"] = False
    for without in ({}, {"gate": ""}, {"gate": "", "push": "int8"}):
        case = Case(policy, tuple(settings.items()), **{**values, **without})
        try:
            case.engine()
        except ConflictError:
            continue
        return case
    raise AssertionError(f"no engine of {policy} with {row}")


POLICIES = {
    **POLICY_CASES,
    "average": ("average", {}),
    "fedbuff-adam": ("fedbuff", {"optimizer": "adam", "lr": 0.02}),  # modulated, and not linear
}
ROWS = pairwise(FACTORS)
PAIRED = [
    (name, possible(*POLICIES[name], ROWS[at % len(ROWS)])) for at, name in enumerate(POLICIES)
]
PAIRED += [(f"fasgd {at}", possible("fasgd", {}, row)) for at, row in enumerate(ROWS)]


@pytest.mark.parametrize(("name", "case"), PAIRED, ids=[name for name, _case in PAIRED])
def test_it_goes_on_alike(name: str, case: Case) -> None:
    assert check(case, seed=zlib.crc32(name.encode())) > 5


@pytest.mark.skipif("AIOPS_CAPTURES" not in os.environ, reason="some minutes: AIOPS_CAPTURES=1")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_with_everything(name: str) -> None:
    for at, row in enumerate(ROWS):
        for run in range(int(os.environ["AIOPS_CAPTURES"])):
            check(possible(*POLICIES[name], row), seed=1000 * run + at, steps=80)


def test_every_pair_is_there() -> None:
    seen = {pair for row in ROWS for pair in combinations(row.items(), 2)}
    assert len(ROWS) < 30
    assert (("push", "lowrank:rank=2"), ("fetch", "topk:0.05")) in seen
    assert (("tables", True), ("live", 2)) in seen


class TestElsewhere:
    """Kernels, threads and devices may change; the bits do not."""

    ALL = Case("fasgd", (("gamma", 0.9),), "topk:0.1", "lowrank:rank=2", GATES["bfasgd"])

    def test_with_other_kernels(self) -> None:
        assert check(self.ALL, 1, live=(None, "numba"), other=(None, "numpy")) > 5
        assert check(self.ALL, 1, live=(None, "numpy"), other=(None, "numba")) > 5

    @pytest.mark.skipif("emulated" not in DEVICES, reason="no C++ compiler")
    @pytest.mark.parametrize("case", [ALL, Case("softsync", (("n", 2),)), Case("dcasgd")])
    def test_on_a_device_and_from_there(self, case: Case) -> None:
        there = (machine_with(device_named("emulated")), "numpy")
        assert check(case, 2, 25, live=there, other=there) > 2
        assert check(case, 3, 25, live=there, other=HERE) > 2
        assert check(case, 4, 25, live=HERE, other=there) > 2

    @pytest.mark.slow
    def test_with_another_number_of_threads(self) -> None:
        with ThreadPoolExecutor(3) as pool:

            def shared(calls: Any) -> None:
                list(pool.map(lambda call: call(), calls))

            several = Resources(parallel_map=shared)
            case = dataclasses.replace(self.ALL, large=True)
            assert check(case, 5, 12, live=HERE, other=(several, "numpy")) > 2


class TestThroughAFile:
    """A capture is written and read as a snapshot file."""

    def test_it_is_the_same(self) -> None:
        case = Case("asgd", (("optimizer", "adagrad"),), fetch="lowrank:rank=2", tables=True)
        script, driver, row = Script(case, 1).run(40), Driver(case.engine()), 0
        for row, step in enumerate(script.steps, 1):
            driver.take(step, row)
            if row > 30 and driver.outstanding is None:
                break
        found = capture(driver.engine, row)
        found.copy()
        header = SnapshotHeader(
            row, 1, "a run", [driver.engine.version], found.settings, {}, found.owners
        )
        plan = SnapshotPlan(header, found.contents)
        data = b"".join(bytes(each) for _offset, buffers in plan.pieces() for each in buffers)
        found.release()

        def read(offset: int, into: memoryview) -> int:
            some = data[offset : offset + len(into)]
            into[: len(some)] = some
            return len(some)

        file = SnapshotFile(read, len(data), "snapshot-1")
        engine = case.engine()
        restore(engine, file.header, file.array)
        again = Driver(engine)
        for later, step in enumerate(script.steps[row:], row + 1):
            assert again.take(step, later) == script.effects[later - 1]


class TestTablesBesideUpdates:
    """Rows of tables are read while later events are handled."""

    @pytest.mark.parametrize(
        ("policy", "settings"),
        [("asgd", {"optimizer": "adagrad"}), ("fasgd", {}), ("ssp", {"optimizer": "adam"})],
    )
    def test_they_are_those_of_the_moment(self, policy: str, settings: dict[str, Any]) -> None:
        """A capture after each event, whose rows are read a few events later."""
        case = Case(policy, tuple(settings.items()), tables=True)
        compared = 0
        for seed in seeds(2):
            script, driver = Script(case, seed).run(60), Driver(case.engine())
            pending: list[tuple[int, Capture, Capture]] = []
            for row, step in enumerate(script.steps, 1):
                driver.take(step, row)
                twin = taken(driver)
                if twin is not None and driver.engine.training is not None:
                    found = capture(driver.engine, 7)
                    found.copy()
                    pending.append((row, found, twin))
                while pending and (pending[0][0] <= row - 8 or row == len(script.steps)):
                    _row, found, twin = pending.pop(0)
                    found.read_rows()
                    for name in (name for name in twin.arrays if name.startswith("table/")):
                        assert found.arrays[name].tobytes() == twin.arrays[name].tobytes()
                        compared += twin.arrays[name].nbytes > 0
                    found.release()
        assert compared > 50

    def test_a_capture_copies_no_rows(self) -> None:
        case = Case("asgd", tables=True)
        driver = Driver(case.engine())
        for row, step in enumerate(Script(case, 1).run(80).steps, 1):
            driver.take(step, row)
            if (
                row > 60
                and sum(each.made for each in driver.engine.tables)
                and driver.outstanding is None
            ):
                break
        assert driver.outstanding is None or isinstance(driver.outstanding.job, CaptureJob)
        found, stored = capture(driver.engine), sum(each.nbytes for each in driver.engine.tables)
        assert found.kept > stored > 0
        assert found.copied == sum(array.nbytes for array in found.overwritten.values())
        assert found.nbytes >= found.copied + stored
        assert [image.held for _table, image in found.images] == [0, 0, 0]
        found.release()
        assert not any(table._images for table in driver.engine.tables)


class TestLeases:
    def test_training_goes_on_while_a_capture_is_written(self) -> None:
        script = Script(Case("fasgd"), 3).run(40)
        driver, found, expected = Driver(Case("fasgd").engine()), None, None
        for row, step in enumerate(script.steps, 1):
            if found is not None:  # the capture's own lease
                step = dataclasses.replace(step, leased=True)
            driver.take(step, row)
            if found is None and row > 10 and (expected := taken(driver)) is not None:
                found = capture(driver.engine, row)
                found.copy()
        assert found is not None
        assert expected is not None
        assert driver.engine.version > expected.owners["versions"][0][2]
        same_capture(found, expected)
        alive = driver.engine.defined_store.alive
        found.release()
        assert driver.engine.defined_store.alive == alive - 1

    def test_an_update_must_not_be_outstanding(self) -> None:
        script = Script(Case(), 1).run(60)
        driver = Driver(Case().engine())
        refused = 0
        for row, step in enumerate(script.steps, 1):
            driver.take(step, row)
            if driver.outstanding is not None and isinstance(driver.outstanding.job, UpdateJob):
                refused += 1
                with pytest.raises(AssertionError, match="sum in progress"):
                    capture(driver.engine)
        assert refused


class TestWithoutAJournal:
    @pytest.mark.parametrize("ended", [False, True], ids=["none", "one that ended"])
    def test_queued_pushes_count_as_never_received(self, ended: bool) -> None:
        case = Case(recall=True, gate=GATES["reapply"])
        for seed in range(40):
            script, driver = Script(case, seed), Driver(case.engine())
            for step in script.run(60).steps:
                driver.take(step, 0)
                found = taken(driver)
                if found is None or not found.owners.get("queue"):
                    continue
                engine = case.engine()
                restore(engine, found, found.array, pytest.fail if ended else None)
                waiting = [values[0] for _kind, *values in found.owners["queue"]]
                for _row, number, seq, *_rest in waiting:
                    [member] = [m for m in engine.membership if m.number == number]
                    assert member.last_seq < seq
                    assert seq not in member.answers
                assert engine.training is not None
                assert not engine.training.updates.queued
                assert not engine.training.replies.pending
                return
        pytest.fail("nothing was ever queued")


class TestSettings:
    def test_other_settings_are_refused_by_name(self) -> None:
        found = capture(Case("fasgd").engine())
        other = Case("fasgd", (("lr", 0.5),)).engine()
        with pytest.raises(UsageError, match=r"server with lr=0\.\d+, and this one has lr=0\.5"):
            restore(other, found, found.array)
        with pytest.raises(UsageError, match=r"server with policy='fasgd'.* policy='asgd'"):
            restore(Case("asgd").engine(), found, found.array)

    def test_an_engine_without_a_model_or_any_event(self) -> None:
        found, engine = capture(Case().engine()), Case().engine()
        restore(engine, found, found.array)
        assert engine.training is None
        assert pack(capture(engine).owners) == pack(found.owners)


def test_a_member_that_is_forgotten_still_has_its_push_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of others may have left while a push waits at a barrier."""
    monkeypatch.setattr(membership, "DEPARTED", 1)
    for name in ("hardsync", "ssp-0", "softsync"):
        check(possible(*POLICIES[name], ROWS[0]), seed=1)


def test_a_server_that_was_ending_refuses_pushes_when_rows_that_follow_are_replayed() -> None:
    """A last snapshot is taken while it ends, and a push that comes then was refused."""
    ending = running("asgd")
    ending.post(Stopping(ending.now, kept=True))
    found = capture(ending.engine)
    again = Inline("asgd", {})
    restore(again.engine, found, found.array)
    for each in (ending, again):
        each.push(1, G)
        assert [error.code for error in each.errors(1)] == ["unavailable"]
    assert pack(capture(again.engine).owners) == pack(capture(ending.engine).owners)
    again.post(Resumed(again.now, 2))
    again.join(1)
    again.push(1, G)
    assert again.engine.version == 1
