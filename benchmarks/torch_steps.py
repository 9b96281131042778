"""The benchmark of PyTorch's steps: training with its own AdamW, and through a server.

    python -m benchmarks.torch_steps [--device auto] [--width 512] [--blocks 8] [--steps 20]
                                     [--rounds 5] [--json out.json] [--plot out.png]

One process trains a transformer on random tokens, in turns with `torch.optim.AdamW`, which is the
limit, and with a `RemoteOptimizer` at servers on the same machine: with nothing set, and with asgd
and AdamW. Where the model is on a GPU, each server is once on the host and once on that GPU.
Measured is the time of a step with its forward and backward pass, in rounds of some steps;
``x AdamW`` is the median ratio.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

from rich.table import Table

from aiops.errors import UsageError
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from benchmarks import plots, report
from benchmarks.compare import Cell
from benchmarks.serving import serving

_ALONE = "AdamW alone"
_POLICIES: Mapping[str, tuple[str, ...]] = {
    "schedule-free": (),
    "asgd": ("--set", "optimizer=adamw", "--lr", "0.001"),
}
_CONTEXT, _TOKENS, _HEADS = 128, 256, 8
_WARM = 10  # steps in which is made what is made once

Step = Callable[[], None]


@dataclass(frozen=True)
class Options:
    """The options of the benchmark."""

    device: Annotated[str, "of the model: cpu, cuda or auto"] = "auto"
    width: Annotated[int, f"of the transformer, a multiple of {_HEADS}"] = 512
    blocks: int = 8
    batch: Annotated[int, f"windows of {_CONTEXT} tokens in a mini-batch"] = 32
    steps: Annotated[int, "in a round"] = 20
    rounds: int = 5

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        if self.device not in ("auto", "cpu", "cuda"):
            raise UsageError("--device is cpu, cuda or auto (a GPU, where PyTorch sees one)")
        if min(self.width, self.blocks, self.batch, self.steps, self.rounds) < 1:
            raise UsageError("width, blocks, batch, steps and rounds are 1 or more")
        if self.width % _HEADS:
            raise UsageError(f"--width is a multiple of {_HEADS}, the heads of attention")


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: a cell for each way to take steps.

    Raises
    ------
    UsageError
        When an option makes no sense, or there is no such device.
    """
    import torch

    options.check()
    there = torch.cuda.is_available()
    device = ("cuda" if there else "cpu") if options.device == "auto" else options.device
    if device == "cuda" and not there:
        raise UsageError("--device cuda: PyTorch sees no GPU here")
    about = machine(("numpy", "torch", "numba"))
    with ExitStack() as stack:
        own, parameters = training(options, device)
        ways = {_ALONE: own}
        for name, flags in _servers(device):
            log(f"starting the server of {name}")
            url, _process = stack.enter_context(serving(*flags))
            ways[name], _ = training(options, device, url, stack)
        for step in ways.values():
            timed(step, _WARM, device)
        rounds = []
        for number in range(options.rounds):
            log(f"round {number + 1} of {options.rounds}")
            rounds.append({w: timed(step, options.steps, device) for w, step in ways.items()})
    cells = [
        {
            "cell": way,
            "rounds": [{"ms": each[way], "x_alone": each[way] / each[_ALONE]} for each in rounds],
            "ms": report.spread([each[way] for each in rounds]),
            "x_alone": report.spread([each[way] / each[_ALONE] for each in rounds]),
        }
        for way in ways
    ]
    results = {"device": device, "parameters": parameters, "cells": cells}
    return record("benchmark", "torch_steps", options, results, about)


def _servers(device: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each server's name, and its policy and flags."""
    for policy, settings in _POLICIES.items():
        yield f"{policy}, server on the host", (policy, *settings)
        if device == "cuda":
            yield f"{policy}, server on the GPU", (policy, *settings, "--device", "cuda")


def training(
    options: Options,
    device: str,
    url: str | None = None,
    stack: ExitStack | None = None,
    *,
    logs: bool = False,
) -> tuple[Step, int]:
    """Return what takes a step of a model of its own, and the model's parameters.

    ``url``: of the server that it is trained at, until ``stack`` ends; None: by AdamW alone.
    ``logs``: the server is told the loss of each step.
    """
    import torch
    from torch import nn

    from aiops.client.torch import RemoteOptimizer

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        *(options.width, _HEADS, 4 * options.width, 0.0), batch_first=True, norm_first=True
    )
    model = nn.Sequential(
        nn.Embedding(_TOKENS, options.width),
        nn.TransformerEncoder(layer, options.blocks, enable_nested_tensor=False),
        nn.Linear(options.width, _TOKENS),
    ).to(device)
    tokens = torch.randint(_TOKENS, (options.batch, _CONTEXT + 1), device=device)
    optimizer: Any
    if url is None or stack is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    else:
        optimizer = stack.enter_context(RemoteOptimizer(model, url))

    def step() -> None:
        scores = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if logs:
            optimizer.log(loss=loss.item())

    return step, sum(each.numel() for each in model.parameters())


def timed(step: Step, steps: int, device: str) -> float:
    """Take some steps; return what one took, in milliseconds."""
    import torch

    before = time.perf_counter()
    for _ in range(steps):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - before) / steps


def table(result: Mapping[str, Any]) -> Table:
    """Make the table of a report."""
    rows = []
    for cell in result["cells"]:
        times = [f"{cell['ms'][key]:.2f}" for key in ("median", "min", "max")]
        rows.append([cell["cell"], *times, report.times(cell, "x_alone")])
    millions = result["parameters"] / 1e6
    title = f"A step of {millions:.1f} million parameters on {result['device']}; medians of rounds"
    return report.table(title, ("by", "ms", "least", "most", "x AdamW"), rows)


def cells(result: Mapping[str, Any]) -> Sequence[Cell]:
    """Return what can be compared with another run's: steps beside AdamW's."""
    return [
        Cell.of(cell["cell"], "cost", cell["x_alone"], beside=_ALONE, less=True)
        for cell in result["cells"]
        if cell["cell"] != _ALONE
    ]


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw the times."""
    names = [cell["cell"] for cell in result["cells"]]
    line = plots.rounds("a step", result["cells"], "ms")
    panel = Panel("", "", "ms", [line], bottom=0, ticks=names)
    return Figure("A step of PyTorch", [panel], 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
