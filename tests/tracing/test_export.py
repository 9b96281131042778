"""What is sent by OTLP, as a collector receives it."""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from aiops.tracing.delivery import SpanQueue
from aiops.tracing.spans import Span
from tests.support import PATIENCE

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from aiops.tracing import export


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.paths = list[str]()
        self.requests = list[Any]()
        ours = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    raise AssertionError("it is not asked for")
                ours.paths.append(self.path)
                ours.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.mark.parametrize("end", ["", "/", "/v1/traces"])
def test_spans_arrive_at_the_endpoint(end: str, collector: Collector) -> None:
    out = export.opened("server", collector.url + end)
    about, run = {"aiops.bytes": 12, "aiops.used": False}, {"aiops.run": "ab"}
    spans = [
        Span("aiops.exchange", 5 << 64, 3, 0, 1000, 2500, "server", about, "Refused: no", run),
        Span("aiops.queue", 5 << 64, 4, 3, 1000, 1200, resource=run),
    ]
    assert out.export(spans) == ""
    out.close()
    assert collector.paths == ["/v1/traces"]
    [resource] = collector.requests[0].resource_spans
    said = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert said["service.name"] == "aiops-server"
    assert said["aiops.run"] == "ab"
    whole, part = resource.scope_spans[0].spans
    assert int.from_bytes(whole.trace_id) == 5 << 64
    assert (int.from_bytes(whole.span_id), whole.parent_span_id) == (3, b"")
    assert (whole.start_time_unix_nano, whole.end_time_unix_nano) == (1000, 2500)
    assert (whole.status.code, whole.status.message) == (2, "Refused: no")
    assert {each.key for each in whole.attributes} == set(about)
    assert int.from_bytes(part.parent_span_id) == 3
    assert part.status.code == 0


def test_the_environment_s_endpoint_and_name(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,room=7")
    out = export.opened("worker", "")
    assert out.export([Span("aiops.step", 1, 2, 0, 1, 2)]) == ""
    out.close()
    [resource] = collector.requests[0].resource_spans
    said = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert (said["service.name"], said["room"]) == ("mine", "7")


def test_what_goes_wrong_is_returned_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    out = export.opened("worker", "http://127.0.0.1:9")
    ended = threading.Event()

    def close() -> None:
        out.close()
        ended.set()

    threading.Timer(0.1, close).start()  # which ends its repetitions
    why = out.export([Span("aiops.step", 1, 2, 0, 1, 2)])
    assert "127.0.0.1" in why or "shutdown" in why.lower()
    assert ended.wait(PATIENCE)
    assert caplog.text == ""


def test_what_others_log_by_the_same_logger_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    theirs = logging.getLogger(OTLPSpanExporter.__module__)
    with export._Said() as said:
        other = threading.Thread(target=theirs.warning, args=("of another",))
        other.start()
        other.join(PATIENCE)
        theirs.warning("ours")
    assert [record.getMessage() for record in caplog.records] == ["of another"]
    assert said.text == "ours"
    theirs.warning("later")
    assert caplog.records[-1].getMessage() == "later"


def test_workers_of_a_process_are_told_apart(collector: Collector) -> None:
    out = export.opened("worker", collector.url)
    names = [{"service.instance.id": name} for name in ("alice", "bob")]
    spans = [Span("aiops.step", 1, n, 0, 1, 2, resource=names[n % 2]) for n in (2, 3, 4)]
    assert out.export(spans) == ""
    out.close()
    found = [
        {each.key: each.value.string_value for each in resource.resource.attributes}
        for resource in collector.requests[0].resource_spans
    ]
    assert [each["service.instance.id"] for each in found] == ["alice", "bob"]


def test_of_a_collector_that_is_gone_our_warning_alone_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    queue = SpanQueue(lambda: export.opened("worker", "http://127.0.0.1:9"))
    queue.offer([Span("aiops.step", 1, 2, 0, 1, 2)])
    queue.close(PATIENCE)
    [record] = caplog.records
    assert record.name == "aiops.tracing"
    assert "traces are lost, 1 spans so far" in caplog.text
