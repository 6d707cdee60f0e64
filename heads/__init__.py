"""Headway: multi-token prediction heads for any Hugging Face causal LM, and decoding with them, exactly as before."""

from heads.backbone import Backbone
from heads.checkpoint import load, save
from heads.decoding.draft_model import DraftModelDecoding
from heads.decoding.dynamic import DynamicDecoding
from heads.decoding.generate import generate
from heads.decoding.tree import Tree
from heads.decoding.tree_decoding import TreeDecoding
from heads.families import create, families
from heads.loading import BackboneConfig, load_backbone, load_tokenizer
from heads.ngrams import NgramTable
from heads.opening import load_with_backbone

__all__ = [
    "Backbone",
    "BackboneConfig",
    "DraftModelDecoding",
    "DynamicDecoding",
    "NgramTable",
    "Tree",
    "TreeDecoding",
    "create",
    "families",
    "generate",
    "load",
    "load_backbone",
    "load_tokenizer",
    "load_with_backbone",
    "save",
]
