"""Training on a Ray cluster of several nodes, with a node that is killed in the middle.

It takes 40 s of processor time, nearly all of it Ray's own and the start of its processes (each
node 2 s, each actor 1 s): hence one test, of one cluster, in a process of its own.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support import Process

_LONGEST = 360.0


@pytest.mark.slow
@pytest.mark.timeout(_LONGEST + 30)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_jobs_on_a_cluster_of_which_a_node_is_killed(tmp_path: Path) -> None:
    env = {"PYTHONWARNINGS": "ignore"}  # Ray's own
    scenario = Process("-m", "tests.ray.cluster_scenario", str(tmp_path), env=env, started=True)
    try:
        status, out, err = scenario.end(_LONGEST)
    finally:
        scenario.kill()
    assert status == 0, err[-8000:]
    assert "all is well" in out
