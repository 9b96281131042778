"""The settings that `aiops.ray.train` gives a server, or finds at one that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aiops.errors import ConflictError, UsageError
from aiops.ray.server_settings import check_same, choose_servers, on_node, server_config
from aiops.state.directory import IDENTITY_FILE

RUNNING = server_config({"policy": "asgd", "lr": 0.5, "threads": 2, "push_codec": "int8"})


@pytest.mark.parametrize(
    "given", [{}, {"policy": "asgd"}, {"lr": 0.5, "push_codec": "int8"}, {"push_codec": ["int8"]}]
)
def test_what_is_left_out_or_the_same_is_taken(given: dict[str, Any]) -> None:
    check_same("digits", given, RUNNING, None, 2)
    check_same("digits", given, RUNNING, 2, 2)


@pytest.mark.parametrize(
    ("given", "asked", "what"),
    [
        ({"policy": "fasgd", "lr": 0.5}, None, "has policy='asgd', not 'fasgd': leave"),
        ({"lr": 0.1, "push_codec": "raw"}, 2, r"has lr=0\.5, not 0\.1; push_codec=\['int8'\], not"),
        ({}, 3, "has servers=2, not 3: leave"),
    ],
)
def test_others_are_refused(given: dict[str, Any], asked: int | None, what: str) -> None:
    with pytest.raises(UsageError, match=rf"under the name 'digits' {what}"):
        check_same("digits", given, RUNNING, asked, 2)


def test_a_setting_that_is_not_the_callers() -> None:
    with pytest.raises(UsageError, match=r"aiops\.ray\.train sets 'port' of the server itself"):
        server_config({"port": 7171})


def test_acks_are_of_a_server_with_a_state(tmp_path: Path) -> None:
    running = server_config({"acks": "durable"}, tmp_path)
    assert running.acks == "durable"
    assert f"--state={tmp_path}" in running.flags()
    check_same("digits", {"acks": "durable"}, running, None, 1)
    with pytest.raises(UsageError, match="needs --state"):
        server_config({"acks": "durable"})


def test_with_a_standby_acknowledgements_mean_replicated(tmp_path: Path) -> None:
    assert server_config({"acks": "replicated"}, tmp_path, standby=True).acks == "replicated"
    with pytest.raises(ConflictError, match="does not wait for the standby"):
        server_config({"acks": "written"}, tmp_path, standby=True)


def test_a_store_is_for_copies_of_a_folder_of_each_node() -> None:
    url = "s3://bucket/run?scheme=http"
    config = server_config({"acks": "durable"}, url)
    here, there = (on_node(config, "/tmp", node) for node in ("a", "b"))
    assert here.state != there.state
    assert here.state == on_node(server_config({}, url), "/tmp", "a").state
    assert here.state != on_node(server_config({}, "s3://bucket/other"), "/tmp", "a").state
    assert here.state is not None
    assert here.state.is_relative_to("/tmp/aiops-ray")
    assert f"--state-copy={url}" in here.flags()
    assert choose_servers(config, [8.0, 8.0], 1.0, 1.0, False) == 1
    with pytest.raises(ConflictError, match="standby=True takes no state="):
        server_config({}, url, standby=True)


def test_a_folder_is_where_it_is(tmp_path: Path) -> None:
    config = server_config({}, tmp_path)
    assert on_node(config, "/tmp", "a") is config
    assert server_config({}, "run").state == Path.cwd() / "run"


@pytest.mark.parametrize(
    ("mib", "nodes", "server", "workers", "standby", "count"),
    [
        (1, [8.0, 8.0], 1.0, 2.0, False, 1),  # a small model
        (1024, [8.0], 1.0, 2.0, False, 4),  # no more have been measured on one node
        (1024, [8.0], 4.0, 2.0, False, 1),  # room for a second beside the workers is not there
        (1024, [0.0, 4.0, 4.0, 4.0], 2.0, 4.0, False, 3),  # a head without processors
        (1024, [4.0, 4.0, 4.0], 2.0, 8.0, False, 2),
        (1024, [8.0, 2.0], 1.0, 2.0, True, 2),  # the standbys have the smaller node
        (1024, [8.0], 1.0, 8.0, False, 1),  # it waits for room
    ],
)
def test_as_many_servers_as_seem_best(
    mib: int, nodes: list[float], server: float, workers: float, standby: bool, count: int
) -> None:
    config = server_config({"model_size": mib << 20})
    assert choose_servers(config, nodes, server, workers, standby) == count


def test_the_number_of_servers_is_that_of_the_state(tmp_path: Path) -> None:
    config = server_config({}, tmp_path)
    with pytest.raises(UsageError, match="give model_size=BYTES"):
        choose_servers(config, [8.0], 1.0, 1.0, False)
    (tmp_path / IDENTITY_FILE).touch()
    assert choose_servers(config, [8.0], 1.0, 1.0, False) == 1
