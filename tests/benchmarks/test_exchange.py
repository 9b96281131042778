"""The exchange benchmark: what it accepts, what it finds out, what it reports."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.lab import drawing
from aiops.lab.processes import ProcessFailed
from aiops.lab.run_record import machine
from aiops.net.process_tree import having, session
from benchmarks import exchange, report
from benchmarks.exchange import KIB, MIB, Options
from benchmarks.peers import base, turn
from benchmarks.peers.base import LEARNING_RATE, Job
from benchmarks.peers.team import Team
from tests.peers import eventually

LIAR = "tests.benchmarks.liar"
PRESENT = SimpleNamespace(missing=lambda: None, SETTINGS={"whole": False}, ENVIRONMENT={})
"""A peer whose library is installed."""


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("4KiB", 4096), ("1 MiB", MIB), ("64kib", 64 * KIB), ("8B", 8)],
)
def test_sizes_are_read_and_written(text, size):
    assert exchange.parse_size(text) == size
    assert exchange.parse_size(exchange.format_size(size)) == size


@pytest.mark.parametrize("text", ["", "0", "4KB", "-4", "6", "1.5MiB", "KiB", "4 KiB!"])
def test_a_size_that_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="multiple of 4 bytes"):
        exchange.parse_size(text)


def test_an_unknown_peer_is_named_with_the_nearest_known_one():
    with pytest.raises(UsageError, match="unknown peer 'pyzqm'; did you mean 'pyzmq'"):
        exchange.run(Options(peers=("pyzqm",)))


@pytest.mark.parametrize("name", ["os.nothing", "no.where", "tests.benchmarks.missing", "."])
def test_a_peer_that_is_no_module_either_is_unknown(name):
    with pytest.raises(UsageError, match="unknown peer"):
        exchange.run(Options(peers=(name,)))


def test_an_unknown_setting_is_named_with_the_nearest_known_one():
    with pytest.raises(UsageError, match="raw has no setting 'sndbuff'; did you mean 'sndbuf'"):
        exchange.run(Options(peers=("raw",), settings=(("raw", "sndbuff", 1),)))


@pytest.mark.parametrize(
    "wrong", [{"rounds": 0}, {"sizes": (6,)}, {"workers": (0,)}, {"peers": ()}, {"deadline": 0}]
)
def test_numbers_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UsageError, match="at least one peer"):
        exchange.run(Options(**wrong))


def options_of(line, monkeypatch):
    found = []

    def run(options, log):
        found.append(options)
        raise UsageError("seen")  # before anything is measured

    monkeypatch.setattr(exchange, "run", run)
    with pytest.raises(SystemExit):
        exchange.main(line.split())
    return found[0]


def test_the_command_line_becomes_options(monkeypatch):
    line = "--sizes 4KiB,1MiB --workers 1,2 --peers raw,grpc --rounds 2 --whole"
    line += " --settings raw.sndbuf=4096,grpc.whole=false"
    assert options_of(line, monkeypatch) == Options(
        sizes=(4 * KIB, MIB),
        workers=(1, 2),
        peers=("raw", "grpc"),
        rounds=2,
        whole=True,
        settings=(("raw", "sndbuf", 4096), ("grpc", "whole", False)),
    )


def test_the_peers_are_those_over_tcp_unless_others_are_asked_for(monkeypatch):
    def peers(*named):
        measured = []
        monkeypatch.setattr(
            exchange, "contest", lambda jobs, *rest: dict.fromkeys(measured.extend(jobs) or ())
        )
        monkeypatch.setattr(exchange.base, "load", lambda name: PRESENT)
        options = Options(sizes=(256,), workers=(1,), **({"peers": named} if named else {}))
        found = exchange.run(options)
        assert found["options"]["peers"] == tuple(measured)
        return measured

    assert peers() == list(base.TCP)
    assert peers("same-host") == list(base.SAME_HOST)
    assert peers("raw", "same-host") == ["raw", *base.SAME_HOST]
    assert not base.TCP.keys() & base.SAME_HOST.keys()


@pytest.mark.parametrize(
    "line",
    [
        *("--workers one", "--settings raw.sndbuf", "--sizes 3", "--rounds x"),
        *("--peers none", "--same-host"),
    ],
)
def test_a_wrong_command_line_exits_with_2(line, capsys):
    with pytest.raises(SystemExit) as caught:
        exchange.main(line.split())
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("load", [base.load_sgd, lambda: base._blocked_sgd])
def test_sgd_is_exact_wherever_the_gradient_lies(load):
    sgd = load()
    elements = 3 * base._BLOCK + 5
    theta, g = np.zeros(elements, np.float32), base.gradient(elements)
    misaligned = np.frombuffer(b"x" + g.tobytes(), np.uint8)[1:].view(np.float32)
    assert not misaligned.flags.aligned
    assert not misaligned.flags.writeable
    sgd(theta, g)
    sgd(theta, misaligned)
    base.check_server(theta, 2)


def test_the_check_of_the_server_finds_one_wrong_element():
    theta = base.gradient(1000) * np.float32(-5 * LEARNING_RATE)
    base.check_server(theta, 5)
    theta[700] += np.float32(LEARNING_RATE)
    with pytest.raises(ValueError, match=r"wrong in 1 of 1000 places after 5 cycles: \[700\]"):
        base.check_server(theta, 5)


def test_the_check_of_the_server_does_not_pretend_beyond_exact_sums():
    with pytest.raises(ValueError, match="too many for an exact check"):
        base.check_server(np.zeros(4, np.float32), base.MAX_CYCLES + 1)


def at_version(version, elements=7000):
    return base.gradient(elements) * np.float32(-version * LEARNING_RATE)


def test_the_check_of_a_worker_tells_whole_mixed_and_torn():
    mixed = np.concatenate([at_version(3), at_version(4)])
    torn = mixed.copy()
    torn[6999] += np.float32(LEARNING_RATE / 2)
    assert base.check_worker(at_version(3), 2, 4, whole=False) == "whole"
    assert base.check_worker(mixed, 2, 4, whole=False) == "mixed"
    assert base.check_worker(torn, 2, 4, whole=False) == "torn"


@pytest.mark.parametrize(
    ("params", "whole"),
    [
        (np.concatenate([at_version(3), at_version(4)]), True),  # two versions
        (at_version(1), False),  # older than the worker's own last update
        (at_version(5), False),  # from the future
        (np.roll(at_version(3), 1), False),  # shifted
        (at_version(0), False),  # never received
    ],
)
def test_the_check_of_a_worker_finds_what_is_worse(params, whole):
    with pytest.raises(ValueError, match="expected one whole version from 2 to 4"):
        base.check_worker(params, 2, 4, whole=whole)


def test_pieces_are_views_that_cover_the_array():
    array = np.zeros(10, np.float32)
    parts = base.pieces(array, 16)
    assert [part.size for part in parts] == [4, 4, 2]
    assert all(np.shares_memory(part, array) for part in parts)


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def ended(pid):
    """Return whether a process that is not our child is gone, or is only not yet reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def pids(team):
    return [child.popen.pid for child in team._children]


