"""A coded gradient is made of encoders that have encoded just such tensors."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.client.coded_gradient import CodedGradient
from aiops.client.coding import Coding
from aiops.client.encode_push import parts_of
from aiops.codecs.choice import CodecChoice
from aiops.model.layout import Layout
from aiops.wire.template import Template
from tests.client.test_steady import Half

ARRAYS = {"w": np.ones(400, np.float32), "b": np.ones(3, np.float32)}


@pytest.mark.parametrize("codec", [None, "bf16"])
def test_encoders_of_another_plan_are_not_taken(codec: str | None) -> None:
    """The plan may change while a coded push is under way."""
    layout = Layout.of(ARRAYS)
    ours = Coding(layout, CodecChoice.of(["int8"]))
    parts, _payloads = parts_of(layout, ARRAYS, 0, ours)
    assert CodedGradient.of(layout, parts, ours) is not None
    other = Coding(layout, CodecChoice.of([codec or "int8"]))
    if codec is not None:
        parts_of(layout, ARRAYS, 0, other)
    with pytest.raises(ValueError, match="has been encoded in int8"):
        CodedGradient.of(layout, parts, other)


def test_ctrl_c_before_a_push_is_under_way_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with Half(True, "coded") as half:
        for _ in range(2):
            half.client.exchange(half.params, half.gradient)
        steady = half.client._connection.short.steady
        before = half.coding()

        def interrupted(*_given: object) -> bytes:
            assert half.coding() != before
            raise KeyboardInterrupt

        half.gradient["v"][:] = 0.3
        with monkeypatch.context() as patch:
            patch.setattr(Template, "filled", interrupted)
            with pytest.raises(KeyboardInterrupt):
                steady.begin(half.params, half.gradient)
        assert half.coding() == before
        assert not steady.under_way
        assert half.client.exchange(half.params, half.gradient).version == 3
