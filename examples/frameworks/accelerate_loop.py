"""Fine-tune a small transformer by LoRA, in a loop with Accelerate and PEFT.

::

    pip install 'aiops-ps[server,frameworks]'
    aiops run --workers 2 examples/frameworks/accelerate_loop.py

A GPT-2 of bytes has learnt Python's help, and learns the source of Python's library by matrices of
rank 8 that are added to its own. Only those are on the server. ``# aiops`` marks the lines that
differ from training alone.
"""

from __future__ import annotations

import importlib
import inspect
import os
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from aiops.client.torch import RemoteOptimizer, standalone  # aiops

STEPS = int(os.environ.get("STEPS", "300"))  # of this worker
CONTEXT = 64
SOURCES = ("argparse", "ast", "datetime", "decimal", "doctest", "inspect", "tarfile", "typing")


def blocks(text: str) -> Any:
    """Return a text in blocks of bytes, int64[n, CONTEXT]."""
    data = torch.tensor(list(text.encode()))
    return data[: len(data) // CONTEXT * CONTEXT].view(-1, CONTEXT)


def learnt(steps: int) -> Any:
    """Return a transformer that has learnt Python's help, the same on each worker."""
    topics = importlib.import_module("pydoc_data.topics").topics
    text = blocks("".join(topics[name] for name in sorted(topics)))
    torch.manual_seed(0)
    size = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "vocab_size": 256}
    dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **size, **dropout))
    optimizer = torch.optim.AdamW(model.parameters(), 0.003)
    for _ in range(steps):
        batch = text[torch.randint(len(text), (16,))]
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    return model


def main() -> float:
    """Fine-tune; return the cost of source that is held out, in nats per byte."""
    rank, workers = standalone()  # aiops: was rank, workers = 0, 1
    torch.set_num_threads(1)  # workers on one machine share its processors
    source = blocks("".join(inspect.getsource(importlib.import_module(n)) for n in SOURCES))
    seen, held_out = source[: len(source) * 9 // 10], source[-256:]
    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True
    )
    model: Any = get_peft_model(learnt(STEPS), lora)
    data = torch.utils.data.DataLoader(seen[rank::workers], 8, shuffle=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    optimizer: Any = RemoteOptimizer(model)  # aiops: was optimizer: Any = adamw(model)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    step = 0
    while step < STEPS:
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=batch, labels=batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    step += 1
                optimizer.step()
                optimizer.zero_grad()
            if step == STEPS:
                break
    optimizer.optimizer.close()  # aiops
    with torch.no_grad():
        return float(model(input_ids=held_out, labels=held_out).loss)


def adamw(model: Any) -> Any:
    """Return the optimizer of training alone, of what is not frozen."""
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 0.003)


if __name__ == "__main__":
    print(f"{main():.3f} nats per byte of source that is held out")
