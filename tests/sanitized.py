"""The compiled code is the library that ``make sanitize`` has built.

As a plugin of pytest (``-p tests.sanitized``), or for a command: ``python -m tests.sanitized
torture frames --only steady --jobs 1``. Jobs in processes of their own have the usual library.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

NAME = "aiops.compiled._core"
LIBRARY = Path(__file__).parents[1] / "build" / "sanitized" / "_core.abi3.so"

spec = importlib.util.spec_from_file_location(NAME, LIBRARY)
assert spec is not None
assert spec.loader is not None
sys.modules[NAME] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[NAME])


def pytest_report_header() -> str:
    return f"compiled code: {sys.modules[NAME].__file__}"


if __name__ == "__main__":
    from aiops.__main__ import main

    main()
