"""Standbys of a sharded model's servers, promoted together, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import aiops
from aiops.cli.stats import tables
from aiops.common import urls
from aiops.common.generations import term
from aiops.durable.shard_standbys import ShardCopy
from aiops.errors import AiopsError, ConnectionLost, Refused, Superseded, UsageError
from aiops.filters.screen import LEARNT, SEEDING
from aiops.model.layout import Array
from aiops.net.disk import SystemDisk
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.serving.shard_links import ShardLinks
from aiops.serving.standby.link import ask
from aiops.serving.standby.server import StandbyServer
from aiops.state.directory import StateListing
from aiops.wire.messages import Message
from aiops.wire.standby_messages import Promote, Promoted
from tests.peers import eventually
from tests.serving.standby.test_standby import StandbyThread
from tests.support import PATIENCE, ServerThread

ONES: Mapping[str, Array] = {"w": np.ones(64, np.float32)}
ZEROS: Mapping[str, Array] = {"w": np.zeros(64, np.float32)}

PLAIN = {"policy": "asgd", "lr": 1.0, "kernels": "numpy"}


class Run:
    """A lead and its followers, and a standby of each."""

    def __init__(self, folder: Path, shards: int = 2, **settings: Any) -> None:
        self._stack, self._folder = contextlib.ExitStack(), folder
        self.settings = {**PLAIN, "snapshot_every": 1000.0, **settings}
        self.numbers = range(1, shards)
        self.followers = [self.follower("a", shard) for shard in self.numbers]
        self.lead = self.leading("a", self.followers)
        self.copies = [self.follower_standby("b", shard) for shard in self.numbers]
        self.standby = self.standing("b", self.copies)

    def _enter(self, kind: Any, state: str, **settings: Any) -> Any:
        given = {"shards": 1, **self.settings, **settings}
        return self._stack.enter_context(kind(state=self._folder / state, **given))

    def follower(self, state: str, shard: int, port: int = 0) -> ServerThread:
        return self._enter(ServerThread, f"{state}/shard-{shard}", follower=True, port=port)

    def leading(self, state: str, followers: list[Any], port: int = 0) -> ServerThread:
        named = [each.url.removeprefix("aiops://") for each in followers]
        return self._enter(ServerThread, state, followers=named, port=port)

    def follower_standby(self, state: str, shard: int, port: int = 0) -> StandbyThread:
        given = {"follower": True, "shard": shard, "standby": self.lead.url, "port": port}
        return self._enter(StandbyThread, f"{state}/shard-{shard}", **given)

    def standing(self, state: str, followers: list[Any]) -> StandbyThread:
        named = [each.url.removeprefix("aiops://") for each in followers]
        given = {"followers": named, "shard_bytes": 1, "standby": self.lead.url}
        return self._enter(StandbyThread, state, **given)

    @property
    def both(self) -> str:
        return urls.write_all([*urls.parse_all(self.lead.url), *urls.parse_all(self.standby.url)])

    def caught_up(self) -> None:
        """Wait until each standby has all rows of its server."""
        servers = [self.lead, *self.followers]
        for server, standby in zip(servers, [self.standby, *self.copies], strict=True):
            standby.wait(server.call(lambda running: running.run_state.kept.newest))

    def until(self, true: Any, url: str = "") -> dict[str, Any]:
        """Return the statistics of a server (default: the lead) once they are as they should be."""
        with aiops.Client(url or self.lead.url, timeout=PATIENCE) as client:
            for _ in range(int(PATIENCE / 0.02)):
                found = dict(client.stats())
                if true(found["state"]):
                    return found
                threading.Event().wait(0.02)
        raise AssertionError(found["state"])

    def stop_primaries(self) -> None:
        for server in (self.lead, *self.followers):
            server.stop()

    def promote(self) -> Message:
        return promote(self.standby.url)

    def close(self) -> None:
        with contextlib.suppress(Superseded):
            self._stack.close()


def promote(url: str) -> Message:
    """Promote a standby, as ``aiops promote`` does."""
    env = CURRENT_ENVIRONMENT.get()
    return asyncio.run(ask(env, url, None, lambda local: Promote(1), PATIENCE))


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def make(**settings: Any) -> Run:
        runs.append(Run(tmp_path, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.mark.parametrize("filter", ["off", "norm+curvature"])
@pytest.mark.parametrize("acks", ["written", "durable", "replicated"])
def test_a_worker_goes_on_with_the_standbys(acks: str, filter: str, made: Any) -> None:
    """Each step adds -1 to every parameter, exactly once, before and after."""
    run = made(acks=acks, filter=filter)
    with aiops.Worker(run.both, ZEROS, timeout=30) as worker:
        for _ in range(SEEDING + LEARNT) if filter != "off" else ():
            assert not worker.step(ONES).used
        for step in range(1, 13):
            if step == 7:
                if acks != "replicated":
                    run.caught_up()
                run.stop_primaries()
                found = run.promote()
                assert isinstance(found, Promoted)
                assert found.version == 6
                assert term(found.generation) == 1
            receipt = worker.step(ONES)
            assert receipt.used
            assert receipt.version == step
            assert (worker.params["w"] == -step).all()
        report = worker.stats()
        assert [line["version"] for line in report["shards"]] == [12, 12]


def cut_off(standby: StandbyServer) -> None:
    """End the feed of a standby, which does not reach its primary any more."""
    standby._primaries = ["aiops://127.0.0.1:1"]
    if standby._open is not None:
        standby._open.fault(ConnectionLost("its cable is cut"))


@pytest.mark.parametrize(
    ("cuts", "survived"),
    [
        ({0: 3}, 3),  # the lead's: the followers go back
        ({1: 3}, 3),  # the lead goes back, and the other follower
        ({0: 5, 1: 7, 2: 3}, 3),  # all are at moments of their own
        ({0: 0, 2: 5}, 0),
    ],
    ids=str,
)
def test_standbys_at_different_moments_go_back_to_the_newest_that_all_have(
    cuts: Mapping[int, int], survived: int, made: Any
) -> None:
    """What is lost is told: the worker counts it, and goes on from what there is."""
    run = made(shards=3, acks="written")
    standbys = [run.standby, *run.copies]
    with aiops.Worker(run.both, ZEROS, timeout=30) as worker:
        for step in range(9):
            servers = [run.lead, *run.followers]
            for number, at in cuts.items():
                if at == step:
                    row = servers[number].call(lambda running: running.run_state.kept.newest)
                    standbys[number].wait(row)
                    standbys[number].call(cut_off)
            worker.step(ONES)
        for number in {0, 1, 2} - cuts.keys():
            row = servers[number].call(lambda running: running.run_state.kept.newest)
            standbys[number].wait(row)
        run.stop_primaries()
        found = run.promote()
        assert isinstance(found, Promoted)
        assert term(found.generation) == 1
        assert found.version == survived
        assert not worker.step(ONES).pushed  # it was computed with parameters that are lost
        for step in range(survived + 1, survived + 4):
            assert worker.step(ONES).version == step
            assert (worker.params["w"] == -step).all()
        assert worker.rolled_back == 9 - survived
        assert [line["version"] for line in worker.stats()["shards"]] == [survived + 3] * 3


@pytest.mark.parametrize("again", [False, True], ids=["one", "all"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["connect", "roll_back", "lead"])
def test_a_promotion_that_ends_halfway_is_made_again(
    name: str, after: bool, again: bool, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The followers' standbys are followers by then, and have gone back or not.

    That of the lead is started again, or all are.
    """
    run = made(acks="written")
    with aiops.Worker(run.both, ZEROS, timeout=30) as worker:
        for step in range(6):
            if step == 4:
                run.caught_up()
                run.standby.call(cut_off)
            worker.step(ONES)
        run.copies[0].wait(run.followers[0].call(lambda running: running.run_state.kept.newest))
        run.stop_primaries()
        broken, way = list[str](), getattr(ShardLinks, name)

        def ends(links: ShardLinks, *given: Any) -> Any:
            if broken or links._standby:
                return way(links, *given)
            broken.append(name)

            async def waited() -> None:
                if after:
                    await way(links, *given)
                raise UsageError("it ends here")

            if name != "lead":
                return waited()
            if after:
                way(links, *given)
            raise UsageError("it ends here")

        monkeypatch.setattr(ShardLinks, name, ends)
        with pytest.raises(Refused, match="it ends here; start it again with --standby"):
            run.promote()
        assert isinstance(run.standby.error, UsageError)
        if again:
            run.copies[0].stop()
            run.copies = [run.follower_standby("b", 1)]
        run.standby = run.standing("b", run.copies)
        run.until(lambda state: not state["shards"][0]["gone"], run.standby.url)
        found = promote(run.standby.url)
        assert isinstance(found, Promoted)
        assert found.version == 4
    with aiops.Worker(run.standby.url, ZEROS, timeout=30) as worker:
        assert worker.step(ONES).version == 5
        assert (worker.params["w"] == -5).all()


