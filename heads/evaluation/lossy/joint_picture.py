"""Draw what masks and thresholds do to a joint distribution: six heat maps for one prompt (DynaMo, figure 9).

(a) vanilla    (b) CO-0.5    (c) CO              co-occurrence masks with α_c = 0, 0.5, 1
(d) vanilla    (e) AT        (f) AT + G-3        adaptive threshold without and with Gaussian blur, nothing masked

The joint covers the 10 likeliest tokens of x_{t+1} and of x_{t+2}, at temperature 1 and without a static threshold, so
that each map shows one effect. In the end entries with a repeated token are divided by 100 (Algorithm 1).
"""
# k candidate (an axis of a map: the first is x_{t+1}, the second x_{t+2}), T position, V vocabulary

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from heads.backbone.model import CommitPlan
from heads.decoding.dynamo.candidates import Candidates, take_candidates
from heads.decoding.dynamo.cooccurrence import Cooccurrence, open_cooccurrence
from heads.decoding.dynamo.joint import check_independent, mask, outer, penalize_repetition
from heads.decoding.dynamo.threshold import adaptive_threshold
from heads.evaluation.pictures import DARK, STYLE, new_figure, save_figure
from heads.extras import needs_extra
from heads.interface.token_heads import TokenHeads

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

PENALTY = 100.0
"""Divides entries with a token of the prompt, or with the same token twice."""
TOP = 10
BLUR = 3
LONGEST_LABEL = 12
LONGEST_PROMPT = 60
ZERO = "#E9E9E9"
SIGNS = {" ": "␣", "\n": "↵", "\t": "→", "\r": "←"}


def draw_joint_maps(
    token_heads: TokenHeads,
    tokenizer: Any,
    prompt: str,
    cooccurrence: Cooccurrence | str | Path,
    path: str | Path,
) -> None:
    """Draw six heat maps of the joint distribution of the two tokens after a prompt into one PNG.

    Args:
        cooccurrence: a table of n-grams or its folder.

    Raises:
        ValueError: heads or a table that `DynamicDecoding` refuses, or an empty prompt.
    """
    check_independent(token_heads)
    table = open_cooccurrence(cooccurrence, 2, token_heads.backbone.vocab_size)
    tokens_1T = torch.tensor([tokenizer(prompt)["input_ids"]], dtype=torch.long, device=token_heads.backbone.device)
    if not tokens_1T.numel():
        raise ValueError("The prompt is empty; give at least one word.")
    places = predict_two(token_heads, tokens_1T)
    seen_1V = torch.zeros(1, token_heads.backbone.vocab_size, dtype=torch.bool, device=tokens_1T.device)
    seen_1V[0, tokens_1T[0]] = True
    maps = {
        name: penalize_repetition(joint, places, seen_1V, PENALTY)[0].cpu()
        for name, joint in joint_maps(places, table).items()
    }
    labels = [[show_token(tokenizer, token) for token in place.tokens_Bk[0].tolist()] for place in places]
    shown = repr(prompt if len(prompt) <= LONGEST_PROMPT else f"…{prompt[-LONGEST_PROMPT:]}")
    title = f"joint distribution of the two tokens after {shown}, repetition ÷ {PENALTY:g}"
    draw_maps(maps, labels, title, path)


@torch.no_grad()
def predict_two(token_heads: TokenHeads, tokens_1T: Tensor) -> list[Candidates]:
    """The likeliest tokens for x_{t+1} (the backbone) and for x_{t+2} (head 1) after a text."""
    valid_1T = torch.ones_like(tokens_1T, dtype=torch.bool)
    _, output = token_heads.backbone.prefill(tokens_1T, valid_1T, token_heads.taps)
    plan = CommitPlan.whole(valid_1T)
    state = token_heads.commit(None, output.tokens_BN, output.taps, output.positions_BN, plan)
    row_1 = torch.zeros(1, dtype=torch.long, device=tokens_1T.device)  # no drafted token is read
    hidden_1D, _ = token_heads.step(1, token_heads.first_level(state), row_1, row_1)
    head = token_heads.projection(1)
    logits = [token_heads.backbone.logits(output.final_BND[:, -1]), head.spread(head(hidden_1D), -torch.inf)]
    return [take_candidates(x_1V.float().softmax(dim=-1), TOP, place=n) for n, x_1V in enumerate(logits, start=1)]


