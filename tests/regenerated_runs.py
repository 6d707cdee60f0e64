"""Runs of `python -m train regenerate-data` on a tiny backbone, and the plain reference of what it writes."""

import json

import torch
from tiny_run import write_config

from train.__main__ import run_command

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


ENDS = (256, *range(0, 256, 8))
"""Of the tiny backbone, whose texts would hardly ever end with one end token; some are cut nevertheless."""


CHATS = [[f"question {'x' * n} {turn}" for turn in range(1 + n % 3)] for n in range(7)]


def write(folder, out, *flags, data="text", batch=4):
    """The command in this process, in float64: rows do not depend on what they are batched with."""
    train = [{"path": str(folder / f"{data}.jsonl")}]
    config = write_config(folder, "run", backbone={"dtype": "float64"}, data={"train": train})
    sizes = ("--batch-size", str(batch), "--prompt-tokens", "12", "--max-new-tokens", "10")
    run_command(["regenerate-data", "--config", config, "--out", str(folder / out), *sizes, *flags])
    return (folder / out).read_bytes()


def rows(content):
    return [json.loads(line) for line in content.splitlines()]


@torch.no_grad()
def say(model, prompt, count=10):
    """The plain reference: one prompt, plain greedy steps, no cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        if tokens[-1] in ENDS or tokens[-1] == model.config.eos_token_id:
            break
    return tokens[len(prompt) :]
