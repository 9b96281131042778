"""Every Python block of the documentation runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from aiops.algorithms import find
from aiops.serving.config import Config, read_file
from tests.support import ServerThread

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]
FILES = [
    pytest.param(text, id=f"{page.name}-{number}")
    for page in PAGES
    for number, text in enumerate(re.findall(r"```toml\n(policy.*?)```", page.read_text(), re.S))
]
NEEDS_A_MODEL = ("AsyncClient", "aiops.Client(")  # watching starts when there is something to watch


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(
    block: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import aiops
    from aiops.lab.workloads import MLP

    monkeypatch.chdir(tmp_path)  # some write files
    policy = "average" if "ModelAverager" in block else "fasgd"
    with ServerThread(policy=policy) as server:
        monkeypatch.setenv("AIOPS_URL", server.url)  # as `aiops run` does
        if any(word in block for word in NEEDS_A_MODEL):
            with aiops.Client(server.url, role="worker") as client:
                client.define(MLP((64, 32, 10)).init(seed=0))
        exec(block.replace("aiops://127.0.0.1:7171", server.url), {"__name__": "block"})
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("text", FILES)
def test_file_of_settings_is_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(text)
    config = Config(**read_file(path), token="secret")
    assert find(config.policy).make(config.settings())


def test_the_extras_that_are_named_can_be_installed() -> None:
    """In commands of the pages and files, and in what the program says to do."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = set(project["optional-dependencies"])
    files = [*PAGES, ROOT / "Makefile", ROOT / "deploy" / "Dockerfile"]
    files += [file for room in ("aiops", "benchmarks", "examples") for file in _python(room)]
    named: dict[str, set[str]] = {}
    for file in files:
        for extras in re.findall(r"(?:aiops-ps|'\.)\[([\w,]+)\]", file.read_text()):
            for extra in extras.split(","):
                named.setdefault(extra, set()).add(file.name)
    assert {"server", "torch", "ray", "cuda12"} <= named.keys()
    assert not {extra: found for extra, found in named.items() if extra not in known}


def _python(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
