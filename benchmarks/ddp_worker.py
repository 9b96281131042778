"""A process of PyTorch's DDP that trains the model of ``examples/gpt.py`` with AdamW.

    torchrun --nproc-per-node 2 benchmarks/ddp_worker.py --steps 300 --lr 0.003 --cosine

It prints what the example prints: the cost of what is held out, and the seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

_EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"
_WARMUP = 0.1  # of the steps


def example() -> Any:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("gpt_example", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def factor(step: int, steps: int, cosine: bool) -> float:
    """Return what the learning rate is multiplied by: it rises first, and may fall to 0.

    >>> [round(factor(step, 100, True), 2) for step in (0, 9, 55, 99)]
    [0.1, 1.0, 0.5, 0.0]
    """
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return (1 + math.cos(math.pi * share)) / 2 if cosine else 1.0


def main(argv: Sequence[str] | None = None) -> None:
    """Train as one of the ranks that ``torchrun`` has started."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--cosine", action="store_true")
    options, rank = parser.parse_args(argv), int(os.environ["RANK"])
    gpt = example()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    begun = time.perf_counter()
    distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(gpt.GPT())
    adamw = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        adamw, lambda step: factor(step, options.steps, options.cosine)
    )
    gpt.train(model, _Scheduled(adamw, schedule, model), options.steps, rank)
    found, seconds = gpt.held_out_cost(model, gpt.text()[1]), time.perf_counter() - begun
    print(f"rank {rank}: {found:.3f} nats per byte of what is held out, {seconds:.0f} s")
    distributed.destroy_process_group()


class _Scheduled:
    """An optimizer that clips gradients at 1, and its schedule, as one."""

    def __init__(self, optimizer: Any, schedule: Any, model: Any) -> None:
        self._optimizer, self._schedule, self._model = optimizer, schedule, model
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        """Take a step, and have the next rate."""
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()


if __name__ == "__main__":
    main()
