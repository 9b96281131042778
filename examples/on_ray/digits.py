"""Train a perceptron on handwritten digits with the workers of a Ray cluster.

::

    pip install 'aiops-ps[server,ray]'
    python examples/on_ray/digits.py                    # a cluster of this machine
    RAY_ADDRESS=auto python examples/on_ray/digits.py   # the cluster that this machine is a node of

Each worker sees the rows that it is dealt. Rank 0 evaluates after each epoch, and reports a
checkpoint.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray.data
import ray.train

import aiops
import aiops.ray
from aiops.lab.workloads import MLP, load


def loop(config: Mapping[str, Any]) -> None:
    """Train one worker, on the rows that it is dealt."""
    digits = load("digits").flat()
    model = MLP((digits.features, 64, digits.classes))
    rows = aiops.ray.get_dataset_shard("rows")
    with aiops.Worker(params=model.init(seed=int(os.environ["AIOPS_SEED"]))) as worker:
        while rows.epoch < config["epochs"]:
            for batch in rows.iter_batches(batch_size=32):
                x, y = digits.train_x[batch["data"]], digits.train_y[batch["data"]]
                _loss, gradients = model.gradients(worker.params, x, y)
                worker.step(gradients)
            if aiops.ray.get_context().get_world_rank() == 0:
                accuracy = model.accuracy(worker.evaluation(), digits.test_x, digits.test_y)
                _report(accuracy, worker.params)


def _report(accuracy: float, params: Mapping[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder, "model.npz"), **params)
        aiops.ray.report({"accuracy": accuracy}, ray.train.Checkpoint.from_directory(folder))


def main(argv: Sequence[str]) -> int:
    """Train with as many workers as ``argv`` says, by default two."""
    count = len(load("digits").train_y)
    order = np.random.default_rng(0).permutation(count)
    result = aiops.ray.train(
        loop,
        policy="fasgd",
        num_workers=int(argv[0]) if argv else 2,
        config={"epochs": 20},
        datasets={"rows": ray.data.from_numpy(np.array_split(order, 16))},
        run_config=ray.train.RunConfig(
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    assert result.metrics is not None
    print(f"checkpoints in {result.path}")
    print(f"test accuracy: {result.metrics['accuracy']:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
