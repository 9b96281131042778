"""The common command line of the benchmarks: files, and a server of one's own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

import aiops
from aiops.lab.figures import Figure, Panel, Series
from aiops.lab.processes import ProcessFailed
from aiops.lab.run_record import machine
from benchmarks import report
from benchmarks.serving import serving
from tests.benchmarks.test_exchange import gone
from tests.rows import each_row


def run(*argv: str, **changes: Any) -> None:
    """Run a benchmark that measures how many sizes it was given."""
    parser = argparse.ArgumentParser("benchmarks.nothing")
    parser.add_argument("--sizes", default="1,2")

    def measure(chosen: dict[str, Any]) -> dict[str, Any]:
        assert list(chosen) == ["sizes"]
        return {"benchmark": "nothing", "machine": machine(["numpy"]), **chosen}

    report.main(
        *(parser, measure, lambda found: report.table("t", ["n"], [[str(found["sizes"])]]), argv),
        **{
            "lists": {"sizes": int},
            "notes": lambda found: ["a note of [1, 2]"],
            "drawn": lambda found: Figure(
                "f", [Panel("p", "x", "y", [Series("l", [1], [[2]])])], 1
            ),
            **changes,
        },
    )


@pytest.mark.slow
def test_a_folder_gets_the_report_the_table_and_the_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "results"
    run("--sizes=3,4", f"--out={folder}")
    assert {path.name for path in folder.iterdir()} == {
        f"nothing.{s}" for s in ("json", "txt", "png")
    }
    found = json.loads((folder / "nothing.json").read_text())
    assert found["sizes"] == [3, 4]
    text = (folder / "nothing.txt").read_text()
    assert "(3, 4)" in text
    assert "a note of [1, 2]" in text
    assert not any(line.endswith(" ") for line in text.splitlines())
    assert "a note of [1, 2]" in capsys.readouterr().out
    assert (folder / "nothing.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_measured_in_shared_memory_has_files_of_its_own(tmp_path: Path) -> None:
    run(f"--out={tmp_path}", drawn=None, near=lambda found: True)
    wanted = {"nothing-same-host.json", "nothing-same-host.txt"}
    assert {path.name for path in tmp_path.iterdir()} == wanted


def test_without_a_figure_there_is_no_plot(tmp_path: Path) -> None:
    run(f"--out={tmp_path}", drawn=None)
    assert {path.name for path in tmp_path.iterdir()} == {"nothing.json", "nothing.txt"}


@each_row(
    ("flags", "says"),
    [
        (["--sizes=one"], "--sizes one: 'one' is no number"),
        (["--plot=x.gif"], "a plot is .png or .svg"),
        (["--out=/dev/null/x"], "is no folder to write to"),
        (["--json=/no/such/place.json"], "there is no folder /no/such"),
    ],
)
def test_a_wrong_option_is_a_sentence_and_status_2(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*flags)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_what_failed_is_told_and_the_status_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(failures=lambda found: ["this did"])
    assert caught.value.code == 1
    assert "failed:\n  this did" in capsys.readouterr().out


def test_an_interrupt_is_told_and_the_status_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(text: str) -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        run(lists={"sizes": interrupt})
    assert caught.value.code == 130
    assert "all processes are ended" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_of_ones_own_is_ended() -> None:
    with serving("asgd", "--no-shm") as (url, pid), aiops.Client(url) as client:
        assert client.stats()["policy"] == "asgd"
        assert not gone(pid)
    assert gone(pid)


@pytest.mark.slow
def test_a_server_that_does_not_start_is_told() -> None:
    with pytest.raises(ProcessFailed, match="before it printed a line"), serving("asdg"):
        pass
