"""The flags that commands hand on to the server that they start."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from aiops.cli.server_flags import ServerSettings, _with_variables


def test_what_workers_read_too_travels_in_the_environment() -> None:
    given = ["--policy=asgd", "--trace=otlp:http://a:4318", "--token=secret", "--set=lr=0.1"]
    flags, environment = _with_variables(given, {"HOME": "/root", "AIOPS_TRACE": "otlp:"})
    assert flags == ["--policy=asgd", "--set=lr=0.1"]
    assert environment == {
        "HOME": "/root",
        "AIOPS_TRACE": "otlp:http://a:4318",
        "AIOPS_TOKEN": "secret",
    }


@pytest.mark.parametrize(
    ("variables", "found"),
    [({}, "otlp:http://a:4318"), ({"AIOPS_TRACE": "otlp:"}, "otlp:")],
)
def test_workers_are_told_what_a_file_of_settings_has_traced(
    variables: dict[str, str], found: str, tmp_path: Path
) -> None:
    file = tmp_path / "server.toml"
    file.write_text('trace = "otlp:http://a:4318"\n')
    context = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))
    context.meta["aiops.server_flags"] = [f"--config={file}"]
    settings = ServerSettings(context, variables)
    assert settings.environment["AIOPS_TRACE"] == found
    assert settings.flags == [f"--config={file}"]


def test_a_file_that_is_not_there_is_the_server_s_to_tell() -> None:
    context = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))
    settings = ServerSettings(context, {"AIOPS_CONFIG": "/nowhere/server.toml"})
    assert "AIOPS_TRACE" not in settings.environment
