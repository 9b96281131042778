"""Train a small GPT on text, byte by byte, in PyTorch: its parameters are on a server.

::

    aiops run --workers 2 examples/gpt.py               # a server and two workers
    python examples/gpt.py URL                          # one worker, at a server that runs

The text is Python's own help, 0.7 MB that every Python has. ``# aiops`` marks the lines that differ
from a loop with ``torch.optim.AdamW``. There is no learning rate: the server's rule,
``schedule-free``, has one for any number of workers. Without a URL (nor ``$AIOPS_URL``) it starts
a server of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from aiops.client.torch import RemoteOptimizer  # aiops

WIDTH, HEADS, BLOCKS, CONTEXT = 128, 4, 4, 128
BATCH_SIZE = 8  # windows of the text


class Block(torch.nn.Module):  # type: ignore[misc]
    """Attention and a perceptron, each added to the stream, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.mix, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        """Return the stream, float32[windows, context, width]."""
        heads = self.mix(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(torch.nn.Module):  # type: ignore[misc]
    """Scores of the byte after each byte; 0.84 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = torch.nn.Embedding(256, WIDTH), torch.nn.Embedding(CONTEXT, WIDTH)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 256, bias=False)
        for name, weights in self.named_parameters():
            if weights.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))  # added to the stream
                torch.nn.init.normal_(weights, std=0.007 if last else 0.02)

    def forward(self, seen: Any) -> Any:
        """Return scores, float32[windows, context, 256], of int64[windows, context]."""
        x = self.bytes(seen) + self.places(torch.arange(seen.shape[1], device=seen.device))
        return self.head(self.norm(self.blocks(x)))


def text() -> tuple[Any, Any]:
    """Return the bytes to train with, and those that are held out, int64."""
    topics = importlib.import_module("pydoc_data.topics").topics
    data = torch.tensor(list("".join(topics[name] for name in sorted(topics)).encode()))
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def windows(data: Any, starts: Any) -> tuple[Any, Any]:
    """Return the bytes of some windows, and the byte after each, int64[windows, context]."""
    found = data[starts[:, None] + torch.arange(CONTEXT + 1)]
    return found[:, :-1], found[:, 1:]


def cost(model: Any, seen: Any, following: Any) -> Any:
    """Return the mean cross-entropy, in nats per byte."""
    return functional.cross_entropy(model(seen).flatten(0, 1), following.flatten())


def held_out_cost(model: Any, data: Any) -> float:
    """Return the cost of 128 windows of what is held out."""
    starts = torch.linspace(0, len(data) - CONTEXT - 1, 128).long()
    with torch.no_grad():
        parts = [cost(model, *windows(data, some)) for some in starts.split(32)]
    return float(torch.stack(parts).mean())


def train(model: Any, optimizer: Any, steps: int, rank: int) -> None:
    """Take some steps, each with windows of its own."""
    data, _held_out = text()
    drawn = torch.Generator().manual_seed(rank)
    for step in range(steps):
        starts = torch.randint(len(data) - CONTEXT, (BATCH_SIZE,), generator=drawn)
        loss = cost(model, *windows(data, starts))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # with a RemoteOptimizer the server takes the step
        if step % 50 == 0:
            print(f"rank {rank}  step {step:4}  {loss.item():.3f} nats", flush=True)


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
    """Train, and print the cost of what is held out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?", default=os.environ.get("AIOPS_URL"))
    parser.add_argument("--steps", type=int, default=300, help="of this worker")
    options, rank = parser.parse_args(argv), int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)  # workers on one machine share its processors
    torch.manual_seed(0)
    url, model, begun = options.url, GPT(), time.perf_counter()
    with (
        contextlib.nullcontext(url) if url else own_server() as where,
        RemoteOptimizer(model, where) as optimizer,  # aiops: was torch.optim.AdamW(...)
    ):
        train(model, optimizer, options.steps, rank)
        with optimizer.evaluation():  # aiops: where the model is evaluated, such as an average
            found = held_out_cost(model, text()[1])
    seconds = time.perf_counter() - begun
    print(f"rank {rank}: {found:.3f} nats per byte of what is held out, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
