"""Train a small ResNet on CIFAR-10, in a plain loop of PyTorch.

::

    pip install 'aiops-ps[server,torch]'
    aiops run --workers 2 examples/frameworks/pytorch_resnet.py

It wants CIFAR-10 in ``$AIOPS_DATA``. ``# aiops`` marks the lines that differ from training alone,
with AdamW.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.nn import functional

from aiops.client.torch import RemoteOptimizer  # aiops
from aiops.lab.workloads import load

STEPS = int(os.environ.get("STEPS", "600"))  # of this worker
WIDTHS = (16, 32, 64)


class Block(torch.nn.Module):  # type: ignore[misc]
    """Two convolutions, and what they are added to (He et al. 2016)."""

    def __init__(self, below: int, width: int) -> None:
        super().__init__()
        stride = 1 if below == width else 2
        self.first = torch.nn.Conv2d(below, width, 3, stride, padding=1, bias=False)
        self.norm1 = torch.nn.BatchNorm2d(width)
        self.second = torch.nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = torch.nn.BatchNorm2d(width)
        across = torch.nn.Conv2d(below, width, 1, stride, bias=False)
        self.across = torch.nn.Identity() if below == width else across

    def forward(self, x: Any) -> Any:
        """Return float32[n, width, h, w]."""
        inner = functional.relu(self.norm1(self.first(x)))
        return functional.relu(self.across(x) + self.norm2(self.second(inner)))


def resnet() -> Any:
    """Return ResNet-8: 78,042 parameters."""
    blocks = [Block(below, width) for below, width in zip((16, *WIDTHS), WIDTHS, strict=False)]
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        *blocks,
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(WIDTHS[-1], 10),
    )


def images(x: Any) -> Any:
    """Return images as PyTorch has them, float32[n, 3, 32, 32]."""
    return torch.tensor(x, dtype=torch.float32).reshape(-1, 32, 32, 3).permute(0, 3, 1, 2)


def main() -> float:
    """Train; return the share of test images that are classified wrongly."""
    torch.set_num_threads(1)  # workers on one machine share its processors
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    cifar = load("cifar10")
    model = resnet()
    optimizer: Any = RemoteOptimizer(model)  # aiops: was optimizer: Any = adamw(model)
    x, y = images(cifar.train_x), torch.tensor(cifar.train_y)
    for _ in range(STEPS):
        chosen = torch.randint(len(x), (64,))
        batch = x[chosen].flip(3) if torch.rand(()) < 0.5 else x[chosen]
        optimizer.zero_grad()
        functional.cross_entropy(model(batch), y[chosen]).backward()
        optimizer.step()
    optimizer.close()  # aiops
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(part).argmax(dim=1) for part in images(cifar.test_x).split(1000)])
    return float((found != torch.tensor(cifar.test_y)).float().mean())


def adamw(model: Any) -> Any:
    """Return the optimizer of training alone."""
    return torch.optim.AdamW(model.parameters(), 0.003)


if __name__ == "__main__":
    print(f"{main():.1%} of the test images are classified wrongly")
