"""Compiled code: its build, its absence, and the constants that it shares with Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aiops import compiled
from aiops.client import coded_answer, steady, steady_increments
from aiops.client.sync import shard_socket
from aiops.codecs import whole_gradient
from aiops.engine.staleness import _MEMORY, EXACT
from aiops.kernels.interface import STATISTIC_SCALE
from aiops.model.parts import LARGEST
from aiops.store.finite_guard import LIMIT
from aiops.wire.messages import REMEMBERED

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "aiops" / "compiled").glob("*.[ch]"))
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in FILES)


def test_without_it_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiops.compiled._core", None)
    assert compiled.exchange_type({}) is None


def test_what_has_no_digest_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of this name would be a package."""
    monkeypatch.setitem(sys.modules, "aiops.compiled._core", ModuleType("_core"))
    assert compiled.exchange_type({}) is None


def test_one_of_another_source_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout keeps the library when its source becomes another."""
    if compiled.exchange_type({}) is None:
        pytest.skip("there is no library")
    monkeypatch.setattr("aiops.compiled.loading._digest", lambda: "another")
    assert compiled.exchange_type({}) is None


def test_a_checkout_has_that_of_its_sources() -> None:
    """Else every test of compiled code would be left out: ``python hatch_build.py`` makes it."""
    library = ROOT / "aiops" / "compiled" / "_core.abi3.so"
    if library.exists():
        assert compiled.exchange_type({}) is not None


def test_one_that_a_later_python_has_built_fits_an_earlier_one() -> None:
    """3.13's headers have functions of these macros, whatever version of the ABI is asked for."""
    assert not re.search(r"(?<!`)PyObject_DelAttr(String)?\b", SOURCE)


def test_the_variable_turns_it_off() -> None:
    assert compiled.exchange_type({compiled.COMPILED: "0"}) is None
    there = compiled.exchange_type({}) is not None
    assert (compiled.exchange_type({compiled.COMPILED: "1"}) is not None) == there


