"""Generated files and their machine code on disk."""

from __future__ import annotations

import linecache
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from aiops.kernels import Spans, build, cache, numba_kernel
from tests.kernels.rules import FASGD, SGD

ROOT = Path(__file__).parents[2]
TEXT = "def update(x):\n    raise ValueError(x)\n"
PROCESS = """
import numpy as np
from aiops.kernels import Spans, build
from tests.kernels.rules import SGD
kernel = build(SGD, np.float32, "numba")
base, grad, target = (np.linspace(-1, 1, 1000, dtype=np.float32) for _ in range(3))
sums = kernel(Spans.whole(1000, 0.1), 1.0, base, grad, target, [])
print(sums[0], target.tobytes().hex()[:64], sum(kernel._update.stats.cache_hits.values()))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "aiops" / "kernels"


def test_the_folder_follows_the_environment(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.folder() == home
    assert home.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in ("", "relative/is/ignored"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache.folder() == tmp_path / ".cache" / "aiops" / "kernels"


def test_a_folder_that_others_may_write_to_is_not_trusted(home: Path) -> None:
    cache.folder()
    home.chmod(0o777)
    assert cache.folder() is None


def test_a_module_is_written_once_and_what_runs_is_the_given_text(home: Path) -> None:
    module, on_disk = cache.load("once", TEXT)
    assert on_disk
    path = home / "once.py"
    assert module.__file__ == str(path)
    assert path.read_text() == TEXT
    os.utime(path, (1, 1))
    cache.load("once", TEXT)
    assert path.stat().st_mtime == 1  # Numba's cache goes by it
    path.write_text("def update(x):\n    return 'not ours'\n")
    module, _ = cache.load("once", TEXT)
    with pytest.raises(ValueError, match="seen"):
        module.update("seen")
    assert path.read_text() == TEXT
    assert [file.name for file in home.iterdir()] == ["once.py"]


def test_losing_a_race_keeps_the_winners_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = Path.exists

    def another_process_is_quicker(path: Path) -> bool:
        if path.name == "race.py" and not exists(path):
            path.write_text(TEXT)
            os.utime(path, (1, 1))
            return False
        return exists(path)

    monkeypatch.setattr(Path, "exists", another_process_is_quicker)
    _, on_disk = cache.load("race", TEXT)
    assert on_disk
    assert (home / "race.py").stat().st_mtime == 1


def test_without_hard_links_the_file_is_moved(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError("operation not supported")

    monkeypatch.setattr(os, "link", unsupported)
    assert cache.load("moved", TEXT)[1]
    assert (home / "moved.py").read_text() == TEXT


def test_without_a_folder_the_text_runs_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    module, on_disk = cache.load("memory", TEXT)
    assert not on_disk
    assert module.__file__ == "<aiops kernel memory>"
    assert linecache.getline("<aiops kernel memory>", 2) == "    raise ValueError(x)\n"


@pytest.mark.slow
def test_a_kernel_compiled_in_memory_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    kernel = build(SGD, np.float32, "numba")
    monkeypatch.setattr(numba_kernel, "_compile", numba_kernel._compile.__wrapped__)
    w = np.ones(3, np.float32)
    kernel(Spans.whole(3, 0.5), 1.0, w, np.ones(3, np.float32), w, [])
    assert w.tolist() == [0.5] * 3


def test_the_identity_covers_the_rule_and_the_dtype() -> None:
    texts = [build(rule, d, "numba").text for rule in (SGD, FASGD) for d in ("f4", "f8")]
    assert len({numba_kernel._identity(text) for text in texts}) == 4
    assert numba_kernel._identity(texts[0]) == numba_kernel._identity(texts[0])


@pytest.mark.slow
def test_processes_share_what_one_compiled(home: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("NUMBA_CACHE_DIR", None)

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    racing = [start(), start()]
    found = [process.communicate()[0].split() for process in racing]
    assert [process.returncode for process in racing] == [0, 0]
    assert found[0][:2] == found[1][:2]
    files = [file.name for file in home.iterdir() if file.is_file()]
    assert len(files) == 1
    assert files[0].startswith("sgd_")
    later = start()
    *result, hits = later.communicate()[0].split()
    assert result == found[0][:2]
    assert hits == "1"
