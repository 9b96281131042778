"""The server processes of a trial: one or several shards, and perhaps a standby of each.

They have numbers: the shards of the first site, the lead first, and behind them those of the
second. One site serves; the servers of the other one are their standbys, until they are promoted.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from aiops.client.sync.client import Client
from aiops.errors import AiopsError, ConnectionLost, DeadlineExceeded, Refused
from aiops.lab.torture.lead_line import LeadLine
from aiops.lab.torture.plan import LineCut, SecondKill
from aiops.lab.torture.spawner import Forked, Spawner
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.faults import VARIABLE
from aiops.serving.config import shard_folder
from aiops.serving.standby.link import ask
from aiops.wire.standby_messages import Promote, Promoted

PATIENCE = 300.0
"""Seconds for anything that should take a moment, on a machine that is busy."""

RunServer = Callable[[list[str]], None]

GRACE = 10.0
"""Seconds within which a server that is asked to end has to: what container managers give it."""

_ASK_AGAIN = ("cannot be promoted", "was not promoted")
"""Parts of the refusals of a promotion that may succeed later, as standbys write them."""

_PORTS = range(20_000, 32_000)  # below those that systems give to outgoing connections


class TrialFailed(AiopsError):
    """A trial cannot go on: a process did not do its part."""


def looks(missing: str) -> Iterator[None]:
    """Yield from time to time, and less often the longer it takes: each look costs the machine.

    Raises
    ------
    TrialFailed
        When `PATIENCE` is over; ``missing`` is the beginning of its text.
    """
    began = time.monotonic()
    while True:
        yield
        waited = time.monotonic() - began
        if waited > PATIENCE:
            raise TrialFailed(f"{missing} within {PATIENCE:g} s")
        time.sleep(min(0.1, max(0.004, waited / 10)))


class GroupPlan(Protocol):
    """The servers that a trial needs: `TrialPlan`, for one."""

    @property
    def acks(self) -> str:
        """Their ``--acks``; empty: they keep no state."""

    @property
    def sites(self) -> int:
        """2 with standbys, else 1."""

    @property
    def shards(self) -> int:
        """The servers that have a part of the model."""

    @property
    def cuts(self) -> int:
        """The times that the line between a lead and its first follower is cut."""

    def flags(self) -> list[str]:
        """Return their flags, but for their folders, their ports and their peers."""


class ServerGroup:
    """The servers of a trial, each of which can be killed and started again.

    Parameters
    ----------
    plan
        The trial's: its layout and its flags.
    folder
        Where they keep their states and write what they say.
    spawner
        Forks them.
    run_server
        Runs a server with these flags.
    """

    def __init__(
        self, plan: GroupPlan, folder: Path, spawner: Spawner, run_server: RunServer
    ) -> None:
        self._site = 0  # that serves
        self._plan, self._folder, self._spawner = plan, folder, spawner
        self._run_server = run_server
        self._rng = random.Random()  # ports: two trials of one seed may run side by side
        self._ports = [self.free_port() for _ in range(plan.sites * plan.shards)]
        self._processes: dict[int, Forked] = {}
        self._all: list[Forked] = []
        self._line = LeadLine(self._ports[1]) if plan.cuts else None

    @property
    def url(self) -> str:
        """The address for workers."""
        leads = range(0, len(self._ports), self._plan.shards)
        return "aiops://" + ",".join(map(self._address, leads))

    @property
    def port(self) -> int:
        """The port of the server that workers speak to."""
        return self._ports[self._lead]

    @property
    def current(self) -> Forked:
        """The server that workers speak to."""
        return self._processes[self._lead]

    @property
    def state(self) -> Path:
        """The folder of its state."""
        return self._folder / f"state-{self._lead}"

    @property
    def have_snapshots(self) -> bool:
        """True if each server that has a part of the model has a snapshot to begin with."""
        folders = [self._folder / f"state-{number}" for number in self._serving]
        if self._plan.shards > 1:
            folders[0] /= shard_folder(0)
        names = [[path.name for path in folder.glob("snapshot-*")] for folder in folders]
        return all(any(not name.endswith(".part") for name in mine) for mine in names)

    @property
    def _lead(self) -> int:
        """The number of the server that workers speak to."""
        return self._site * self._plan.shards

    @property
    def _serving(self) -> range:
        """The numbers of the servers that have the model, the lead first."""
        return range(self._lead, self._lead + self._plan.shards)

    def begin(self, faults: str = "") -> None:
        """Start all of them; ``faults``: of the one that workers speak to."""
        self._start_each(range(len(self._ports)), faults)

    def start(self, faults: str = "") -> None:
        """Start the one that workers speak to."""
        self._start(self._lead, faults)

    def strike(self, targets: Collection[int]) -> None:
        """Kill servers: those of `KillMoment.targets`."""
        for number in self._numbers(targets):
            self._processes[number].kill()

    def recover(
        self, targets: Collection[int], faults: str = "", second: SecondKill | None = None
    ) -> None:
        """See to what follows: what was killed is started again.

        Behind the lead its standby is promoted, and the standbys of its followers with it. The
        servers of its site are then started as standbys of the new ones, also a follower that lives
        on. ``second``: what is killed meanwhile, and started again.
        """
        numbers = self._numbers(targets)
        if self._plan.sites == 1 or self._lead not in numbers:
            self._start_each(numbers, faults)
            return
        old = [*self._serving]
        if second is not None and second.amid == "promotion":
            self._promote_amid(second)
        else:
            self._promote()
            self._site = 1 - self._site
        for number in old:
            self._processes[number].kill()
        if second is not None and second.amid == "return":
            self._return_amid(second, old)
        else:
            self._start_each(old)

    def _numbers(self, targets: Collection[int]) -> list[int]:
        """Return the numbers of servers, given those that count from the lead on."""
        return [(self._lead + target) % len(self._ports) for target in targets]

    def _promote(self) -> None:
        """Have the standbys take their servers' places, as ``aiops promote`` does."""
        env = CURRENT_ENVIRONMENT.get()
        url = f"aiops://{self._address((1 - self._site) * self._plan.shards)}"
        found = asyncio.run(ask(env, url, None, lambda local: Promote(1), PATIENCE))
        if not isinstance(found, Promoted):
            raise TrialFailed(f"{found.kind!r} is no answer to a promotion")

    def _promote_amid(self, second: SecondKill) -> None:
        """Have the standbys promoted, while some of them are killed, as often as it takes.

        Until a promotion is known to have succeeded, a standby is started again as it was; from
        then on as the server that it has become.
        """
        lead = (1 - self._site) * self._plan.shards
        killed = [lead + target for target in second.targets]
        with ThreadPoolExecutor(1) as thread:
            promotion = thread.submit(self._promote)
            time.sleep(second.seconds)
            for number in killed:
                self._processes[number].kill()
            if not promotion.done() or promotion.exception() is not None:
                self._start_each(killed)
        serves = promotion.exception() is None or not self._promote_again()
        self._site = 1 - self._site
        if serves:  # what was started again is a standby, or nothing was
            for number in killed:
                self._processes[number].kill()
            self._start_each(killed)

    def _promote_again(self) -> bool:
        """Ask until there is a promotion; return False if there was one, without an answer.

        A standby that cannot be promoted, as the others are not there in time, says so and ends: it
        is started again. One may have ended so before it could answer.
        """
        lead = (1 - self._site) * self._plan.shards
        for _ in looks("no promotion succeeded"):
            try:
                self._promote()
                break
            except Refused as error:
                if "no standby" in str(error):
                    return False
                if not any(text in str(error) for text in _ASK_AGAIN):
                    raise TrialFailed(f"a promotion was refused: {error}") from None
            except (ConnectionLost, DeadlineExceeded):
                pass  # of a server that is killed, or that has just been started
            if self._processes[lead].wait(0) is not None:
                self._start_each([lead])
        return True

    def _return_amid(self, second: SecondKill, old: list[int]) -> None:
        """Start the old servers as standbys, while some of all servers are killed."""
        for number in reversed(old):
            self._start(number)
        time.sleep(second.seconds)
        self.strike(second.targets)
        self._start_each(self._numbers(second.targets))
        for number in old:
            self.ready(self._processes[number])

    def _start_each(self, numbers: Collection[int], faults: str = "") -> None:
        """Start servers, followers before their lead, which does not start without them.

        The one that workers speak to may be killed before it is ready: it is not waited for.
        """
        for number in sorted(numbers, reverse=True):
            if number == self._lead:
                self._start(number, faults)
            else:
                self._start(number)
                self.ready(self._processes[number])

    def ready(self, server: Forked | None = None) -> None:
        """Wait until a server, default the main one, has printed its URL."""
        server = server or self.current
        for _ in looks("a server was not ready"):
            if "aiops://" in server.text():
                return
            if (status := server.wait(0)) is not None:
                raise TrialFailed(f"a server ended with status {status}: {last_line(server)}")

    def wait_for_standbys(self) -> None:
        """Wait until acknowledgements mean ``replicated``, if there are standbys, on each shard.

        Without a standby they mean less. That of the lead is to know the others.
        """
        if self._plan.sites == 1:
            return
        for _ in looks("acknowledgements did not mean 'replicated'"):
            serving, standing = self._states(self._site), self._states(1 - self._site)
            fed = [line.get("acks") == "replicated" and line.get("standbys") for line in serving]
            there = [line.get("whole") and not line["gone"] for line in standing[1:]]
            if len(fed) == self._plan.shards == 1 + len(there) and all(fed) and all(there):
                return

    def _states(self, site: int) -> list[dict[str, Any]]:
        """Return what the lead of a site tells of the states of its shards, its own first."""
        with Client(f"aiops://{self._address(site * self._plan.shards)}", timeout=PATIENCE) as told:
            state = told.stats()["state"]
        return [state, *state.get("shards", ())]

    def end(self, server: Forked | None = None) -> None:
        """End a server, default the main one, in good order."""
        server = server or self.current
        server.signal(signal.SIGTERM)
        _check_ended(server, PATIENCE)

    def end_all(self) -> None:
        """End a lead, and its followers with it, in good order."""
        self.end()
        for number in self._serving[1:]:
            _check_ended(self._processes[number], PATIENCE)

    def end_together(self, targets: Collection[int]) -> float:
        """Ask servers, those of `KillMoment.targets`, to end; return the seconds that it took.

        Raises
        ------
        TrialFailed
            When one of them does not end with status 0 within `GRACE`.
        """
        servers, began = (
            [self._processes[number] for number in self._numbers(targets)],
            time.monotonic(),
        )
        for server in servers:
            server.signal(signal.SIGTERM)
        for server in servers:
            _check_ended(server, max(0.0, began + GRACE - time.monotonic()))
        return time.monotonic() - began

    def cut(self, cut: LineCut) -> None:
        """Cut the lead off from its first follower for a while."""
        assert self._line is not None, "the plan has cuts"
        self._line.cut(silent=cut.silent)
        time.sleep(cut.seconds)
        self._line.heal()

    def close(self) -> None:
        """Kill all that run."""
        for process in self._all:
            process.kill()
        if self._line is not None:
            self._line.close()

    def copied(self, folder: str) -> tuple[Forked, int]:
        """Start a server on another state folder; return it and its port."""
        port = self.free_port()
        return self._fork([*self._plan.flags(), *self._kept(folder)], port), port

    def free_port(self) -> int:
        """Return a port that no process uses now."""
        while True:
            port = self._rng.choice(_PORTS)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return port

    def _start(self, number: int, faults: str = "") -> None:
        flags, (site, shard) = self._plan.flags(), divmod(number, self._plan.shards)
        flags += self._kept(f"state-{number}")
        if shard:
            flags.append("--follower")
        elif self._plan.shards > 1:
            numbers = range(number + 1, number + self._plan.shards)
            followers = [*map(self._address, numbers)]
            if self._line is not None:
                followers[0] = f"127.0.0.1:{self._line.port}"
            flags += ["--followers", ",".join(followers)]
        if self._plan.sites > 1:
            flags += ["--standby-deadline", str(PATIENCE)]
        if site != self._site:
            flags += ["--standby", f"aiops://{self._address(self._lead)}"]
            flags += ["--shard", str(shard)] if shard else []
        self._processes[number] = self._fork(flags, self._ports[number], faults)

    def _address(self, number: int) -> str:
        return f"127.0.0.1:{self._ports[number]}"

    def _kept(self, folder: str) -> list[str]:
        return ["--state", str(self._folder / folder)] if self._plan.acks else []

    def _fork(self, flags: list[str], port: int, faults: str = "") -> Forked:
        output = self._folder / f"server-{len(self._all)}"
        environment = {VARIABLE: faults} if faults else None
        process = self._spawner.start(
            self._run_server, output, ["--port", str(port), *flags], environment=environment
        )
        self._all.append(process)
        return process


