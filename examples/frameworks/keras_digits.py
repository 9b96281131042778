"""Train a convolutional network on handwritten digits with Keras 3, on its PyTorch backend.

::

    pip install 'aiops-ps[server,frameworks]'
    aiops run --workers 2 examples/frameworks/keras_digits.py

``# aiops`` marks the lines that differ from training alone, with Adam.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch

from aiops.client.keras import KerasOptimizer  # aiops
from aiops.lab.workloads import load

EPOCHS = int(os.environ.get("EPOCHS", "7"))  # of this worker, each of 45 mini-batches


def main() -> float:
    """Train; return the share of test images that are classified wrongly."""
    torch.set_num_threads(1)  # workers on one machine share its processors
    keras.utils.set_random_seed(int(os.environ.get("RANK", "0")))  # another order for each
    digits = load("digits").flat()
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Reshape((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    optimizer = KerasOptimizer(global_clipnorm=1.0)  # aiops: was optimizer = adam()
    cost = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, cost, metrics=["accuracy"])
    model.fit(digits.train_x, digits.train_y, batch_size=32, epochs=EPOCHS, verbose=0)
    optimizer.close()  # aiops
    return 1 - float(model.evaluate(digits.test_x, digits.test_y, verbose=0)[1])


def adam() -> keras.optimizers.Optimizer:
    """Return the optimizer of training alone."""
    return keras.optimizers.Adam(0.003, global_clipnorm=1.0)


if __name__ == "__main__":
    print(f"{main():.2%} of the test images are classified wrongly")