def test_a_follower_from_before_a_promotion_is_not_taken_for_a_promoted_standby(made: Any) -> None:
    """It has rows of the same numbers as the servers of now, and of other steps."""
    run = made(acks="written")
    with aiops.Worker(run.both, ZEROS, timeout=30) as worker:
        for step in range(6):
            if step == 3:  # what comes then is lost
                run.caught_up()
                for standby in (run.standby, *run.copies):
                    standby.call(cut_off)
            worker.step(ONES)
    run.stop_primaries()
    assert isinstance(run.promote(), Promoted)
    with aiops.Worker(run.standby.url, ZEROS, timeout=30) as worker:
        for _ in range(9):
            worker.step({"w": 10 * ONES["w"]})
        assert (worker.params["w"] == -93).all()
    run.lead = run.standby
    old = run.follower("a", 1)  # as it was started before, and not as a standby
    run.standby = run.standing("a", [old])
    run.standby.wait(run.lead.call(lambda running: running.server.run_state.kept.newest))
    with pytest.raises(Refused, match=r"is not there \(this follower is no standby: start it with"):
        run.promote()
    with aiops.Worker(run.lead.url, ZEROS, timeout=30) as worker:
        assert worker.step(ONES).version == 13
    old.stop()
    [follower], run.copies = run.copies, [run.follower_standby("a", 1, urls.parse(old.url)[1])]
    for standby, primary in ((run.standby, run.lead), (run.copies[0], follower)):
        standby.wait(primary.call(lambda running: running.server.run_state.kept.newest))
    run.until(lambda state: state["shards"][0].get("whole"), run.standby.url)
    assert isinstance(run.promote(), Promoted)
    with aiops.Worker(run.standby.url, ZEROS, timeout=30) as worker:
        assert (worker.params["w"] == -94).all()


