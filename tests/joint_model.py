"""Tiny models whose backbone and heads are trained together, and gradients of each loss by another route."""

import torch
from head_losses import head_rows
from tiny import random_tokens, tiny_model

from heads.backbone.model import Backbone
from heads.families import create
from train.objective.model import TrainedModel

SCALE = 0.1
COUNT = 16  # of labels, as far as the loss knows: its division, in float32, is exact
# Models are float64, but their norms and softmaxes round to float32 inside; what is compared reaches 0.1 and more.
TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}


def build(architecture="llama", family="dynamo", *, seed=0, **settings):
    """A backbone and heads in float64; the same weights at every call."""
    backbone = Backbone(tiny_model(architecture, attn="eager"))
    torch.manual_seed(seed)
    settings = {"trains_backbone": True, **settings}
    config = settings.pop("heads", {})
    token_heads = None if family is None else create(family, backbone, num_heads=2, **config).double()
    if token_heads is not None:
        for p in token_heads.parameters():
            torch.nn.init.normal_(p, std=0.2)
    return TrainedModel(backbone, token_heads, **settings)


def a_batch(rows=2, length=12):
    tokens = random_tokens(rows, length, seed=3)
    mask = torch.rand(rows, length, generator=torch.Generator().manual_seed(4)) > 0.2
    documents = (torch.arange(length) >= 7).long().expand(rows, length)
    return {"input_ids": tokens, "loss_mask": mask, "document_ids": documents}


def backbone_gradients(model):
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.model.named_parameters()}


def joint(scale, architecture, family, **config):
    model = build(architecture, family, gradient_scale=scale, heads=config)
    model(**a_batch(), counts_K=torch.full((3,), COUNT))["loss"].backward()
    return backbone_gradients(model)


def apart(architecture, family, **config):
    """g_1, g_2, …: each head's loss alone, plain, through a model without gates."""
    found = []
    for which in range(3):
        model = build(architecture, family, heads=config)
        batch = a_batch()
        rows = list(head_rows(model, batch, with_backbone=True))[which]
        logits = rows.projection(rows.hidden_RD)
        labels = batch["input_ids"].flatten()[rows.rows_R + rows.shift]
        (torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / COUNT).backward()
        found.append(backbone_gradients(model))
    return found
