"""Ids that both sides compute alike, and the choice of what is traced."""

from __future__ import annotations

import pytest

from aiops.tracing.spans import FIRST, LONGEST, SHARE, Sampler, brief, span_of, trace_of


def test_ids_are_those_of_the_push_and_of_opentelemetry_s_sizes() -> None:
    assert trace_of("ab", 1) == trace_of("ab", 1)
    traces = {trace_of(client, seq) for client in ("ab", "cd") for seq in range(50)}
    assert len(traces) == 100
    assert all(0 < trace < 1 << 128 for trace in traces)
    assert max(trace.bit_length() for trace in traces) > 120
    spans = {span_of(trace, name) for trace in traces for name in ("aiops.step", "aiops.push")}
    assert len(spans) == 200
    assert all(0 < span < 1 << 64 for span in spans)


def taken(sampler: Sampler, count: int = 4000) -> list[int]:
    return [seq for seq in range(1, count + 1) if sampler.takes(trace_of("ab", seq), seq)]


def test_by_default_the_first_pushes_and_a_share_of_the_others() -> None:
    sampler, unknown = Sampler.of({})
    found = taken(sampler)
    assert not unknown
    assert found[:FIRST] == list(range(1, FIRST + 1))
    assert 0.5 * SHARE < (len(found) - FIRST) / 4000 < 2 * SHARE


@pytest.mark.parametrize(
    ("name", "argument", "share"),
    [
        ("always_on", "", 1),
        ("parentbased_always_on", "", 1),
        ("always_off", "", 0),
        ("parentbased_always_off", "", 0),
        ("traceidratio", "0.25", 0.25),
        ("parentbased_traceidratio", "0.25", 0.25),
        ("traceidratio", "", 1),
        ("traceidratio", "0", 0),
    ],
)
def test_the_samplers_of_the_environment(name: str, argument: str, share: float) -> None:
    environment = {"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": argument}
    sampler, unknown = Sampler.of(environment)
    assert not unknown
    assert len(taken(sampler)) / 4000 == pytest.approx(share, abs=0.03)


def test_a_peer_does_not_have_more_traced_than_the_first() -> None:
    assert not Sampler(0, 0.0).takes(trace_of("ab", 0), 0)
    assert not any(Sampler(10, 0.0).takes(trace_of("ab", seq), seq) for seq in (0, -1, 11))
    assert Sampler(10, 0.0).takes(trace_of("ab", 1), 1)
    assert not Sampler(10, 0.0).takes(trace_of("ab", 1), 1, repeated=True)
    assert Sampler(0, 1.0).takes(trace_of("ab", 1), 1, repeated=True)


def test_texts_of_peers_are_cut() -> None:
    assert brief("short") == "short"
    assert brief("x" * LONGEST) == "x" * LONGEST
    assert brief("x" * 1000) == "x" * (LONGEST - 1) + "…"
    assert brief("abcd", 3) == "ab…"


@pytest.mark.parametrize("argument", ["x", "-1", "1.5", "nan"])
def test_a_sampler_that_cannot_be_read_is_told(argument: str) -> None:
    environment = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": argument}
    sampler, unknown = Sampler.of(environment)
    assert unknown == f"OTEL_TRACES_SAMPLER_ARG={argument} is no number from 0 to 1"
    assert taken(sampler)[:FIRST] == list(range(1, FIRST + 1))
    assert Sampler.of({"OTEL_TRACES_SAMPLER": "jaeger_remote"})[1]


def test_the_share_is_taken_as_the_sdk_takes_it() -> None:
    """Other programs of a trace would decide alike."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

    ours, theirs = Sampler(0, 0.3), TraceIdRatioBased(0.3)
    for seq in range(1, 200):
        trace = trace_of("ab", seq)
        decision = theirs.should_sample(None, trace, "").decision
        assert ours.takes(trace, seq) == (decision is Decision.RECORD_AND_SAMPLE)
