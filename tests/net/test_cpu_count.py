"""How many processors there are for us: bound to some, and with a quota of their time."""

from __future__ import annotations

import os
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from aiops.net.cpu_count import BLAS, quota, share, usable
from tests.rows import each_row
from tests.support import PATIENCE


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has batch processes")
def test_all_threads_of_a_batch_process_are_batch() -> None:
    program = """
import os, threading
from aiops.net.cpu_count import run_as_batch
ended = threading.Event()
threading.Thread(target=ended.wait).start()
run_as_batch()
threading.Thread(target=ended.wait).start()
print([os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")])
ended.set()
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.strip() == str([os.SCHED_BATCH] * 3)


def machine(
    folder: Path,
    groups: str,
    mounts: list[tuple[str, str, str, str]],
    files: dict[str, str],
) -> Path:
    """A process's /proc entries, and the file system of control groups that they speak of."""
    me = folder / "proc"
    me.mkdir()
    (me / "cgroup").write_text(groups)
    lines = ["22 28 0:20 / /proc rw,nosuid shared:12 - proc proc rw"]
    for kind, root, point, options in mounts:
        place = str(folder / point).replace(" ", "\\040")
        lines.append(f"30 22 0:26 {root} {place} rw,relatime shared:4 - {kind} {kind} {options}")
    (me / "mountinfo").write_text("\n".join(lines) + "\n")
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return me


TWO = ("cgroup2", "/", "cg", "rw")
ONE = ("cgroup", "/", "cg/cpu,cpuacct", "rw,cpu,cpuacct")


@each_row(
    ("groups", "mounts", "files", "expected"),
    [
        pytest.param("0::/\n", [TWO], {"cg/cpu.max": "150000 100000"}, 1.5, id="a container"),
        pytest.param("0::/\n", [TWO], {"cg/cpu.max": "max 100000"}, inf, id="no limit"),
        pytest.param("0::/\n", [TWO], {}, inf, id="the uppermost group"),
        pytest.param(
            "0::/a/b\n",
            [TWO],
            {"cg/a/b/cpu.max": "max 100000", "cg/a/cpu.max": "300000 100000"},
            3.0,
            id="of the group around it",
        ),
        pytest.param(
            "0::/a/b\n",
            [TWO],
            {"cg/a/b/cpu.max": "50000 100000", "cg/a/cpu.max": "300000 100000"},
            0.5,
            id="the least",
        ),
        pytest.param(
            "0::/docker/x/in\n",
            [("cgroup2", "/docker/x", "a cg", "rw")],
            {"a cg/in/cpu.max": "200000 100000"},
            2.0,
            id="of a tree mounted in part, at a path with a space",
        ),
        pytest.param(
            "0::/../elsewhere\n",
            [("cgroup2", "/docker/x", "cg", "rw")],
            {"cg/cpu.max": "200000 100000"},
            2.0,
            id="of a group that cannot be seen",
        ),
        pytest.param(
            "4:cpu,cpuacct:/job\n1:name=systemd:/\n",
            [ONE],
            {
                "cg/cpu,cpuacct/job/cpu.cfs_quota_us": "400000",
                "cg/cpu,cpuacct/job/cpu.cfs_period_us": "200000",
            },
            2.0,
            id="the first version",
        ),
        pytest.param(
            "4:cpu,cpuacct:/\n",
            [ONE],
            {
                "cg/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "cg/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            inf,
            id="the first version without a limit",
        ),
        pytest.param(
            "4:memory:/\n",
            [("cgroup", "/", "cg/memory", "rw,memory")],
            {"cg/memory/cpu.cfs_quota_us": "1"},
            inf,
            id="of something else",
        ),
        pytest.param("0::/\n", [TWO], {"cg/cpu.max": "what?"}, inf, id="unreadable"),
    ],
)
def test_a_quota(
    groups: str,
    mounts: list[tuple[str, str, str, str]],
    files: dict[str, str],
    expected: float,
    tmp_path: Path,
) -> None:
    assert quota(machine(tmp_path, groups, mounts, files)) == expected


def test_there_is_none_where_there_are_no_groups(tmp_path: Path) -> None:
    assert quota(tmp_path / "nowhere") == inf


@each_row(("most", "expected"), [("350000", 3), ("50000", 1), ("900000", 5), ("max", 5)])
def test_usable_is_the_least_and_rounded_down(
    most: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 4, 5, 7}, raising=False)
    me = machine(tmp_path, "0::/\n", [TWO], {"cg/cpu.max": f"{most} 100000"})
    assert usable(me) == expected


def test_a_share_is_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiops.net.cpu_count.usable", lambda: 8)
    assert [share(processes) for processes in (1, 3, 8, 100)] == [8, 2, 1, 1]


LOOKING = """
import sys, threadpoolctl
from aiops.algorithms.fasgd import FASGD
threads = {pool["num_threads"] for pool in threadpoolctl.threadpool_info()}
print("threads for matrix products:", threads, file=sys.stderr)

class Looking(FASGD):
    name = "looking"
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", [["-m", "aiops.server"], ["-m", "aiops", "serve"]])
@pytest.mark.parametrize(
    ("given", "expected"), [({}, "{1}"), ({"OPENBLAS_NUM_THREADS": "2"}, "{2}")]
)
def test_a_server_starts_no_threads_for_matrix_products(
    command: list[str], given: dict[str, str], expected: str, tmp_path: Path
) -> None:
    """Unless its user wants them."""
    (tmp_path / "looking.py").write_text(LOOKING)
    environment = {key: value for key, value in os.environ.items() if key not in BLAS}
    path = os.pathsep.join(filter(None, (str(tmp_path), environment.get("PYTHONPATH", ""))))
    with subprocess.Popen(
        [sys.executable, *command, "--port", "0", "--policy", "looking:Looking"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "PYTHONPATH": path, **given},
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("aiops://")
        server.terminate()
        _out, said = server.communicate(timeout=PATIENCE)
    assert f"threads for matrix products: {expected}" in said
