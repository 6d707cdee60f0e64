"""A model with another tokenizer, under which drafts are scored (section 5.1): small, with 1,024 tokens of its own.

It is trained by the demo backbone's recipe on the training files, for about four minutes, and stays in its folder. An
interrupted training resumes from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from heads.data.standard_library import load_heldout_files, stdlib_documents
from train.config import read_config
from train.run import run

END = "<|endoftext|>"
VOCABULARY = 1024
TRAINED = "last"


def open_other_judge(folder: Path, heldout_list: str, steps: int) -> tuple[Any, Any]:
    """The model and its tokenizer; they are trained if the folder does not hold them yet."""
    shape, weights = folder / "shape", folder / f"run-{steps}" / TRAINED
    if not (weights / "config.json").is_file():
        if not (shape / "config.json").is_file():
            write_shape(shape, heldout_list)
        with contextlib.redirect_stdout(sys.stderr):
            run(read_config(arguments_of(folder, heldout_list, steps)))
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(shape)


def write_shape(folder: Path, heldout_list: str) -> None:
    """A config and a byte-level BPE tokenizer that is learned from the training files; whole or not at all."""
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    texts = (text for _, text in stdlib_documents("train", load_heldout_files(heldout_list)))
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END).save_pretrained(
        unfinished
    )
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=160,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    ).save_pretrained(unfinished)
    unfinished.rename(folder)


def arguments_of(folder: Path, heldout_list: str, steps: int) -> list[str]:
    """The demo backbone's recipe with another shape and tokenizer."""
    shape = str(folder / "shape")
    settings = {
        "backbone.name_or_path": shape,
        "backbone.tokenizer": shape,
        "output_dir": str(folder / f"run-{steps}"),
        "data.heldout_list": heldout_list,
        "trainer.max_steps": steps,
        "trainer.per_device_train_batch_size": 8,
        "trainer.logging_steps": 50,
        "evaluation.every_steps": steps,
        "save_every_steps": 100,
        "compile": "false",
        "resume": str((folder / f"run-{steps}").exists()).lower(),
    }
    given = (part for name, value in settings.items() for part in (f"--{name}", str(value)))
    return ["--config", "configs/demo/base.yaml", *given]
