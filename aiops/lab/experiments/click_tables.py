"""A recommender in the shape of DLRM, on clicks that are drawn from a known truth: a `Task`.

Categorical features have tables of embeddings, and dense ones a perceptron of their own; products
of each two of these vectors go through a last perceptron, which says whether there is a click
(Naumov et al. 2019, "Deep learning recommendation model for personalization and recommendation
systems"). Tables are dense here, as all parameters of a simulation in turns are: each push has the
gradient of all rows, most of them 0.

The truth has vectors of its own for each value of a feature, and a click is drawn with the
probability that they give; so the least cost that any model can have is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from aiops.lab.experiments.torch_task import TorchTask
from aiops.model.layout import Array, Ints

VALUES = (1000, 500, 200, 100, 50, 10)
"""How many values each categorical feature has."""

_DENSE = 8  # dense features
_WIDTH = 8  # of an embedding
_UNITS = 32  # of the hidden layers
_TRUE_WIDTH = 3  # of the truth's vectors
_MEAN = 1.0  # of their components, so that each feature says something for itself
_TRAINED, _TESTED = 100_000, 20_000  # examples
_STRENGTH = 2.5  # standard deviation of the truth's log-odds
_TAIL = 1.2  # the k-th most frequent value of a feature comes with a probability like 1/k to this
_PAIRS = tuple(itertools.combinations(range(len(VALUES) + 1), 2))


@dataclass(frozen=True, eq=False)
class Clicks:
    """Examples drawn from the truth, always the same.

    Attributes
    ----------
    values
        Of the categorical features, int64[n, features].
    dense
        The other features, float32[n, dense].
    clicks
        Whether there was one, int64[n].
    chances
        The truth's probability of it, float64[n].
    """

    values: Ints
    dense: Array
    clicks: Ints
    chances: Array

    @property
    def least_cost(self) -> float:
        """The mean cost, in nats, of the model that knows the truth."""
        p = self.chances
        return float(-np.where(self.clicks == 1, np.log(p), np.log1p(-p)).mean())

    def part(self, first: int, end: int) -> Clicks:
        """Return some of the examples."""
        arrays = (self.values, self.dense, self.clicks, self.chances)
        return Clicks(*(array[first:end] for array in arrays))


def drawn_clicks(count: int) -> Clicks:
    """Return that many examples."""
    random = np.random.default_rng(2019)
    columns, vectors = [], []
    for many in VALUES:
        weights = np.arange(1, many + 1) ** -_TAIL
        column = random.choice(many, count, p=weights / weights.sum())
        columns.append(column)
        vectors.append(random.normal(_MEAN, 1, (many, _TRUE_WIDTH))[column])
    dense = random.standard_normal((count, _DENSE))
    vectors.append(dense @ random.standard_normal((_DENSE, _TRUE_WIDTH)) / np.sqrt(_DENSE))
    odds = sum((vectors[one] * vectors[other]).sum(1) for one, other in _PAIRS)
    odds = _STRENGTH * (odds - odds.mean()) / odds.std()
    chances = 1 / (1 + np.exp(-odds))
    clicks = (random.random(count) < chances).astype(np.int64)
    return Clicks(np.stack(columns, 1), dense.astype(np.float32), clicks, chances)


class ClickTables(TorchTask):
    """The model, its examples, and its gradient.

    Attributes
    ----------
    tested_clicks
        The examples of the test.
    """

    def __init__(self) -> None:
        super().__init__(_shapes())
        found = drawn_clicks(_TRAINED + _TESTED)
        self.examples = _TRAINED
        self.tested_clicks = found.part(_TRAINED, _TRAINED + _TESTED)
        self._trained = _tensors(found.part(0, _TRAINED))
        self._tested = _tensors(self.tested_clicks)

    def deviation(self, name: str, shape: tuple[int, ...]) -> float:
        """Return 0.1 of tables, and He's of layers."""
        return 0.1 if name.startswith("table") else float((2 / shape[1]) ** 0.5)

    def scores(self, weights: Mapping[str, Any], rows: Ints) -> tuple[Any, Any]:
        """Return those of some examples, float32[n, 2], and whether there was a click."""
        chosen = torch.from_numpy(rows)
        values, dense, clicks = (each[chosen] for each in self._trained)
        return _scores(weights, values, dense), clicks

    def tested(self, weights: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
        """Yield those of all examples of the test."""
        values, dense, clicks = self._tested
        yield _scores(weights, values, dense), clicks


def _shapes() -> dict[str, tuple[int, ...]]:
    tables = {f"table{place}": (many, _WIDTH) for place, many in enumerate(VALUES)}
    return {
        **tables,
        "dense1.weight": (_UNITS, _DENSE),
        "dense1.bias": (_UNITS,),
        "dense2.weight": (_WIDTH, _UNITS),
        "dense2.bias": (_WIDTH,),
        "top1.weight": (_UNITS, len(_PAIRS) + _WIDTH),
        "top1.bias": (_UNITS,),
        "top2.weight": (2, _UNITS),
        "top2.bias": (2,),
    }


def _tensors(clicks: Clicks) -> tuple[Any, Any, Any]:
    return torch.tensor(clicks.values), torch.tensor(clicks.dense), torch.tensor(clicks.clicks)


def _scores(weights: Mapping[str, Any], values: Any, dense: Any) -> Any:
    def layer(x: Any, name: str) -> Any:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    own = layer(functional.relu(layer(dense, "dense1")), "dense2")
    tables = [weights[f"table{place}"][values[:, place]] for place in range(len(VALUES))]
    vectors = torch.stack([*tables, own], 1)
    products = vectors @ vectors.transpose(1, 2)
    first, second = (list(side) for side in zip(*_PAIRS, strict=True))
    x = torch.cat([products[:, first, second], own], 1)
    return layer(functional.relu(layer(x, "top1")), "top2")