def test_the_port_is_held_while_followers_are_promoted(made: Any) -> None:
    """If another process took it, the followers would have no lead any more."""
    run, taken = made(acks="written"), list[socket.socket]()
    with aiops.Worker(run.both, ZEROS, timeout=30) as worker:
        worker.step(ONES)
        run.caught_up()
    run.stop_primaries()

    def take(host: str, port: int) -> bool:
        taken.append(socket.create_server((host, port)))
        return True

    def patch(running: StandbyServer) -> None:
        running._env = replace(running._env, free_port=take)

    run.standby.call(patch)
    try:
        assert isinstance(run.promote(), Promoted)
    finally:
        for sock in taken:
            sock.close()
    with aiops.Worker(run.standby.url, ZEROS, timeout=30) as worker:
        assert worker.step(ONES).version == 2


def shown(url: str, report: Mapping[str, Any]) -> str:
    """Return what ``aiops stats`` prints."""
    console = Console(file=io.StringIO(), width=160)
    console.print(tables(url, report))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_each_lag_is_shown_and_snapshots_are_kept_in_sets(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SystemDisk, "segment", 1 << 14)
    run = made(snapshot_every=0.05)
    folders = [tmp_path / "b" / f"shard-{shard}" for shard in (0, 1)]

    def kept() -> list[StateListing]:
        return [StateListing(path.name for path in folder.iterdir()) for folder in folders]

    def rows_have_gone(listing: StateListing) -> bool:
        # A standby whose next row has gone drops all it has: it is without a segment for a moment.
        return bool(listing.segments) and listing.segments[0] > 1

    with aiops.Worker(run.lead.url, ZEROS, timeout=30) as worker:
        for _ in range(500):
            worker.step(ONES)
            found = kept()
            if all(len(each.snapshots) > 1 and rows_have_gone(each) for each in found):
                break
        else:
            pytest.fail(f"old rows are kept: {found}")
        # A snapshot is there before the one that it replaces is removed.
        few = lambda: all(len(each.snapshots) <= 5 for each in kept())  # noqa: E731
        eventually(few, "old snapshots have gone")
        state = run.until(lambda state: all(s.get("standbys") for s in (state, *state["shards"])))
        text = shown(run.lead.url, state)
        for url, place in ((run.standby.url, ""), (run.copies[0].url, " (shard 1)")):
            assert url.removeprefix("aiops://") + place in text
        state = run.until(lambda state: state["shards"][0].get("whole"), run.standby.url)
        assert "the standby of shard 1 of 2 at" in shown(run.standby.url, state)
        run.caught_up()
        run.stop_primaries()
        run.promote()
    with aiops.Worker(run.standby.url, ZEROS, timeout=30) as again:
        assert (again.params["w"] == worker.params["w"]).all()


