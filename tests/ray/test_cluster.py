"""Training on a Ray cluster of several nodes, with a node that is killed in the middle.

Nearly all of its processor time is Ray's own and the start of processes (each node 2 s, each actor
1 s), and it waits for longer than it computes: hence one test, of two clusters at the same time,
each in a process of its own.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import Process

_LONGEST = 360.0
_SCENARIO = "tests.ray.cluster_scenario"


@pytest.mark.slow
@pytest.mark.timeout(_LONGEST + 30)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_jobs_on_a_cluster_of_which_a_node_is_killed(tmp_path: Path) -> None:
    env = {"PYTHONWARNINGS": "ignore"}  # Ray's own
    scenarios = [
        Process("-m", _SCENARIO, str(tmp_path / group), group, env=env, started=True)
        for group in ("restarts", "standbys")
    ]
    try:
        with ThreadPoolExecutor() as threads:
            ends = [*threads.map(lambda scenario: scenario.end(_LONGEST), scenarios)]
    finally:
        for scenario in scenarios:
            scenario.kill()
    for status, out, err in ends:
        assert status == 0, f"{out[-2000:]}\n{err[-8000:]}"
        assert "all is well" in out
