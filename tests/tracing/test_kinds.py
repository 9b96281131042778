"""How traces are asked for, and what is said where that is a slip."""

from __future__ import annotations

import pytest

from aiops import tracing
from aiops.errors import UsageError
from aiops.serving.config import Config


@pytest.mark.parametrize("text", ["otlp", "jaeger:", "http://host:4318", "otlp4:"])
def test_another_kind_is_told(text: str) -> None:
    with pytest.raises(UsageError, match=f"--trace {text}: traces are sent by OTLP"):
        Config(trace=text)


def test_without_being_asked_for_there_is_none() -> None:
    assert tracing.begun("", "worker", {}, {}) is None
    assert tracing.begun("", "worker", {}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}) is None
    assert tracing.begun("", "worker", {}, {"OTEL_TRACES_EXPORTER": "none"}) is None


def test_opentelemetry_s_own_variables() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    asked = {"OTEL_TRACES_EXPORTER": "console, otlp"}
    assert tracing.begun("", "worker", {}, asked) is not None
    assert tracing.begun("otlp:", "worker", {}, {"OTEL_SDK_DISABLED": "True"}) is None


def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(tracing.importlib, "import_module", gone)


def test_packages_that_are_missing_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch)
    with pytest.raises(UsageError, match=r"pip install 'aiops-ps\[otel\]'"):
        tracing.begun("otlp:", "worker", {}, {})
    with pytest.raises(UsageError, match=r"pip install 'aiops-ps\[otel\]'"):
        tracing.check("otlp:")


def test_where_only_opentelemetry_asks_that_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lacking(monkeypatch)
    assert tracing.begun("", "worker", {}, {"OTEL_TRACES_EXPORTER": "otlp"}) is None
    assert "OTEL_TRACES_EXPORTER=otlp, and nothing is traced" in caplog.text


def test_a_sampler_that_is_unknown_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    assert tracing.begun("otlp:", "worker", {}, {"OTEL_TRACES_SAMPLER": "mine"})
    assert "OTEL_TRACES_SAMPLER=mine is none that aiops has" in caplog.text