def being_read(standby: StandbyServer) -> ShardCopy:
    """Return what a follower's standby says of itself while a thread reads its state."""
    standby._made._restoring = True
    try:
        return standby._held()
    finally:
        standby._made._restoring = False


def test_a_promotion_without_the_standby_of_a_follower_is_refused(made: Any) -> None:
    """It is named, nothing is changed, and the promotion can be tried again."""
    run = made()
    with aiops.Worker(run.both, ZEROS, timeout=30) as worker:
        worker.step(ONES)
        run.caught_up()
        [copy] = run.copies
        port = urls.parse(copy.url)[1]
        copy.stop()
        run.until(lambda state: state["shards"][0]["gone"], run.standby.url)
        with pytest.raises(Refused, match=f"shard 1 of 2 at 127.0.0.1:{port} is not there"):
            run.promote()
        worker.step(ONES)  # with the primary, and the standby is fed on
        run.copies = [run.follower_standby("b", 1, port)]
        run.caught_up()
        held = run.copies[0].call(being_read)
        assert (held.run, held.whole) == ("", False)
        with pytest.raises(
            AiopsError, match="is there: a standby takes the place of a server that"
        ):
            promote(run.copies[0].url)
        run.until(lambda state: not state["shards"][0]["gone"], run.standby.url)
        run.stop_primaries()
        assert isinstance(run.promote(), Promoted)
        assert worker.step(ONES).version == 3
        run.copies[0].stop()
        moved = urls.parse(run.follower("b", 1).url)[1]  # as its parent starts it again
        run.standby.call(lambda standby: standby.follower_moved(1, moved))
        assert worker.step(ONES).version == 4


def test_the_old_servers_come_back_as_standbys(made: Any) -> None:
    """The old lead lives, is told and ends; what only the old servers have is dropped."""
    run = made()
    with aiops.Worker(run.both, ZEROS, timeout=30) as worker:
        for _ in range(3):
            worker.step(ONES)
        run.caught_up()
        run.promote()
        run.lead.wait()
        with pytest.raises(Superseded, match=f"superseded by {run.standby.url}"):
            run.lead.__exit__()
        for server in run.followers:
            server.stop()
        for step in range(4, 7):
            assert worker.step(ONES).version == step
        run.lead, run.followers = run.standby, run.copies
        run.copies = [run.follower_standby("a", 1)]
        run.standby = run.standing("a", run.copies)
        rows = [each.served.run_state.kept.newest for each in (run.lead, *run.followers)]
        for row, standby in zip(rows, [run.standby, *run.copies], strict=True):
            standby.wait(row)
        assert worker.step(ONES).version == 7


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "leads 2 shards, and this standby is to be that of 1: start it with --shards 2"),
        ({"follower": True, "shard": 2}, "has no shard 2 at present"),
    ],
)
def test_the_standby_of_another_part_ends(
    settings: dict[str, Any], text: str, tmp_path: Path
) -> None:
    kept = {**PLAIN, "shards": 2, "state": tmp_path / "a"}
    with ServerThread(**kept) as server:
        given = {**PLAIN, **settings, "state": tmp_path / "b", "standby": server.url}
        with StandbyThread(**given) as standby:
            if settings:  # it may come
                while text not in standby.call(lambda running: running._why):
                    threading.Event().wait(0.02)
                return
            assert isinstance(standby.error, UsageError)
            assert text in str(standby.error)
