"""The algorithms benchmark: choosing, resuming, the slow line, tables, plots; tiny runs of it."""

from __future__ import annotations

import asyncio
import functools
import json
import time

import numpy as np
import pytest

from aiops import errors
from aiops.algorithms import BUILT_IN
from aiops.lab.workloads import load
from benchmarks import algorithms
from benchmarks.algorithms import cases, command, idle, plots, straggler, tables
from benchmarks.algorithms.cases import AlgorithmCase
from benchmarks.algorithms.link import Proxy, SlowLine, Stopwatch
from benchmarks.algorithms.problem import Bench, Problem
from benchmarks.algorithms.results import AlgorithmResults, fingerprint
from tests.rows import each_row

# ------------------------------------------------------------ what is measured


def test_everything_that_is_measured_is_a_policy_with_settings_it_has():
    found = [*map(AlgorithmCase, cases.policies()), *cases.VARIANTS, *cases.grid([])]
    for case in [*found, *idle.cases(), *straggler.cases()]:
        case.check(workers=4)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert set(BUILT_IN) <= set(names)


def test_a_policy_brings_its_variants_and_a_variant_comes_alone():
    plain, variants = cases.chosen(["asgd"], [])
    assert [case.name for case in plain] == ["asgd"]
    assert "asgd adam" in [case.name for case in variants]
    plain, variants = cases.chosen(["asgd adam"], [])
    assert plain == []
    assert [case.name for case in variants] == ["asgd adam"]


def test_settings_make_a_variant_of_what_is_chosen():
    assert cases.chosen(["asgd"], ["lr=0.5"]) == (
        [],
        [AlgorithmCase("asgd", "lr=0.5", {"lr": "0.5"})],
    )


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(errors.UsageError, match="asgd"):
        cases.chosen(["asdg"], [])


@each_row(
    "flags",
    [["--only=asdg"], ["--parts=speed"], ["--only=asgd", "--set=lr=-1"], ["--dataset=mnits"]],
)
def test_a_wrong_option_ends_with_status_2_before_anything_runs(flags, monkeypatch, capsys):
    monkeypatch.setattr(command, "carry_out", None)
    with pytest.raises(SystemExit) as ended:
        algorithms.main(["--dataset=digits", *flags])
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_what_is_held_out_is_not_trained_on():
    digits = load("digits").flat()
    with Bench(Problem(dataset="digits", validate=True), digits) as bench:
        x = np.load(bench.folder / "x.npy")
        held, labels = bench._test
        assert len(x) + len(held) == len(digits.train_x)
        np.testing.assert_array_equal(np.concatenate((x, held)), digits.train_x)
        assert len(labels) == len(held)
        # ... and an epoch is one of the whole training set, so that runs are of equal length.
        assert bench.steps == 10 * len(digits.train_x) // 32
    assert not bench.folder.exists()


# ------------------------------------------------------------ the file

KEY = {"policy": "asgd", "settings": {"lr": 0.1}, "seed": 0}


def test_a_row_is_found_again_by_its_key_and_code(tmp_path):
    path, task = tmp_path / "results.json", {"dataset": "digits"}
    AlgorithmResults(path, task, "abc").put("runs", KEY, {"accuracy": 0.5})
    again = AlgorithmResults(path, task, "abc")
    assert again.find("runs", KEY) == {**KEY, "accuracy": 0.5, "code": "abc"}
    assert again.find("runs", {**KEY, "seed": 1}) is None
    assert AlgorithmResults(path, task, "abd").find("runs", KEY) is None


def test_a_new_row_takes_the_old_ones_place(tmp_path):
    results = AlgorithmResults(tmp_path / "results.json", {}, "abc")
    for accuracy in (0.5, 0.6):
        for seed in (0, 1):
            results.put("runs", {**KEY, "seed": seed}, {"accuracy": accuracy})
    written = json.loads((tmp_path / "results.json").read_text())
    assert [(row["seed"], row["accuracy"]) for row in written["runs"]] == [(0, 0.6), (1, 0.6)]


