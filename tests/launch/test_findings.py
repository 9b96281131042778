"""What `aiops doctor` says of what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiops.common.launchers import detect
from aiops.launch.findings import (
    BROKEN,
    GOOD,
    NOTE,
    Finding,
    Machine,
    Reach,
    StateDisk,
    judge_machine,
    judge_place,
    judge_reach,
    judge_state,
)
from tests.common.test_launchers import KUBERNETES, SLURM, TORCHRUN
from tests.rows import each_row

SOUND: dict[str, Any] = {
    "processors": 8,
    "memory": 32 << 30,
    "descriptors": (1024, 65536),
    "packages": {"numpy": "2", "numba": "0.6", "uvloop": "0.2", "safetensors": "0.4"},
    "math_threads": {"OMP_NUM_THREADS": "2"},
    "shared_memory": "",
    "port": 7171,
    "port_free": True,
    "token": True,
    "version": "1.0",
}
THERE: dict[str, Any] = {
    "stages": {"address": 0.001, "connect": 0.002, "welcome": 0.1},
    "ip": "10.0.0.1",
    "round_trip": 0.0001,
    "clock": 0.01,
    "report": {"aiops": "1.0"},
}


def said(findings: Iterable[Finding], state: str) -> str:
    return " | ".join(f"{f.what}: {f.text} → {f.advice}" for f in findings if f.state == state)


def machine(**changed: Any) -> Machine:
    return Machine(**{**SOUND, **changed})


def test_a_sound_machine() -> None:
    found = list(judge_machine(machine(), 4, 1 << 20))
    assert {each.state for each in found} == {GOOD}
    assert not any(each.advice for each in found)


@each_row(
    ("changed", "workers", "model", "text"),
    [
        (
            {},
            8,
            0,
            "threads: 8 workers on 8 processors, with 2 threads each → set OMP_NUM",
        ),
        ({"math_threads": {}}, 4, 0, "each starts 8 threads for its mathematics → set OMP_NUM_TH"),
        ({}, 4, 8 << 30, "memory: 34.4 GB available; 4 workers may need 140 GB → run fewer"),
        ({"packages": {"numpy": "2"}}, 1, 0, "numba, uvloop, safetensors not installed (numpy 2)"),
        ({"shared_memory": "none here"}, 1, 0, "shared memory: none here → workers on the server"),
        ({"descriptors": (256, 256)}, 1, 0, "open files: at most 256, and a server needs one"),
        ({"port_free": False}, 1, 0, "port: 7171 is taken on this machine"),
        ({"token": False}, 1, 0, "token: AIOPS_TOKEN is not set"),
    ],
)
def test_what_may_surprise(changed: dict[str, Any], workers: int, model: int, text: str) -> None:
    assert text in said(judge_machine(machine(**changed), workers, model), NOTE)


def test_no_limit_of_open_files() -> None:
    assert "no limit, at most any number" in said(
        judge_machine(machine(descriptors=(None, None)), 1, 0), GOOD
    )


def test_a_server_that_answers() -> None:
    found = list(judge_reach(Reach("aiops://a:1", **THERE), detect({}), machine()))
    assert {each.state for each in found} == {GOOD}
    assert "aiops://a:1 at 10.0.0.1: address 1.00 ms, connect 2.00 ms, welcome 100 ms" in (
        found[0].text
    )
    assert "aiops 1.0, like the server's" in said(found, GOOD)


@each_row(
    ("changed", "state", "text"),
    [
        ({"clock": -90.0}, NOTE, "clocks: the server's is 1 min 30 s behind → aiops does not need"),
        ({"report": {"aiops": "2.0"}}, NOTE, "versions: aiops 1.0 here, 2.0 on the server"),
        ({"report": {"file_errors": ["full"]}}, BROKEN, "server's files: full → make room"),
        ({"report": {"corrupted": 2}}, NOTE, "network: 2 connections to the server ended"),
        ({"report": {"waits": {"probe": 1.0, "ping": 5.0}}}, GOOD, "waits: probe 1 s, ping 5 s"),
        ({"ip": "127.0.0.1"}, NOTE, "on this machine, and memory is not shared with it"),
        ({"error": "no", "refused": True}, BROKEN, "set AIOPS_TOKEN to the same value"),
        ({"error": "no", "stages": {}}, BROKEN, "names the machine: is 'a' known"),
        (
            {"error": "refused", "stages": {"address": 0.1}},
            BROKEN,
            "aiops://a:1: refused (after address 100 ms) → is the server running",
        ),
        ({"error": "no welcome"}, BROKEN, "something else may listen on that port"),
    ],
)
def test_what_is_wrong_with_a_server(changed: dict[str, Any], state: str, text: str) -> None:
    reach = Reach("aiops://a:1", **{**THERE, **changed})
    assert text in said(judge_reach(reach, detect(SLURM), machine()), state)


def test_a_concluded_address_names_the_job_s_port() -> None:
    reach = Reach("aiops://trial1:7171", {"address": 0.1}, "10.0.0.1", "refused")
    assert "rank 0's server, of `aiops join`, has port 23652" in said(
        judge_reach(reach, detect(SLURM), machine()), BROKEN
    )


def test_places() -> None:
    assert not list(judge_place(detect(SLURM)))
    assert "no server is named" in said(judge_place(detect({})), NOTE)
    assert "no server is named" in said(judge_place(detect(KUBERNETES)), NOTE)
    lacking = {"JOB_COMPLETION_INDEX": "1", "AIOPS_URL": "aiops://a"}
    assert "set WORLD_SIZE to their number" in said(judge_place(detect(lacking)), NOTE)
    assert "RANK must be a whole" in said(judge_place(detect({**TORCHRUN, "RANK": "x"})), BROKEN)


@each_row(
    ("disk", "state", "text"),
    [
        (StateDisk("d", "Permission denied"), BROKEN, "state: d: Permission denied → give the"),
        (StateDisk("d", "", 100 << 30, "ext4", 1e-3), GOOD, "107 GB free on ext4, a synced write"),
        (StateDisk("d", "", 1 << 20, "ext4", 1e-3), NOTE, "make room: snapshots and the journal"),
        (StateDisk("d", "", 100 << 30, "tmpfs", 0.0), NOTE, "gone when the machine restarts"),
        (StateDisk("d", "", 100 << 30, "nfs4", 0.01), NOTE, "must never use one folder"),
    ],
)
def test_disks_for_a_state(disk: StateDisk, state: str, text: str) -> None:
    assert text in said(judge_state(disk, 1 << 20), state)
