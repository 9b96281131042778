"""``--shards auto``: the rule, the settings, and what a start makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import aiops
from aiops.cli import serve
from aiops.errors import ConflictError, UsageError
from aiops.net import cpu_count
from aiops.serving import main, shard_count
from aiops.serving.config import Config, read_file
from aiops.serving.safetensors_io import write_model
from aiops.serving.shard_count import held_shards, settle_shards
from aiops.shards.automatic import ALONE, LEAST, MOST, choose_shards
from tests.rows import each_row

MIB = 1 << 20
SETTINGS: dict[str, Any] = {"policy": "asgd", "kernels": "numpy", "port": 0}


class TestRule:
    @each_row(
        ("nbytes", "processors", "hosts", "shards"),
        [
            (MIB, 64, 0, 1),
            (2 * LEAST - 1, 64, 0, 1),
            (2 * LEAST, 64, 0, 2),
            (2 * LEAST, 1, 0, 1),
            (1 << 40, 2, 0, 2),
            (1 << 40, 64, 0, MOST),
            (1 << 40, 1, 7, 8),
            (3 * LEAST, 1, 7, 3),
            (None, 1, 7, 8),
            (0, 1, 1, 1),
        ],
    )
    def test_the_number(self, nbytes: int | None, processors: int, hosts: int, shards: int) -> None:
        found = choose_shards(nbytes, processors, hosts)
        assert found.shards == shards
        assert found.why.startswith(f"{shards} server")

    def test_a_state_keeps_its_number(self) -> None:
        assert choose_shards(MIB, 1, held=3).shards == 3
        assert choose_shards(1 << 40, 8, held=1).why == "1 server, as in the state"

    @each_row(
        ("link", "hosts", "shards"),
        [
            (1, 0, 1),
            (ALONE, 0, 1),
            (ALONE + 1, 0, 2),
            (1 << 40, 0, MOST),
            (None, 0, MOST),
            (1, 7, 8),
        ],
    )
    def test_servers_on_one_machine_share_its_link(
        self, link: int | None, hosts: int, shards: int
    ) -> None:
        found = choose_shards(1 << 40, 64, hosts, link=link)
        assert found.shards == shards
        assert ("the link of" in found.why) == (shards < MOST)

    def test_without_a_size_it_says_what_to_give(self) -> None:
        with pytest.raises(UsageError, match="--model-size"):
            choose_shards(None, 8)


class TestSettings:
    def test_as_a_flag_a_file_and_an_argument(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found: list[Config] = []

        async def run(config: Config, _announce: Any) -> None:
            found.append(config)

        monkeypatch.setattr(main, "run", run)
        monkeypatch.setattr(serve, "_log_to_stderr", lambda _config: None)
        monkeypatch.setattr(cpu_count, "usable", lambda: 2)
        app = typer.Typer()
        app.command()(serve.serve)
        (tmp_path / "s.toml").write_text('shards = "auto"\n')
        auto = ["--model-size", str(2 * LEAST)]
        for words in (
            ["--shards", "auto", *auto],
            [f"--config={tmp_path / 's.toml'}", *auto],
            ["--shards=3"],
        ):
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, result.output
        assert [config.shards for config in found] == [2, 2, 3]
        assert read_file(tmp_path / "s.toml") == {"shards": "auto"}

    def test_another_word_is_refused(self) -> None:
        app = typer.Typer()
        app.command()(serve.serve)
        result = CliRunner().invoke(app, ["--shards=many"])
        assert result.exit_code != 0
        assert "a number, or auto" in str(result.exception)

    def test_where_it_makes_no_sense(self, tmp_path: Path) -> None:
        with pytest.raises(ConflictError, match="no followers of its own"):
            settle_shards({"shards": "auto", "follower": True}, 2)
        with pytest.raises(UsageError, match="its primary has"):
            settle_shards({"shards": "auto", "standby": "aiops://a", "state": tmp_path}, 2)


class TestStart:
    def test_a_number_is_left_alone(self) -> None:
        assert settle_shards({"shards": 3}, 1) == ({"shards": 3}, "")
        assert settle_shards({}, 1) == ({}, "")

    def test_the_file_of_the_model_tells_its_size(self, tmp_path: Path) -> None:
        path = tmp_path / "m.safetensors"
        write_model(path, {"w": np.zeros(2 * LEAST // 4, np.float32)}, 0)
        settled, why = settle_shards({"shards": "auto", "init": path}, 8)
        assert settled["shards"] == 2
        assert why.startswith("--shards auto: 2 servers for")
        path.unlink()
        with pytest.raises(UsageError, match=f"--init {path}: No such file"):
            settle_shards({"shards": "auto", "init": path}, 8)

    def test_the_first_of_the_named_followers_are_used(self) -> None:
        named = ["a:1,b:1", "c:1"]
        given = {"shards": "auto", "followers": named, "model_size": 3 * LEAST}
        found, _why = settle_shards(given, 1)
        assert (found["shards"], found["followers"]) == (3, ["a:1", "b:1"])

    def test_the_link_that_is_named_wins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shard_count, "link_rate", lambda host: {"10.0.0.1": 1}.get(host))
        given = {"shards": "auto", "model_size": 1 << 40}
        assert settle_shards(given, 8)[0]["shards"] == MOST
        assert settle_shards({**given, "host": "10.0.0.1"}, 8)[0]["shards"] == 1
        named = {**given, "host": "10.0.0.1", "link_rate": "10Gbit/s"}
        assert settle_shards(named, 8)[0]["shards"] == 3
        with pytest.raises(UsageError, match="--link-rate 'fast' is not a rate"):
            settle_shards({**given, "link_rate": "fast"}, 8)

    async def test_a_state_goes_on_with_its_number(self, tmp_path: Path) -> None:
        settings = {**SETTINGS, "state": tmp_path / "s"}
        assert held_shards(tmp_path / "s") is None
        async with aiops.serve(**settings, shards=2):
            pass
        assert held_shards(tmp_path / "s") == 2
        async with aiops.serve(**settings, shards="auto", model_size=1) as server:
            assert server.config.shards == 2
        (tmp_path / "s").rename(tmp_path / "t")
        few = {"shards": "auto", "followers": ["a:1"], "state": tmp_path / "t"}
        assert settle_shards(few, 1)[0]["followers"] == ["a:1"]

    async def test_one_event_loop_runs_one_server(self) -> None:
        async with aiops.serve(**SETTINGS, shards="auto", model_size=1 << 40) as server:
            assert server.config.shards == 1
