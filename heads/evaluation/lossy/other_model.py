"""The likelihood of a text under another model, as a measure of what lossy decoding loses.

A model gives its own likeliest tokens the highest scores, so its own likelihood would reward text that loops. The other
model must read the same token ids. Its figure has a meaning only beside that of plain generation's text.
"""
# B text, T prompt position, N new token, L prompt and new tokens, V vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def log_likelihood(other_model: Any, prompt_1T: Tensor, tokens: list[int]) -> float:
    """The log-probability (natural) of new tokens after their prompt, summed over them.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> _ = torch.nn.init.zeros_(model.lm_head.weight)                  # each of 16 tokens is as likely as any other
    >>> round(log_likelihood(model, torch.tensor([[3, 4]]), [5, 6, 7]), 4)    # -3 ln 16
    -8.3178

    Raises:
        ValueError: a token that the other model's vocabulary does not have.
    """
    text_1L = torch.cat([prompt_1T, prompt_1T.new_tensor([tokens])], dim=1).to(other_model.device)
    size = other_model.get_input_embeddings().num_embeddings
    if int(text_1L.max()) >= size:
        raise ValueError(
            f"The text has token {int(text_1L.max())}, but the model that scores it has {size} tokens; give one that "
            f"was trained with the same tokenizer."
        )
    return -float(new_token_losses(other_model, text_1L, prompt_1T.shape[1]).sum())


@torch.no_grad()
def new_token_losses(model: Any, tokens_BL: Tensor, prompt_length: int) -> Tensor:
    """(B, N): -log p (natural) of each token after the prompt in float64, padding after a text's end included."""
    logits_BNV = model(tokens_BL).logits[:, prompt_length - 1 : -1].double()
    return nn.functional.cross_entropy(logits_BNV.transpose(1, 2), tokens_BL[:, prompt_length:], reduction="none")
