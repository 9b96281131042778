"""Gradients of the networks: of one mini-batch until the next is taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aiops.client.params import Params
from aiops.lab.experiments.bandwidth.networks import NETWORKS, lessons, material
from aiops.model.layout import Layout


@pytest.mark.parametrize("network", NETWORKS)
def test_a_gradient_can_be_computed_again(network: str) -> None:
    """On newer parameters, of the same mini-batch; each worker has mini-batches of its own."""
    if network == "transformer":
        pytest.importorskip("torch")
    with material(network, "digits", 8) as files:
        start, given = lessons(network, files.sizes, str(Path(files.folder)), 4, 1, 2)
        layout = Layout.of(start)
        first, second = (given(index, Params(layout)) for index in range(2))

        def bits(gradients: object) -> bytes:
            return b"".join(np.ascontiguousarray(a).tobytes() for a in gradients(start).values())  # type: ignore[operator]

        found = []
        for gradients in (first, second):
            for _ in range(2):
                gradients.advance()
                found.append(bits(gradients))
                assert found[-1] == bits(gradients)
        assert len({*found}) == 4
        loss, accuracy = files.test(start)
        classes = 256 if network == "transformer" else 10
        assert loss == pytest.approx(np.log(classes), rel=0.4)
        assert 0 <= accuracy < 0.5
