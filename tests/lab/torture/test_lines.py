"""Hostile followers and primaries, in virtual time: single lies, and all that a seed draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from aiops.lab.torture import attacked_lines
from aiops.lab.torture.changed_line import ChangedLine
from aiops.lab.torture.frame_templates import FrameTemplate
from aiops.lab.torture.line_trial import LineTrial, draw_lines
from tests.seeds import seeds

Header = dict[str, Any]
Lie = Callable[[Header], None]
"""Changes the header of a message."""


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("partner", ["follower", "filtering-follower", "primary"])
def test_all_goes_on_beside_a_hostile_partner(partner: str, seed: int) -> None:
    result = LineTrial(draw_lines(seed, (partner,))).run()
    assert result.wrong == []


def lies(kind: str, lie: Lie) -> type[ChangedLine]:
    """A line that tells one lie: about each message of a kind."""

    class Lying(ChangedLine):
        def _instead(self, raw: bytes, frame: FrameTemplate) -> Iterator[tuple[bytes, float]]:
            if frame.kind != kind:
                yield raw, 0.0
                return
            header = msgpack.unpackb(frame.header)
            lie(header)
            data: bytes = msgpack.packb(header)
            yield b"\xce" + len(data).to_bytes(4, "big") + data + frame.payloads, 0.0

    return Lying


def told(monkeypatch: pytest.MonkeyPatch, partner: str, kind: str, lie: Lie, **plan: Any) -> Any:
    """Have a partner tell a lie for a round; return the trial's result."""
    monkeypatch.setattr(attacked_lines, "ChangedLine", lies(kind, lie))
    monkeypatch.setattr("aiops.lab.torture.line_trial._RATES", (1.0,))
    greets = kind in ("shard_state", "standby_welcome")
    monkeypatch.setattr("aiops.lab.torture.line_trial._CUTS", float(greets))
    given = {"policy": "asgd", "state": True, "tables": False, "token": False, **plan}
    result = LineTrial(replace(draw_lines(3, (partner,)), peers=1, **given)).run()
    assert result.wrong or result.frames > 0, "it was told"
    return result


def sums(*numbers: Any, dtype: str = "<i8") -> Lie:
    def lie(header: Header) -> None:
        header["sums"] = np.array(numbers, dtype).tobytes()

    return lie


DEEP: Header = {"a": {"b": {"c": {"d": {"e": 1}}}}}


@pytest.mark.parametrize(
    "holds",
    [
        {"portions": 5},
        {"portions": [[]]},
        {"versions": [[1]]},
        {"history": [[1, 2, 3]]},
        {"history": [[1, "x"]]},
        {"snapshots": 7},
    ],
)
def test_a_lead_outlives_a_follower_with_a_senseless_state(
    monkeypatch: pytest.MonkeyPatch, holds: dict[str, Any]
) -> None:
    lie: Lie = lambda header: header["holds"].update(holds)  # noqa: E731
    assert told(monkeypatch, "follower", "shard_state", lie).wrong == []


@pytest.mark.parametrize(
    ("kind", "lie"),
    [
        ("update_done", lambda header: header.update(sums=b"1234567")),
        ("push_arrived", lambda header: header.update(fault={"details": {"text": 1, "self": 2}})),
        ("traffic_counted", lambda header: header.update(state=DEEP)),
    ],
)
@pytest.mark.parametrize("state", [True, False])
def test_a_lead_outlives_a_lying_follower(
    monkeypatch: pytest.MonkeyPatch, kind: str, lie: Lie, state: bool
) -> None:
    assert told(monkeypatch, "follower", kind, lie, state=state).wrong == []


@pytest.mark.parametrize("squares", [-1e9, float("nan")])
def test_a_norm_that_is_none_clips_no_gradient(
    monkeypatch: pytest.MonkeyPatch, squares: float
) -> None:
    clipped = {"asgd": {"set": {"lr": 1, "clip": 0.5}}}
    monkeypatch.setattr("aiops.lab.torture.attacked.SETTINGS", clipped)
    lie = sums(squares, dtype="<f8")
    assert told(monkeypatch, "follower", "update_done", lie).wrong == []


def test_statistics_do_not_wait_for_a_follower_that_counts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers pings."""
    lie: Lie = lambda header: header.update(id=header["id"] + 1)  # noqa: E731
    assert told(monkeypatch, "follower", "traffic_counted", lie).wrong == []


def test_a_standby_believes_no_generation_without_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would prove it to its primary, which would end for that."""
    later = 1 << 40
    lie: Lie = lambda header: header.update(generation=header["generation"] + later)  # noqa: E731
    assert told(monkeypatch, "primary", "standby_welcome", lie).wrong == []