def do_everything(team):
    team.launch()
    team.connect()
    team.run(2)
    team.finish()


@pytest.mark.parametrize(
    ("how", "deadline", "expected"),
    [
        pytest.param("hang", 3.0, "no answer from .*within 3 s", marks=pytest.mark.slow),
        ("die", 60.0, "worker 0 ended with status 3; its last line: the end"),
        ("lose", 60.0, "the server's parameters are wrong in 64 of 64 places"),
        ("move", 60.0, "the parameters moved to another array"),
    ],
)
def test_a_failing_peer_is_reported_and_leaves_nothing_behind(how, deadline, expected):
    team = Team(Job(LIAR, 64, 1, {"how": how, "whole": False}), deadline, {})
    try:
        with pytest.raises(ProcessFailed, match=expected):
            do_everything(team)
        started = pids(team)
    finally:
        team.kill()
    assert len(started) == 2
    assert all(gone(pid) for pid in started)


def test_who_leaves_the_process_group_is_killed_with_it():
    team = Team(Job(LIAR, 64, 1, {"how": "stray", "whole": False}), 60.0, {})
    try:
        team.launch()
        team.connect()
        team.run(1)
        processes = [pid for leader in pids(team) for pid in session(leader)]
    finally:
        team.kill()
    assert len(processes) == 3
    eventually(lambda: all(map(ended, processes)), "the stray process is killed")


def test_temporary_files_go_with_the_team():
    team = Team(Job(LIAR, 64, 1, {"how": "lose", "whole": False}), 60.0, {})
    try:
        team.launch()
        team.connect()  # a process has no environment before its program has begun
        (pid, *_) = pids(team)
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        [folder] = [Path(one[7:]) for one in environment if one.startswith("TMPDIR=")]
        (folder / "left").mkdir()
    finally:
        team.kill()
    assert not folder.exists()


