"""Learn embeddings of words from their contexts, with two tables that are held by the server.

::

    python -m aiops.server --policy fasgd               # prints its URL
    python examples/embeddings_numpy.py URL             # in as many terminals as you like

Without a URL (nor ``$AIOPS_URL``) it starts a server of its own. The vocabulary has room for ten
million words. The server stores the few thousand that occur, and a worker holds one batch of them.

The text is generated: every word belongs to one of eight topics, and words of a topic appear
together. Skip-gram with negative sampling (Mikolov et al. 2013) has to learn the topics. A word is
classified by the topic of its nearest neighbour.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import aiops

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

VOCABULARY, WIDTH = 10_000_000, 16
TOPICS, WORDS_PER_TOPIC = 8, 250
STEPS, PAIRS, NEGATIVES = 500, 512, 4

# One table for words and one for their contexts, as in word2vec.
TABLES = {
    "words": aiops.Table(VOCABULARY, WIDTH, scale=0.1, seed=1),
    "contexts": aiops.Table(VOCABULARY, WIDTH, scale=0.1, seed=2),
}


class Text:
    """Endless text: batches of a word, a word from its context, and words drawn at random."""

    def __init__(self, seed: int) -> None:
        self.words = np.random.default_rng(0).choice(VOCABULARY, TOPICS * WORDS_PER_TOPIC, False)
        self.topics = np.arange(len(self.words)) % TOPICS
        self._rng = np.random.default_rng(seed)

    def batch(self) -> tuple[Ints, Ints, Floats]:
        """Return ids of words, ids of [the context's word, negatives...] and their labels."""
        places = self._rng.integers(0, WORDS_PER_TOPIC, (2, PAIRS)) * TOPICS
        word, context = places + self._rng.integers(0, TOPICS, PAIRS)
        others = self._rng.integers(0, len(self.words), (PAIRS, NEGATIVES))
        labels = np.zeros((PAIRS, 1 + NEGATIVES), np.float32)
        labels[:, 0] = 1
        return self.words[word], self.words[np.column_stack([context, others])], labels


def gradients(words: Floats, contexts: Floats, labels: Floats) -> tuple[float, Floats, Floats]:
    """Return the loss, and its gradients for words [n, width] and contexts [n, k, width]."""
    scores = np.einsum("nw,nkw->nk", words, contexts)
    chance = 1 / (1 + np.exp(-scores))
    loss = -np.log(np.where(labels > 0, chance, 1 - chance) + 1e-7).sum(axis=1).mean()
    slope = (chance - labels)[..., None]
    return float(loss), (slope * contexts).sum(axis=1), slope * words[:, None]


def train(url: str) -> float:
    """Train, and return the share of words whose nearest neighbour is of their own topic."""
    text = Text(seed=os.getpid())
    with aiops.Worker(url, {}, tables=TABLES) as worker:
        word, context, labels = text.batch()
        words = worker.fetch_rows("words", word)
        for step in range(STEPS):
            contexts = worker.fetch_rows("contexts", context.ravel()).reshape(*context.shape, WIDTH)
            loss, by_word, by_context = gradients(words, contexts, labels)
            worker.push_rows("contexts", context.ravel(), by_context.reshape(-1, WIDTH))
            pushed, (word, context, labels) = word, text.batch()
            receipt, words = worker.exchange_rows("words", pushed, by_word, word)
            if step % 100 == 0:
                print(f"version {receipt.version:5}  staleness {receipt.staleness}  {loss:.4f}")
        return same_topic(worker, text)


def same_topic(worker: Any, text: Text) -> float:
    """Return the share of words whose nearest neighbour, by cosine, is of the same topic."""
    vectors = worker.fetch_rows("words", text.words)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    nearness = vectors @ vectors.T
    np.fill_diagonal(nearness, -1)
    return float((text.topics[nearness.argmax(axis=1)] == text.topics).mean())


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """Run a server as long as it is needed; yield its URL, the first line that it prints."""
    command = [sys.executable, "-m", "aiops.server", "--port", "0", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def main(argv: Sequence[str]) -> int:
    """Train at the server given in ``argv`` or ``$AIOPS_URL``, or at one of its own."""
    url = argv[0] if argv else os.environ.get("AIOPS_URL")
    with contextlib.nullcontext(url) if url else own_server() as where:
        print(f"neighbours of the same topic, accuracy: {train(where):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
