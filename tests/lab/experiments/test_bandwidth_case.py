"""The settings of a run, and the command line that makes them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from aiops.cli.bandwidth import _cases
from aiops.errors import AiopsError
from aiops.lab.experiments.bandwidth.case import BandwidthCase
from aiops.lab.experiments.bandwidth.presets import PRESETS


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_run_and_all_its_runs_differ(preset: str) -> None:
    for case in PRESETS[preset]:
        case.check()
    assert len({case.key for case in PRESETS[preset]}) == len(PRESETS[preset])
    assert len({case.name for case in PRESETS[preset]}) == len(PRESETS[preset])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"dataset": "digit"}, "did you mean 'digits'"),
        ({"network": "transform"}, "did you mean 'transformer'"),
        ({"gate": "bfasgdd"}, "did you mean 'bfasgd'"),
        ({"push_codec": ("int9",)}, "int8"),
        ({"budget": "2 MBs"}, "--bandwidth-budget '2 MBs' is not a rate"),
        ({"link": "fast"}, "--link 'fast' is not a rate"),
        ({"delay": 0.1}, "--delay needs --link"),
        ({"workers": 8, "gradients": 7}, "--gradients must be 8 to"),
        ({"per_process": 0}, "--per-process must be 1 to"),
        ({"policy": "average"}, "average among themselves"),
        ({"policy": "hardsync", "gate": "periodic"}, "drop --gate"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(AiopsError) as caught:
        BandwidthCase(**settings).check()
    assert why in str(caught.value)


def test_a_case_is_found_again_by_its_settings() -> None:
    case = BandwidthCase(gate="bfasgd:c_push=0.1", push_codec=("topk:0.01", "raw@*.bias"), seed=3)
    again = BandwidthCase.of(json.loads(json.dumps(dataclasses.asdict(case))))
    assert (again, again.key) == (case, case.key)
    assert BandwidthCase(seed=4).key != BandwidthCase(seed=3).key


def test_workers_share_the_processes() -> None:
    case = BandwidthCase(workers=10, per_process=4)
    assert [list(workers) for workers in case.processes()] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]


def test_the_servers_flags() -> None:
    case = BandwidthCase(
        gate="bfasgd", push_codec=("int8", "raw@b"), budget="2MB/s", set=("gamma=0.9",)
    )
    flags = case.server.flags()
    for flag in ("--gate=bfasgd", "--push-codec=int8", "--push-codec=raw@b", "--set=gamma=0.9"):
        assert flag in flags
    assert "--bandwidth-budget=2MB/s" in flags
    assert not any(flag.startswith("--fetch-codec") for flag in flags)


class TestSweep:
    def test_each_value_with_each(self) -> None:
        swept = {"gate": ["", "bfasgd"], "push_codec": [(), ("int8",), ("onebit",)], "seed": None}
        cases = _cases(None, {"gradients": 100, "link": None}, swept)
        assert len(cases) == 6
        assert {case.gradients for case in cases} == {100}
        assert {(case.gate, case.push_codec) for case in cases} == {
            (gate, codec) for gate in ("", "bfasgd") for codec in ((), ("int8",), ("onebit",))
        }

    def test_flags_hold_for_every_run_of_a_preset(self) -> None:
        cases = _cases("quick", {"gradients": 100}, {"seed": [1, 2]})
        assert len(cases) == 2 * len(PRESETS["quick"])
        assert {case.gradients for case in cases} == {100}

    def test_what_becomes_the_same_is_run_once(self) -> None:
        assert len(_cases("quick", {}, {"gate": ["bfasgd"]})) < len(PRESETS["quick"])

    def test_no_such_preset(self) -> None:
        with pytest.raises(AiopsError, match="did you mean 'pareto'"):
            _cases("pareeto", {}, {})
