"""The flags that commands hand on to the server that they start."""

from __future__ import annotations

from aiops.cli.server_flags import _with_variables


def test_what_workers_read_too_travels_in_the_environment() -> None:
    given = ["--policy=asgd", "--trace=otlp:http://a:4318", "--token=secret", "--set=lr=0.1"]
    flags, environment = _with_variables(given, {"HOME": "/root", "AIOPS_TRACE": "otlp:"})
    assert flags == ["--policy=asgd", "--set=lr=0.1"]
    assert environment == {
        "HOME": "/root",
        "AIOPS_TRACE": "otlp:http://a:4318",
        "AIOPS_TOKEN": "secret",
    }