def test_its_constants_are_pythons() -> None:
    defined = dict(re.findall(r"#define (\w+) +(.+?) +/\*", SOURCE))
    known = {
        "LARGEST": LARGEST,
        "VIEWS": steady._VIEWS,
        "RECEIVE": shard_socket.RECEIVE,
        "NUMBERS": len(steady._PUSH),
        "VERSIONS": len(steady._ACK) - 1,
        "REMEMBERED": REMEMBERED,
        "EXACT": EXACT,
        "MEMORY": _MEMORY,
        "LIMIT": LIMIT,
        "SCALE": STATISTIC_SCALE,
        "SLOTS": len(steady._ACK) + len(steady._STATISTICS),
        "AGE": len(coded_answer._BEFORE),
        "ACKS": steady_increments.MOST,
        "PARTS": whole_gradient.MOST,
    }
    for name, value in known.items():
        assert eval(defined[name].replace("LL", "")) == value, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_can_be_read_in_an_hour(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


class TestBuild:
    @pytest.fixture
    def hook(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        pytest.importorskip("hatchling")
        monkeypatch.syspath_prepend(str(ROOT))
        import hatch_build

        return hatch_build

    def test_a_library_that_can_be_loaded(self, hook: Any, tmp_path: Path) -> None:
        try:
            library = hook.compile_core(ROOT, tmp_path)
        except hook.CannotCompile as error:
            pytest.skip(str(error))
        assert [library] == list(tmp_path.iterdir())
        code = "import sys; sys.path.insert(0, sys.argv[1]); from _core import Exchange"
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)

    @pytest.mark.parametrize("flags", ["-Ofast", "-ffast-math", "-funsafe-math-optimizations"])
    def test_flags_of_an_environment_leave_the_arithmetic_alone(
        self, hook: Any, tmp_path: Path, flags: str
    ) -> None:
        """With such a flag gcc links what makes a process flush subnormal numbers to zero."""
        try:
            hook.compile_core(ROOT, tmp_path, environment={**os.environ, "CFLAGS": flags})
        except hook.CannotCompile as error:
            pytest.skip(str(error))
        code = "import sys; sys.path.insert(0, sys.argv[1]); import _core"
        code += "; print(float(sys.argv[2]) * 1.0)"
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), "5e-324"], check=True, capture_output=True
        )
        assert done.stdout == b"5e-324\n"

    @pytest.mark.parametrize("command", ["false", "nowhere-at-all"])
    def test_a_compiler_that_fails_leaves_none(
        self, hook: Any, tmp_path: Path, command: str
    ) -> None:
        (tmp_path / "_core.abi3.so").write_bytes(b"of an older source")
        with pytest.raises(hook.CannotCompile, match=command):
            hook.compile_core(ROOT, tmp_path, environment={"CC": command})
        assert list(tmp_path.iterdir()) == []

    def test_without_a_compiler_the_reason_is_told(
        self, hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hook.shutil, "which", lambda name: None)
        with pytest.raises(hook.CannotCompile, match="there is no C compiler"):
            hook.compile_core(ROOT, tmp_path, environment={})
        monkeypatch.setattr(hook.sysconfig, "get_path", lambda name: str(tmp_path))
        with pytest.raises(hook.CannotCompile, match="Python's headers are not in"):
            hook.compile_core(ROOT, tmp_path, environment={})

    def test_a_wheel_without_a_compiler_is_a_plain_one(
        self, hook: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CC", "false")
        monkeypatch.delenv("AIOPS_COMPILED", raising=False)
        warned: list[str] = []

        class App:
            display_warning = staticmethod(warned.append)

        made = hook.CustomBuildHook(str(ROOT), {}, None, None, str(ROOT), "wheel", App())
        data: dict[str, Any] = {"force_include": {}}
        made.initialize("standard", data)
        made.finalize("standard", data, "")
        assert data == {"force_include": {}}
        assert "compiled code is left out: false" in warned[0]
        monkeypatch.setenv("AIOPS_COMPILED", "1")
        with pytest.raises(hook.CannotCompile):
            made.initialize("standard", data)

    @pytest.mark.parametrize(
        ("own", "environment", "found"),
        [
            (("manylinux_2_40_x86_64", "linux_x86_64"), {}, "linux_x86_64"),
            (("musllinux_1_2_aarch64", "linux_aarch64"), {}, "linux_aarch64"),
            (("macosx_15_0_arm64",), {}, "macosx_15_0_arm64"),
            (("macosx_15_0_arm64",), {"MACOSX_DEPLOYMENT_TARGET": "11.0"}, "macosx_11_0_arm64"),
            (("macosx_15_0_arm64",), {"MACOSX_DEPLOYMENT_TARGET": "10.9"}, "macosx_11_0_arm64"),
            (("macosx_15_0_arm64",), {"MACOSX_DEPLOYMENT_TARGET": "14.2"}, "macosx_14_0_arm64"),
            (("macosx_15_0_x86_64",), {"MACOSX_DEPLOYMENT_TARGET": "10.13"}, "macosx_10_13_x86_64"),
            (("macosx_15_0_arm64",), {"ARCHFLAGS": "-arch x86_64"}, "macosx_15_0_x86_64"),
            (
                ("macosx_15_0_arm64",),
                {"MACOSX_DEPLOYMENT_TARGET": "12", "ARCHFLAGS": "-arch arm64 -arch x86_64"},
                "macosx_12_0_universal2",
            ),
        ],
    )
    def test_the_platform_is_that_which_the_compiler_builds_for(
        self,
        hook: Any,
        monkeypatch: pytest.MonkeyPatch,
        own: tuple[str, ...],
        environment: dict[str, str],
        found: str,
    ) -> None:
        monkeypatch.setattr("packaging.tags.platform_tags", lambda: iter(own))
        assert hook.platform_of(environment) == found

    def test_a_mac_s_compiler_is_told_the_processor(
        self, hook: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given = {"CC": "cc", "ARCHFLAGS": "-arch x86_64"}
        assert "-arch" not in hook.compiler(given) or sys.platform == "darwin"
        monkeypatch.setattr(hook.sys, "platform", "darwin")
        command = hook.compiler(given)
        assert command[command.index("-arch") + 1] == "x86_64"


def test_what_tries_a_wheel_tells_whether_compiled_code_carries_exchanges() -> None:
    """It is cibuildwheel's test of each wheel."""
    program = [sys.executable, str(ROOT / ".ci" / "try_compiled.py")]
    settings = {**os.environ, "PYTHONPATH": str(ROOT)}
    settings.pop(compiled.COMPILED, None)
    without = {**settings, compiled.COMPILED: "0"}
    done = subprocess.run(program, env=without, capture_output=True, text=True)
    assert done.returncode == 1
    assert "has no compiled code that can be used" in done.stderr
    if compiled.exchange_type({}) is not None:
        done = subprocess.run(program, env=settings, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("compiled code carries exchanges: ")
