"""The command line: what each subcommand prints, and how it ends."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

import aiops
from aiops.algorithms import BUILT_IN
from aiops.cli import main
from aiops.cli.policy_catalog import TOPICS
from aiops.cli.stats import tables
from aiops.compiled import exchange_type
from aiops.serving.safetensors_io import read_model
from aiops.state.directory import journal_name
from tests.support import Process, ServerThread

START = {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "b": np.zeros(4, np.float32)}


@dataclass(frozen=True)
class Done:
    """The end of a command: its exit status and output."""

    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Its error: one line on stderr, and an exit status of sysexits."""
        assert 64 <= self.status <= 78, self
        assert self.out == ""
        assert self.err.startswith("aiops: ")
        assert self.err.count("\n") == 1
        return self.err.strip()


@pytest.fixture
def aiops_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command line inside this process, as if from a shell without a terminal."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["aiops", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.main()
        said = capsys.readouterr()
        status = ended.value.code or 0
        assert isinstance(status, int)
        return Done(status, said.out, said.err)

    return run


def train(server: ServerThread, steps: int = 5) -> None:
    with aiops.Worker(server.url, START, name="worker-1") as worker:
        for _ in range(steps):
            worker.step({name: 0.1 * array for name, array in worker.params.items()})


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with ServerThread(policy="fasgd", kernels="numpy") as running:
        train(running)
        yield running


class TestAsAWhole:
    def test_version(self, aiops_command: Any) -> None:
        compiled = "no" if exchange_type() is None else "yes"
        printed = f"aiops {aiops.__version__}\ncompiled exchange: {compiled}\n"
        assert aiops_command("--version") == Done(0, printed, "")

    def test_help_lists_every_command(self, aiops_command: Any) -> None:
        done = aiops_command("--help")
        assert done.status == 0
        for command in main.COMMANDS:
            assert f" {command} " in done.out
        assert "..." not in done.out.partition("Commands:")[2], "a summary is too long for a line"

    def test_help_imports_no_command(self) -> None:
        """It takes a fifth of a second, and the commands' modules over half a second."""
        code = "import sys; from aiops.cli.main import main; sys.argv = ['aiops', '--help']\n"
        code += "try: main()\nexcept SystemExit: print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        loaded = done.stdout.split()
        assert "typer" in loaded
        assert not {"numpy", "rich", "aiops.cli.serve", "aiops.algorithms"} & set(loaded)

    @pytest.mark.parametrize("command", main.COMMANDS)
    def test_every_command_has_help(self, command: str, aiops_command: Any) -> None:
        done = aiops_command(command, "--help")
        assert done.status == 0
        assert "Usage:" in done.out

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["sevre"], "'sevre'"),
            (["stats", "--wach", "aiops://host"], "--wach"),
            (["demo", "--workers", "some"], "--workers"),
        ],
    )
    def test_a_slip_is_one_line(self, arguments: list[str], says: str, aiops_command: Any) -> None:
        assert says in aiops_command(*arguments).error


