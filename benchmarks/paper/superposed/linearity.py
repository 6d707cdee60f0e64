"""How linear a backbone is in superposed embeddings, by step and by layer (equation 8, figures 3 and 15).

Beam search writes three texts. At every step the backbone reads each beam's newest token after that beam's text, and
the superposition of the three tokens after the earlier superpositions. The cosine compares its output on the
superposition with the weighted sum of its outputs on the beams. Hidden states of any two texts are alike to a degree,
so a control has the same cosine with the beams of another prefix: only what lies above it is linearity.
"""
# B prefix, K beam, D width, S layer (0: the embedding, then each layer, then the logits), V vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.paper.superposed.bench import Row, SuperposedBench
from benchmarks.paper.superposed.quality import rounded

BEAMS = 3
BATCH = 10


@torch.no_grad()
def measure_linearity(bench: SuperposedBench) -> Row:
    """Cosines of each batch of ten prefixes, step and layer, (batch, step, layer); and of the control."""
    plan, model = bench.plan, bench.opened.model
    batches = bench.windows[: BATCH * plan.linear_batches, : plan.prefix].split(BATCH)
    found = [cosines(model, prefixes_BT, plan.linear_steps) for prefixes_BT in batches]
    return {
        "cosine": rounded(torch.stack([own.mean(dim=0) for own, _ in found])),
        "control": rounded(torch.stack([other.mean(dim=0) for _, other in found])),
    }


def cosines(model: Any, prefixes_BT: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Cosines with the prefix's own beams, and with the next prefix's; (B, steps, S) each."""
    many = len(prefixes_BT)
    beams_cache, superposed_cache = DynamicCache(), DynamicCache()
    rows_RT = prefixes_BT.repeat_interleave(BEAMS, dim=0)
    logits_RV = model(rows_RT, past_key_values=beams_cache).logits[:, -1]
    model(prefixes_BT, past_key_values=superposed_cache)
    scores_BK, tokens_BK = logits_RV.log_softmax(-1).view(many, BEAMS, -1)[:, 0].topk(BEAMS, dim=-1)
    own, other = [], []
    for _ in range(steps):
        weights_BK = scores_BK.double().softmax(dim=-1).float()
        readings = read(model, beams_cache, model.get_input_embeddings()(tokens_BK).flatten(0, 1)[:, None])
        mixed = [torch.einsum("bk,bkd->bd", weights_BK, state_RD.view(many, BEAMS, -1)) for state_RD in readings]
        together = read(model, superposed_cache, mixed[0][:, None])
        own.append(similarity(together, mixed))
        other.append(similarity(together, [state_BD.roll(1, dims=0) for state_BD in mixed]))
        log_p_BKV = readings[-1].log_softmax(dim=-1).view(many, BEAMS, -1)
        totals_BC = (scores_BK[..., None] + log_p_BKV).flatten(1)
        scores_BK, places_BK = totals_BC.topk(BEAMS, dim=-1)
        parents_BK = places_BK // log_p_BKV.shape[-1]
        tokens_BK = places_BK % log_p_BKV.shape[-1]
        beams_cache.reorder_cache((torch.arange(many)[:, None] * BEAMS + parents_BK).flatten())
    return torch.stack(own, dim=1), torch.stack(other, dim=1)


def read(model: Any, cache: DynamicCache, embeddings_R1D: Tensor) -> list[Tensor]:
    """The embedding, what each layer makes of it, and the logits, each (R, D or V); the cache grows by a slot."""
    output = model(inputs_embeds=embeddings_R1D, past_key_values=cache, output_hidden_states=True)
    return [state_R1D[:, -1] for state_R1D in output.hidden_states] + [output.logits[:, -1]]


def similarity(one: list[Tensor], another: list[Tensor]) -> Tensor:
    """(B, S): the cosine at each layer."""
    pairs = zip(one, another, strict=True)
    return torch.stack([torch.cosine_similarity(a_BD.double(), b_BD.double(), dim=-1) for a_BD, b_BD in pairs], dim=1)
