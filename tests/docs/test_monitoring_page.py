"""docs/guide-monitoring.md has every metric, and what it says about settings and bounds holds."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from aiops.dashboard.board import CHANGED
from aiops.dashboard.series import COARSE
from aiops.metrics.metric import LONGEST, MOST
from aiops.net import http_listener
from aiops.serving.config import Config
from docs._tools.metrics.__main__ import main
from docs._tools.metrics.page import page, table

PATH = Path(__file__).parents[2] / "docs" / "guide-monitoring.md"
PAGE = PATH.read_text(encoding="utf-8")


def test_it_is_up_to_date() -> None:
    assert table() in PAGE
    assert page(PAGE) == PAGE, "run `make docs`"


def test_the_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = PAGE.replace(table(), "")
    assert bare != PAGE
    (tmp_path / "page.md").write_text(bare, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["metrics", str(tmp_path / "page.md")])
    main()
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == PAGE


def test_the_numbers_on_it() -> None:
    assert f"at most {http_listener.CONNECTIONS} connections" in PAGE
    assert f"at most {http_listener.WAITING} of them wait" in PAGE
    size, seconds = http_listener.LONGEST_REQUEST >> 10, f"{http_listener.PATIENCE:g}"
    assert f"a request has {size} KiB and {seconds} s" in PAGE
    assert f"At most {http_listener.STREAMS} pages" in PAGE
    assert f"rows of at most {CHANGED} workers" in PAGE
    assert f"in at most {COARSE} points" in PAGE
    assert f"{MOST} tensors" in PAGE
    assert f"cut to {LONGEST} characters" in PAGE
    assert f"series of their own, {Config().metrics_workers} by default" in PAGE
    assert f"The address, {Config().metrics_host} by default" in PAGE


def test_expressions_name_metrics() -> None:
    """Those of the table of questions; of the process there are prometheus-client's own."""
    known = set(re.findall(r"^\| `(aiops_\w+)`", table(), re.MULTILINE))
    text = PAGE.partition("Some questions")[2].partition("\n## ")[0]
    named = set(re.findall(r"\baiops_\w+", text))
    assert len(named) > 5
    assert {re.sub(r"_(?:bucket|sum|count)$", "", name) for name in named} <= known
