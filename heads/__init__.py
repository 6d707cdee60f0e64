"""Headway: multi-token prediction heads for any Hugging Face causal LM, and decoding with them, exactly as before."""

from heads.backbone import Backbone, CommitPlan
from heads.checkpoint import load, save
from heads.decoding.draft_model import DraftModelDecoding
from heads.decoding.dynamic import DynamicDecoding
from heads.decoding.dynamic_tree import DynamicTree
from heads.decoding.generate import generate
from heads.decoding.rules import TypicalRule
from heads.decoding.steps import TreeDrafter, accept_greedy
from heads.decoding.tree import Tree
from heads.decoding.tree_decoding import TreeDecoding
from heads.draft_vocabulary import most_frequent_tokens
from heads.families import create, families
from heads.loading import BackboneConfig, load_backbone, load_tokenizer
from heads.ngrams import NgramTable
from heads.opening import load_with_backbone
from heads.pruning import prune_vocabulary

__all__ = [
    "Backbone",
    "BackboneConfig",
    "CommitPlan",
    "DraftModelDecoding",
    "DynamicDecoding",
    "DynamicTree",
    "NgramTable",
    "Tree",
    "TreeDecoding",
    "TreeDrafter",
    "TypicalRule",
    "accept_greedy",
    "create",
    "families",
    "generate",
    "load",
    "load_backbone",
    "load_tokenizer",
    "load_with_backbone",
    "most_frequent_tokens",
    "prune_vocabulary",
    "save",
]
