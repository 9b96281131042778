"""Train a convolutional network on handwritten digits with Flax and Optax.

::

    pip install 'aiops-ps[server,frameworks]'
    aiops run --workers 2 examples/frameworks/flax_digits.py

``# aiops`` marks the lines that differ from training alone, with AdamW.
"""

from __future__ import annotations

import functools
import os
from itertools import islice
from typing import Any

import jax
import optax
from flax import linen

from aiops.client.jax import RemoteTree  # aiops
from aiops.lab.workloads import batches, load

STEPS = int(os.environ.get("STEPS", "300"))  # of this worker
ADAMW = optax.adamw(0.001)


class Net(linen.Module):  # type: ignore[misc]
    """Ten scores of an image of 8 × 8."""

    @linen.compact  # type: ignore[untyped-decorator]
    def __call__(self, images: Any, train: bool) -> Any:
        """Return scores, float32[batch, 10], of float32[batch, 64]."""
        x = linen.Conv(16, (3, 3))(images.reshape(-1, 8, 8, 1))
        x = linen.relu(linen.BatchNorm(use_running_average=not train)(x))
        x = linen.max_pool(x, (2, 2), (2, 2))
        x = linen.relu(linen.Conv(32, (3, 3))(x))
        return linen.Dense(10)(x.reshape(len(x), -1))


def main() -> float:
    """Train; return the share of test images that are classified wrongly."""
    digits, net = load("digits").flat(), Net()
    made = net.init(jax.random.key(0), digits.train_x[:1], train=True)
    params, seen = made["params"], made["batch_stats"]

    @jax.jit  # type: ignore[untyped-decorator]
    @functools.partial(jax.grad, has_aux=True)
    def gradients_at(params: Any, seen: Any, x: Any, y: Any) -> Any:
        variables = {"params": params, "batch_stats": seen}
        scores, changed = net.apply(variables, x, train=True, mutable=["batch_stats"])
        cost = optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()
        return cost, changed["batch_stats"]

    seed = int(os.environ.get("RANK", "0"))
    params = (remote := RemoteTree(params)).params  # aiops: was state = ADAMW.init(params)
    for x, y in islice(batches(digits, 32, seed), STEPS):
        gradients, seen = gradients_at(params, seen, x, y)
        remote.step(gradients)  # aiops: was updates, state = ADAMW.update(gradients, state, params)
        params = remote.params  # aiops: was params = optax.apply_updates(params, updates)
    params = remote.close()  # aiops
    variables = {"params": params, "batch_stats": seen}
    wrong = net.apply(variables, digits.test_x, train=False).argmax(axis=1) != digits.test_y
    return float(wrong.mean())


if __name__ == "__main__":
    print(f"{main():.2%} of the test images are classified wrongly")
