"""Headway: multi-token prediction heads for Hugging Face causal LMs, and decoding with them, exactly as before."""

from heads.backbone.loading import BackboneConfig, load_backbone, load_tokenizer
from heads.backbone.model import Backbone, CommitPlan
from heads.checkpoint.convert import prune_vocabulary
from heads.checkpoint.opening import load_with_backbone
from heads.checkpoint.save_load import load, save
from heads.decoding.acceptance.rules import TypicalRule
from heads.decoding.draft_model_decoding import DraftModelDecoding
from heads.decoding.dynamo.decoding import DynamicDecoding
from heads.decoding.generate import generate
from heads.decoding.own_loop import TreeDrafter, accept_greedy
from heads.decoding.superposed.decoding import SuperposedDecoding
from heads.decoding.tree_decoding import TreeDecoding
from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.export.exporting import export_heads, import_heads
from heads.export.hub.push import push_to_hub
from heads.families import create, families
from heads.interface.draft_vocabulary import most_frequent_tokens
from heads.ngrams.table import NgramTable
from heads.products.packed import pack_weights
from heads.quantization.packed_heads import pack_heads
from heads.quantization.quantizer import MXConfig

__all__ = [
    "Backbone",
    "BackboneConfig",
    "CommitPlan",
    "DraftModelDecoding",
    "DynamicDecoding",
    "DynamicTree",
    "MXConfig",
    "NgramTable",
    "SuperposedDecoding",
    "Tree",
    "TreeDecoding",
    "TreeDrafter",
    "TypicalRule",
    "accept_greedy",
    "create",
    "export_heads",
    "families",
    "generate",
    "import_heads",
    "load",
    "load_backbone",
    "load_tokenizer",
    "load_with_backbone",
    "most_frequent_tokens",
    "pack_heads",
    "pack_weights",
    "prune_vocabulary",
    "push_to_hub",
    "save",
]
