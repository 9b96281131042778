"""Typical mistakes: what is printed, and the exit status.

Each is answered, before a time-out of its own is over, by one line that names what is wrong, and
what to do where that can be known; never by a traceback. docs/guide-running.md has the statuses.
Mistakes of a command are rows of `COMMANDS`, those of a program with a worker rows of `PROGRAMS`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops import errors
from aiops.cli import main
from tests.rows import each_row
from tests.support import PATIENCE, ServerThread

ROOT = Path(__file__).parents[2]

COMMANDS = [
    # command line                                  status  printed
    ("sevre", 64, "No such command 'sevre'. Did you mean 'serve'?"),
    ("serve --polcy asgd", 64, "No such option: --polcy (Possible options: --policy"),
    ("serve surplus", 64, "unexpected extra argument"),
    ("serve --policy fagsd", 64, "no policy is called 'fagsd'; did you mean 'fasgd'?"),
    ("serve --policy nowhere:Mine", 69, "no module 'nowhere'; is it on PYTHONPATH?"),
    ("serve --policy ./mine.py:Mine", 64, "write package.module:name, with the module as in an im"),
    ("serve --policy :", 64, "write package.module:name"),
    ("serve --policy ..:Mine", 64, "write package.module:name"),
    ("serve --policy broken:Mine", 64, "broken cannot be imported: ZeroDivisionError: division"),
    ("serve --policy lacking:Mine", 69, "lacking cannot be imported: ModuleNotFoundError: No mo"),
    ("serve --policy unfinished:Mine", 64, "unfinished.py, line 2)"),
    ("serve --policy json:Mine", 64, "json has no 'Mine'"),
    (
        "serve --policy json:loads",
        64,
        "is not a class derived from aiops.algorithms.base.Algorithm",
    ),
    ("serve --policy fasgd --set gama=0.9", 64, "no setting 'gama'; did you mean 'gamma'?"),
    ("serve --policy fasgd --set gamma", 64, "--set 'gamma': write key=value"),
    ("serve --policy fasgd --set gamma=much", 64, "gamma must be a number, not 'much'"),
    ("serve --policy fasgd --set gamma=2", 64, "gamma must be in [0, 1), not 2.0"),
    ("serve --policy fasgd --set optimizer=adam", 64, "fasgd has no setting 'optimizer'; known:"),
    ("serve --policy asgd --set optimizer=adm", 64, "no optimizer is called 'adm'; did you mean"),
    ("serve --policy asgd --set schedule=cosin:9", 64, "'cosin'; did you mean 'cosine'?"),
    ("serve --lr -1", 64, "lr must be a positive learning rate, not -1.0"),
    ("serve --lr fast", 64, "'--lr'"),
    ("serve --policy hardsync", 64, "say how many with --workers N"),
    ("serve --workers 0", 64, "--workers must be more than 0, not 0"),
    ("serve --port 99999", 64, "port must be 0 to 65535, not 99999"),
    ("serve --port {taken}", 69, "address already in use"),
    ("serve --host 0.0.0.0", 64, "without a token: any process there could read"),
    ("serve --host 198.51.100.1 --token t", 69, "cannot listen on 198.51.100.1"),
    ("serve --init {none}", 66, "none.safetensors: No such file or directory"),
    ("serve --init {text}", 65, "is not a safetensors file"),
    ("serve --init {folder}", 66, "Is a directory"),
    ("serve --save {text}/m.safetensors", 73, "cannot write the model to"),
    ("serve --save-every 5", 64, "--save-every needs --save FILE.safetensors"),
    ("serve --state {text}", 73, "is a file: name a folder"),
    ("serve --state /dev/null/state", 73, "Not a directory"),
    ("serve --record {text}", 73, "is a file: name a folder"),
    ("serve --record r --state s", 64, "--state keeps a journal of the run already"),
    ("serve --acks durable", 64, "--acks durable needs --state DIR"),
    ("serve --keep-journal", 64, "--keep-journal keeps that of --state DIR"),
    ("serve --config {none}", 66, "none.safetensors: No such file or directory"),
    ("serve --config {text}", 78, "not TOML"),
    ("serve --config {misspelt}", 78, "no setting 'polcy'; did you mean 'policy'?"),
    ("serve --config {mistyped}", 78, "port must be a whole number, not 'seven'"),
    ("serve --bandwidth-budget 2MBs", 64, "is not a rate: write a number with B/s, KB/s"),
    ("serve --bandwidth-budget 5", 64, "is 5 bytes per second: it must be from 1000"),
    ("serve --bandwidth-budget 1MB/s --worker-budget 2MB/s", 64, "lower it, or drop it"),
    ("serve --push-codec tpok:0.1", 64, "no codec is called 'tpok'; did you mean 'topk'?"),
    ("serve --push-codec topk:7", 64, "give a number above 0 and at most 1, such as 0.01"),
    ("serve --gate bfasg", 64, "no gate is called 'bfasg'; did you mean 'bfasgd'?"),
    ("serve --filter robst", 64, "--filter must be off, robust"),
    ("serve --consistency relaxd", 64, "did you mean 'relaxed'?"),
    ("serve --kernels nmba", 64, "did you mean 'numba'?"),
    ("serve --device gpu", 64, "write cpu, cuda or cuda:N"),
    ("serve --shards two", 64, "--shards must be a number, or auto"),
    ("serve --shards 2 --followers a --followers b --token t", 64, "takes 1 followers"),
    ("serve --standby aiops://a", 64, "--standby needs --state DIR"),
    ("serve --tls-cert {none}", 66, "--tls-cert"),
    ("serve --tls-cert {text}", 65, "if its key is in another file, give --tls-key"),
    ("serve --tls-key {none}", 64, "`aiops tls init DIR` makes all of them"),
    ("serve --tokens {none}", 66, "`aiops token new --file"),
    ("serve --tokens {text}", 77, "is open to other users (mode 644)"),
    ("serve --metrics-host 0.0.0.0", 64, "--metrics-host is the address of --metrics-port"),
    ("run {none}", 66, "there is no script"),
    ("run --workers 0 {text}", 64, "'--workers'"),
    ("join {text}", 64, "on one machine use `aiops run`"),
    ("ping", 64, "Missing argument 'url'"),
    ("ping http://localhost", 64, "write aiops://host:port"),
    ("ping aiops://localhost:99999", 64, "Port out of range"),
    ("ping aiops://127.0.0.1:{free} --timeout 0.2", 69, "cannot be reached (Connection refused)"),
    ("ping {open}", 77, "asks for a token: pass token=... or set AIOPS_TOKEN"),
    ("ping {open} --token wrong", 77, "the token is wrong"),
    (
        "promote aiops://127.0.0.1:{free} --timeout 0.2",
        69,
        "cannot be reached (Connection refused)",
    ),
    ("replay {none}", 66, "No such file or directory"),
    ("replay {text}", 65, "is a file, and a record is a folder"),
    ("state show {none}", 66, "No such file or directory"),
    ("replay {folder}", 65, "is not the --state of a server"),
    ("state verify {folder}", 65, "is not the --state of a server"),
    ("state verify {text}", 65, "is neither the --state of a server nor a snapshot file"),
    ("policies nope", 64, "no policy is called 'nope'"),
    ("demo --dataset digit", 64, "did you mean 'digits'?"),
    ("simulate --policy nope", 64, "no policy is called 'nope'"),
    ("tls init {text}", 73, "File exists"),
    ("advise", 64, "--parameters is needed"),
]


@pytest.fixture(scope="module")
def guarded() -> Iterator[ServerThread]:
    """A server that asks for a token."""
    with ServerThread(token="secret", kernels="numpy") as server:
        yield server


@pytest.fixture
def places(tmp_path: Path, guarded: ServerThread) -> Iterator[dict[str, object]]:
    """What the rows name in braces."""
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))  # bound, and not listening: connections are refused
        found = {
            "none": tmp_path / "none.safetensors",
            "text": tmp_path / "text",
            "folder": tmp_path,
            "misspelt": tmp_path / "misspelt.toml",
            "mistyped": tmp_path / "mistyped.toml",
            "taken": taken.getsockname()[1],
            "free": free.getsockname()[1],
            "open": guarded.url,
        }
        (tmp_path / "text").write_text("a text, and nothing else")
        (tmp_path / "text").chmod(0o644)
        (tmp_path / "broken.py").write_text("1 / 0")
        (tmp_path / "lacking.py").write_text("import nowhere_to_be_found")
        (tmp_path / "unfinished.py").write_text("\nclass Mine(")
        (tmp_path / "misspelt.toml").write_text("polcy = 'asgd'")
        (tmp_path / "mistyped.toml").write_text("port = 'seven'")
        yield found


def told(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> int:
    """Run the command line in this process; return its exit status."""
    for name in [name for name in os.environ if name.startswith("AIOPS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("aiops.cli.serve._log_to_stderr", lambda config: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["aiops", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(("line", "status", "printed"), COMMANDS, ids=lambda cell: str(cell))
def test_of_a_command(
    line: str,
    status: int,
    printed: str,
    places: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = line.format(**places).split()
    if arguments[0] == "serve" and "--port" not in arguments:
        arguments += ["--port", "0"]
    begun = time.monotonic()
    assert told(monkeypatch, arguments) == status
    assert time.monotonic() - begun < PATIENCE / 2  # that of a client is 60 s
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    assert err.startswith("aiops: ")
    assert printed in err


def test_there_are_fifty_and_more() -> None:
    assert len(COMMANDS) >= 50


class TestVariables:
    @pytest.mark.parametrize(
        ("name", "printed"),
        [
            ("AIOPS_POLCY", "so it has no effect: did you mean AIOPS_POLICY?"),
            ("AIOPS_FANCY", "AIOPS_FANCY is set, and aiops has no such variable"),
        ],
    )
    def test_one_that_is_unknown_is_told(
        self,
        name: str,
        printed: str,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv(name, "1")
        monkeypatch.setattr(sys, "argv", ["aiops", "--version"])
        with pytest.raises(SystemExit):
            main.main()
        assert printed in capfd.readouterr().err

    def test_a_worker_s_log_has_it_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        from aiops.client import variables

        variables._warn_of_unknown.cache_clear()
        monkeypatch.setenv("AIOPS_TOKN", "secret")
        for _ in range(2):
            assert variables.server_url("aiops://a") == "aiops://a"
        assert caplog.text.count("did you mean AIOPS_TOKEN?") == 1

    def test_a_value_that_cannot_work(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("AIOPS_PORT", "seven")
        monkeypatch.setattr(sys, "argv", ["aiops", "serve"])
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert ended.value.code == 64
        assert "(env var: 'AIOPS_PORT')" in capfd.readouterr().err


def test_no_command_at_all_shows_the_help(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(monkeypatch, []) == 64
    out, err = capfd.readouterr()
    assert (out.startswith("Usage: aiops"), err) == (True, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_output_that_cannot_be_written() -> None:
    with open("/dev/full", "w") as full:
        done = command("--help", stdout=full)
    assert done.returncode == 74
    assert done.stderr == b"aiops: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("line", ["--help", "policies asgd"])
def test_a_reader_that_has_seen_enough(line: str) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        done = command(*line.split(), stdout=pipe)
    assert (done.returncode, done.stderr) == (0, b"")


def command(*words: str, stdout: Any) -> subprocess.CompletedProcess[bytes]:
    """Run the command line in a process of its own, whose output goes to a file."""
    words = (sys.executable, "-m", "aiops", *words)
    return subprocess.run(
        words, stdout=stdout, stderr=subprocess.PIPE, timeout=60, cwd=ROOT, check=False
    )


# ------------------------------------------------------------------ programs with a worker

W, B = np.ones((3, 4), np.float32), np.zeros(4, np.float32)
MODEL = {"w": W, "b": B}


def step(gradients: Any, **options: Any) -> Callable[[str], Any]:
    """A worker's step."""

    def run(url: str) -> Any:
        with aiops.Worker(url, MODEL, timeout=5.0) as worker:
            return worker.step(gradients, **options)

    return run


