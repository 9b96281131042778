r"""Train a recommender with tables of embeddings (DLRM), in a plain loop of PyTorch.

::

    pip install 'aiops-ps[server,torch]'
    aiops run --workers 2 --policy asgd --set optimizer=adagrad --set lr=0.03 \
        examples/frameworks/pytorch_dlrm.py

The tables are on the server, and a worker holds the rows of a mini-batch. Clicks are drawn from a
known truth, of which the best model leaves 0.412 nats. ``# aiops`` marks the lines that differ from
training alone, with Adagrad.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from aiops.client.torch import Embedding, RemoteOptimizer  # aiops
from aiops.lab.experiments.click_tables import VALUES, drawn_clicks

STEPS = int(os.environ.get("STEPS", "2000"))  # of this worker
WIDTH, UNITS, DENSE = 8, 32, 8
TESTED = 20_000


class Recommender(nn.Module):  # type: ignore[misc]
    """Products of each two vectors go through a perceptron (Naumov et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList()
        for many in VALUES:
            rows = Embedding(many, WIDTH, scale=0.1)  # aiops: was rows = embedding(many)
            self.tables.append(rows)
        self.dense = nn.Sequential(nn.Linear(DENSE, UNITS), nn.ReLU(), nn.Linear(UNITS, WIDTH))
        pairs = list(itertools.combinations(range(len(VALUES) + 1), 2))
        self.first, self.second = (list(side) for side in zip(*pairs, strict=True))
        self.top = nn.Sequential(
            nn.Linear(len(pairs) + WIDTH, UNITS), nn.ReLU(), nn.Linear(UNITS, 2)
        )

    def forward(self, values: Any, dense: Any) -> Any:
        """Return scores of no click and of one, float32[n, 2]."""
        own = self.dense(dense)
        rows = [table(values[:, place]) for place, table in enumerate(self.tables)]
        vectors = torch.stack([*rows, own], 1)
        products = vectors @ vectors.transpose(1, 2)
        return self.top(torch.cat([products[:, self.first, self.second], own], 1))


def main() -> float:
    """Train; return the cost of the test's examples, in nats."""
    torch.set_num_threads(1)  # workers on one machine share its processors
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    clicks = drawn_clicks(100_000 + TESTED)
    parts = clicks.values, clicks.dense, clicks.clicks
    values, dense, clicked = (torch.tensor(part) for part in parts)
    model = Recommender()
    optimizer: Any = RemoteOptimizer(model)  # aiops: was optimizer: Any = adagrad(model)
    for _ in range(STEPS):
        chosen = torch.randint(100_000, (128,))
        optimizer.zero_grad()
        functional.cross_entropy(model(values[chosen], dense[chosen]), clicked[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        scores = model(values[-TESTED:], dense[-TESTED:])
        cost = functional.cross_entropy(scores, clicked[-TESTED:])
    optimizer.close()  # aiops
    return float(cost)


def embedding(many: int) -> Any:
    """Return the table of training alone."""
    table = nn.Embedding(many, WIDTH)
    nn.init.normal_(table.weight, std=0.1)
    return table


def adagrad(model: Any) -> Any:
    """Return the optimizer of training alone."""
    return torch.optim.Adagrad(model.parameters(), 0.03)


if __name__ == "__main__":
    print(f"{main():.4f} nats per example of the test")
