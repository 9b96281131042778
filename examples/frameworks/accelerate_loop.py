"""Fine-tune a frozen network by small adapters (LoRA), in a loop with Accelerate.

::

    pip install 'aiops-ps[server,frameworks]'
    aiops run --workers 2 examples/frameworks/accelerate_loop.py

A network has learnt the digits 0 to 4, and learns 5 to 9 by matrices of rank 4 that are added to
its own. Only those are on the server. ``# aiops`` marks the lines that differ from training alone.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn import functional

from aiops.client.torch import RemoteOptimizer, standalone  # aiops
from aiops.lab.workloads import load

STEPS = int(os.environ.get("STEPS", "300"))  # of this worker


class Adapted(torch.nn.Module):  # type: ignore[misc]
    """A frozen linear layer, and a matrix of low rank that is added to its own."""

    def __init__(self, layer: Any, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = torch.nn.Linear(layer.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, layer.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x: Any) -> Any:
        """Return float32[batch, out_features]."""
        return self.layer(x) + self.up(self.down(x))


def learnt(x: Any, y: Any) -> Any:
    """Return a network that has learnt some digits, the same on each worker."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    for _ in range(100):
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def main() -> float:
    """Fine-tune; return the share of test images of the new digits that are classified wrongly."""
    rank, workers = standalone()  # aiops: was rank, workers = 0, 1
    torch.set_num_threads(1)  # workers on one machine share its processors
    digits = load("digits").flat()
    x, y = torch.tensor(digits.train_x), torch.tensor(digits.train_y)
    test_x, test_y = torch.tensor(digits.test_x), torch.tensor(digits.test_y)
    old = learnt(x[y < 5], y[y < 5])
    model: Any = torch.nn.Sequential(Adapted(old[0], 4), old[1], Adapted(old[2], 4))
    mine = torch.utils.data.TensorDataset(x[rank::workers], y[rank::workers])
    data = torch.utils.data.DataLoader(mine, 16, shuffle=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    optimizer: Any = RemoteOptimizer(model)  # aiops: was optimizer: Any = adamw(model)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    step = 0
    while step < STEPS:
        for images, labels in data:
            with accelerator.accumulate(model):
                accelerator.backward(functional.cross_entropy(model(images), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    step += 1
                optimizer.step()
                optimizer.zero_grad()
            if step == STEPS:
                break
    optimizer.optimizer.close()  # aiops
    new = test_y >= 5
    with torch.no_grad():
        wrong = model(test_x[new]).argmax(dim=1) != test_y[new]
    return float(wrong.float().mean())


def adamw(model: Any) -> Any:
    """Return the optimizer of training alone, of what is not frozen."""
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 0.06)


if __name__ == "__main__":
    print(f"{main():.2%} of the new digits are classified wrongly")
