"""The multilayer perceptron of the papers, in NumPy, with its exact gradient.

Its parameters are a mapping of named arrays, never held by the model: the caller hands in the
version that is current. So one :class:`MLP` may serve any number of threads and workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from aiops.errors import UsageError
from aiops.lab.workloads.seeds import Purpose, generator

__all__ = ["MLP", "Arrays"]

Array = NDArray[Any]
Arrays = Mapping[str, Array]
"""Arrays by parameter name; they may be read-only."""


class MLP:
    """A perceptron with ReLU between its layers and a softmax at the end.

    Layer i computes ``h W + b`` with ``W = params["layer{i}.weight"]``, shape (in, out), and
    ``b = params["layer{i}.bias"]``, shape (out,). The loss is the negative log-likelihood of the
    right classes, averaged over the mini-batch. FASGD's experiments use sizes (784, 200, 10) on
    MNIST (Odena, "Faster Asynchronous SGD", 2016).

    Args:
        sizes: inputs, units of each hidden layer, classes; (in, out) alone is logistic regression.
        dtype: of parameters and gradients: float32 (default) or float64.

    Attributes:
        sizes: as given, a tuple.
        dtype: as given, a ``numpy.dtype``.
        shapes: the parameters' names and shapes, first layer first.

    Examples with more than one axis (images) are flattened. In all methods ``x`` has shape
    (n, ...) with ``sizes[0]`` numbers in a row, and ``y`` holds n integers below ``sizes[-1]``.
    Parameters that have diverged give a loss of nan or inf, without a warning.
    """

    def __init__(self, sizes: Sequence[int], dtype: DTypeLike = np.float32) -> None:
        self.sizes = tuple(int(size) for size in sizes)
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        if len(self.sizes) < 2 or min(self.sizes) < 1:
            raise UsageError(f"layer sizes {self.sizes}: give inputs and classes, each 1 or more")
        if self.dtype not in (np.float32, np.float64):
            raise UsageError(f"dtype {self.dtype}: a perceptron here is float32 or float64")
        self._layers = [(f"layer{i}.weight", f"layer{i}.bias") for i in range(len(self.sizes) - 1)]
        self.shapes: dict[str, tuple[int, ...]] = {}
        for (weight, bias), wide, narrow in zip(
            self._layers, self.sizes, self.sizes[1:], strict=False
        ):
            self.shapes |= {weight: (wide, narrow), bias: (narrow,)}

    def init(self, seed: int) -> dict[str, Array]:
        """Return fresh parameters: biases 0, weights N(0, 2 / inputs).

        Reference: He et al., "Delving Deep into Rectifiers", 2015, equation 10.
        """
        rng = generator(seed, Purpose.INITIAL_PARAMETERS)
        params: dict[str, Array] = {}
        for name, shape in self.shapes.items():
            if len(shape) == 1:
                params[name] = np.zeros(shape, self.dtype)
            else:
                normal = rng.standard_normal(shape) * np.sqrt(2 / shape[0])
                params[name] = normal.astype(self.dtype)
        return params

    def logits(self, params: Arrays, x: Array) -> Array:
        """Return the scores before the softmax, shape (n, classes)."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self._forward(params, x)[-1]

    def predict(self, params: Arrays, x: Array) -> NDArray[np.int64]:
        """Return the most likely class of each example, shape (n,)."""
        best: NDArray[np.int64] = np.argmax(self.logits(params, x), axis=1)
        return best

    def accuracy(self, params: Arrays, x: Array, y: Array) -> float:
        """Return the share of examples whose most likely class is the right one, in [0, 1]."""
        return float(np.mean(self.predict(params, x) == y))

    def loss(self, params: Arrays, x: Array, y: Array) -> float:
        """Return the negative log-likelihood of the labels, in nats, mean over the examples."""
        with np.errstate(over="ignore", invalid="ignore"):
            return _negative_log_likelihood(_log_softmax(self._forward(params, x)[-1]), y)

    def evaluate(self, params: Arrays, x: Array, y: Array) -> tuple[float, float]:
        """Return the loss and the accuracy, as those methods give them, in one pass."""
        with np.errstate(over="ignore", invalid="ignore"):
            scores = self._forward(params, x)[-1]
            right = float(np.mean(np.argmax(scores, axis=1) == y))
            return _negative_log_likelihood(_log_softmax(scores), y), right

    def gradients(
        self, params: Arrays, x: Array, y: Array, out: Arrays | None = None
    ) -> tuple[float, dict[str, Array]]:
        """Return the loss and its gradient with respect to every parameter.

        Args:
            params: the parameters.
            x: the mini-batch.
            y: its labels.
            out: arrays to write the gradients into, by name, of the parameters' shapes and dtype;
                views of one arena spare a copy. By default new arrays are made.

        Returns:
            the loss, as :meth:`loss` gives it, and the gradients by name (the arrays of ``out``).
        """
        if out is None:
            out = {name: np.empty(shape, self.dtype) for name, shape in self.shapes.items()}
        with np.errstate(over="ignore", invalid="ignore"):
            inputs, scores = self._scored(params, x, y)
            loss = _negative_log_likelihood(scores, y)
            self._backward(params, inputs, scores, y, out)
        return loss, {name: out[name] for name in self.shapes}

    def gradient(self, params: Arrays, x: Array, y: Array, out: Arrays) -> None:
        """Write the gradient of the loss, as `gradients` does, without the loss itself."""
        with np.errstate(over="ignore", invalid="ignore"):
            self._backward(params, *self._scored(params, x, y), y, out)

    def _forward(self, params: Arrays, x: Array) -> list[Array]:
        """Return what goes into each layer, and at the end the logits."""
        rows = np.asarray(x, dtype=self.dtype)
        rows = rows.reshape(len(rows), math.prod(rows.shape[1:]))
        if rows.shape[1] != self.sizes[0] or not len(rows):
            raise UsageError(
                f"x has shape {np.shape(x)}; a perceptron of sizes {self.sizes} takes one or more "
                f"examples of {self.sizes[0]} numbers"
            )
        values = [rows]
        for weight, bias in self._layers:
            if len(values) > 1:
                np.maximum(values[-1], 0, out=values[-1])
            values.append(values[-1] @ params[weight])
            values[-1] += params[bias]
        return values

    def _scored(self, params: Arrays, x: Array, y: Array) -> tuple[list[Array], Array]:
        """Return what goes into each layer, and the log-probabilities of the classes."""
        *inputs, scores = self._forward(params, x)
        if len(y) != len(scores):
            raise UsageError(f"there are {len(scores)} examples, but {len(y)} labels")
        return inputs, _log_softmax(scores)

    def _backward(
        self, params: Arrays, inputs: Sequence[Array], scores: Array, y: Array, out: Arrays
    ) -> None:
        # d loss / d logits = (softmax − one-hot) / n, in the logits' own memory.
        scores[scores < _LEAST] = -np.inf
        delta = np.exp(scores, out=scores)
        delta[np.arange(len(y)), y] -= 1
        delta /= len(y)
        for i in reversed(range(len(self._layers))):
            weight, bias = self._layers[i]
            np.matmul(inputs[i].T, delta, out=out[weight])
            np.add.reduce(delta, axis=0, out=out[bias])
            if i:
                delta = delta @ params[weight].T
                delta *= inputs[i] > 0


_LEAST = -69.0
"""A probability below 1e-30 counts as 0 in the gradient: what would follow from it are subnormal
numbers, with which a processor multiplies many times as slowly."""


def _log_softmax(scores: Array) -> Array:
    """Turn scores into log-probabilities, in place; the largest becomes 0, so none overflows."""
    scores -= np.maximum.reduce(scores, axis=1, keepdims=True)
    scores -= np.log(np.add.reduce(np.exp(scores), axis=1, keepdims=True))
    return scores


def _negative_log_likelihood(log_probabilities: Array, y: Array) -> float:
    if len(y) != len(log_probabilities):
        raise UsageError(f"there are {len(log_probabilities)} examples, but {len(y)} labels")
    return -float(log_probabilities[np.arange(len(y)), y].mean(dtype=np.float64))
