"""vLLM's connector for hidden states on a machine without CUDA; only vLLM imports it, in its own environment.

vLLM copies the states by a CUDA stream to pinned memory. On a CPU they are in memory already, so that one method is
replaced; the lock, the file and its name in the answer stay vLLM's own.
"""

import importlib
from typing import Any

import torch

theirs: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector")


class Copied:
    """Stands for the CUDA event of a copy that is complete."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Returns at once, since nothing is being copied."""


class CpuHiddenStatesConnector(theirs.ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Writes the states of a finished request, as its base class does on a GPU."""

    def _submit_async_write(self, pending: Any) -> None:
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = theirs.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).clone()
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        self._req_copy_events[pending.req_id] = Copied()
        self._write_tensors(tensors, Copied(), pending.filename, self._lock_fds.pop(pending.req_id, None))