def _check_ended(server: Forked, patience: float) -> None:
    """Wait until a server that was asked to end has done so, in good order."""
    status, text = server.wait(patience), server.text()
    if status == -signal.SIGTERM and "aiops://" not in text:  # as it had no handler yet
        return
    if status is None:
        raise TrialFailed(f"a server did not end within {patience:.1f} s: {last_line(server)}")
    if status != 0 or "Traceback" in text:
        raise TrialFailed(f"a server that was to end gave status {status}: {last_line(server)}")


def last_line(process: Forked) -> str:
    """Return the last line that a process wrote."""
    lines = process.text().strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"


def copy_state(source: Path, target: Path) -> None:
    """Copy a state directory that no server uses; holes stay holes, and the lock is left out."""
    target.mkdir()
    for path in source.iterdir():
        if path.name == "LOCK":
            continue
        with path.open("rb") as read, (target / path.name).open("wb") as write:
            size = os.fstat(read.fileno()).st_size
            write.truncate(size)
            at = 0
            while at < size:
                try:
                    at = os.lseek(read.fileno(), at, os.SEEK_DATA)
                except OSError:  # only a hole follows
                    break
                end = os.lseek(read.fileno(), at, os.SEEK_HOLE)
                os.pwrite(write.fileno(), os.pread(read.fileno(), end - at, at), at)
                at = end
