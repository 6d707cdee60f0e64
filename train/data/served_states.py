"""A frozen backbone's hidden states from an inference server, which runs large backbones faster than training code.

vLLM (0.20 and later; its documentation calls it "Hidden State Extraction") writes a file for each prompt:

    vllm serve MODEL --no-enable-chunked-prefill \\
        --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config":
            {"hf_config": {"eagle_aux_hidden_state_layer_ids": [30, 32]}}}' \\
        --kv-transfer-config '{"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": "/states"}}'

    /states/REQUEST.safetensors        token_ids (T) and hidden_states (T, layer ids, D), named in the answer
    /states/REQUEST.safetensors.lock   locked until the file is whole

Layer id i is the residual stream after i layers: 0 is the embeddings, and n the last layer's output without the final
norm, which is applied here. Every document of a block is a request of its own, unless documents attend to each other.
The beginning of the first one is also run here, and a server whose states differ from these is refused.
"""
# B block, N tap, T position, D model width, L layer id of the server

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from heads.backbone.state import HiddenTap
from heads.extras import needs_extra
from train.config.states_server import StatesServerConfig
from train.objective.document_attention import document_lengths
from train.objective.model import TrainedModel

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT = 600.0  # seconds
FILE_TIMEOUT = 600.0  # seconds from the answer to its whole file
PAUSE = 0.01  # seconds between two looks at a lock
TRIES = 7  # of one request; the pauses double from 0.5 s to 8 s
COMPARED = 128  # tokens at most that are also run here
TOLERANCE = 0.1
"""Largest difference from the states computed here, as a share of their size (both root mean squares). bfloat16 keeps 8
bits and errors add up over layers: servers were seen at 0.002 to 0.03. A neighbouring layer's states differ by a third
and more, and other weights by more than 1."""


def layer_ids(taps: Sequence[HiddenTap], num_layers: int) -> list[int]:
    """The layers of which a server has to give the states, in the order in which it gives them.

    >>> layer_ids(["final", 0, 2], num_layers=32)
    [30, 32]
    """
    return sorted({layer_id(tap, num_layers) for tap in taps})


def layer_id(tap: HiddenTap, num_layers: int) -> int:
    return num_layers if tap == "final" else num_layers - tap