def test_an_interrupt_ends_every_process(monkeypatch):
    started = []

    class Interrupted(Team):
        def run(self, cycles):
            started.extend(pids(self))
            raise KeyboardInterrupt

    monkeypatch.setattr(turn, "Team", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        exchange.run(Options(sizes=(256,), workers=(1,), peers=(LIAR,)))
    assert len(started) == 2
    assert all(gone(pid) for pid in started)


def test_a_peer_that_lies_gets_no_figures_and_a_failure_exit(capsys):
    with pytest.raises(SystemExit) as caught:
        exchange.main(f"--peers {LIAR} --sizes 256B --workers 1 --rounds 1 --seconds 0.001".split())
    assert caught.value.code == 1
    printed = capsys.readouterr().out
    assert "failed:" in printed
    assert "256 B x 1: tests.benchmarks.liar's server" in printed


@pytest.mark.slow
def test_a_tiny_run_makes_a_whole_report(tmp_path, capsys):
    pytest.importorskip("zmq")
    file = tmp_path / "out.json"
    line = "--peers raw,pyzmq --sizes 4KiB --workers 2 --rounds 2 --seconds 0.01 --json"
    exchange.main([*line.split(), str(file)])
    printed = capsys.readouterr().out
    words = ("4 KiB", "raw", "pyzmq", "cycles/s", "x raw", "x best", "p99.9 µs", "server's CPU µs")
    for word in words:
        assert word in printed
    assert "x mpi" not in printed
    found = json.loads(file.read_text())
    assert found["benchmark"] == "exchange"
    assert {"cpu", "cores", "system", "python", "packages", "time"} <= found["machine"].keys()
    assert found["machine"]["packages"]["numpy"] == np.__version__
    assert found["peers"]["raw"]["settings"]["sndbuf"] == 1 << 20
    assert found["skipped"] == {}
    (cell,) = found["cells"]
    assert (cell["size"], cell["workers"]) == (4 * KIB, 2)
    assert list(cell["peers"]) == ["raw", "pyzmq"]
    for figures in cell["peers"].values():
        check_figures(figures)


def check_figures(figures):
    assert figures["failed"] is None
    assert figures["reads"] in ("whole", "mixed", "torn")
    assert len(figures["rounds"]) == 2
    for one in figures["rounds"]:
        cycles = figures["cycles_per_worker"] * 2
        assert one["cycles_per_second"] * one["seconds"] == pytest.approx(cycles)
        assert one["gb_per_second"] == pytest.approx(2 * 4096 * one["cycles_per_second"] / 1e9)
        assert 0 < one["p50_us"] <= one["p90_us"] <= one["p99_us"] <= one["p999_us"]
        check_processor_time(one)
    assert not {"x_memcpy", "x_mpi", "x_ray"} & figures.keys()
    for key in ("cycles_per_second", "gb_per_second", "x_raw", "x_best"):
        values = sorted(one[key] for one in figures["rounds"])
        assert figures[key] == pytest.approx(
            {"median": sum(values) / 2, "min": values[0], "max": values[1]}
        )


def check_processor_time(figures):
    """Each side works in every cycle."""
    if sys.platform != "linux":
        return
    for side in ("server", "worker"):
        assert figures[f"{side}_cpu_us"] > 0
        assert figures[f"{side}_kernel_us"] >= 0
    both = figures["server_cpu_us"] + figures["worker_cpu_us"]
    assert figures["cpu_us"] == pytest.approx(both)


@pytest.mark.skipif(sys.platform != "linux", reason="it is read from /proc")
def test_the_processor_time_of_a_server_is_that_of_all_that_serve():
    team = Team(Job(LIAR, 64, 1, {"how": "burn", "whole": False}), 60.0, {})
    try:
        team.launch()
        team.connect()
        team.processor_time()
        team.run(1)  # in which a process of the server's, in another session, works for 0.2 s
        served, worked = team.processor_time()
    finally:
        team.kill()
    assert 0.2 <= served.total < 1.0
    assert worked.total < 0.1


class Fake:
    def __init__(self, failed, *rates):
        self.failed = failed
        self.rounds = [{"cycles_per_second": rate} for rate in rates]


def test_ratios_are_taken_within_a_round_and_a_failed_peer_is_no_measure():
    turns = {
        "raw": Fake(None, 10.0, 100.0),
        "aiops": Fake(None, 8.0, 90.0),
        "pyzmq": Fake(None, 4.0, 90.0),
        "grpc": Fake(None, 2.0, 100.0),
        "gloo": Fake("it hung", 9.0),
    }
    turn.compare(turns)
    assert [one["x_raw"] for one in turns["aiops"].rounds] == [0.8, 0.9]
    assert [one["x_best"] for one in turns["aiops"].rounds] == [2.0, 0.9]
    assert "x_raw" not in turns["gloo"].rounds[0]


def test_ratios_are_taken_within_a_group():
    rates = {"raw": 16.0, "aiops": 8.0, "mpi_tcp": 32.0, "torch_rpc": 4.0}
    rates |= {"memcpy": 64.0, "views": 32.0, "mpi": 16.0, "ray": 1.0}
    turns = {name: Fake(None, rate) for name, rate in rates.items()}
    turns[LIAR] = Fake(None, 4.0)
    turn.compare(turns)
    found = {
        name: {key: value for key, value in turn.rounds[0].items() if key.startswith("x_")}
        for name, turn in turns.items()
    }
    assert found["aiops"] == {"x_raw": 0.5, "x_best": 2.0}
    assert found["mpi_tcp"] == {"x_raw": 2.0, "x_best": 8.0}
    assert found["views"] == {"x_memcpy": 0.5, "x_mpi": 2.0, "x_ray": 32.0}
    assert found["memcpy"] == {"x_memcpy": 1.0, "x_mpi": 4.0, "x_ray": 64.0}
    assert list(found[LIAR].values()) == [0.25, 1.0, 0.0625, 0.25, 4.0, 0.5]


def test_a_peer_that_is_not_installed_is_skipped_with_one_line(monkeypatch):
    raw = base.load("raw")
    monkeypatch.setattr(raw, "missing", lambda: "sockets are not installed; buy some")
    said = []
    found = exchange.run(Options(sizes=(256,), workers=(1,), peers=("raw",)), said.append)
    assert found["skipped"] == {"raw": "sockets are not installed; buy some"}
    assert "skipping raw: sockets are not installed; buy some" in said
    assert found["cells"] == [{"size": 256, "workers": 1, "peers": {}}]


def test_the_spread_of_figures():
    assert report.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_a_table_is_printed_whole_on_a_narrow_console(capsys):
    made = report.table("title", ["name", "figure"], [["x" * 100, "123,456,789"], [], ["y", "1"]])
    report.show(made, machine(["numpy"]))
    printed = capsys.readouterr().out
    assert "x" * 100 in printed
    assert "123,456,789" in printed
    assert f"numpy {np.__version__}" in printed


@pytest.mark.slow
def test_it_is_drawn_of_what_did_not_fail(tmp_path):
    pytest.importorskip("matplotlib")
    rounds = [{"gb_per_second": value, "cpu_us": 8 * value} for value in (1.0, 2.0, 4.0)]
    points = {"p50_us": 1.0, "p90_us": 2.0, "p99_us": 3.0, "p999_us": 4.0}
    fine = {"failed": None, "rounds": rounds, **points}
    lost = {"failed": "it hung", "rounds": rounds[:1]}
    cells = [
        {"size": size, "workers": workers, "peers": {"raw": fine, "aiops": lost}}
        for size in (4 * KIB, MIB)
        for workers in (1, 2)
    ]
    figure = exchange.figure({"cells": cells})
    titles = ["1 worker", "2 workers", "4 KiB", "1 MiB", "4 KiB, 1 worker", "4 KiB, 2 workers"]
    titles += ["processor time, 1 worker", "processor time, 2 workers"]
    assert [panel.title for panel in figure.panels] == titles
    first, last, spent = (figure.panels[place] for place in (0, -3, -1))
    assert [line.ys for line in spent.lines] == [[[8.0, 8.0], [16.0, 16.0], [32.0, 32.0]], []]
    assert [line.ys for line in first.lines] == [[[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]], []]
    assert first.ticks == ["4K", "1M"]
    assert [(line.label, line.ys) for line in last.lines] == [("raw", [[1.0, 2.0, 3.0, 4.0]])]
    for each in rounds:
        del each["cpu_us"]  # as in a report of another system
    assert [panel.title for panel in exchange.figure({"cells": cells}).panels] == titles[:-2]
    (path,) = drawing.save(figure, tmp_path / "some.figure", (".png",))
    assert path == tmp_path / "some.figure.png"
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flag", "says"), [("x.jpg", "a plot is .png or .svg"), ("x", "a plot is")]
)
def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    flag, says, monkeypatch, capsys
):
    monkeypatch.setattr(exchange, "run", None)
    with pytest.raises(SystemExit) as caught:
        exchange.main(["--plot", flag])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_what_a_killed_server_leaves_is_killed_with_the_team():
    """A shard is a process of a session of its own, and its lead does not live to end it."""
    team = Team(Job(LIAR, 64, 1, {"how": "shard", "whole": False}), 60.0, {})
    try:
        team.launch()
        team.connect()
        team.run(1)
        folder = team._scratch.name
        strays: set[int] = set()  # between its fork and its exec it has no environment to be seen

        def seen() -> bool:
            strays.update(set(having(f"TMPDIR={folder}")) - set(pids(team)))
            return bool(strays)

        eventually(seen, "the stray process is there")
    finally:
        team.kill()
    eventually(lambda: all(map(ended, strays)), "the stray process is killed")


def test_percentiles_are_in_microseconds():
    found = report.percentiles([0.001] * 99 + [0.1])
    assert found["p50_us"] == found["p90_us"] == pytest.approx(1000.0)
    assert found["p99_us"] < found["p999_us"] <= 1e5
