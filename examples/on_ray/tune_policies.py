"""Compare policies and learning rates with Ray Tune: each trial is a job of its own.

::

    pip install 'aiops-ps[server,ray]' 'ray[tune]'
    python examples/on_ray/tune_policies.py             # a cluster of this machine
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from ray import tune

import aiops
import aiops.ray
from aiops.lab.workloads import MLP, batches, load

WORKERS, STEPS = 2, 500


def loop() -> None:
    """Train one worker; rank 0 reports the accuracy in the end."""
    digits = load("digits").flat()
    model = MLP((digits.features, 32, digits.classes))
    rank = aiops.ray.get_context().get_world_rank()
    with aiops.Worker(params=model.init(seed=0)) as worker:
        for x, y in islice(batches(digits, 32, seed=rank), STEPS):
            _loss, gradients = model.gradients(worker.params, x, y)
            worker.step(gradients)
        if rank == 0:
            accuracy = model.accuracy(worker.evaluation(), digits.test_x, digits.test_y)
            aiops.ray.report({"accuracy": accuracy})


def trial(chosen: Mapping[str, Any]) -> None:
    """Run the job of one trial."""
    result = aiops.ray.train(
        loop, policy=chosen["policy"], lr=chosen["lr"], num_workers=WORKERS, kernels="numpy"
    )
    assert result.metrics is not None
    tune.report(result.metrics)


def main(_argv: Sequence[str]) -> int:
    """Run all trials, and print the best."""
    tuner = tune.Tuner(
        # The trial itself only waits; its server and workers ask Ray for places of their own.
        tune.with_resources(trial, {"cpu": 0.1}),
        param_space={
            "policy": tune.grid_search(["asgd", "fasgd"]),
            "lr": tune.grid_search([0.005, 0.05]),
        },
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", max_concurrent_trials=2),
    )
    best = tuner.fit().get_best_result()
    assert best.config is not None
    assert best.metrics is not None
    print(f"best: {best.config['policy']} with lr {best.config['lr']}")
    print(f"test accuracy: {best.metrics['accuracy']:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
