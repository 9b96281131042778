"""Servers that crash in virtual time, at any point, and come back: workers ride it out."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops import testing
from aiops.engine.events import Applied
from aiops.errors import RolledBack, Superseded, Unavailable, UsageError
from aiops.net.faulty_disk import points
from aiops.serving.server import Server
from aiops.serving.shard_links import ShardLinks
from aiops.shards.shard import Shard
from aiops.sim.virtual.server_machine import ServerMachine
from aiops.state.directory import StateListing
from aiops.wire.server_messages import UpdateDone

MODEL = {"w": np.zeros(8)}
STEP = {"w": np.ones(8)}
FOLDER = Path("state")
SETTINGS: dict[str, Any] = {
    "policy": "asgd",
    "kernels": "numpy",
    "set": {"lr": 1.0},
    "state": FOLDER,
    "snapshot_every": 0.1,
}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("acks", ["written", "durable"])
def test_a_worker_rides_out_a_crash(acks: str) -> None:
    @testing.virtual()
    async def main() -> None:
        async with ServerMachine(acks=acks, **SETTINGS) as machine:
            machine.disk.seconds = 0.01
            async with aiops.AsyncWorker(machine.url, MODEL) as worker:
                for step in range(1, 31):
                    await asyncio.sleep(0.05)
                    if step % 10 == 0:
                        old = machine.server
                        machine.crash()
                        assert not machine.running
                        await machine.start()
                        assert machine.server is not old
                    receipt = await worker.step(STEP)
                    assert (receipt.version, receipt.used) == (step, True)
                assert (worker.params["w"] == -30).all()
                assert machine.server.engine.version == 30

    main()


@pytest.mark.parametrize("acks", ["written", "replicated"])
def test_a_standby_is_promoted_when_its_primary_is_lost(acks: str) -> None:
    """And the old primary, which comes back, is told that it is superseded."""

    @testing.virtual()
    async def main() -> None:
        settings = {**SETTINGS, "acks": acks}
        async with ServerMachine(**settings) as primary:
            settings["standby"] = primary.url
            async with ServerMachine("b", port=7172, **settings) as other:
                url = f"{primary.url},{other.host}:{other.port}"
                async with aiops.AsyncWorker(url, MODEL) as worker:
                    for _ in range(10):
                        await worker.step(STEP)
                    await asyncio.sleep(1.0)
                    primary.cut_power()
                    other.standby.promote()
                    for step in range(11, 21):
                        assert (await worker.step(STEP)).version == step
                    assert (worker.params["w"] == -20).all()
                    assert worker.rolled_back == 0
                    assert other.server.run_state.generation > 1
                    assert other.serving

    main()


@pytest.mark.parametrize("acks", ["written", "durable", "replicated"])
def test_a_standby_has_no_row_that_its_primary_loses_with_the_power(acks: str) -> None:
    """A promotion would bring back pushes of which workers were told that they are lost."""

    async def main(seed: int) -> int:
        settings = {**SETTINGS, "acks": acks, "snapshot_every": 60.0}
        primary = ServerMachine(seed=seed, **settings)
        await primary.start()
        other = ServerMachine("b", port=7172, standby=primary.url, **settings)
        await other.start()
        primary.disk.seconds = other.disk.seconds = 0.003
        async with aiops.AsyncWorker(primary.url, MODEL) as worker:
            for _ in range(40 + 5 * seed):
                await worker.step(STEP)
                await asyncio.sleep(0.01)
            primary.cut_power()
            testing.network().silence(other.host)
            await primary.start()
            receipt = await worker.step(STEP)  # it learns what is lost
            left = primary.server.engine.version - receipt.used
            assert left == 40 + 5 * seed - worker.rolled_back
            await worker.abandon()
        primary.crash()
        testing.network().restore(other.host)
        assert other.promote()
        await testing.until(lambda: other.serving, "it is promoted", limit=60.0)
        assert 20 < other.server.engine.version <= left
        await other.stop()
        return left - 40 - 5 * seed

    lost = [testing.run(main(seed), seed=seed) for seed in range(4)]
    assert all(lost) == (acks == "written")


@testing.virtual()
async def test_a_server_that_crashes_while_it_starts_does_not_serve() -> None:
    settings = {**SETTINGS, "acks": "written"}
    old = ServerMachine(**settings)
    await old.start()
    async with aiops.AsyncWorker(old.url, MODEL) as worker:
        await worker.step(STEP)
        new = ServerMachine("b", port=7172, standby=old.url, **settings)
        await new.start()
        await testing.until(lambda: new.standby.whole, "it has a state", limit=10.0)
        for machine in (old, new):
            old.crash()
            machine.crash_at("journal.written")  # the row with which it goes on
            if machine is old:
                await old.start()
            else:
                assert new.promote()
            await asyncio.sleep(10)
            assert not machine.running
            assert not machine.serving
        await worker.abandon()


@testing.virtual()
async def test_a_superseded_server_has_ended() -> None:
    settings = {**SETTINGS, "acks": "written"}
    async with (
        ServerMachine(**settings) as old,
        ServerMachine("b", port=7172, standby=old.url, **settings) as new,
    ):
        assert old.serving
        assert not new.serving
        assert not old.promote(), "it is no standby"
        assert not new.promote(), "it has no state yet"
        async with aiops.AsyncWorker(old.url, MODEL) as worker:
            await worker.step(STEP)
            await testing.until(lambda: new.standby.whole, "it has a state", limit=10.0)
        assert new.promote()
        await testing.until(lambda: not old.running, "it was told", limit=60.0)
        assert new.serving
        assert not old.serving
        assert isinstance(old.error, Superseded)
        with pytest.raises(Superseded):
            await old.start()
        assert not old.running


@testing.virtual()
async def test_a_promoted_server_that_was_started_again_ends_the_old_one() -> None:
    """It crashes before it can tell it, or the old one is started again later."""
    settings = {**SETTINGS, "acks": "written"}
    async with (
        ServerMachine(**settings) as old,
        ServerMachine("b", port=7172, standby=old.url, **settings) as new,
    ):
        async with aiops.AsyncWorker(old.url, MODEL) as worker:
            await worker.step(STEP)
            await testing.until(lambda: new.standby.whole, "it has a state", limit=10.0)
        testing.network().silence(old.host)
        assert new.promote()
        await testing.until(lambda: new.serving, "it is promoted", limit=10.0)
        for _ in range(2):
            new.crash()
            del new.settings["standby"]
            await new.start()
            new.settings["standby"] = old.url
        assert old.serving
        testing.network().restore(old.host)
        await testing.until(lambda: not old.running, "it was told", limit=60.0)
        assert isinstance(old.error, Superseded)
        assert new.serving


def shards(acks: str, count: int = 3, **more: Any) -> list[ServerMachine]:
    """A lead and its followers."""
    settings = {**SETTINGS, "acks": acks, "shard_bytes": 1, **more}
    ports = range(7181, 7180 + count)
    followers = [ServerMachine(f"f-{port}", port=port, follower=True, **settings) for port in ports]
    named = [f"{each.host}:{each.port}" for each in followers]
    return [ServerMachine(followers=named, **settings), *followers]


@pytest.mark.parametrize(("acks", "power"), [("written", False), ("durable", True)])
def test_a_worker_rides_out_the_crashes_of_shards(acks: str, power: bool) -> None:
    """One after the other, then all; a lead that is started waits for its followers."""

    @testing.virtual()
    async def main() -> None:
        machines = shards(acks)
        for machine in reversed(machines):
            await machine.start()
        model = {"w": np.zeros(24)}
        async with aiops.AsyncWorker(machines[0].url, model) as worker:
            for step in range(1, 13):
                receipt = await worker.step({"w": np.ones(24)})
                assert (receipt.version, receipt.used) == (step, True)
                ended = machines if step % 4 == 0 else [machines[step % 4 - 1]]
                for machine in ended:
                    machine.cut_power() if power else machine.crash()
                await asyncio.gather(*(machine.start() for machine in ended))
            assert (worker.params["w"] == -12).all()
            lines = machines[0].server.coordinator.report()  # type: ignore[union-attr]
            assert [line["version"] for line in lines] == [12, 12, 12]
        for machine in machines:
            await machine.stop()
            assert machine.error is None

    main()


LATE = r"at f-7181:7181 is gone \(it answers, and has not done its part of update 4, of version 4"


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A follower that never says that it has done update 4; the tickets of those, as they come."""
    applied, found = Shard.applied, list[int]()

    def unsaid(shard: Shard, event: Applied) -> UpdateDone | None:
        done = applied(shard, event)
        if shard.shard != 1 or event.ticket != 4 or found:
            return done
        found.append(event.ticket)
        return None

    monkeypatch.setattr(Shard, "applied", unsaid)
    return found