def joint_maps(places: Sequence[Candidates], cooccurrence: Cooccurrence | None) -> dict[str, Tensor]:
    """The maps (1, k, k) by name, before the repetition penalty.

    >>> places = [Candidates(tokens_Bk=torch.tensor([[0, 1]]), probs_Bk=torch.tensor([[0.9, 0.1]]))] * 2
    >>> maps = joint_maps(places, None)
    >>> maps["(e) AT"]
    tensor([[[0.8100, 0.0000],
             [0.0000, 0.0000]]])
    """
    vanilla, half, whole = (mask(outer(places), places, cooccurrence, power) for power in (0.0, 0.5, 1.0))
    counts = [place.counts for place in places]
    return {
        "(a) vanilla": vanilla,
        "(b) CO-0.5": half,
        "(c) CO": whole,
        "(d) vanilla": vanilla,
        "(e) AT": adaptive_threshold(vanilla, counts, 1),
        f"(f) AT + G-{BLUR}": adaptive_threshold(vanilla, counts, BLUR),
    }


def draw_maps(maps: Mapping[str, Tensor], labels: Sequence[Sequence[str]], title: str, path: str | Path) -> None:
    """Draw two rows of three maps on one colour scale, which is finer for small probabilities."""
    figure = new_figure(13, 9)
    with needs_extra("plots", "A picture is to be drawn"):
        from matplotlib.colors import PowerNorm
    norm = PowerNorm(0.5, vmin=0, vmax=max(float(map_kk.max()) for map_kk in maps.values()))
    panels = figure.subplots(2, 3)
    for axes, (name, map_kk) in zip(panels.flat, maps.items(), strict=True):
        image = draw_map(axes, map_kk, labels, norm)
        axes.set_title(name, loc="left", fontsize=11, color=DARK)
    bar = figure.colorbar(image, ax=panels, shrink=0.6, pad=0.02)
    bar.set_label("probability (grey: zero)", **STYLE)
    bar.ax.tick_params(labelsize=9, colors=DARK)
    figure.suptitle(title, fontsize=11.5, color=DARK, parse_math=False)
    save_figure(figure, path)


def draw_map(axes: Axes, map_kk: Tensor, labels: Sequence[Sequence[str]], norm: Normalize) -> Any:
    """Draw one map: x_{t+1} from top to bottom, x_{t+2} from left to right, the likeliest first."""
    values = np.ma.masked_equal(map_kk.numpy(), 0.0)
    axes.set_facecolor(ZERO)
    image = axes.imshow(values, norm=norm, cmap="YlGnBu", aspect="equal")
    axes.set_yticks(range(len(labels[0])), labels[0], parse_math=False)
    axes.set_xticks(range(len(labels[1])), labels[1], rotation=90, parse_math=False)
    axes.set_ylabel("next token", **STYLE)
    axes.set_xlabel("token after it", **STYLE)
    axes.tick_params(labelsize=9, colors=DARK, length=0)
    axes.set_xticks([i - 0.5 for i in range(1, len(labels[1]))], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, len(labels[0]))], minor=True)
    axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)
    return image


def show_token(tokenizer: Any, token: int) -> str:
    """A token as a label; a token that is part of a character as the tokenizer spells it."""
    text = tokenizer.decode([token])
    return show_text(tokenizer.convert_ids_to_tokens(token) if "\ufffd" in text else text, LONGEST_LABEL)


def show_text(text: str, longest: int) -> str:
    """Text on one line with signs for white space: long runs are counted, long texts are cut.

    >>> show_text(" the", 12), show_text("\\n            x", 12), show_text("supercalifragilistic", 12)
    ('␣the', '↵␣×12x', 'supercalifr…')
    """
    shown, i = "", 0
    while i < len(text):
        run = len(text[i:]) - len(text[i:].lstrip(text[i]))
        sign = SIGNS.get(text[i], text[i] if text[i].isprintable() else "□")
        shown += f"{sign}×{run}" if run > 3 and text[i] in SIGNS else sign * run
        i += run
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"
