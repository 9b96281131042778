"""Train a small GPT-2 on text, byte by byte, with Hugging Face's Trainer.

::

    pip install 'aiops-ps[server,frameworks]'
    aiops run --workers 2 examples/frameworks/huggingface_trainer.py

``# aiops`` marks the lines that differ from training alone, with AdamW.
"""

from __future__ import annotations

import importlib
import os
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from aiops.client.torch import RemoteOptimizer, standalone  # aiops

STEPS = int(os.environ.get("STEPS", "300"))  # of this worker
CONTEXT = 64


def blocks() -> list[dict[str, list[int]]]:
    """Return Python's own help, 0.7 MB that every Python has, in blocks of bytes."""
    topics = importlib.import_module("pydoc_data.topics").topics
    text = list("".join(topics[name] for name in sorted(topics)).encode())
    starts = range(0, len(text) - CONTEXT, CONTEXT)
    return [
        {"input_ids": text[at : at + CONTEXT], "labels": text[at : at + CONTEXT]} for at in starts
    ]


def main() -> float:
    """Train; return the cost of what is held out, in nats per byte."""
    rank, workers = standalone()  # aiops: was rank, workers = 0, 1
    torch.set_num_threads(1)  # workers on one machine share its processors
    torch.manual_seed(0)
    data = blocks()
    held_out, seen = data[-256:], data[: len(data) * 9 // 10]
    size = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "vocab_size": 256}
    dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **size, **dropout))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=8,
            learning_rate=0.003,
            lr_scheduler_type="constant",  # aiops: was lr_scheduler_type="cosine",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=seen[rank::workers],
            eval_dataset=held_out,
            optimizer_cls_and_kwargs=(RemoteOptimizer, {}),  # aiops
        )
        trainer.train()
        trainer.optimizer.optimizer.close()  # aiops
        return float(trainer.evaluate()["eval_loss"])


if __name__ == "__main__":
    print(f"{main():.3f} nats per byte of what is held out")
