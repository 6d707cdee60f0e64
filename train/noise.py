"""Noise on the hidden states that heads read in training (EAGLE, section 4; NEFTune has it on embeddings).

While decoding, heads read states of texts that the backbone wrote, not of those that they were trained on; noise keeps
them from leaning on small differences. EAGLE draws U(-0.1, 0.1) · 512 / length for Llama's states, whose size is about
1; here the range goes with each state's own size, so that it means the same on any backbone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_noise(states_BTD: Tensor, size: float, generator: torch.Generator | None = None) -> Tensor:
    """Each number plus U(-size, size) times the root mean square of its state.

    >>> states = torch.tensor([[3.0, -4.0]])                       # of root mean square 3.54
    >>> moved = add_noise(states, 0.1, torch.Generator().manual_seed(0)) - states
    >>> bool((moved.abs() <= 0.354).all()), bool((moved != 0).all())
    (True, True)

    Args:
        generator: torch's global one where it is not given, which the Trainer seeds and keeps in checkpoints.
    """
    size_BT1 = size * states_BTD.detach().float().square().mean(dim=-1, keepdim=True).sqrt()
    noise_BTD = torch.rand(states_BTD.shape, generator=generator, device=states_BTD.device) * 2 - 1
    return states_BTD + (noise_BTD * size_BT1).to(states_BTD.dtype)
