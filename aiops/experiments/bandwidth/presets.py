"""What ``aiops bandwidth --preset NAME`` runs: plain lists of cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from aiops.experiments.bandwidth.case import Case

_MNIST = Case(policy="fasgd", lr=0.005, workers=16, per_process=4, batch_size=8)
_DIGITS = Case(
    policy="fasgd", lr=0.005, dataset="digits", hidden=64, batch_size=32, gradients=4000, samples=10
)

_FETCH = "bfasgd:c_fetch=0.125"
_PUSH = "bfasgd:c_push=0.08,c_fetch=0.125"
_REAPPLY = "bfasgd:c_push=0.08,c_fetch=0.125,skipped=reapply"

PRESETS: Mapping[str, Sequence[Case]] = {
    # half a minute: what a gate does, what codecs do, and both
    "quick": (
        _DIGITS,
        replace(_DIGITS, gate=_PUSH),
        replace(_DIGITS, push_codec=("int8",), fetch_codec=("int8",)),
        replace(_DIGITS, gate=_PUSH, push_codec=("topk:0.01",), fetch_codec=("int8",)),
    ),
    # accuracy against bytes, on MNIST with 16 workers: gates × codecs
    "pareto": (
        _MNIST,
        replace(_MNIST, gate=_FETCH),
        replace(_MNIST, gate=_PUSH),
        replace(_MNIST, gate=_REAPPLY),
        replace(_MNIST, gate=f"{_PUSH},by=tensor"),
        replace(_MNIST, gate="periodic:k_push=8,k_fetch=8"),
        replace(_MNIST, gate="constant:p_push=0.12,p_fetch=0.12"),
        replace(_MNIST, push_codec=("int8",), fetch_codec=("int8",)),
        replace(_MNIST, gate=_PUSH, push_codec=("int8",), fetch_codec=("int8",)),
        replace(_MNIST, gate=_PUSH, push_codec=("onebit",), fetch_codec=("int8",)),
        replace(_MNIST, gate=_PUSH, push_codec=("topk:0.01",), fetch_codec=("int8",)),
        replace(_MNIST, gate=_PUSH, push_codec=("topk:0.01",), fetch_codec=("topk:0.1",)),
    ),
    # the server chooses the gate's constants to keep to so many bytes per second
    "budget": tuple(
        replace(_MNIST, gate="bfasgd", budget=budget, gradients=20_000)
        for budget in ("", "20MB/s", "10MB/s", "5MB/s", "2MB/s")
    ),
    # the same training behind an uplink of 20 Mbit/s, raw and with everything that spares bytes
    "link": tuple(
        replace(case, link="20Mbit/s", delay=0.005, gradients=2000)
        for case in (
            _MNIST,
            replace(_MNIST, gate=_PUSH),
            replace(_MNIST, push_codec=("topk:0.01",), fetch_codec=("int8",)),
            replace(_MNIST, gate=_PUSH, push_codec=("topk:0.01",), fetch_codec=("topk:0.1",)),
        )
    ),
}
