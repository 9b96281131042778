"""What ``aiops stats`` prints."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from aiops.cli.stats import tables


def shown(report: Mapping[str, Any]) -> str:
    """Return the text of a server's statistics."""
    out = io.StringIO()
    Console(file=out, width=400).print(tables("URL", report))
    return out.getvalue()
