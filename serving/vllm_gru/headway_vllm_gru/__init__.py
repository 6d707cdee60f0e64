"""Tells vLLM which class runs a folder of `headway export --to vllm-gru`; vLLM calls `register` in every process."""

from __future__ import annotations


def register() -> None:
    from vllm import ModelRegistry

    ModelRegistry.register_model("EagleHeadwayGru", "headway_vllm_gru.model:EagleHeadwayGru")
