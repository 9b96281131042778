"""The peers of the exchange benchmark: each does its work, and leaves nothing behind."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from aiops.lab import processes
from aiops.lab.processes import ProcessFailed
from aiops.net.process_tree import having, session
from benchmarks.peers import base, memcpy, mpi, ours
from benchmarks.peers.base import KEEP_MEMORY, LEARNING_RATE, MODULES, Job
from benchmarks.peers.orders import WorkerOrders
from benchmarks.peers.team import READS, Team
from tests.benchmarks.test_exchange import ended, pids
from tests.peers import eventually
from tests.zygote import IMPORTED, ForkingModule

ELEMENTS = 40_000  # more than the least that aiops, MPI and Ray treat as large

# PyTorch is imported by every process of a team, for seconds: its variant tries all at once.
WHOLE = {"torch_rpc": {"whole": True, "chunk": 4096, "lanes_from": 0}}
VARIANTS = [
    *((name, {}) for name in MODULES),
    *(
        (name, WHOLE.get(name, {"whole": True}))
        for name in MODULES
        if not base.load(name).SETTINGS["whole"]
    ),
    ("mpi", {"btl_vader_single_copy_mechanism": "none"}),
    ("mpi", {"pml": "ucx"}),
    ("ray", {"views": True, "put_from": 1 << 30}),  # both of its other ways, in one Ray
]


def team_of(name, settings=(), workers=2, **environment):
    peer = base.load(name)
    if why := peer.missing():
        pytest.skip(why)
    job = Job(name, ELEMENTS, workers, {**peer.SETTINGS, **dict(settings)})
    given = {**peer.ENVIRONMENT, **environment}
    if IMPORTED in environment:  # what the C library reads at its start is no fork's, but for speed
        given = {name: given[name] for name in given.keys() - KEEP_MEMORY.keys()}
    return Team(job, 100.0, given)


@pytest.fixture
def forked(monkeypatch):
    """Returns what a peer's processes need to be forked; those of MPI and Ray start others."""

    def needs(name):
        if name.startswith(("mpi", "ray")):
            return {}
        monkeypatch.setattr(processes, "subprocess", ForkingModule())
        torch = ",torch.distributed.rpc" if name in ("gloo", "torch_rpc") else ""
        return {IMPORTED: f"numba,benchmarks.peers.orders{torch}"}

    return needs


@pytest.mark.parametrize("batch", [False, True])
def test_workers_are_batch_processes_if_that_is_asked_for(batch, forked):
    job = Job("raw", 64, 2, base.load("raw").SETTINGS, batch)
    team = Team(job, 60.0, forked("raw"))
    try:
        team.launch()
        team.connect()
        server, *workers = (os.sched_getscheduler(each.popen.pid) for each in team._children)
        assert server == os.SCHED_OTHER
        assert workers == [os.SCHED_BATCH if batch else os.SCHED_OTHER] * 2
    finally:
        team.kill()


def named(variant):
    name, settings = variant
    return "-".join([name, *(f"{key}={value}" for key, value in settings.items())])


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=named)
def test_a_peer_does_the_work_and_is_gone(variant, forked):
    name, settings = variant
    # A worker is a process with its own imports: what a variant does otherwise, one shows.
    team = team_of(name, settings, 1 if settings else 2, **forked(name))
    try:
        team.launch()
        team.connect()
        team.run(2)
        team.run(3)
        found = {*having(f"TMPDIR={team._scratch.name}"), *pids(team)}
        found.update(*map(session, pids(team)))
        reads = team.finish()
    finally:
        team.kill()
    assert reads in READS
    assert reads == "whole" or not team.job.settings["whole"]
    eventually(lambda: all(map(ended, found)), f"{name} is gone")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mpi", "ray", "views"])
def test_a_peer_that_is_killed_at_work_leaves_no_process_and_no_file(name):
    team = team_of(name, workers=1)
    before = set(os.listdir("/dev/shm"))
    try:
        team.launch()
        team.connect()
        team.run(1)
        found = having(f"TMPDIR={team._scratch.name}")
    finally:
        team.kill()
    assert len(found) > (3 if name == "ray" else 1)
    eventually(lambda: all(map(ended, found)), f"{name} is gone")
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if "vader" in name or "ompi" in name or "plasma" in name]


