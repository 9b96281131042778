"""Variables of the environment: those that aiops reads are known, and others are told."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import aiops
from aiops.common.variables import KNOWN, unknown_variables
from aiops.serving.config import Config
from tests.rows import each_row

ROOT = Path(aiops.__file__).parents[1]


def test_every_setting_of_a_server_is_known() -> None:
    assert {f"AIOPS_{field.name.upper()}" for field in dataclasses.fields(Config)} <= KNOWN


def test_every_variable_in_the_code_is_known_and_the_other_way_round() -> None:
    settings = {f"AIOPS_{field.name.upper()}" for field in dataclasses.fields(Config)}
    named: set[str] = set()
    for folder in ("aiops", "benchmarks", "deploy", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name not in ("test_variables.py", "test_mistakes.py"):
                named |= set(re.findall(r"""["'](AIOPS_[A-Z_]*[A-Z])["'=]""", path.read_text()))
    ours = {name for name in named if not name.startswith("AIOPS_TEST_")} - {"AIOPS_X"}
    assert ours <= KNOWN
    assert ours | settings >= KNOWN


@each_row(
    ("name", "told"),
    [
        ("AIOPS_POLCY", "AIOPS_POLCY is set, and aiops has no such variable, so it has no effect:"),
        ("AIOPS_TOKN", "did you mean AIOPS_TOKEN?"),
        ("AIOPS_WORKER_TIMEOUTS", "has no effect"),
    ],
)
def test_one_that_is_unknown(name: str, told: str) -> None:
    [text] = unknown_variables({name: "1", "AIOPS_URL": "aiops://a", "PATH": ""})
    assert told in text


@each_row(
    "name",
    [
        *("AIOPS_SERVICE_HOST", "AIOPS_SERVICE_PORT_AIOPS", "AIOPS_PORT_7171_TCP_ADDR"),
        *("AIOPS_SERVER_SERVICE_HOST", "AIOPS_TEST_NESTED", "_AIOPS_COMPLETE", "AIOPSX"),
    ],
)
def test_what_others_set_is_not_told(name: str) -> None:
    """Kubernetes, for a service whose name begins with aiops; a shell; the tests."""
    assert list(unknown_variables({name: "1"})) == []
