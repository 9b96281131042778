"""All benchmarks in one command: what runs, what is said, and what becomes of a failure."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from aiops.cli import bench
from aiops.errors import UsageError
from benchmarks import report, suite
from benchmarks.suite import ENTRIES, Clock, Entry
from tests.benchmarks.test_exchange import gone
from tests.peers import eventually
from tests.rows import each_row

RESULTS = Path(__file__).parents[2] / "docs" / "results"
COMMANDS = bench.COMMANDS.keys()
NO_BENCHMARKS = {"all", "plot"}


def test_every_benchmark_is_in_it() -> None:
    assert {entry.settings.split()[0] for entry in ENTRIES.values()} == COMMANDS - NO_BENCHMARKS


@each_row("name", [name for name in ENTRIES if (RESULTS / f"{name}.json").exists()])
def test_it_runs_what_the_results_page_documents(name: str) -> None:
    written = re.sub(r"\s+", " ", (RESULTS / "README.md").read_text())
    assert f"`aiops bench {ENTRIES[name].settings} --out docs/results`" in written


@each_row("name", ENTRIES)
@each_row("quick", [False, True])
def test_every_flag_is_one_of_the_benchmarks(
    name: str, quick: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is given with a help flag behind it: argparse reads all of it first."""
    command, *flags = ENTRIES[name].command(quick=quick)
    main = bench._module(command).main
    with pytest.raises(SystemExit) as ended:
        main([*flags, "--out", "x", "--help"])
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_a_look_is_a_look() -> None:
    assert sum(entry.hurried for entry in ENTRIES.values()) <= 285


class TestClock:
    def test_at_first_it_believes_what_it_is_told(self) -> None:
        clock = Clock({"a": 10, "b": 20, "c": 30})
        assert clock.left() == 60
        assert clock.left(gone=4) == 56
        assert clock.left(gone=15) == 50, "what takes longer than expected is nearly over"

    def test_then_it_goes_by_what_has_run(self) -> None:
        clock = Clock({"a": 10, "b": 20, "c": 30})
        clock.done("a", 20, whole=True)
        assert clock.left() == 100
        clock.done("b", 1, whole=False)
        assert clock.left() == 60, "one that failed at once says nothing of the others"
        clock.done("c", 60, whole=True)
        assert clock.left() == 0


def scripts(folder: Path, monkeypatch: pytest.MonkeyPatch, **bodies: str) -> None:
    """Have the suite consist of these programs; each is given its own flags and ``--out``."""
    package = folder / "benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, body in bodies.items():
        (package / f"{name}.py").write_text("import os, pathlib, sys, time\n" + body)
    monkeypatch.setattr(suite, "_ROOT", folder)
    entries = {name: Entry(f"{name} --full", "--hasty", 10.0, 1.0) for name in bodies}
    monkeypatch.setattr(suite, "ENTRIES", entries)


def run(names: list[str], out: Path, quick: bool = False) -> tuple[dict[str, str], str]:
    console = Console(file=io.StringIO(), width=200)
    failed = suite.run(names, out, console, quick=quick)
    assert isinstance(console.file, io.StringIO)
    return failed, console.file.getvalue()


WRITES = "pathlib.Path(sys.argv[-1], 'NAME.txt').write_text(' '.join(sys.argv[1:]))\n"


@pytest.mark.slow
def test_one_that_fails_is_told_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = "print('a', flush=True); print('it broke', file=sys.stderr); sys.exit(3)"
    bodies = {"first": WRITES.replace("NAME", "first"), "second": fails}
    bodies["third"] = WRITES.replace("NAME", "third")
    scripts(tmp_path, monkeypatch, **bodies)
    failed, said = run(list(bodies), tmp_path)
    assert failed == {"second": "exit status 3: a / it broke"}
    assert (tmp_path / "third.txt").read_text() == f"--full --out {tmp_path}"
    lines = said.splitlines()
    assert lines[0] == "1/3 first: first --full"
    assert re.fullmatch(r"1/3 first took .*, about .* left", lines[1])
    assert "2/3 second FAILED after" in said
    assert re.fullmatch(r"3/3 third took [^,]*", lines[-1])
    assert run(["first"], tmp_path, quick=True)[0] == {}
    assert (tmp_path / "first.txt").read_text() == f"--hasty --out {tmp_path}"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_one_that_is_to_be_alone_has_one_core_and_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tells = (
        "print(len(os.sched_getaffinity(0)), os.environ['NUMBA_NUM_THREADS']); sys.stdout.flush()\n"
        "sys.exit(1)"
    )
    scripts(tmp_path, monkeypatch, one=tells)
    monkeypatch.setattr(suite, "ENTRIES", {"one": Entry("one", "", 1.0, 1.0, alone=True)})
    assert run(["one"], tmp_path)[0] == {"one": "exit status 1: 1 1"}


@pytest.mark.slow
@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_one_that_runs(tmp_path: Path, way: signal.Signals) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.suite", "--only", "soak", "--out", str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert running.stderr is not None
    try:
        assert "1/1 soak: soak --minutes 60" in running.stderr.readline()
        child = only(lambda: children(running.pid))
        running.send_signal(way)
        assert running.wait(60) == (130 if way == signal.SIGINT else 143)
    finally:
        running.kill()
        running.wait()
        running.stderr.close()
    eventually(lambda: gone(child), "the benchmark is gone")


def only(found: Callable[[], list[int]]) -> int:
    eventually(lambda: len(found()) == 1, "it has begun")
    return found()[0]


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_which_are_to_run() -> None:
    assert suite._names(None) == list(ENTRIES)
    assert suite._names("kernels, exchange") == ["exchange", "kernels"]
    with pytest.raises(UsageError, match="no benchmark is called 'kernel'; did you mean 'kernels'"):
        suite._names("kernel")


def test_what_cannot_run_here_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lame = replace(ENTRIES["gpu"], missing=lambda: "there is no such GPU")
    monkeypatch.setattr(suite, "ENTRIES", {**ENTRIES, "gpu": lame})
    assert suite._there(["kernels", "gpu"]) == (["kernels"], {"gpu": "there is no such GPU"})


@pytest.mark.parametrize("line", ["--only nothing", "--out /dev/null/x --only kernels"])
def test_a_wrong_command_line_exits_with_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        suite.main(line.split())
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_what_failed_is_told_at_the_end_and_the_status_is_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "ask_for_plots", lambda path: None)
    monkeypatch.setattr(suite, "run", lambda names, *rest, **more: {names[0]: "it broke"})
    with pytest.raises(SystemExit) as ended:
        suite.main(["--only", "link,kernels", "--out", str(tmp_path)])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "1 of 2 benchmarks ran" in printed
    assert printed.endswith("failed:\n  kernels: it broke\n")