@pytest.mark.parametrize(
    ("no_shm", "met"),
    [(True, "shares memory with its server"), (False, "reached .* over TCP alone")],
)
def test_aiops_by_another_transport_than_the_peers_is_found_out(no_shm, met):
    job = Job("aiops", 64, 1, {"no_shm": no_shm})
    with pytest.raises(RuntimeError, match=f"the worker {met}, and no_shm is {no_shm}"):
        ours.check_transport(SimpleNamespace(near=no_shm), job)
    ours.check_transport(SimpleNamespace(near=not no_shm), job)


@pytest.mark.slow
def test_aiops_is_not_measured_over_tcp_under_another_name(forked):
    team = team_of("shared", AIOPS_NO_SHM="1", **forked("shared"))
    try:
        team.launch()
        with pytest.raises(ProcessFailed, match="reached its server over TCP alone"):
            team.connect()
    finally:
        team.kill()


def test_memcpys_workers_are_added_up():
    job = Job("memcpy", 100, 2, memcpy.SETTINGS)
    server = memcpy.Server(job)
    folder = server.start()
    workers = [memcpy.Worker(job, folder, index) for index in range(2)]
    for worker in [*workers, workers[0]]:
        worker.cycle()
    assert base.check_worker(workers[0].params, 2, 3, whole=True) == "whole"
    base.check_server(server.parameters(), 3)
    for path in Path(folder).iterdir():
        path.unlink()
    Path(folder).rmdir()


class Rings:
    """A bell that has rung ``count`` times; to wait for one more would be for ever."""

    def __init__(self, count):
        self.count = count

    def recv(self, most):
        if not self.count:
            raise AssertionError("it waits for ever")
        self.count -= 1
        return b"!"


@pytest.mark.parametrize(
    ("runs", "rings"),
    [(0, 1), (0, 3), (1, 4), (1, 5), (2, 7)],
)
def test_mpis_server_does_not_miss_a_worker_that_rings_early(runs, rings):
    server = mpi.Server.__new__(mpi.Server)
    server._job, server._rung, server._bell = Job("mpi", 64, 3), 0, Rings(rings)
    server._sleep(runs)
    assert server._rung == 3 * runs + 1


@pytest.mark.parametrize(("runs", "rings"), [(0, 0), (1, 1), (1, 3), (2, 6)])
def test_mpis_server_sleeps_until_a_worker_rings_for_the_next_run(runs, rings):
    server = mpi.Server.__new__(mpi.Server)
    server._job, server._rung, server._bell = Job("mpi", 64, 3), 0, Rings(rings)
    with pytest.raises(AssertionError, match="it waits for ever"):
        server._sleep(runs)


def orders_for(worker, **settings):
    orders = WorkerOrders()
    orders.worker, orders.whole = worker, True
    orders.array = None if settings.get("views") else worker.params
    return orders


class Quiet:
    """A worker alone, with its own idea of where its parameters are."""

    def __init__(self, moves=False):
        self.params = np.zeros(70, np.float32)
        self.said = []
        self._moves = moves

    def cycle(self):
        self.said.append("cycle")
        new = self.params - np.float32(LEARNING_RATE) * base.gradient(70)
        if self._moves:
            self.params = new
        else:
            self.params[:] = new


class Busy(Quiet):
    def wake(self):
        self.said.append("wake")

    def rest(self):
        self.said.append("rest")


def test_a_restless_worker_is_told_when_a_run_begins_and_when_it_is_over():
    orders = orders_for(Busy())
    orders.run(2)
    orders.run(1)
    assert orders.worker.said == ["wake", "cycle", "cycle", "rest", "wake", "cycle", "rest"]
    assert orders.check(3) == "whole"


def test_parameters_move_with_views_alone():
    for views in (True, False):
        orders = orders_for(Quiet(moves=True), views=views)
        orders.run(2)
        if views:
            assert orders.check(2) == "whole"
        else:
            with pytest.raises(ValueError, match="moved to another array"):
                orders.check(2)


def test_parameters_that_change_after_the_last_cycle_are_found_out():
    orders = orders_for(Quiet(), views=True)
    orders.run(2)
    orders.worker.cycle()
    with pytest.raises(ValueError, match="changed after the worker's last cycle"):
        orders.check(3)


def test_mpi_without_mpirun_says_what_to_install(monkeypatch):
    monkeypatch.setattr(mpi, "shutil", SimpleNamespace(which=lambda name: None))
    assert mpi.missing() == "mpirun is not installed; apt-get install openmpi-bin libopenmpi-dev"
