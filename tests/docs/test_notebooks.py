"""Every notebook runs from its first cell to its last, as Jupyter would run it."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))

SHORTER = {"SECONDS = 8.0": "SECONDS = 0.5", "track_every=1.0": "track_every=0.05"}


def cells(path: Path) -> list[str]:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["nbformat"] == 4
    for cell in found["cells"]:
        assert cell["cell_type"] == "markdown" or not (cell["outputs"] or cell["execution_count"])
    return ["".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == "code"]


async def executed(sources: list[str], names: dict[str, Any]) -> None:
    """Run cells one after another in one loop; they may await."""
    for source in sources:
        made = compile(source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        found = eval(made, names)
        if inspect.isawaitable(found):
            await found


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib").use("agg")
    sources = cells(path)
    for long, short in SHORTER.items():
        assert any(long in source for source in sources)
        sources = [source.replace(long, short) for source in sources]
    names: dict[str, Any] = {"__name__": "notebook"}
    asyncio.run(executed(sources, names))
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2
    assert all("accuracy" in line for line in told)
    assert len(names["axes"].lines) == 2
    assert all(names[run][-1].step > 0 for run in ("free", "barrier"))
