"""Every Python block of the documentation runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import ServerThread

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]
NEEDS_A_MODEL = "AsyncClient"  # watching starts when there is something to watch


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    import aiops

    with ServerThread(policy="fasgd") as server:
        if NEEDS_A_MODEL in block:
            with aiops.Client(server.url, role="worker") as client:
                client.define({"w": np.zeros(3, np.float32)})
        exec(block.replace("aiops://127.0.0.1:7171", server.url), {"__name__": "block"})
        assert "Traceback" not in capsys.readouterr().err


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