def join(params: Any, **options: Any) -> Callable[[str], Any]:
    """A worker that joins."""

    def run(url: str) -> None:
        aiops.Worker(url, params, timeout=5.0, **options).close()

    return run


def closed(url: str) -> None:
    worker = aiops.Worker(url, MODEL)
    worker.close()
    worker.step(MODEL)


def serve(**settings: Any) -> Callable[[str], Any]:
    """A server in this process's event loop."""

    async def run() -> None:
        async with aiops.serve(**{"port": 0, **settings}):
            pass

    return lambda _url: asyncio.run(run())


def average(url: str) -> None:
    from aiops.client import ModelAverager

    ModelAverager(url, MODEL).close()


PROGRAMS = [
    ("no URL", lambda _url: aiops.Worker(params=MODEL), errors.UsageError, "set AIOPS_URL="),
    ("the model in its place", lambda _url: aiops.Worker(MODEL), errors.UsageError, "by name"),
    ("no model", join(None), errors.UsageError, "params are arrays by name"),
    ("a list", join([W, B]), errors.UsageError, "not list"),
    ("an empty model", join({}), errors.UsageError, "1 to 65536 tensors, not 0"),
    ("a tree", join({"layer": MODEL}), errors.UsageError, "one flat dict, such as {'layer.w'"),
    (
        "integers",
        join({"w": W.astype(int)}),
        errors.UsageError,
        "dtype 'int64' of 'w' cannot be trained",
    ),
    (
        "another shape",
        join({**MODEL, "w": W.T}),
        errors.BadPush,
        "'w' has shape (3, 4), not (4, 3)",
    ),
    ("another name", join({"v": W, "b": B}), errors.BadPush, "it has no tensor 'v'"),
    ("overlap", join(MODEL, overlap=99), errors.UsageError, "up to 8"),
    (
        "a role",
        lambda url: aiops.Client(url, role="wroker"),
        errors.Refused,
        "neither 'worker' nor",
    ),
    ("a token too many", join(MODEL, token="t"), errors.Unauthorised, "asked for no token"),
    ("a gradient's shape", step({"w": W.T, "b": B}), errors.AiopsError, "(4, 3)"),
    ("a gradient too many", step({**MODEL, "v": W}), errors.AiopsError, "'v'"),
    (
        "no gradients",
        step(None),
        errors.UsageError,
        "gradients are arrays by name, as {'w': array}",
    ),
    ("NaN", step({"w": W, "b": B * np.nan}), errors.BadPush, "'b'"),
    ("a huge value", step({"w": W, "b": B + 1e30}), errors.BadPush, "'b'"),
    ("a negative factor", step(MODEL, lr_factor=-1.0), errors.UsageError, "lr_factor"),
    ("closed before", closed, errors.AiopsError, "closed"),
    ("an averager", average, errors.UsageError, "start it with --policy average"),
    ("a keyword", serve(polcy="asgd"), errors.UsageError, "no setting 'polcy'; did you mean"),
    ("a setting", serve(policy="asgd", set={"lr": "high"}), errors.UsageError, "a number"),
    ("a port as text", serve(port="7171"), errors.UsageError, "a whole number, not '7171'"),
    ("no port", serve(port=None), errors.UsageError, "port must be a whole number, not None"),
    ("workers as text", serve(workers="2"), errors.UsageError, "a whole number, not '2'"),
    ("no policy", serve(policy=None), errors.UsageError, "policy must be a string, not None"),
    ("half a worker", serve(workers=2.5), errors.UsageError, "a whole number, not 2.5"),
    (
        "a number of followers",
        serve(followers=3, shards="auto"),
        errors.UsageError,
        "a list of str",
    ),
    ("a number as set", serve(set=[1]), errors.UsageError, "a list of strings, not list"),
    ("a number as a path", serve(state=3), errors.UsageError, "state must be a path, not 3"),
    ("a flag of text", serve(no_shm="yes"), errors.UsageError, "must be True or False, not 'yes'"),
    ("a token of bytes", serve(token=b"secret"), errors.UsageError, "a string, not bytes"),
    (
        "a table",
        lambda _url: aiops.Table(0, 4),
        errors.UsageError,
        "rows must be a whole number",
    ),
]


@pytest.fixture(scope="module")
def training() -> Iterator[ServerThread]:
    with ServerThread(policy="asgd", kernels="numpy") as server:
        with aiops.Worker(server.url, MODEL):
            pass
        yield server


@each_row(("mistake", "run", "error", "said"), PROGRAMS, ids=[str(row[0]) for row in PROGRAMS])
def test_of_a_program(
    mistake: str,
    run: Callable[[str], Any],
    error: type[Exception],
    said: str,
    training: ServerThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AIOPS_URL", raising=False)
    begun = time.monotonic()
    with pytest.raises(error) as caught:
        run(training.url)
    assert time.monotonic() - begun < PATIENCE / 2  # that of a client is 60 s
    assert said in str(caught.value), mistake
    assert "\n" not in str(caught.value)
