"""How traces are asked for, and what is said where that is a slip."""

from __future__ import annotations

import time

import pytest

from aiops import tracing
from aiops.errors import UsageError
from aiops.serving.config import Config
from aiops.tracing import Tracing
from tests.tracing.collected import collecting


@pytest.mark.parametrize("text", ["otlp", "jaeger:", "http://host:4318", "otlp4:"])
def test_another_kind_is_told(text: str) -> None:
    with pytest.raises(UsageError, match=f"--trace {text}: traces are sent by OTLP"):
        Config(trace=text)


def started(text: str, environment: dict[str, str]) -> Tracing | None:
    return tracing.start(text, "worker", {}, time.time_ns, environment)


def test_without_being_asked_for_there_is_none() -> None:
    assert started("", {}) is None
    assert started("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}) is None
    assert started("", {"OTEL_TRACES_EXPORTER": "none"}) is None


def test_opentelemetry_s_own_variables() -> None:
    with collecting():
        assert started("", {"OTEL_TRACES_EXPORTER": "console, otlp"}) is not None
        assert started("otlp:", {"OTEL_SDK_DISABLED": "True"}) is None


def test_where_there_is_no_such_clock_nothing_is_traced() -> None:
    with collecting():
        assert tracing.start("otlp:", "worker", {}, None, {}) is None


@pytest.mark.parametrize("argument", ["always_off", "traceidratio"])
def test_a_sampler_that_takes_none(argument: str) -> None:
    off = {"OTEL_TRACES_SAMPLER": argument, "OTEL_TRACES_SAMPLER_ARG": "0"}
    with collecting():
        assert started("otlp:", off) is None


@pytest.mark.parametrize(
    "name", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"]
)
def test_another_protocol_is_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with collecting():
        assert started("otlp:", {name: "grpc"}) is None
        assert f"{name}=grpc, and nothing is traced" in caplog.text
        assert started("otlp:", {name: "http/protobuf"}) is not None
        assert started("otlp:http://host:4318", {name: "grpc"}) is not None, "which is by HTTP"


def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(tracing.importlib, "import_module", gone)


def test_packages_that_are_missing_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch)
    with pytest.raises(UsageError, match=r"pip install 'aiops-ps\[otel\]'"):
        started("otlp:", {})
    with pytest.raises(UsageError, match=r"pip install 'aiops-ps\[otel\]'"):
        tracing.check("otlp:", {})


def test_what_is_disabled_needs_no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch)
    tracing.check("otlp:", {"OTEL_SDK_DISABLED": "true"})


def test_where_only_opentelemetry_asks_that_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lacking(monkeypatch)
    assert started("", {"OTEL_TRACES_EXPORTER": "otlp"}) is None
    assert "OTEL_TRACES_EXPORTER=otlp, and nothing is traced" in caplog.text


def test_a_sampler_that_is_unknown_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with collecting():
        assert started("otlp:", {"OTEL_TRACES_SAMPLER": "mine"})
    assert "OTEL_TRACES_SAMPLER=mine is none that aiops has" in caplog.text
