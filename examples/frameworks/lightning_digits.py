"""Train a convolutional network on handwritten digits with Lightning.

::

    pip install 'aiops-ps[server,frameworks]'
    aiops run --workers 2 examples/frameworks/lightning_digits.py

``# aiops`` marks the lines that differ from training alone, with AdamW.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import lightning
import torch
from torch.nn import functional

from aiops.client.torch import RemoteOptimizer  # aiops
from aiops.lab.workloads import load

STEPS = int(os.environ.get("STEPS", "300"))  # of this worker


class Digits(lightning.LightningModule):  # type: ignore[misc]
    """Ten scores of an image of 8 × 8."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.BatchNorm2d(16),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(16, 32, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(512, 10),
        )

    def training_step(self, batch: Any, number: int) -> Any:
        """Return the cost of a mini-batch."""
        images, labels = batch
        return functional.cross_entropy(self.net(images), labels)

    def test_step(self, batch: Any, number: int) -> None:
        """Note the share of images that are classified wrongly."""
        images, labels = batch
        wrong = self.net(images).argmax(dim=1) != labels
        self.log("wrong", wrong.float().mean())

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return RemoteOptimizer(self)  # aiops: was return torch.optim.AdamW(self.parameters(), 0.01)


def loader(x: Any, y: Any, size: int, shuffle: bool) -> Any:
    """Return a loader of images, float32[n, 1, 8, 8], and their labels."""
    images = torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8)
    data = torch.utils.data.TensorDataset(images, torch.tensor(y))
    return torch.utils.data.DataLoader(data, size, shuffle=shuffle)


def main() -> float:
    """Train; return the share of test images that are classified wrongly."""
    torch.set_num_threads(1)  # workers on one machine share its processors
    lightning.seed_everything(int(os.environ.get("RANK", "0")), verbose=False)
    digits, model = load("digits"), Digits()
    trainer = lightning.Trainer(
        max_steps=STEPS,
        max_epochs=-1,
        devices=1,
        gradient_clip_val=1.0,
        default_root_dir=tempfile.gettempdir(),
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader(digits.train_x, digits.train_y, 32, shuffle=True))
    trainer.optimizers[0].close()  # aiops
    found = trainer.test(model, loader(digits.test_x, digits.test_y, 1000, False), verbose=False)
    return float(found[0]["wrong"])


if __name__ == "__main__":
    print(f"{main():.2%} of the test images are classified wrongly")