class TestCompletion:
    """What a shell is given to complete a word of a command line."""

    @pytest.mark.parametrize(
        ("words", "offered"),
        [
            ("aiops sta", ["stats", "state"]),
            ("aiops stats --wa", ["--watch"]),
            ("aiops serve --polic", ["--policy"]),
            ("aiops serve --policy fas", ["fasgd"]),
        ],
    )
    def test_of_a_word(
        self, words: str, offered: list[str], aiops_command: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("_AIOPS_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        done = aiops_command()
        assert (done.status, done.out.split(), done.err) == (0, offered, "")


class TestPolicies:
    def test_lists_all_with_one_line_each(self, aiops_command: Any) -> None:
        done = aiops_command("policies")
        lines = [line for line in done.out.splitlines() if line.startswith("  ")]
        assert sorted(line.split()[0] for line in lines) == sorted(BUILT_IN)
        assert all(line.endswith(".") for line in lines)
        assert len({len(line) - len(line[2:].split(maxsplit=1)[1]) for line in lines}) == 1

    def test_lists_them_by_family(self, aiops_command: Any) -> None:
        lines = aiops_command("policies").out.splitlines()
        headings = [line for line in lines if line and not line.startswith((" ", "aiops"))]
        assert headings[0] == "Synchronous or bounded"
        assert lines.index("Staleness-aware") < next(n for n, x in enumerate(lines) if "fasgd" in x)

    def test_shows_one(self, aiops_command: Any) -> None:
        out = aiops_command("policies", "fasgd").out
        assert "θ ← θ − α / (v · max(τ, 1)) · g" in out
        assert "Odena, Faster Asynchronous SGD, eqs 4-8" in out
        assert "algorithms/fasgd.py" in out
        table = [line.split() for line in out.splitlines()]
        assert ["lr", "0.005", "float", "Learning", "rate"] in [row[:5] for row in table]
        assert ["gamma", "0.95", "float", "γ,"] in [row[:4] for row in table]
        assert ["clip", "0.0", "float", "Scale"] in [row[:4] for row in table]
        assert "``" not in out
        assert ".. math" not in out

    @pytest.mark.parametrize("name", [*sorted(BUILT_IN), *TOPICS])
    def test_every_page_fits_80_columns(self, name: str, aiops_command: Any) -> None:
        done = aiops_command("policies", name)
        assert done.status == 0
        lines = [line for line in done.out.splitlines() if not line.startswith("Code ")]
        assert max(map(cell_len, lines)) <= 80  # the accents of m̂ take no column

    def test_what_many_share(self, aiops_command: Any) -> None:
        assert "(1+τ)^(−a)" in aiops_command("policies", "modulations").out
        assert "adamw" in aiops_command("policies", "optimizers").out
        assert "cosine:N[:F]" in aiops_command("policies", "schedules").out
        rows = json.loads(aiops_command("policies", "modulations", "--json").out)["rows"]
        assert rows[0] == {"name": "none", "s(τ)": "1", "source": "Downpour SGD, Dean et al. 2012"}

    def test_json(self, aiops_command: Any) -> None:
        listed = json.loads(aiops_command("policies", "--json").out)
        assert [row["name"] for row in listed] == sorted(BUILT_IN)
        assert {"family", "summary", "class", "built_in"} < set(listed[0])
        found = json.loads(aiops_command("policies", "diloco", "--json").out)
        settings = {setting["name"]: setting for setting in found["settings"]}
        assert settings["local_steps"]["default"] == 20
        assert settings["overlap"]["type"] == "bool"
        assert settings["beta1"]["group"] == "The server's optimiser"
        assert len(found["equations"]) == 1
        assert "Streaming DiLoCo" in found["source"]

    def test_a_package_that_is_broken_does_not_hide_the_others(
        self, aiops_command: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Point:
            name, value = "theirs", "nowhere.at_all:Thing"

        monkeypatch.setattr("aiops.algorithms.metadata.entry_points", lambda group: [Point])
        out = aiops_command("policies").out
        assert re.search("theirs +cannot be loaded: policy 'theirs': there is no module", out)
        assert "fasgd" in out
        assert "'nowhere.at_all'" in aiops_command("policies", "theirs").error

    def test_says_that_a_barrier_needs_the_number_of_workers(self, aiops_command: Any) -> None:
        assert "--policy hardsync --workers N" in aiops_command("policies", "hardsync").out

    def test_an_unknown_one_gets_the_nearest(self, aiops_command: Any) -> None:
        assert "did you mean 'fasgd'?" in aiops_command("policies", "fagsd").error
        assert "did you mean 'schedules'?" in aiops_command("policies", "schedule").error

    def test_one_of_the_current_folder(
        self, aiops_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "mine_for_this_test.py").write_text(
            "from aiops.algorithms.asgd import ASGD\n"
            "class Mine(ASGD):\n    '''My own.'''\n    name = 'mine'\n"
        )
        monkeypatch.chdir(tmp_path)
        assert "My own." in aiops_command("policies", "mine_for_this_test:Mine").out


class TestPing:
    def test_one_line(self, server: ServerThread, aiops_command: Any) -> None:
        done = aiops_command("ping", server.url)
        assert done.status == 0
        assert done.out.startswith(f"{server.url} is alive: fasgd, version 5, 0 workers, answered")
        assert done.out.count("\n") == 1

    def test_a_dead_one(self, aiops_command: Any) -> None:
        with ServerThread() as running:
            url = running.url
        assert url in aiops_command("ping", url, "--timeout", "0.1").error

    def test_what_is_no_address(self, aiops_command: Any) -> None:
        assert "aiops://host:port" in aiops_command("ping", "http://localhost").error

    def test_with_a_token(self, aiops_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        with ServerThread(token="secret") as running:
            assert "token" in aiops_command("ping", running.url).error
            assert "is alive" in aiops_command("ping", running.url, "--token", "secret").out
            monkeypatch.setenv("AIOPS_TOKEN", "secret")
            assert "is alive" in aiops_command("ping", running.url).out


class TestStats:
    def test_tables(self, server: ServerThread, aiops_command: Any) -> None:
        done = aiops_command("stats", server.url)
        assert (done.status, done.err) == (0, "")
        for text in (server.url, "fasgd", "lr=0.005", "version", "staleness", "100.0%"):
            assert text in done.out
        worker = next(line for line in done.out.splitlines() if "worker-1" in line)
        assert worker.split()[1:4] == ["gone", "5", "0"]
        assert "…" not in done.out

    def test_settings_of_some_tensors(self, aiops_command: Any) -> None:
        given = {"weight_decay": [0.5, "0@*bias"], "lr": ["0.25@w", 0.125]}
        with ServerThread(policy="asgd", set=given) as running:
            shown = "asgd  lr=0.125, weight_decay=0.5, weight_decay=0@*bias, lr=0.25@w"
            assert shown in " ".join(aiops_command("stats", running.url).out.split("\n"))
            report = json.loads(aiops_command("stats", running.url, "--json").out)
            assert report["settings"]["per_tensor"] == "weight_decay=0@*bias lr=0.25@w"

    def test_warnings(self, aiops_command: Any, caplog: pytest.LogCaptureFixture) -> None:
        """They are in the log as soon as the server listens, too."""
        with ServerThread(policy="fasgd", push_codec=("topk:0.01",)) as server:
            out = aiops_command("stats", server.url).out
        assert "fasgd divides by second moments, and topk" in " ".join(out.split())
        assert "fasgd divides by second moments, and topk" in caplog.text

    def test_where_a_schedule_of_examples_is(self, aiops_command: Any) -> None:
        given = {"schedule_unit": "examples", "mini_batch": 500, "schedule_start": 7000}
        with ServerThread(policy="asgd", set=given) as running:
            with aiops.Worker(running.url, {"w": np.zeros(1)}) as worker:
                for _ in range(4):
                    worker.step({"w": np.ones(1)})
            words = aiops_command("stats", running.url).out.split()
            assert words[words.index("schedule's") :][:3] == ["schedule's", "examples", "8,999"]

    def test_a_rate_that_has_risen(self, aiops_command: Any) -> None:
        with ServerThread(policy="schedule-free") as running:
            with aiops.Worker(running.url, {"w": np.zeros(3)}) as worker:
                for _ in range(37):
                    worker.step({"w": np.ones(3)})
            words = aiops_command("stats", running.url).out.split()
            assert words[words.index("learning") :][:3] == ["learning", "rate", "×2.09"]

    def test_before_there_is_a_model(self, aiops_command: Any) -> None:
        with ServerThread() as running:
            assert "version" in aiops_command("stats", running.url).out

    def test_json(self, server: ServerThread, aiops_command: Any) -> None:
        report = json.loads(aiops_command("stats", server.url, "--json").out)
        assert (report["policy"], report["version"], report["gradients"]) == ("fasgd", 5, 5)

    def test_many_clients_and_a_long_tail_fit_a_screen(self, server: ServerThread) -> None:
        report = server.call(lambda running: running.engine.report())
        report["workers"] = [{**report["workers"][0], "worker": n} for n in range(5000)]
        report["staleness"] = {str(tau): 5000 - tau for tau in range(5000)}
        console = Console(width=100)
        with console.capture() as captured:
            console.print(tables("aiops://host", report))
        assert "and 4,960 more" in captured.get()
        assert len(captured.get().splitlines()) < 80

    @pytest.mark.slow
    def test_watch_until_the_server_is_gone(self) -> None:
        with ServerThread() as running:
            watching = Process("-m", "aiops", "stats", running.url, "--watch", "--timeout", "0.5")
            try:
                assert "schedule-free  version 0" in watching.line()
                assert "schedule-free  version 0" in watching.line()
            except BaseException:
                watching.kill()
                raise
        status, _out, err = watching.end()
        assert status == 0
        assert err.startswith("the server is gone")
        assert err.count("\n") == 1

    @pytest.mark.slow
    def test_watch_until_interrupted(self, server: ServerThread) -> None:
        watching = Process("-m", "aiops", "stats", server.url, "--watch", "--json")
        try:
            assert json.loads(watching.line())["version"] == 5
            watching.signal(signal.SIGINT)
            status, _out, err = watching.end()
            assert (status, err) == (0, "")
        finally:
            watching.kill()


class TestReplay:
    @pytest.fixture
    def journal(self, tmp_path: Path) -> Path:
        path = tmp_path / "run.journal"
        saved = tmp_path / "live.safetensors"
        with ServerThread(policy="sasgd", record=path, save=saved) as running:
            train(running)
        return path

    def test_says_what_it_ended_with(self, journal: Path, aiops_command: Any) -> None:
        done = aiops_command("replay", str(journal))
        assert (done.status, done.err) == (0, "")
        rows = {line.split()[0]: line.split()[1] for line in done.out.splitlines()}
        live = read_model(journal.with_name("live.safetensors"))
        assert rows["policy"] == "sasgd"
        assert rows["version"] == "5"
        assert int(rows["events"]) >= 12
        data = b"".join(live[name].tobytes() for name in START)
        assert rows["sha256"] == hashlib.sha256(data).hexdigest()
        assert "cut short" not in done.out
        assert "damaged" not in done.out

    @pytest.mark.parametrize("kernels", ["numba", "numpy"])
    def test_saves_and_speaks_json(self, kernels: str, journal: Path, aiops_command: Any) -> None:
        model = journal.with_name("again.safetensors")
        flags = ("--json", "--kernels", kernels, "--save", str(model))
        found = json.loads(aiops_command("replay", str(journal), *flags).out)
        assert found["complete"] is True
        assert (found["version"], found["kernels"]) == (5, kernels)
        assert found["saved"] == str(model)
        live = read_model(journal.with_name("live.safetensors"))
        for name, array in read_model(model).items():
            np.testing.assert_array_equal(array, live[name])

    def test_a_record_cut_short_says_so(self, journal: Path, aiops_command: Any) -> None:
        segment = journal / journal_name(1)
        segment.write_bytes(segment.read_bytes().rstrip(b"\0")[:-20])
        done = aiops_command("replay", str(journal))
        assert done.status == 0
        assert "cut short" in done.out

    def test_rows_before_damage_are_replayed(self, journal: Path, aiops_command: Any) -> None:
        segment = journal / journal_name(1)
        data = bytearray(segment.read_bytes())
        data[data.index(START["w"].tobytes()) + 3] ^= 0x01
        segment.write_bytes(data)
        done = aiops_command("replay", str(journal))
        assert done.status == 1
        assert "which had been synced" in done.out
        assert "version   0" in done.out

    def test_what_is_no_journal(self, tmp_path: Path, aiops_command: Any) -> None:
        (tmp_path / "other").write_text("no journal")
        said = aiops_command("replay", str(tmp_path / "other")).error
        assert "is a file, and a record is a folder" in said
        assert "No such file" in aiops_command("replay", str(tmp_path / "none")).error
        assert "did you mean 'numba'" in aiops_command("replay", "x", "--kernels", "nmba").error

    def test_nothing_to_save(self, tmp_path: Path, aiops_command: Any) -> None:
        path = tmp_path / "run.journal"
        with ServerThread(record=path):
            pass
        assert aiops_command("replay", str(path)).status == 0
        save = ("--save", str(tmp_path / "m.safetensors"))
        assert "no model was defined" in aiops_command("replay", str(path), *save).error


class TestBench:
    def test_flags_are_the_benchmarks_own(self, aiops_command: Any) -> None:
        done = aiops_command("bench", "kernels", "--help")
        assert done.status == 0
        assert "--repeats" in done.out

    def test_runs_it(self, aiops_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        import benchmarks.kernels

        given: list[list[str]] = []
        monkeypatch.setattr(benchmarks.kernels, "main", given.append)
        assert aiops_command("bench", "kernels", "--size", "9", "more").status == 0
        assert given == [["--size", "9", "more"]]

    def test_is_offered_in_a_checkout_alone(
        self, aiops_command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        assert " bench " in aiops_command("--help").out
        monkeypatch.setattr(main, "__file__", str(tmp_path / "aiops" / "cli" / "main.py"))
        assert " bench " not in aiops_command("--help").out

    def test_without_a_checkout(self, aiops_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "benchmarks", None)
        assert "come with the repository" in aiops_command("bench", "exchange").error


class TestDemoRefuses:
    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            (["--policy", "fagsd"], "did you mean 'fasgd'?"),
            (["--dataset", "digit"], "did you mean 'digits'?"),
            (["--workers", "0"], "--workers must be 1 to 64, not 0"),
            (["--steps", "3"], "--steps must be 4 to"),
            (["--batch-size", "0"], "--batch-size must be"),
            (["--seed", "-1"], "--seed must be"),
            (["--lr", "0"], "lr must be a positive learning rate"),
            (["--set", "gama=0.9"], "did you mean 'gamma'?"),
            (["--set", "gamma"], "write key=value"),
            (["--policy", "softsync", "--set", "n=9"], "n = 9 groups"),
            (["--out", "plot.txt"], "a .png, .svg or .pdf"),
        ],
    )
    def test_before_anything_is_started(
        self, flags: list[str], says: str, aiops_command: Any
    ) -> None:
        assert says in aiops_command("demo", *flags).error
