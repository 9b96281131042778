"""Every setting is a flag, a variable and a key of a file; the flag wins, then the variable."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

from aiops.cli import main
from aiops.cli import serve as serve_command
from aiops.errors import ConflictError, UsageError
from aiops.serving.config import Config, read_file
from aiops.serving.server import Server
from tests.rows import each_row
from tests.support import PATIENCE

# Per field three values that work: for the file, the variable and the flag; then how TOML has one.
VALUES: dict[str, tuple[Any, Any, Any]] = {
    "policy": ("asgd", "sasgd", "softsync"),
    "set": (["a=1"], ["b=2"], ["c=3"]),
    "lr": (0.1, 0.2, 0.3),
    "host": ("localhost", "127.0.0.2", "127.0.0.3"),
    "port": (1, 2, 3),
    "token": ("from file", "from variable", "from flag"),
    "tls_cert": (Path("a.pem"), Path("b.pem"), Path("c.pem")),
    "tls_key": (Path("a.key"), Path("b.key"), Path("c.key")),
    "tls_ca": (Path("a.pem"), Path("b.pem"), Path("c.pem")),
    "tokens": (Path("a.toml"), Path("b.toml"), Path("c.toml")),
    "workers": (4, 5, 6),
    "worker_deadline": (1.5, 2.5, 3.5),
    "consistency": ("relaxed", "leased", "relaxed"),
    "live_versions": (2, 3, 4),
    "gate": ("periodic", "constant", "bfasgd"),
    "recall": (0, 1 << 20, 1 << 21),
    "push_codec": (["int8"], ["onebit"], ["fp16"]),
    "fetch_codec": (["int8"], ["onebit"], ["fp16"]),
    "fetch_lag": (0, 1, 2),
    "filter": ("norm", "robust", "norm:4+kardam:0.2"),
    "init": (Path("a.safetensors"), Path("b.safetensors"), Path("c.safetensors")),
    "save": (Path("d.safetensors"), Path("e.safetensors"), Path("f.safetensors")),
    "save_every": (10.0, 20.0, 30.0),
    "record": (Path("g.journal"), Path("h.journal"), Path("i.journal")),
    "state": (Path("a.state"), Path("b.state"), Path("c.state")),
    "acks": ("applied", "applied", "applied"),
    "snapshot_every": (1.5, 2.5, 3.5),
    "state_copy": ("s3://a/b", "s3://c/d", "file:///e"),
    "keep_journal": (True, False, True),
    "standby": ("aiops://a", "aiops://b", "aiops://c,d"),
    "shard": (1, 2, 3),
    "standby_deadline": (1.5, 2.5, 3.5),
    "ledger": (Path("j.jsonl"), Path("k.jsonl"), Path("l.jsonl")),
    "profile": (Path("m.json"), Path("n.json"), Path("o.json")),
    "threads": (1, 2, 3),
    "kernels": ("numpy", "numba", "numpy"),
    "device": ("cuda", "cuda:1", "cuda:2"),
    "max_model": (1 << 20, 1 << 21, 1 << 22),
    "max_connections": (10, 20, 30),
    "failure_timeout": (1.0, 2.0, 3.0),
    "hello_deadline": (1.0, 2.0, 3.0),
    "stall_deadline": (1.0, 2.0, 3.0),
    "min_rate": (0, 100, 200),
    "bandwidth_budget": ("1MB/s", "2MB/s", "3MB/s"),
    "worker_budget": ("1KB/s", "2KB/s", "3KB/s"),
    "drain_deadline": (0.0, 1.0, 2.0),
    "no_shm": (True, False, True),
    "shards": (2, 3, 4),
    "model_size": (1, 2, 3),
    "link_rate": ("1MB/s", "2MB/s", "3MB/s"),
    "shard_bytes": (1, 2, 3),
    "spread_tables": (True, False, True),
    "followers": (["a:1"], ["b:2"], ["c:3"]),
    "follower": (True, False, True),
    "relay": ("a:1", "b:2", "c"),
    "relay_token": ("from file", "from variable", "from flag"),
    "metrics_port": (0, 9001, 9002),
    "dashboard": (True, False, True),
    "metrics_host": ("0.0.0.0", "::1", "localhost"),
    "metrics_workers": (0, 10, 20),
    "track": (["tensorboard:a"], ["wandb:b"], ["mlflow:c"]),
    "track_every": (1.0, 2.0, 3.0),
    "trace": ("otlp:", "otlp:http://a:4318", "otlp:http://b:4318"),
    "log_format": ("json", "text", "json"),
    "log_level": ("debug", "warning", "error"),
}
NEEDS = {
    "spread_tables": {"shards": 2},
    "save_every": {"save": Path("out.safetensors")},
    "standby": {"state": Path("state")},
    "state_copy": {"state": Path("state")},
    "shard": {"state": Path("state"), "standby": "aiops://a", "follower": True},
    "keep_journal": {"state": Path("state")},
    "relay_token": {"relay": "a:1"},
    "metrics_host": {"metrics_port": 9000},
    "tls_key": {"tls_cert": Path("cert.pem")},
    "tls_ca": {"tls_cert": Path("cert.pem")},
}
NAMES = [field.name for field in dataclasses.fields(Config)]

Run = Callable[..., Config]


def text(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


def toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(f'"{item}"' for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else f'"{value}"'


@functools.cache
def command_line() -> tuple[Any, list[Config]]:
    """Return the server's command line, and a list that gets the settings that it has read."""
    seen: list[Config] = []
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(serve_command._with_config_flags(lambda config, _why: seen.append(config)))
    return typer.main.get_command(app), seen


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Return what reads a command line (with variables and a file) as the server does."""
    for name in (*NAMES, "config"):
        monkeypatch.delenv("AIOPS_" + name.upper(), raising=False)

    def run(*flags: str, variables: dict[str, str] | None = None, file: str = "") -> Config:
        if file:
            path = tmp_path / "server.toml"
            path.write_text(file)
            flags = ("--config", str(path), *flags)
        command, seen = command_line()
        seen.clear()
        with monkeypatch.context() as patch:
            for name, value in (variables or {}).items():
                patch.setenv(name, value)
            command(list(flags), standalone_mode=False)
        return seen[0]

    return run


def given(name: str, *sources: str) -> dict[str, Any]:
    """Return the arguments of `read` that give a field its value from these sources."""
    flag, variable = "--" + name.replace("_", "-"), "AIOPS_" + name.upper()
    in_file, in_variable, in_flag = VALUES[name]
    flags: list[str] = []
    variables: dict[str, str] = {}
    lines: list[str] = []
    for other, value in NEEDS.get(name, {}).items():
        needed = "--" + other.replace("_", "-")
        flags += [needed] if value is True else [needed, str(value)]
    if "flag" in sources:
        items = in_flag if isinstance(in_flag, list) else [in_flag]
        flags += [flag] if in_flag is True else [w for item in items for w in (flag, str(item))]
    if "variable" in sources:
        variables[variable] = text(in_variable)
    if "file" in sources:
        lines.append(f"{name.replace('_', '-')} = {toml(in_file)}")
    return {"flags": flags, "variables": variables, "file": "\n".join(lines)}


class TestSources:
    def test_all_fields_are_tried(self) -> None:
        assert list(VALUES) == NAMES

    @each_row("name", NAMES)
    def test_nothing_given_is_the_default(self, read: Run, name: str) -> None:
        assert getattr(read(), name) == getattr(Config(), name)

    @each_row("name", NAMES)
    def test_flag_then_variable_then_file(self, read: Run, name: str) -> None:
        places = ("file", "variable", "flag")
        for count in (1, 2, 3):
            for sources in combinations(places, count):
                arguments = given(name, *sources)
                config = read(
                    *arguments["flags"], variables=arguments["variables"], file=arguments["file"]
                )
                tried = [places.index(source) for source in sources]
                got, wanted = getattr(config, name), VALUES[name][tried[-1]]
                if name == "set":  # each changes what it names
                    wanted = [item for place in tried for item in VALUES["set"][place]]
                assert got == wanted, sources
                assert type(got) is type(wanted), sources

    def test_underscores_and_dashes_in_a_file(self, read: Run) -> None:
        assert read(file="worker_deadline = 7").worker_deadline == 7.0
        assert read(file="worker-deadline = 8").worker_deadline == 8.0

    def test_settings_as_a_table(self, read: Run) -> None:
        config = read(file='policy = "sasgd"\n[set]\nlr = 0.5\nmodulate = "none"')
        assert config.settings() == {"lr": "0.5", "modulate": "none"}

    def test_settings_repeated(self, read: Run) -> None:
        config = read("--set", "rho=1", "--set", "a = 2", "--lr", "3")
        assert config.settings() == {"rho": "1", "a": "2", "lr": 3.0}

    def test_values_for_some_tensors_of_every_source(self, read: Run) -> None:
        """The last that matches counts, so those of a flag come after those of a file."""
        config = read(
            *("--set", "lr=4@flag*, other", "--lr", "0.5"),
            variables={"AIOPS_SET": "lr=3@variable,too"},
            file='policy = "asgd"\n[set]\nlr = [1, "2@file*"]\nweight_decay = "0@*bias"',
        )
        each = "lr=2@file* weight_decay=0@*bias lr=3@variable,too lr=4@flag*,other"
        assert config.settings() == {"lr": 0.5, "per_tensor": each}

    def test_every_source_changes_the_settings_that_it_names(self, read: Run) -> None:
        config = read(
            *("--set", "a=flag"),
            variables={"AIOPS_SET": "a=variable b=variable"},
            file='[set]\na = "file"\nb = "file"\nc = "file"',
        )
        assert config.settings() == {"a": "flag", "b": "variable", "c": "file"}

    @each_row(
        ("flags", "variables", "file", "rate"),
        [
            (["--set", "lr=3"], {}, "lr = 1", "3"),
            (["--set", "lr=3"], {"AIOPS_LR": "2"}, "lr = 1", "3"),
            ([], {"AIOPS_SET": "lr=2"}, "lr = 1", "2"),
            (["--set", "a=3"], {}, "lr = 1", 1.0),
            (["--lr", "3"], {"AIOPS_SET": "lr=2"}, "[set]\nlr = 1", 3.0),
            (["--set", "lr=3", "--lr", "3.0"], {}, "", 3.0),
            (["--set", "lr=4@w", "--lr", "3"], {}, "", 3.0),
        ],
    )
    def test_a_learning_rate_is_a_setting_too(
        self, read: Run, flags: list[str], variables: dict[str, str], file: str, rate: object
    ) -> None:
        assert read(*flags, variables=variables, file=file).settings()["lr"] == rate

    def test_the_files_name_from_a_variable(self, read: Run, tmp_path: Path) -> None:
        path = tmp_path / "other.toml"
        path.write_text("port = 5")
        assert read(variables={"AIOPS_CONFIG": str(path)}).port == 5

    def test_an_empty_variable_is_none(self, read: Run) -> None:
        config = read(variables={"AIOPS_TOKEN": "", "AIOPS_PORT": "", "AIOPS_WORKERS": ""})
        assert (config.token, config.port, config.workers) == (None, Config().port, None)


class TestFile:
    @each_row(
        ("content", "said"),
        [
            ("prot = 1", "no setting 'prot'; did you mean 'port'"),
            ("worker-dedline = 1", "no setting 'worker-dedline'; did you mean 'worker_deadline'"),
            ("[server]\nport = 1", "no setting 'server'"),
            ('port = "7171"', "port must be a whole number, not '7171'"),
            ("port = 1.5", "port must be a whole number, not 1.5"),
            ("port = true", "port must be a whole number, not True"),
            ('lr = "fast"', "lr must be a number, not 'fast'"),
            ("lr = false", "lr must be a number, not False"),
            ("policy = 3", "policy must be a string, not 3"),
            ("init = 3", "init must be a string, not 3"),
            ('set = "lr=1"', "set must be a table, or a list of strings"),
            ("set = [1]", "set must be a table, or a list of strings"),
            ("port = ", "not TOML"),
        ],
    )
    def test_what_is_wrong_with_it(self, tmp_path: Path, content: str, said: str) -> None:
        path = tmp_path / "server.toml"
        path.write_text(content)
        with pytest.raises(UsageError) as caught:
            read_file(path)
        assert said in str(caught.value)
        assert str(path) in str(caught.value)

    def test_not_text(self, tmp_path: Path) -> None:
        path = tmp_path / "server.toml"
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(UsageError, match="not TOML"):
            read_file(path)

    def test_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="No such file"):
            read_file(tmp_path / "server.toml")


class TestValues:
    @each_row(
        ("settings", "said"),
        [
            ({"port": -1}, "port must be 0 to 65535, not -1"),
            ({"port": 65536}, "port must be 0 to 65535, not 65536"),
            ({"metrics_port": 65536}, "--metrics-port must be 0 to 65535, not 65536"),
            ({"metrics_host": "0.0.0.0"}, "--metrics-host is the address of --metrics-port"),
            ({"metrics_workers": -1}, "--metrics-workers must be from 0"),
            ({"workers": 0}, "--workers must be more than 0, not 0"),
            ({"worker_deadline": 0.0}, "--worker-deadline must be more than 0"),
            ({"worker_deadline": float("inf")}, "--worker-deadline must be from 0 to 1e+09"),
            ({"live_versions": 0}, "--live-versions must be more than 0"),
            ({"max_model": -1}, "--max-model must be more than 0"),
            ({"max_connections": 0}, "--max-connections must be more than 0"),
            ({"hello_deadline": -1.0}, "--hello-deadline must be more than 0"),
            ({"stall_deadline": float("nan")}, "--stall-deadline must be more than 0, not nan"),
            ({"failure_timeout": 0.0}, "--failure-timeout must be more than 0"),
            ({"drain_deadline": -0.1}, "--drain-deadline must be from 0"),
            ({"min_rate": -1}, "--min-rate must be from 0"),
            ({"save_every": 0.0, "save": Path("x")}, "--save-every must be more than 0"),
            ({"save_every": 1.0}, "--save-every needs --save"),
            ({"token": ""}, "the token is empty"),
            ({"consistency": "leasd"}, "did you mean 'leased'"),
            ({"kernels": "numbra"}, "did you mean 'numba'"),
            ({"log_format": "jsn"}, "did you mean 'json'"),
            ({"log_level": "warn"}, "did you mean 'warning'"),
        ],
    )
    def test_refused(self, settings: dict[str, Any], said: str) -> None:
        with pytest.raises(UsageError) as caught:
            Config(**settings)
        assert said in str(caught.value)

    @each_row("host", ["0.0.0.0", "::", "192.168.1.7", "parameter.example", ""])
    def test_beyond_loopback_a_token_is_needed(self, host: str) -> None:
        with pytest.raises(UsageError, match=r"without a token.*Set AIOPS_TOKEN"):
            Config(host=host)
        assert Config(host=host, token="open sesame").host == host

    @each_row("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
    def test_loopback_needs_none(self, host: str) -> None:
        assert Config(host=host).token is None

    @each_row(
        ("settings", "kind", "said"),
        [
            ({"policy": "fasdg"}, UsageError, "did you mean 'fasgd'"),
            ({"policy": "hardsync"}, ConflictError, "--workers N"),
            ({"set": ["lr"]}, UsageError, "write key=value"),
            ({"set": ["lrr=1"]}, UsageError, "no setting 'lrr'; did you mean 'lr'"),
            ({"set": ["lr=fast"]}, UsageError, "lr must be a number, not 'fast'"),
            ({"lr": 0.1, "set": ["lr=1"]}, UsageError, "the learning rate is both 0.1"),
            ({"lr": -1.0}, UsageError, "a positive learning rate"),
            ({"lr": float("nan")}, UsageError, "a positive learning rate"),
            (
                {"policy": "softsync", "workers": 2, "set": ["n=3"]},
                ConflictError,
                "choose n from 1 to 2",
            ),
            (
                {"policy": "average", "init": Path("m.safetensors")},
                ConflictError,
                "drop --init, and",
            ),
            (
                {"policy": "average", "save": Path("m.safetensors")},
                ConflictError,
                "drop --save, and",
            ),
        ],
    )
    async def test_an_algorithms_settings(
        self, settings: dict[str, Any], kind: type[UsageError], said: str
    ) -> None:
        with pytest.raises(kind) as caught:
            Server(Config(**settings))
        assert said in str(caught.value)


class TestCommandLine:
    """Whatever is wrong is one line on stderr, and an exit status of sysexits."""

    @each_row(
        ("flags", "said"),
        [
            (["--port", "many"], "'--port'"),
            (["--prot", "1"], "--port"),
            (["--lr", "fast"], "'--lr'"),
            (["--set", "lr=4", "--lr", "3"], "both 3.0 (--lr) and 4 (--set lr): give one"),
            (["--port"], "requires an argument"),
            (["surplus"], "surplus"),
            (["--policy", "fasdg"], "did you mean 'fasgd'"),
            (["--policy", "hardsync"], "--workers N"),
            (["--policy", "no.such.module:Name"], "there is no module"),
            (["--host", "0.0.0.0"], "Set AIOPS_TOKEN"),
            (["--relay-token", "x"], "name it, too"),
            (["--relay", "a:1", "--relay-token", ""], "the relay's token is empty"),
            (["--relay", "a:1", "--policy", "asgd"], "nothing to relay"),
            (["--log-level", "loud"], "known: debug"),
            (["--config", "/no/such.toml"], "No such file"),
            (["--init", "/no/such.safetensors"], "No such file"),
            (["--save", "/dev/null/model.safetensors"], "/dev/null/model.safetensors"),
            (["--record", "/no/such/run.journal"], "No such file"),
            (["--record", "/dev/null"], "is a file: name a folder"),
            (["--record", "/dev/null", "--consistency", "relaxed"], "cannot be recorded"),
            (["--keep-journal"], "--record DIR needs none"),
            (["--host", "198.51.100.1", "--token", "x"], "cannot listen on 198.51.100.1"),
        ],
    )
    def test_bad(
        self,
        flags: list[str],
        said: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        for name in (*NAMES, "config"):
            monkeypatch.delenv("AIOPS_" + name.upper(), raising=False)
        monkeypatch.setattr(sys, "argv", ["aiops.server", "--port", "0", *flags])
        monkeypatch.setattr(serve_command, "_log_to_stderr", lambda config: None)
        with pytest.raises(SystemExit) as caught:
            main.server_main()
        out, err = capsys.readouterr()
        assert 64 <= int(caught.value.code or 0) <= 78
        assert out == ""
        assert len(err.splitlines()) == 1, err
        assert err.startswith("aiops: ")
        assert said in err

    def test_as_a_process(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "aiops.server", "--workers", "none"],
            env={k: v for k, v in os.environ.items() if not k.startswith("AIOPS_")},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert (done.returncode, done.stdout) == (64, "")
        assert len(done.stderr.splitlines()) == 1
        assert "'--workers'" in done.stderr


@each_row("name", [name for name in NAMES if not name.endswith("token")])
def test_settings_as_flags_are_read_as_the_same_settings(name: str, read: Run) -> None:
    for value in VALUES[name]:
        config = Config(**{name: value}, **NEEDS.get(name, {}))
        assert read(*config.flags()) == config


def test_flags_do_not_show_the_tokens() -> None:
    secrets = {"token": "secret", "relay_token": "secret"}
    shown = Config(relay="a:1", policy="asgd", **secrets).flags()
    assert shown == ["--policy=asgd", "--relay=a:1"]
    assert Config(policy="asgd", lr=0.5, port=0).flags(("lr", "device")) == ["--lr=0.5"]


@each_row("name", ["set", "push_codec", "fetch_codec", "followers", "track"])
def test_a_text_is_no_list_of_texts(name: str) -> None:
    given: dict[str, Any] = {name: "lr=1"}
    with pytest.raises(UsageError, match=rf"{name} must be .*, not 'lr=1': write \['lr=1'\]"):
        Config(**given)
