"""Children on a leash: they end when their parent does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import PATIENCE


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules children can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return tmp_path


def write(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(text)
    return name


def run(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_module_runs_as_usual(modules: Path) -> None:
    text = "import sys\nif __name__ == '__main__': print(sys.argv[1:])"
    with run("aiops.net.child_guard", write(modules, "plain", text), "-a", "b") as process:
        assert process.stdout is not None
        assert process.stdout.read() == "['-a', 'b']\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    "busy", ["time.sleep(600)", "while True: pass", "sys.stdout.write('') or input"]
)
def test_it_ends_when_its_parent_does(busy: str, modules: Path) -> None:
    """The pipe closes as it would if the parent were gone."""
    text = f"import sys, time\nprint('here', flush=True)\n{busy}\ntime.sleep(600)"
    with run("aiops.net.child_guard", write(modules, "lasts", text)) as process:
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == "here\n"
            assert process.poll() is None
            process.stdin.close()
            assert process.wait(PATIENCE) == 1
        finally:
            process.kill()


def test_the_word(modules: Path) -> None:
    text = (
        "from aiops.net.child_guard import ChildGuard\nguard = ChildGuard()\n"
        "print('here', flush=True)\n"
    )
    text += "print(guard.wait_for_line(20), flush=True)"
    with run(write(modules, "waits", text)) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "here\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "True\n"
        assert process.wait(PATIENCE) == 0
