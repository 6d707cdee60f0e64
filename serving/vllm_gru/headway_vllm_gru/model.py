"""gru heads as the draft model of vLLM's method "eagle".

vLLM runs the class once over the rows that it verified, with the target's final hidden states, and then once for each
further draft, with the state that came out. Embedding and unembedding are the target's: vLLM shares both where the
folder has neither. vLLM asks each draft for an attention layer, whose cache its scheduler reads; `placeholder` is one
that is never called.

Source: vLLM 0.32.0 v1/spec_decode/llm_base_proposer.py (propose, load_model), model_executor/models/llama_eagle.py.
"""
# N token, D model width

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import maybe_prefix

from headway_vllm_gru.recurrence import Recurrence


class Draft(nn.Module):
    """The part that vLLM calls `model`, whose `embed_tokens` becomes the target's."""

    def __init__(self, vllm_config: VllmConfig, config, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "embed_tokens")
        )
        self.recurrence = Recurrence(config.hidden_size, config.normalize_embeddings)
        ranks = get_tensor_model_parallel_world_size()
        layer = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
        self.placeholder = Attention(
            max(1, config.num_attention_heads // ranks),
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=max(1, config.num_key_value_heads // ranks),
            cache_config=vllm_config.cache_config,
            prefix=maybe_prefix(prefix, f"layers.{layer}.attn"),
        )

    def forward(self, input_ids: Tensor, hidden_states: Tensor) -> Tensor:
        return self.recurrence(self.embed_tokens(input_ids), hidden_states)


class EagleHeadwayGru(LlamaForCausalLM):
    """Llama's class for its `compute_logits` and what vLLM asks of a draft by class; none of its layers."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        target = vllm_config.model_config.get_hidden_size()
        if self.config.hidden_size != target:
            raise ValueError(f"gru heads {self.config.hidden_size} wide were given for a model {target} wide.")
        self.has_own_lm_head = self.has_own_embed_tokens = False
        self.model = Draft(vllm_config, self.config, maybe_prefix(prefix, "model"))
        self.logits_processor = LogitsProcessor(self.config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(N, D) twice: what is scored, and what the next step reads."""
        if inputs_embeds is not None:
            raise NotImplementedError("gru heads read tokens, and embeddings were given: images are not supported.")
        state_ND = self.model(input_ids, hidden_states)
        return state_ND, state_ND

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """
        Raises:
            ValueError: tensors missing or extra.
        """
        cell = dict(self.model.recurrence.cell.named_parameters())
        found = {name.removeprefix("cell."): tensor for name, tensor in weights}
        if set(found) != set(cell):
            raise ValueError(f"The folder holds {sorted(found)}; gru heads are {sorted(cell)}. Export them again.")
        for name, tensor in found.items():
            cell[name].data.copy_(tensor)
        return {f"model.recurrence.cell.{name}" for name in cell} | {"model.embed_tokens.weight"}
