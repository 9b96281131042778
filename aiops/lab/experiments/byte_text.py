"""The base of models that learn to write the documentation of Python, byte by byte: a `Task`.

They read bytes, so they need no tokenizer, and the text ships with every Python: the topics of its
``help()``, about 0.7 MB.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from aiops.lab.experiments.torch_task import TorchTask
from aiops.model.layout import Ints

BYTES = 256

_HELD_OUT = 10  # one of ten bytes, at the end, is for validation
_WINDOWS = 256  # validated
_CHUNK = 32  # of them at a time


class ByteTask(TorchTask):
    """The text, in windows that begin anywhere; derive, and give the scores of the next bytes.

    Parameters
    ----------
    shapes
        Those of the parameters, by name.
    context
        Bytes that are seen.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], context: int) -> None:
        super().__init__(shapes)
        self._context = context
        text = np.frombuffer(_text(), np.uint8).astype(np.int64)
        cut = len(text) - len(text) // _HELD_OUT
        self._text, self._held_out = torch.tensor(text[:cut]), torch.tensor(text[cut:])
        self.examples = cut - context - 1

    def alike(self) -> Ints:
        """Return the windows' numbers, int64, as they lie: a topic after another."""
        return np.arange(self.examples)

    @abstractmethod
    def following(self, weights: Mapping[str, Any], seen: Any) -> Any:
        """Return the scores of the byte after each of ``seen``, int64[windows, context].

        They are float32[windows, context, 256].
        """

    def scores(self, weights: Mapping[str, Any], rows: Ints) -> tuple[Any, Any]:
        """Return those of the bytes of some windows, which begin at ``rows``, and the bytes."""
        return self._scores(weights, self._text, rows)

    def tested(self, weights: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
        """Yield those of windows of the text that is held out."""
        starts = np.linspace(0, len(self._held_out) - self._context - 1, _WINDOWS).astype(np.int64)
        for first in range(0, _WINDOWS, _CHUNK):
            yield self._scores(weights, self._held_out, starts[first : first + _CHUNK])

    def _scores(self, weights: Mapping[str, Any], text: Any, starts: Ints) -> tuple[Any, Any]:
        """Return the scores of the next byte at each place of some windows, and these bytes."""
        windows = text[torch.from_numpy(starts)[:, None] + torch.arange(self._context + 1)]
        found = self.following(weights, windows[:, :-1])
        return found.flatten(0, 1), windows[:, 1:].flatten()


def _text() -> bytes:
    topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "".join(topics[name] for name in sorted(topics)).encode()