def test_another_task_starts_afresh(tmp_path):
    path = tmp_path / "results.json"
    AlgorithmResults(path, {"epochs": 10}, "abc").put("runs", KEY, {"accuracy": 0.5})
    assert AlgorithmResults(path, {"epochs": 5}, "abc")["runs"] == []


def test_the_fingerprint_is_of_code_not_of_words(tmp_path):
    def of(text, name="engine.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return fingerprint(tmp_path)

    first = of('"""A page."""\nlr = 0.1\n')
    assert of('"""Another."""\n\n# and a comment\nlr = 0.1\n') == first
    assert of("lr = 0.2\n") != first
    assert of("lr = 0.1\n") == first
    assert of("anything = 1\n", "lab/demo/run.py") == first


# ------------------------------------------------------------ the slow line


async def test_a_line_passes_every_byte_both_ways_no_faster_than_it_may():
    line, sent = SlowLine(rate=4e6, delay=0.001), bytes(range(256)) * 1024

    async def echo(reader, writer):
        writer.write(await reader.readexactly(len(sent)))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Proxy(f"aiops://127.0.0.1:{port}", line, len(sent)) as proxy:
        host, _, port = proxy.url.removeprefix("aiops://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        began = time.perf_counter()
        writer.write(sent)
        assert await reader.read() == sent
        took = time.perf_counter() - began
        writer.close()
    assert took >= len(sent) / line.rate
    (merge,) = proxy.merges
    assert merge >= len(sent) / line.rate


def test_a_merge_is_from_the_first_byte_up_to_the_last_byte_down():
    merges = []
    watch = Stopwatch(50, SlowLine(rate=100.0, delay=0.5), merges)
    watch.up(50, 11.0)  # set out at 10: half a second for its length, half for the way
    watch.up(50, 11.5)
    watch.down(70, 12.0)
    watch.down(30, 13.0)
    watch.up(10, 20.0)  # a new push; the one before has been answered
    assert merges == [3.0]
    watch.down(10, 21.0)
    watch.close()
    assert merges == [3.0], "ten bytes are no push"


# ------------------------------------------------------------ what is made of it


def row(policy="asgd", seed=0, accuracy=0.97, **changes):
    return {
        "policy": policy,
        "variant": "",
        "settings": {},
        "seed": seed,
        "curve": [[0, 0.1, 2.3], [3200, accuracy, 0.1]],
        "accuracy": accuracy,
        "seconds": 1.0,
        "updates": 100,
        "staleness": 2.0,
        "idle": 0.5,
        "wasted": 0,
        "bytes": 1000,
        "code": "abc",
        **changes,
    }


TASK = {"dataset": "digits", "hidden": 8, "batch_size": 32, "epochs": 2, "workers": 4}
CONTENT = {
    "machine": {},
    "task": TASK,
    "runs": [
        row("sasgd", accuracy=0.95),
        row("asgd", 0, 0.96),
        row("asgd", 1, 0.98),
        row("average", staleness=None),
        row("asgd", variant="adam", settings={"optimizer": "adam"}),
    ],
    "idle": [
        {"policy": "no-delay", "variant": "τ_max 8", "settings": {"tau_max": 8}}
        | {"merge": 3.0, "idle": 0.01, "speed": 0.99},
        {"policy": "hardsync", "variant": "", "settings": {}}
        | {"merge": 3.1, "idle": 0.7, "speed": 0.3},
    ],
    "straggler": [
        {"policy": "hardsync", "healthy": 100.0, "beside": 20.0, "kept": 0.2},
        {"policy": "asgd", "healthy": 100.0, "beside": 99.0, "kept": 0.99},
    ],
}


def cells(table):
    return [list(column.cells) for column in table.columns]


def test_a_policys_seeds_are_one_row_and_variants_come_last():
    columns = cells(tables.of_accuracy(CONTENT["runs"]))
    assert columns[0] == ["asgd", "average", "sasgd", "asgd adam"]
    assert columns[2] == ["2", "1", "1", "1"]
    assert columns[3] == ["97.00%", "97.00%", "95.00%", "97.00%"]
    assert columns[4][0] == "96.00%-98.00%"
    assert columns[5] == ["ok", "ok", "below", "ok"]
    assert columns[8][1] == "-"


def test_stragglers_are_sorted_by_what_is_kept():
    columns = cells(tables.of_straggler(CONTENT["straggler"]))
    assert columns[0] == ["asgd", "hardsync"]
    assert columns[3] == ["99.0%", "20.0%"]


def test_only_parts_that_were_measured_have_tables():
    assert len(list(tables.all_of(CONTENT))) == 3
    assert list(tables.all_of({**CONTENT, "runs": [], "idle": [], "straggler": []})) == []


@pytest.mark.slow
def test_plots_are_drawn_of_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    names = ["results-accuracy.png", "results-idle.png", "results-straggler.png"]
    assert [path.name for path in plots.save(CONTENT, tmp_path / "results")] == names
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert plots.save({**CONTENT, "runs": [], "idle": []}, tmp_path / "one") == [
        tmp_path / "one-straggler.png"
    ]


# ------------------------------------------------------------ real runs
TINY = ["--dataset=digits", "--hidden=8", "--epochs=2", "--workers=2", "--seeds=1"]
CODE = functools.cache(fingerprint)


@pytest.fixture(autouse=True)
def read_once(monkeypatch):
    """Have all of the code be read once for its fingerprint: it takes a second."""
    monkeypatch.setattr(command, "fingerprint", CODE)


@pytest.mark.slow
def test_a_tiny_run_learns_and_is_not_repeated(tmp_path, monkeypatch, capsys):
    flags = [*TINY, "--parts=accuracy", "--only=asgd,diloco", "--variant-seeds=0"]
    flags.append(f"--out={tmp_path}")
    algorithms.main(flags)
    content = json.loads((tmp_path / "algorithms.json").read_text())
    assert [run["policy"] for run in content["runs"]] == ["asgd", "diloco"]
    assert content["task"] == {**TASK, "workers": 2}
    for run in content["runs"]:
        samples = [point[0] for point in run["curve"]]
        assert samples == sorted(samples)
        assert samples[-1] == 2 * len(load("digits").train_x) // 32 * 32
        assert run["accuracy"] == run["curve"][-1][1]
        assert 0 <= run["idle"] <= 1
        assert run["bytes"] > 0
    assert content["runs"][0]["updates"] == samples[-1] // 32
    assert "diloco" in (tmp_path / "algorithms.txt").read_text()
    assert (tmp_path / "algorithms-accuracy.png").exists()
    monkeypatch.setattr("benchmarks.algorithms.accuracy.carry_out", None)  # nothing may run
    algorithms.main(flags)
    assert json.loads((tmp_path / "algorithms.json").read_text())["runs"] == content["runs"]


@pytest.mark.slow
def test_idle_time_and_stragglers_are_measured(tmp_path, monkeypatch):
    for part in (idle, straggler):
        monkeypatch.setattr(part, "SECONDS", 0.6)
        monkeypatch.setattr(part, "WARMUP", 0.2)
    path = tmp_path / "results.json"
    flags = [*TINY, "--parts=idle,straggler", "--only=hardsync", f"--json={path}"]
    algorithms.main(flags)
    content = json.loads(path.read_text())
    (waits,), (lost,) = content["idle"], content["straggler"]
    assert waits["merge"] > 1, "the line alone takes longer than a gradient"
    assert waits["idle"] > 0.5, "hardsync waits for every merge"
    assert lost["kept"] < 0.5, "hardsync waits for the slowest"


@pytest.mark.slow
def test_a_run_that_fails_is_reported_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    async def fail(case, seed, bench):
        if case.policy == "asgd":
            raise command.ProcessFailed("worker-1 ended with status 1", stderr=["a reason"])
        return {key: value for key, value in row(case.policy).items() if key not in KEY}

    monkeypatch.setattr(command.accuracy, "measure", fail)
    path = tmp_path / "results.json"
    flags = [*TINY, "--parts=accuracy", "--only=asgd,sasgd", "--variant-seeds=0"]
    with pytest.raises(SystemExit) as ended:
        algorithms.main([*flags, f"--json={path}"])
    assert ended.value.code == 1
    assert "a reason" in capsys.readouterr().out
    assert [run["policy"] for run in json.loads(path.read_text())["runs"]] == ["sasgd"]