class ServedStates:
    """`TrainedModel.hidden_states` through a server; the first call compares the two.

    Args:
        model: its taps decide which layers are asked for; its backbone's final norm is applied here.

    Raises:
        ValueError: the server cannot be reached, refuses, gives no hidden states, or gives other ones.
    """

    def __init__(self, config: StatesServerConfig, model: TrainedModel) -> None:
        with needs_extra("train", "Hidden states were to come from a server"):
            import openai
        assert config.url is not None
        assert config.folder is not None
        self.config = config
        self.trained = model
        self.model = config.model or model.backbone.model.config.name_or_path
        self.ids = layer_ids(model.stored_taps, model.backbone.num_layers)
        key = os.environ.get(config.key_variable or "OPENAI_API_KEY", "none")
        self._openai = openai
        self._client = openai.OpenAI(base_url=config.url, api_key=key, timeout=ANSWER_TIMEOUT, max_retries=TRIES - 1)
        self._compared = False
        logger.info("hidden states come from %s, after layers %s", config.url, self.ids)

    def __call__(self, tokens_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
        """(B, N, T, D) in the backbone's dtype, on its device."""
        if not self._compared:
            self.compare(tokens_BT[:1], document_ids_BT[:1])
        attended_BT = torch.zeros_like(document_ids_BT) if self.trained.attend_across_documents else document_ids_BT
        asked = [
            document_T.tolist()
            for tokens_T, ids_T in zip(tokens_BT, attended_BT, strict=True)
            for document_T in tokens_T.split(document_lengths(ids_T))
        ]
        with ThreadPoolExecutor(self.config.concurrency) as pool:
            documents = list(pool.map(self.states_of, asked))
        return torch.cat(documents, dim=1).unflatten(1, tokens_BT.shape).transpose(0, 1)

    def compare(self, tokens_1T: Tensor, document_ids_1T: Tensor) -> None:
        """Raise ValueError where the server's states of the first document are not those of the backbone here."""
        first_1T = tokens_1T[:, : min(document_lengths(document_ids_1T[0])[0], COMPARED)]
        here_NTD = self.trained.hidden_states(first_1T, torch.zeros_like(first_1T))[0].float()
        there_NTD = self.states_of(first_1T[0].tolist()).float()
        differences_N = (there_NTD - here_NTD).pow(2).mean((1, 2)).sqrt() / here_NTD.pow(2).mean((1, 2)).sqrt()
        for tap, difference in zip(self.trained.stored_taps, differences_N.tolist(), strict=True):
            if not difference <= TOLERANCE:
                raise ValueError(
                    f"The server at {self.config.url} gave other hidden states than the backbone here: after layer "
                    f"{layer_id(tap, self.trained.backbone.num_layers)} they differ by {difference:.2f} of their size, "
                    f"allowed is {TOLERANCE}. Serve the same model with eagle_aux_hidden_state_layer_ids {self.ids}."
                )
        self._compared = True

    def states_of(self, tokens_T: list[int]) -> Tensor:
        """(N, T, D): the taps of one document, in the order of `stored_taps`."""
        states_TLD = self.read(self.ask(tokens_T), tokens_T).to(self.trained.backbone.device)
        backbone = self.trained.backbone
        by_id = dict(zip(self.ids, states_TLD.to(backbone.dtype).unbind(1), strict=True))
        norm = backbone.projection.norm
        with torch.no_grad():
            taps = [
                norm(by_id[backbone.num_layers])
                if tap == "final" and norm is not None
                else by_id[layer_id(tap, backbone.num_layers)]
                for tap in self.trained.stored_taps
            ]
        return torch.stack(taps)

    def ask(self, tokens_T: list[int]) -> Path:
        """Have the server compute a document's states; returns the file that holds them."""
        openai, url = self._openai, self.config.url
        try:
            answer = self._client.completions.create(model=self.model, prompt=tokens_T, max_tokens=1, temperature=0)
        except openai.APIConnectionError:  # time-outs too
            raise ValueError(
                f"states_server.url={url} was given and does not answer; start the server, with "
                f"eagle_aux_hidden_state_layer_ids {self.ids}. The same command goes on."
            ) from None
        except openai.APIStatusError as error:
            raise ValueError(f"{url} refuses a document of {len(tokens_T)} tokens: {error.message}") from None
        named = (getattr(answer, "kv_transfer_params", None) or {}).get("hidden_states_path")
        if not isinstance(named, str) or not named.endswith(".safetensors"):
            raise ValueError(
                f"{url} answers without hidden states; start it with the speculative method extract_hidden_states, "
                f"eagle_aux_hidden_state_layer_ids {self.ids} and the ExampleHiddenStatesConnector (docs/train.md)."
            )
        assert self.config.folder is not None
        return Path(self.config.folder) / Path(named).name  # the named folder is the server's view, so it is ignored

    def read(self, file: Path, tokens_T: list[int]) -> Tensor:
        """(T, L, D): the states in a file that the server wrote; the file is removed.

        Raises:
            ValueError: the file cannot be read, is of another document or shape, or holds states that are not finite.
        """
        wait_until_whole(file)
        try:
            found = load_file(file)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} cannot be read ({error}); the same command asks for it again.") from None
        expected = (len(tokens_T), len(self.ids), self.trained.backbone.hidden_size)
        states, ids = found.get("hidden_states"), found.get("token_ids")
        if states is None or states.shape != expected or ids is None or ids.tolist() != tokens_T:
            shape = "no hidden_states" if states is None else f"hidden_states of {tuple(states.shape)}"
            raise ValueError(
                f"{file} has {shape}; for this document of {expected[0]} tokens (T, layer ids, D) would be {expected}. "
                f"Start the server with eagle_aux_hidden_state_layer_ids {self.ids}, and give it a folder of its own."
            )
        if not bool(states.isfinite().all()):
            raise ValueError(f"{file} has hidden states that are not finite; serve the backbone in another dtype.")
        file.unlink()
        lock_of(file).unlink(missing_ok=True)
        return states


def lock_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.lock")


def wait_until_whole(file: Path) -> None:
    """Wait for the server's exclusive lock to end, which it holds while it writes; raise ValueError on a time-out."""
    until = time.monotonic() + FILE_TIMEOUT
    while not is_unlocked(lock_of(file)):
        if time.monotonic() > until:
            raise ValueError(
                f"The server names {file.name}, and {file.parent} has no finished file of that name after "
                f"{FILE_TIMEOUT:.0f} s; states_server.folder has to show the server's shared_storage_path."
            )
        time.sleep(PAUSE)


def is_unlocked(lock: Path) -> bool:
    try:
        with lock.open() as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return False
    return True
