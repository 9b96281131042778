"""A plugin of pytest: the compiled code is the library that ``make sanitize`` has built."""

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
