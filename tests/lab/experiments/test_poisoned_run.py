"""A run with hostile workers: its data, and its attacks, on the perceptron and a transformer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aiops.lab.experiments.execution import carry_out, perceptron
from aiops.lab.experiments.poisoned_run import PoisonedRun
from tests.lab.experiments.slopes import params_of
from tests.lab.experiments.small_experiment import TINY

torch = pytest.importorskip("torch")

from aiops.lab.experiments.gpt import ByteGPT  # noqa: E402


def test_examples_of_a_class_are_beside_each_other() -> None:
    task = perceptron("digits", 4)
    classes = task._y[task.alike()]
    assert sorted(task.alike()) == list(range(task.examples))
    assert (np.diff(classes.astype(int)) >= 0).all()


class TestTransformer:
    def test_a_text_is_alike_where_it_lies_together(self) -> None:
        task = ByteGPT(width=32, blocks=1, context=16)
        assert np.array_equal(task.alike(), np.arange(task.examples))

    def test_flipped_classes_are_other_bytes(self) -> None:
        task = ByteGPT(width=32, blocks=1, context=16)
        params, right, wrong = params_of(task), params_of(task), params_of(task)
        rows = np.array([7, 70])
        task.gradient(params, rows, right)
        task.gradient(params, rows, wrong, flipped=True)
        assert not np.array_equal(right["bytes"], wrong["bytes"])
        with torch.no_grad():
            weights = task.weights(params)
            for name, tensor in weights.items():
                tensor -= torch.from_numpy(0.5 * wrong[name])
            scores, bytes_ = task.scores(weights, rows)
        assert scores[:, 255 - bytes_].diagonal().mean() > scores[:, bytes_].diagonal().mean()

    def test_each_attack_is_a_run_of_its_own(self) -> None:
        base = replace(TINY, iterations=6, samples=1)
        digests = set[str]()
        for attack in ("none", "labels", "colluding", "huge"):
            work = PoisonedRun(base, attack, 1 / 3, "off", own_data=True, network="transformer")
            found = carry_out(work, lambda done: None)
            assert [sample["iteration"] for sample in found["curve"]] == [0, 6]
            assert all(np.isfinite(sample["cost"]) for sample in found["curve"])
            digests.add(found["digest"])
        assert len(digests) == 4
