"""The presets of ``aiops bandwidth --preset NAME``: plain lists of cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from aiops.lab.experiments.bandwidth.case import BandwidthCase
from aiops.lab.experiments.execution import TRANSFORMER

_DIGITS = BandwidthCase(
    policy="fasgd", lr=0.005, dataset="digits", hidden=64, batch_size=32, gradients=4000, samples=10
)
_DIGITS_GATE = "bfasgd:c_push=0.08,c_fetch=0.125"

# With no gate each at its best learning rate of a pool; behind one, with a least staleness of about
# half the mean, for fresh gradients would take the largest steps.
_RAW = {
    16: BandwidthCase(policy="fasgd", lr=0.002, workers=16, per_process=4, batch_size=8),
    4: BandwidthCase(policy="fasgd", lr=0.0014, workers=4, batch_size=8),
}
_GATED = {
    16: replace(_RAW[16], lr=0.015, set=("least=16",)),
    4: replace(_RAW[4], lr=0.005, set=("least=5",)),
}
_REAPPLY = {16: 0.005, 4: 0.002}  # the learning rate

_GATE = "bfasgd:c_push=0.11,c_fetch=0.13,local=0.1"
_CODED = "bfasgd:c_push=0.09,c_fetch=0.13,local=0.1"
_RARE = "bfasgd:c_push=0.2,c_fetch=0.25,local=0.1,share=0"
_PAPERS = "bfasgd:c_push=0.11,c_fetch=0.13,skipped=reapply"
# Whatever v̄ is: about the traffic of the first two.
_COIN = {
    16: "constant:p_push=0.11,p_fetch=0.0925,local=0.1",
    4: "constant:p_push=0.11,p_fetch=0.081,local=0.1",
}
_CODED_COIN = {
    16: "constant:p_push=0.13,p_fetch=0.1,local=0.1",
    4: "constant:p_push=0.128,p_fetch=0.085,local=0.1",
}
_RARE_COIN = {
    16: "constant:p_push=0.07,p_fetch=0.055,local=0.1",
    4: "constant:p_push=0.068,p_fetch=0.052,local=0.1",
}
_RELATIVE = "bfasgd:c_push=3,c_fetch=3,relative=true,local=0.1"
_QUARTER = "constant:p_push=0.25,p_fetch=0.25,local=0.1"
_PAPERS_COIN = "constant:p_push=0.0935,p_fetch=0.079,skipped=reapply"
_GATE_ALONE, _COIN_ALONE = "bfasgd:c_push=0.11,c_fetch=0.13", "constant:p_push=0.113,p_fetch=0.096"


def _coded(case: BandwidthCase, gate: str, push: str, fetch: str) -> BandwidthCase:
    return replace(case, gate=gate, push_codec=(push,), fetch_codec=(fetch,))


def _figures(workers: int) -> Iterator[BandwidthCase]:
    """Yield what gates and codecs save, and the controls beside them."""
    raw, coded = _RAW[workers], _GATED[workers]
    gated = coded if workers == 16 else replace(coded, lr=0.004)
    yield raw
    yield replace(gated, gate=_GATE)
    yield replace(gated, gate=_COIN[workers])
    yield replace(raw, lr=_REAPPLY[workers], gate=_PAPERS)
    yield replace(raw, lr=_REAPPLY[workers], gate=_PAPERS_COIN)
    yield _coded(coded, _CODED, "topk:0.01", "topk:0.05")
    yield _coded(coded, _CODED_COIN[workers], "topk:0.01", "topk:0.05")
    yield _coded(coded, _RARE, "topk:0.005", "topk:0.02")
    yield _coded(coded, _RARE_COIN[workers], "topk:0.005", "topk:0.02")
    if workers == 16:
        yield replace(gated, gate=_GATE_ALONE)
        yield replace(gated, gate=_COIN_ALONE)


def _pareto() -> Iterator[BandwidthCase]:
    """Yield gates × codecs."""
    raw, gated = _RAW[16], _GATED[16]
    yield raw
    yield replace(raw, push_codec=("int8",), fetch_codec=("int8",))
    for gate in (_GATE, f"{_GATE},by=tensor", "periodic:k_push=9,k_fetch=11,local=0.1"):
        yield replace(gated, gate=gate)
    yield replace(raw, lr=_REAPPLY[16], gate=_PAPERS)
    for push, fetch in (
        ("int8", "int8"),
        ("onebit", "onebit"),
        ("lowrank:4", "int8"),
        ("topk:0.01", "int8"),
        ("topk:0.01", "topk:0.05"),
    ):
        yield _coded(gated, _CODED, push, fetch)
    yield _coded(gated, _RARE, "topk:0.005", "topk:0.02")


def _link() -> Iterator[BandwidthCase]:
    """Yield the same training behind an uplink of 20 Mbit/s."""
    cases = [
        _coded(_GATED[4], _CODED, "topk:0.01", "topk:0.05"),
        replace(_RAW[4], gradients=1000),
    ]
    for batch_size in (64, 256, 1024):  # a barrier, and as much computed before each as pays
        sync = BandwidthCase(policy="hardsync", lr=0.2, set=("optimizer=momentum",), gradients=600)
        cases.append(replace(sync, batch_size=batch_size))
    return (replace(case, link="20Mbit/s", delay=0.005) for case in cases)


def _transformer() -> Iterator[BandwidthCase]:
    """Yield codecs and gates for a small transformer: under the default policy, and under FASGD."""
    small = BandwidthCase(network=TRANSFORMER, batch_size=16, gradients=600, samples=3)
    usual = replace(small, policy="schedule-free", per_process=4)
    yield usual
    for push, fetch in (
        ("bf16", "bf16"),
        ("int8", "int8"),
        ("lowrank:4", "int8"),
        ("onebit", "int8"),
        ("topk:0.05", "int8"),
        ("topk:0.05", "topk:0.1"),
        ("topk:0.01", "topk:0.05"),
    ):
        yield _coded(usual, "", push, fetch)
    yield replace(usual, gate="constant:p_push=0.25,p_fetch=0.25")
    # The best rate of 0.001, 0.003, 0.01, 0.03 and 0.1, with seed 0.
    raw = replace(usual, policy="fasgd", lr=0.003, set=("relative=0.01",))
    gated = replace(raw, set=("relative=0.01", "least=5"))
    yield raw
    yield _coded(raw, "", "int8", "int8")
    yield replace(gated, gate=_GATE)
    yield replace(gated, gate=_RELATIVE)
    yield replace(gated, gate=_QUARTER)
    yield _coded(gated, _CODED, "topk:0.01", "topk:0.05")


PRESETS: Mapping[str, Sequence[BandwidthCase]] = {
    # half a minute: what a gate does, what codecs do, and both
    "quick": (
        _DIGITS,
        replace(_DIGITS, gate=_DIGITS_GATE),
        replace(_DIGITS, push_codec=("int8",), fetch_codec=("int8",)),
        _coded(_DIGITS, _DIGITS_GATE, "topk:0.01", "int8"),
    ),
    # accuracy against bytes, on MNIST with 16 workers: gates × codecs
    "pareto": tuple(_pareto()),
    # 16 and 4 workers: what docs/results/README.md shows, with --seed 0 --seed 1 --seed 2
    "figures": (*_figures(16), *_figures(4)),
    # the server chooses the gate's constants to keep to a budget of bytes per second
    "budget": tuple(
        replace(_GATED[16], gate="bfasgd:local=0.1", budget=budget)
        for budget in ("", "340MB/s", "135MB/s", "45MB/s")
    ),
    "link": tuple(_link()),
    # the same questions of a transformer, in PyTorch; with --seed 0 --seed 1 ten minutes
    "transformer": tuple(_transformer()),
}
