"""Without an extra: what the core of two packages does, and what is printed for the rest."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from aiops import __version__
from aiops.compiled import exchange_type

ROOT = Path(__file__).parents[2]

HIDE = """
import runpy, sys
allowed = {*sys.stdlib_module_names, "numpy", "msgpack", "aiops"}
class Hidden:  # all other packages, as in an environment that does not have them
    def find_spec(self, name, path=None, target=None):
        if path is None and name not in allowed:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""

TOUR = """
import asyncio
import aiops
assert "numpy" not in sys.modules, "import aiops costs next to nothing"
import numpy as np
import aiops.client, aiops.data, aiops.testing
from aiops.client import ModelAverager, AsyncModelAverager
from aiops.lab.workloads import MLP, load
from aiops.algorithms import find

async def main():
    async with aiops.serve(port=0, kernels="numpy", set={"lr": 0.1}, policy="asgd") as server:
        def blocking():
            with aiops.Worker(server.url, {"w": np.ones(8, np.float32)}) as worker:
                worker.step({"w": np.ones(8, np.float32)})
            with aiops.Client(server.url) as observer:
                return observer.fetch()["w"][0], observer.stats()["version"]
        first, version = await asyncio.to_thread(blocking)
        async with aiops.AsyncWorker(server.url, {"w": np.ones(8, np.float32)}) as worker:
            await worker.step({"w": np.ones(8, np.float32)})
        print(version, round(float(first), 3), round(float(worker.params["w"][0]), 3))
asyncio.run(main())
"""


def bare(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter of its own that has the core's packages alone."""
    words = [sys.executable, "-c", HIDE + code, *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)


def run_module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"sys.argv[0] = 'aiops'\nrunpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return bare(code, *arguments)


def test_the_core_is_two_packages() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {text.partition(">")[0] for text in project["dependencies"]}
    assert names == {"numpy", "msgpack"}


def test_the_page_names_every_extra_with_its_packages() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "install.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall("`([^`]+)`", row[1])}
    assert listed == set(project["optional-dependencies"])
    for row in rows:
        for extra in re.findall("`([^`]+)`", row[1]):
            wanted = project["optional-dependencies"][extra]
            for package in () if extra in ("dev", "cuda12", "cuda13") else wanted:
                name = re.split(r"[>;\[]", package)[0]
                named = row[2] + row[3]
                for each in re.findall(r"[\w-]+", package.partition("[")[2].partition("]")[0]):
                    assert name != "aiops-ps" or f"`{each}`" in named, f"{extra}: {each}"
                assert name == "aiops-ps" or name in named, f"{extra}: {name}"


def test_clients_and_an_embedded_server_need_the_core_alone() -> None:
    done = bare(TOUR)
    assert done.stdout.splitlines() == ["1 0.9 0.8"], done.stderr


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("aiops", ("--help",), "cli"),
        ("aiops", ("serve", "--port", "0"), "server"),
        ("aiops.server", (), "server"),
    ],
)
def test_the_command_line_names_its_extra(
    module: str, arguments: tuple[str, ...], extra: str
) -> None:
    done = run_module(module, *arguments)
    assert done.returncode == 69
    assert done.stdout == ""
    assert done.stderr == (
        "aiops: the command line needs the package 'typer', which is not here:"
        f" pip install 'aiops-ps[{extra}]'\n"
    )


@pytest.mark.parametrize("module", ["aiops", "aiops.server"])
def test_the_version_needs_no_extra(module: str) -> None:
    done = run_module(module, "--version")
    compiled = "no" if exchange_type() is None else "yes"
    printed = f"aiops {__version__}\ncompiled exchange: {compiled}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


def test_a_module_that_is_nowhere_is_no_missing_extra() -> None:
    done = bare("from aiops.cli.extras import missing_package_named as n\nwith n(): import nowhere")
    assert done.returncode == 1
    assert "No module named 'nowhere'" in done.stderr