def test_a_follower_that_never_finishes_an_update_is_given_it_again(
    silent: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """It answers pings. Its connection is ended, and it comes back."""
    caplog.set_level(logging.INFO, "aiops.server")

    @testing.virtual()
    async def main() -> None:
        machines, loop = shards("written"), asyncio.get_running_loop()
        for machine in reversed(machines):
            await machine.start()
        async with aiops.AsyncWorker(machines[0].url, {"w": np.zeros(24)}, timeout=300) as worker:
            for step in range(1, 6):
                began = loop.time()
                receipt = await worker.step({"w": np.ones(24)})
                assert (receipt.version, receipt.used) == (step, True)
                waited = loop.time() - began
                assert (60 < waited < 65) if step == 4 else waited < 1
            assert (worker.params["w"] == -5).all()
        for machine in machines:
            await machine.stop()
            assert machine.error is None

    main()
    assert silent == [4]
    assert re.search(LATE, caplog.text)


def test_without_a_state_workers_are_told_of_a_follower_that_never_finishes_an_update(
    silent: list[int],
) -> None:
    @testing.virtual()
    async def main() -> None:
        machines = shards("applied", state=None)
        for machine in reversed(machines):
            await machine.start()
        async with aiops.AsyncWorker(machines[0].url, {"w": np.zeros(24)}, timeout=70) as worker:
            for _ in range(3):
                await worker.step({"w": np.ones(24)})
            with pytest.raises(Unavailable, match=LATE):
                await worker.step({"w": np.ones(24)})
        for machine in machines:
            machine.crash()

    main()
    assert silent == [4]


async def nine_steps(worker: aiops.AsyncWorker) -> None:
    """Train a model of 24 parameters; some of it is synced by the end, and some is not."""
    for _ in range(9):
        await worker.step({"w": np.ones(24)})
        await asyncio.sleep(0.03)


@pytest.mark.parametrize("lead_too", [False, True])
def test_shards_go_back_in_their_place(lead_too: bool) -> None:
    """What a follower has lost with its power is lost by all; the worker is told."""

    @testing.virtual()
    async def main() -> None:
        machines = shards("written")
        lead, follower = machines[0], machines[1]
        served = list[Server]()
        lead.on_serving = lambda: served.append(lead.server)
        for machine in reversed(machines):
            await machine.start()
        async with aiops.AsyncWorker(lead.url, {"w": np.zeros(24)}) as worker:
            await nine_steps(worker)
            if lead_too:
                lead.crash()
            follower.cut_power()
            await follower.start()
            if lead_too:
                await lead.start()
            for _ in range(3):
                receipt = await worker.step({"w": np.ones(24)})
            assert 0 < worker.rolled_back < 9
            assert (
                receipt.version == 9 - worker.rolled_back + 2
            )  # one was of a version that is lost
            assert (worker.params["w"] == -receipt.version).all()
        assert len(served) > 1
        assert lead.running
        for machine in machines:
            await machine.stop()

    main()


@pytest.mark.parametrize("ordered", [False, True])
def test_a_follower_that_is_lost_when_it_is_to_go_back_does_so_once_it_is_there(
    ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ordered``: it is lost with the order on its way; else the lead has none to send it by."""
    order = ShardLinks.roll_back

    @testing.virtual()
    async def main() -> None:
        machines = shards("written")
        lead, follower = machines[0], machines[2]
        orders = list[list[int]]()

        async def lost(links: ShardLinks, rows: Mapping[int, int]) -> None:
            orders.append([*rows])
            ordering = asyncio.ensure_future(order(links, rows))
            if ordered:
                await asyncio.sleep(0)  # it is sent
            follower.crash()
            if not ordered:
                ordering.cancel()
                await asyncio.sleep(0.1)  # the lead learns of it
                ordering = asyncio.ensure_future(order(links, rows))
            await asyncio.sleep(1.0)
            await follower.start()
            await ordering

        for machine in reversed(machines):
            await machine.start()
        async with aiops.AsyncWorker(lead.url, {"w": np.zeros(24)}) as worker:
            await nine_steps(worker)
            lead.cut_power()
            monkeypatch.setattr(ShardLinks, "roll_back", lost)
            await lead.start()
            monkeypatch.setattr(ShardLinks, "roll_back", order)
            for _ in range(3):
                receipt = await worker.step({"w": np.ones(24)})
            assert orders == [[1, 2]]
            assert 0 < worker.rolled_back < 9
            assert (worker.params["w"] == -receipt.version).all()
        for machine in machines:
            await machine.stop()
            assert machine.error is None

    main()


@testing.virtual()
async def test_a_follower_that_cannot_go_back_is_asked_again() -> None:
    """Its disk is full at first."""
    lead, follower = shards("written", 2)
    await follower.start()
    await lead.start()
    loop = asyncio.get_running_loop()
    async with aiops.AsyncWorker(lead.url, {"w": np.zeros(24)}) as worker:
        await nine_steps(worker)
        lead.cut_power()
        follower.disk.full = True
        loop.call_later(2.5, setattr, follower.disk, "full", False)
        began = loop.time()
        await lead.start()
        assert 2.5 < loop.time() - began < 4
        for _ in range(3):
            receipt = await worker.step({"w": np.ones(24)})
        assert receipt.used
        assert 0 < worker.rolled_back < 9
        assert (worker.params["w"] == -receipt.version).all()
    for machine in lead, follower:
        await machine.stop()
        assert machine.error is None


@testing.virtual()
async def test_a_follower_that_is_to_go_back_is_waited_for_for_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error names it."""
    lead, follower = shards("written", 2)
    order = ShardLinks.roll_back

    async def lost(links: ShardLinks, rows: Mapping[int, int]) -> None:
        follower.crash()
        await asyncio.sleep(0.1)
        await order(links, rows)

    await follower.start()
    await lead.start()
    async with aiops.AsyncWorker(lead.url, {"w": np.zeros(24)}) as worker:
        await worker.step({"w": np.ones(24)})
        lead.cut_power()
        with monkeypatch.context() as patch:
            patch.setattr(ShardLinks, "roll_back", lost)
            why = "^shard 1 of 2 at f-7181:7181 was to go back .* did not come back in 60 s"
            with pytest.raises(UsageError, match=why):
                await lead.start()
        await follower.start()
        await lead.start()
        for _ in range(2):  # the first was of a version that is lost
            receipt = await worker.step({"w": np.ones(24)})
        assert receipt.used
    await lead.stop()


@pytest.mark.parametrize("steps", [4, 8])
@pytest.mark.parametrize("behind", ["lead", "follower"])
def test_standbys_of_shards_with_rows_of_two_histories_go_back_to_where_they_part(
    behind: str, steps: int
) -> None:
    """The servers have lost rows, and wrote others under their numbers; one standby has the old.

    ``behind``: the server whose standby has not been fed since. The other one has lost the rows.
    """

    @testing.virtual()
    async def main() -> None:
        settings = {**SETTINGS, "acks": "written", "shard_bytes": 1, "snapshot_every": 60.0}
        copied = {**settings, "standby": "aiops://a:7171"}
        follower = ServerMachine("a-1", port=7181, follower=True, **settings)
        lead = ServerMachine("a", followers=["a-1:7181"], **settings)
        copy = ServerMachine("b-1", port=7181, follower=True, shard=1, **copied)
        standby = ServerMachine("b", followers=["b-1:7181"], **copied)
        for machine in (follower, lead, copy, standby):
            await machine.start()
        loses, old = (lead, copy) if behind == "follower" else (follower, standby)
        async with aiops.AsyncWorker("aiops://a:7171,b:7171", {"w": np.zeros(24)}) as worker:
            await train(worker, 3, 1.0)
            loses.disk.seconds = 5.0
            await train(worker, steps, 1.0)
            testing.network().silence(old.host)
            loses.cut_power()
            loses.disk.seconds = 0.0
            await loses.start()
            await train(worker, 12, 10.0)  # one of them was of a version that is lost
            assert worker.rolled_back == steps
            assert (worker.params["w"] == -113).all()
            lead.crash()
            follower.crash()
            testing.network().restore(old.host)
            assert standby.promote()
            await testing.until(lambda: standby.serving, "it is promoted", limit=60.0)
            await train(worker, 2, 10.0)
            assert worker.rolled_back == steps + 11
            assert (worker.params["w"] == -13).all()
        for machine in (standby, copy):
            await machine.stop()
            assert machine.error is None

    main()


@pytest.mark.parametrize("acks", ["replicated", "durable", "written"])
def test_a_promotion_that_failed_is_made_again_after_the_old_servers_went_on(acks: str) -> None:
    """One follower's standby was promoted, and is where it was then: all go back to that moment.

    Nothing that was acknowledged as replicated is behind it, as its primary has no standby. With
    ``written`` the lead has lost rows by then, and has written others.
    """

    @testing.virtual()
    async def main() -> None:
        settings = {**SETTINGS, "acks": acks, "shard_bytes": 1, "standby_deadline": 1e6}
        copied = {**settings, "standby": "aiops://a:7171"}
        ports = [7181, 7182]
        followers = [ServerMachine(f"a-{p}", port=p, follower=True, **settings) for p in ports]
        lead = ServerMachine("a", followers=[f"a-{p}:{p}" for p in ports], **settings)
        copies = [
            ServerMachine(f"b-{port}", port=port, follower=True, shard=shard, **copied)
            for shard, port in enumerate(ports, 1)
        ]
        standby = ServerMachine("b", followers=[f"b-{p}:{p}" for p in ports], **copied)
        for machine in (*followers, lead, *copies, standby):
            await machine.start()
        async with aiops.AsyncWorker("aiops://a:7171,b:7171", {"w": np.zeros(24)}) as worker:
            await train(worker, 3, 1.0)
            lead.disk.seconds = 9.0 if acks == "written" else 0.0
            await train(worker, 3, 1.0)
            standby.standby.on_promotion = copies[1].crash
            assert standby.promote()
            await testing.until(lambda: copies[0].serving, "it is promoted", limit=10.0)
            standby.standby.on_promotion = lambda: None
            await copies[1].start()
            if acks == "written":
                lead.cut_power()
                lead.disk.seconds = 0.0
                await lead.start()
            training = asyncio.create_task(train(worker, 5, 10.0))
            await asyncio.sleep(30.0)
            assert lead.serving
            assert not standby.serving
            assert training.done() == (acks != "replicated")
            lost = worker.rolled_back
            assert (lost > 0) == (acks == "written")
            for machine in (lead, *followers):
                machine.crash()
            assert standby.promote()
            await training
            await testing.until(lambda: standby.serving, "it is promoted", limit=60.0)
            await train(worker, 2, 10.0)
            version = standby.server.version
            if acks == "replicated":
                assert (worker.rolled_back, version) == (0, 13)
                assert (worker.params["w"] == -76).all()
            else:  # the first step was of a version that is lost
                assert worker.rolled_back == (lost + 4 if lost else 5)
                assert version == 6 - lost + 1
                assert (worker.params["w"] == -6 + lost - 10).all()
        for machine in (standby, *copies):
            await machine.stop()
            assert machine.error is None

    main()


async def train(worker: aiops.AsyncWorker, steps: int, amount: float) -> None:
    """Add ``-amount`` to each of 24 parameters, some times, and wait until standbys are fed."""
    for _ in range(steps):
        await worker.step({"w": np.full(24, amount)})
    await asyncio.sleep(1.0)


@testing.virtual()
async def test_a_follower_whose_disk_is_full_is_given_its_part_later() -> None:
    """It ends with a sentence, and not with the traceback of an error of its own."""
    lead, follower = shards("written", 2)
    await follower.start()
    await lead.start()
    follower.disk.full = True
    worker = aiops.AsyncWorker(lead.url, {"w": np.zeros(24)})
    defining = asyncio.create_task(worker.connect())
    await testing.until(lambda: not follower.running, "it has no room", limit=60.0)
    assert isinstance(follower.error, UsageError)
    assert str(follower.error) == "--state state: No space left on device"
    follower.disk.full = False
    await follower.start()
    await defining
    assert (await worker.step({"w": np.ones(24)})).version == 1
    await worker.close()
    await lead.stop()


@testing.virtual()
async def test_a_lead_without_a_moment_that_all_have_begins_without_its_own_snapshots() -> None:
    """No follower could have its part of them."""
    lead, follower = shards("applied", 2)
    await follower.start()
    await lead.start()
    async with aiops.AsyncWorker(lead.url, {"w": np.zeros(24)}) as worker:
        follower.disk.seconds = 1e6
        for _ in range(5):
            await worker.step({"w": np.ones(24)})
            await asyncio.sleep(0.1)
        lead.crash()
        follower.crash()
        follower.disk.seconds = 0.0
        assert any(name.startswith("snapshot") for name in lead.disk.names(FOLDER / "shard-0"))
        await asyncio.gather(lead.start(), follower.start())
        assert lead.server.version == follower.server.version == 0
        for _ in range(2):  # it offers what it has; the first step was of a version that is lost
            await worker.step({"w": np.ones(24)})
        assert worker.rolled_back == 5
        assert (worker.params["w"] == -6).all()
        lines = lead.server.coordinator.report()  # type: ignore[union-attr]
        assert lines[0]["version"] == lines[1]["version"] > 0
    await lead.stop()


@testing.virtual()
async def test_a_server_that_is_stopped_while_it_starts_keeps_no_connection() -> None:
    """Its lead would take it for one that is there."""
    lead, follower = shards("written", 2)
    await follower.start()
    await lead.start()
    async with aiops.AsyncWorker(lead.url, {"w": np.zeros(24)}) as worker:
        await worker.step({"w": np.ones(24)})
        follower.crash()
        starting = asyncio.create_task(follower.start())
        await asyncio.sleep(0)
        await follower.stop()
        await starting
        assert not follower.running
        await follower.start()
        assert (await worker.step({"w": np.ones(24)})).version == 2
    await lead.stop()


@testing.virtual()
async def test_a_lead_that_has_crashed_connects_to_no_follower_again() -> None:
    """Not in its next life either, in which it could take a follower from the lead of then."""
    lead, follower = shards("written", 2)
    await follower.start()
    await lead.start()
    ghost = lead.server
    lead.crash()
    follower.crash()
    await follower.start()
    testing.network().revive(lead.host)
    await asyncio.sleep(10.0)
    assert not follower.server.coordinator.led  # type: ignore[union-attr]
    await lead.start()
    assert lead.server is not ghost
    assert follower.server.coordinator.led  # type: ignore[union-attr]
    await lead.stop()


@testing.virtual()
async def test_each_shard_has_a_machine() -> None:
    with pytest.raises(UsageError, match="each shard has a machine of its own"):
        await ServerMachine(shards=2, **SETTINGS).start()


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("point", points())
def test_no_acknowledged_step_is_lost_at_any_point(point: str, power: bool) -> None:
    @testing.virtual()
    async def main() -> int:
        machine = ServerMachine(acks="durable", **SETTINGS)
        machine.disk.seconds = 0.003
        machine.crash_at(point, power=power)
        starts = 0

        async def supervise() -> None:
            nonlocal starts
            while True:
                starts += 1
                await machine.start()
                await testing.until(lambda: not machine.running, "it crashed", limit=100.0)
                machine.crash_at(point, 3 if starts < 4 else 100, power=power)

        supervisor = asyncio.create_task(supervise())
        async with aiops.AsyncWorker(machine.url, MODEL) as worker:
            for step in range(1, 41):
                await asyncio.sleep(0.05)
                receipt = await worker.step(STEP)
                assert (receipt.version, receipt.used) == (step, True)
            assert (worker.params["w"] == -40).all()
        supervisor.cancel()
        await machine.stop()
        return starts

    assert main() > 1


@testing.virtual()
async def test_without_a_state_it_begins_again() -> None:
    settings = {**SETTINGS, "state": None}
    machine = ServerMachine(**settings)
    await machine.start()
    async with aiops.AsyncWorker(machine.url, MODEL) as worker:
        await worker.step(STEP)
        machine.crash()
        await machine.start()
        assert machine.server.engine.version == 0
        await worker.step(STEP)


@testing.virtual()
async def test_nothing_of_a_crashed_server_does_anything() -> None:
    machine = ServerMachine(acks="durable", **SETTINGS)
    await machine.start()
    worker = await aiops.AsyncWorker(machine.url, MODEL).connect()
    await worker.step(STEP)
    server, loop = machine.server, machine._loop
    machine.crash()
    machine.crash()
    await asyncio.sleep(0)
    assert not loop.threads
    files = machine.disk.names(FOLDER)
    await asyncio.sleep(30)
    assert server.engine.version == 1
    assert machine.disk.names(FOLDER) == files


@testing.virtual()
async def test_it_runs_once() -> None:
    async with ServerMachine(**SETTINGS) as machine:
        with pytest.raises(UsageError, match="runs already"):
            await machine.start()
    await machine.stop()


@testing.virtual()
async def test_settings_that_cannot_work() -> None:
    with pytest.raises(UsageError, match="policy"):
        await ServerMachine(policy="fasdg").start()


def test_it_is_for_virtual_time() -> None:
    async def main() -> None:
        ServerMachine()

    with pytest.raises(UsageError, match="that run"):
        asyncio.run(main())


def standbys_of(lead: ServerMachine, acks: str) -> list[ServerMachine]:
    """The standby of a lead of two shards, and that of its follower."""
    settings = {**SETTINGS, "acks": acks, "shard_bytes": 1, "standby": lead.url}
    copy = ServerMachine("g", port=7281, follower=True, shard=1, **settings)
    return [ServerMachine("new", port=7271, followers=["g:7281"], **settings), copy]


@testing.virtual()
async def test_a_promoted_lead_that_goes_back_leaves_nothing_of_later_moments() -> None:
    """Its next start, or a standby of its own, would take that for its state."""
    servers = shards("written", 2)
    standbys = lead, follower = standbys_of(servers[0], "written")
    for machine in (*reversed(servers), *standbys):
        await machine.start()
    async with aiops.AsyncWorker(f"{servers[0].url},new:7271", {"w": np.zeros(24)}) as worker:

        async def step(times: int) -> None:
            for _ in range(times):
                await worker.step({"w": np.ones(24)})
                await asyncio.sleep(0.1)

        await step(3)
        follower.crash()
        await step(3)
        lead.crash()
        await lead.start()  # with another segment
        await step(3)
        listing = StateListing(lead.disk.names(FOLDER / "shard-0"))
        behind = listing.snapshots[0], listing.segments[-1]
        await follower.start()
        for machine in servers:
            machine.crash()
        await asyncio.sleep(0.1)
        assert lead.promote()
        await testing.until(lambda: lead.serving, "it is promoted", limit=60.0)
        files = lead.server.run_state.files
        assert files is not None
        row = files.generations.starts[-1].row
        assert row < min(behind)
        listing = StateListing(lead.disk.names(FOLDER / "shard-0"))
        assert max(listing.snapshots, default=0) <= row
        assert max(listing.segments) == row + 1
        await step(2)
    for machine in standbys:
        machine.crash()


@pytest.mark.parametrize("count", [1, 2])
def test_a_server_to_which_nothing_happens_takes_no_snapshots(count: int) -> None:
    @testing.virtual()
    async def main() -> None:
        machines = (
            shards("written", 2) if count == 2 else [ServerMachine(acks="written", **SETTINGS)]
        )
        for machine in reversed(machines):
            await machine.start()
        async with aiops.AsyncWorker(machines[0].url, {"w": np.zeros(24)}) as worker:
            await worker.step({"w": np.ones(24)})

        def row() -> int:
            found: int = machines[0].server.engine.report()["state"]["row"]
            return found

        await asyncio.sleep(10.0)
        before = row()
        await asyncio.sleep(10.0)
        assert row() == before
        for machine in machines:
            machine.crash()

    main()


@testing.virtual()
async def test_a_promoted_server_that_goes_back_in_its_place_waits_for_no_standby() -> None:
    """It has none yet, as before it went back."""
    servers = shards("replicated", 2)
    standbys = lead, follower = standbys_of(servers[0], "replicated")
    for machine in (*standbys, *servers):
        machine.settings["standby_deadline"] = 1e6
    for machine in (*reversed(servers), *standbys):
        await machine.start()
    async with aiops.AsyncWorker(f"{servers[0].url},new:7271", {"w": np.zeros(24)}) as worker:
        for _ in range(3):
            await worker.step({"w": np.ones(24)})
        for machine in servers:
            machine.crash()
        assert lead.promote()
        await testing.until(lambda: lead.serving, "it is promoted", limit=60.0)
        before = follower.server
        before._stop_with(RolledBack("another server lacks rows", row=1))
        await testing.until(lambda: follower.server is not before, "it is back", limit=60.0)
        assert before.run_state.alone
        assert follower.server.run_state.alone
        await asyncio.wait_for(worker.step({"w": np.ones(24)}), 60.0)
        assert lead.server.version == 4
    for machine in standbys:
        machine.crash()
