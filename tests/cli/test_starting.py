"""What a server's process does before it imports its modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from aiops.cli.starting import state_folder
from tests.rows import each_row

CODE = """
import gc, sys
from aiops.cli import starting
starting.begin()
print(gc.isenabled(), "numpy" in sys.modules, "asyncio" in sys.modules)
starting.end()
print(gc.isenabled(), gc.get_freeze_count() > 0)
"""


@each_row(
    ("arguments", "environment", "found"),
    [
        (["--policy", "fasgd"], {}, None),
        (["--state", "one"], {}, "one"),
        (["--state=one"], {"AIOPS_STATE": "two"}, "one"),
        (["--port=0", "--state", "one", "--state=three"], {}, "three"),
        (["--state"], {}, None),
        (["--state-folder=x"], {"AIOPS_STATE": "two"}, "two"),
    ],
)
def test_the_folder(arguments: list[str], environment: dict[str, str], found: str | None) -> None:
    assert state_folder(arguments, environment) == (None if found is None else Path(found))


def test_it_imports_next_to_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-c", CODE, "--state", str(tmp_path)]
    made = subprocess.run(words, capture_output=True, text=True, check=False)
    assert made.stdout.splitlines() == ["False False False", "True True"], made.stderr
