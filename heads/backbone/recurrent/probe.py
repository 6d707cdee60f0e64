"""Check on eight tokens, when a model is wrapped, that its recurrent layers follow a tree as plain generation would.

A list of model names would be out of date with the next release, and would not know which kernels are installed. A tree
pass and the pass after it have to give the logits of the model's own one-token steps, or the model is refused. The
probe also finds out:

- whether the model can read several tokens from a state. Jamba's layers forget the state (logits are off by 5e-4 of the
  largest).
- how far one-token steps differ from a forward over the whole text. Nemotron-H's forward keeps time steps above a
  limit, and its steps do not. Decoding is exact there too, since plain generation takes the steps. But a text that is
  read again gets other states than one that was generated, so such caches are not reused between calls.
"""
# B row, T position, N node, V vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from heads.backbone.rounding import above, relative_error
from heads.backbone.state import CommitPlan

READ = 4
"""Tokens of the prompt; four more follow it."""


@torch.no_grad()
def check_recurrence(backbone: Any) -> None:
    """Check a tree pass against one-token steps, and set `step_error` and `continues` of the backbone's recurrence.

    Raises:
        ValueError: the tree pass gives other logits than the model's own one-token steps.
    """
    model = backbone.model
    was_training = model.training
    model.eval()
    try:
        tokens_1T = torch.arange(2 * READ, device=backbone.heads_device)[None] % backbone.vocab_size
        whole_TV = model(input_ids=tokens_1T.to(backbone.device), use_cache=False).logits[0].float()
        steps_TV = one_by_one(model, tokens_1T.to(backbone.device))
        recurrence = backbone.recurrence
        recurrence.step_error = above(relative_error(steps_TV, whole_TV[READ:]), model.dtype)
        if error := above(relative_error(by_tree(backbone, tokens_1T), steps_TV), model.dtype):
            raise ValueError(
                f"{type(model).__name__} keeps a recurrent state, and a pass over drafted tokens gave logits that "
                f"differ from its own one-token steps by {error:.1e} of the largest one, so decoding would not be "
                f"exact; choose another backbone."
            )
        recurrence.continues = not above(
            relative_error(continued(backbone, tokens_1T), whole_TV[READ - 1]), model.dtype
        )
    finally:
        model.train(was_training)


def one_by_one(model: Any, tokens_1T: Tensor) -> Tensor:
    """(T - READ, V): logits after the tokens that follow the prompt, as plain generation gets them."""
    cache = DynamicCache(config=model.config)
    logits: list[Tensor] = []
    for tokens_1U in torch.split(tokens_1T, [READ, *[1] * (tokens_1T.shape[1] - READ)], dim=1):
        past = sum(len(piece_UV) for piece_UV in logits)
        position_ids = torch.arange(past, past + tokens_1U.shape[1], device=tokens_1T.device)[None]  # as `generate`
        given = {"position_ids": position_ids, "past_key_values": cache, "use_cache": True}
        logits.append(model(input_ids=tokens_1U, **given).logits[0])
    return torch.cat(logits[1:]).float()


def by_tree(backbone: Any, tokens_1T: Tensor) -> Tensor:
    """The same by a pass over a chain of three with a wrong sibling of its second token, and the pass after it."""
    state, _ = backbone.read(tokens_1T[:, :READ], torch.ones_like(tokens_1T[:, :READ], dtype=torch.bool))
    root, second, third, last = tokens_1T[0, READ:]
    tree_1N = torch.stack([root, third, second, third])[None]
    depth_N = torch.tensor([0, 1, 1, 2], device=root.device)
    sees_NN = torch.eye(4, dtype=torch.bool, device=root.device)
    sees_NN[1:, 0] = sees_NN[3, 2] = True
    output = backbone.verify(state, tree_1N, depth_N, sees_NN)
    path = [0, 2, 3]
    logits = [backbone.logits(output.final_BND[0, path])]
    state = backbone.commit(state, output, CommitPlan.from_paths([path], root.device))
    output = backbone.verify(state, last[None, None], depth_N[:1], sees_NN[:1, :1])
    return torch.cat([*logits, backbone.logits(output.final_BND[0])]).float()


def continued(backbone: Any, tokens_1T: Tensor) -> Tensor:
    """(V,): logits after the prompt when it is read in two passes of several tokens."""
    prompt_1T = tokens_1T[:, :READ]
    valid_1T = torch.ones_like(prompt_1T, dtype=torch.bool)
    _, output = backbone.read(prompt_1T, valid_1T, chunk=READ // 2)
    logits_V: Tensor = backbone.logits(output.final_BND[0, -1]).float()
    return logits_V
