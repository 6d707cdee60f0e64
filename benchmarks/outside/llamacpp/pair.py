"""A tiny Qwen3 and eagle heads of a draft vocabulary fitted to its texts, so that drafts are accepted.

It has what the demo's models lack: norms on queries and keys, fewer key-value heads than heads, wider heads than hidden
size / heads, an unembedding that is not tied, and a draft that scores only some tokens. Weights are random; the
tokenizer is the demo's.
"""
# B text, T position, R supervised row, D model width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import heads
from heads.backbone.masks import causal
from heads.interface.token_heads import TeacherForcing, TokenHeads

SEED = 0
WIDER = 5.0  # times the usual standard deviation of weights, so that scores are far apart and ties are rare


def qwen3_of(base: PreTrainedModel, name: str) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights and the vocabulary of `base`; its name is the folder whose tokenizer it uses."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=base.config.vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=base.config.max_position_embeddings,
        tie_word_embeddings=False,
        bos_token_id=base.config.bos_token_id,
        eos_token_id=base.config.eos_token_id,
        initializer_range=0.02 * WIDER,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.config._name_or_path = name
    return model


def taught_heads(model: Any, prompts: list[Tensor], new_tokens: int, steps: int = 60) -> TokenHeads:
    """Eagle heads over the tokens of the model's own greedy texts and some more, fitted to these texts by AdamW."""
    prompts_BT = torch.cat(prompts)
    with torch.no_grad():
        tokens_BT = model.generate(
            prompts_BT,
            attention_mask=torch.ones_like(prompts_BT),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    some = sorted({*tokens_BT.flatten().tolist(), *range(0, model.config.vocab_size, 3)})
    token_heads = heads.create("eagle", model, num_heads=4, draft_tokens=some)
    fit(token_heads, tokens_BT, prompts_BT.shape[1], steps)
    return token_heads.eval()


def fit(token_heads: TokenHeads, tokens_BT: Tensor, begin: int, steps: int) -> None:
    """Cross-entropy of all heads with the text after its first tokens."""
    backbone, (batch, length) = token_heads.backbone, tokens_BT.shape
    positions_BT = torch.arange(length).expand(batch, length)
    may_attend = causal(torch.ones_like(tokens_BT, dtype=torch.bool))
    mask = backbone.mask_style.finish(may_attend, positions_BT, positions_BT, backbone.dtype)
    with torch.no_grad():
        _, taps = backbone.forward(
            tokens_BT, taps=token_heads.hidden_taps, attention_mask=mask, position_ids=positions_BT, use_cache=False
        )
    index_BT = torch.arange(batch * length).view(batch, length)
    rows = [index_BT[:, begin - 1 : length - 1 - k].flatten() for k in range(1, token_heads.num_heads + 1)]
    forcing = TeacherForcing(tokens_BT=tokens_BT, taps=taps, positions_BT=positions_BT, mask=mask, rows=rows)
    parameters = [parameter for parameter in token_heads.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3)
    for _ in range(steps):
        losses = []
        for k, hidden_RD in enumerate(token_heads.teacher_forced(forcing), start=1):
            projection = token_heads.projection(k)
            entries_R, scored_R = projection.find(forcing.token(1 + k, rows[k - 1]))
            losses.append(nn.functional.cross_entropy(projection(hidden_RD[scored_R]), entries_R[scored_R]))
        gradients = torch.autograd.grad(torch.stack(losses).sum(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
