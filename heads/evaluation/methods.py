"""The decoding methods that are compared: plain `generate`, prompt lookup, draft models, tree and dynamic decoding.

A method decodes one prompt; all methods of a comparison share one `GreedySettings` or one `SampledSettings`. Methods
are lossless except `dynamic` and trees under typical acceptance, which are marked as lossy.
"""
# T prompt position

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import CompileConfig

from heads.decoding.draft_model_decoding import DraftModelDecoding
from heads.decoding.dynamo.cooccurrence import Cooccurrence
from heads.decoding.dynamo.decoding import DynamicDecoding
from heads.decoding.proposers.draft_length import DEFAULT_K
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.decoding.tree_decoding import TreeDecoding
from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.interface.token_heads import TokenHeads

TreeShape = Tree | DynamicTree | str | Path | int | None
Promise = Literal["same text", "same distribution", "lossy"]
LOOKUP_ALONE = "lookup without heads"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one `generate` call.

    Attributes:
        tokens: the new tokens.
        passes: backbone passes; None if the method does not count them.
        seconds: by phase of `DecodingStats`; None if the method does not measure them.
    """

    tokens: list[int]
    passes: int | None = None
    seconds: dict[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to decode a prompt (1, T).

    Attributes:
        count_passes: counts backbone passes in an untimed run, for methods whose outcome has no count.
        promises: plain generation's text, which is then compared; or its distribution alone, for a method that takes
            random numbers in another order; or "lossy".
    """

    name: str
    run: Callable[[Tensor], Outcome]
    count_passes: Callable[[Tensor], int] | None = None
    promises: Promise = "same text"


@dataclass(frozen=True, kw_only=True)
class GreedySettings:
    """How every method of a comparison generates greedily.

    Attributes:
        new_tokens: most tokens to generate; an end-of-text token ends a text earlier.
        repetition_penalty: as in `generate`; 1 is no penalty, None the backbone's own.
    """

    new_tokens: int = 128
    repetition_penalty: float | None = None

    def generate(self, model: Any, prompt_1T: Tensor, **more: Any) -> Any:
        """`model.generate` with these settings."""
        fields: dict[str, Any] = {"max_new_tokens": self.new_tokens, "do_sample": False}
        if self.repetition_penalty is not None:
            fields["repetition_penalty"] = self.repetition_penalty
        return unpadded(model, prompt_1T, fields | more)


def penalty_used(model: Any, given: float | None) -> float:
    """The repetition penalty of a call of `generate`: the given one, else the backbone's own, else 1 for none."""
    own = model.generation_config.repetition_penalty
    return given if given is not None else 1.0 if own is None else float(own)


UNCHANGED_SCORES: dict[str, Any] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": None,
    "typical_p": 1.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
}
"""Arguments of `generate` that switch off what a backbone's generation_config may do to its distribution."""


@dataclass(frozen=True, kw_only=True)
class SampledSettings:
    """How every method of a comparison samples, from the backbone's whole distribution at a temperature.

    Sampled text does not loop as a small model's greedy text does. Each call begins with the same seed, so a method
    that takes one random number for each token writes plain generation's text.

    Attributes:
        new_tokens: most tokens to generate; an end-of-text token ends a text earlier.
        temperature: above 0.
        seed: seed of torch's global generator, from which `generate` samples.
    """

    new_tokens: int = 128
    temperature: float = 1.0
    seed: int = 0

    def generate(self, model: Any, prompt_1T: Tensor, **more: Any) -> Any:
        """`model.generate` with these settings, after setting the seed."""
        torch.manual_seed(self.seed)
        fields = {"max_new_tokens": self.new_tokens, "do_sample": True, "temperature": self.temperature}
        return unpadded(model, prompt_1T, UNCHANGED_SCORES | fields | more)


Settings = GreedySettings | SampledSettings


def unpadded(model: Any, prompt_1T: Tensor, fields: dict[str, Any]) -> Any:
    """`model.generate` with a mask of ones: without one, it would take a pad token in the prompt for padding."""
    return model.generate(prompt_1T, attention_mask=torch.ones_like(prompt_1T), **fields)


def own_random_numbers(settings: Settings) -> Promise:
    """The promise of a lossless method that accepts drafts with its own random numbers."""
    return "same distribution" if isinstance(settings, SampledSettings) else "same text"


def plain(model: Any, settings: Settings) -> Method:
    """`model.generate`: one pass for each token, the prompt's pass included."""

    def run(prompt_1T: Tensor) -> Outcome:
        tokens = new_tokens(settings.generate(model, prompt_1T), prompt_1T)
        return Outcome(tokens=tokens, passes=len(tokens))

    return Method(name="plain", run=run)


def plain_compiled(model: Any, settings: Settings) -> Method:
    """`model.generate` with a static cache and a compiled forward, on CPUs too, where `generate` would not compile."""
    fields = compiled_static_cache()

    def run(prompt_1T: Tensor) -> Outcome:
        tokens = new_tokens(settings.generate(model, prompt_1T, **fields), prompt_1T)
        return Outcome(tokens=tokens, passes=len(tokens))

    return Method(name="plain, compiled static cache", run=run)


def compiled_static_cache() -> dict[str, Any]:
    """What makes `generate` compile, on every device."""
    config = CompileConfig()
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


def prompt_lookup(model: Any, settings: Settings, num_tokens: int = DEFAULT_LOOKUP) -> Method:
    """`model.generate` with drafts copied from where the last tokens occurred earlier in the text."""
    return assisted(model, settings, "prompt lookup", prompt_lookup_num_tokens=num_tokens)


def assistant_model(model: Any, draft_model: Any, settings: Settings) -> Method:
    """`model.generate` with a draft model: transformers' own assisted generation with its default settings."""
    return assisted(model, settings, "assistant_model", assistant_model=draft_model)


def assisted(model: Any, settings: Settings, name: str, **more: Any) -> Method:
    """`model.generate` with drafts; an untimed run counts its passes, which `generate` does not return."""

    def run(prompt_1T: Tensor) -> Outcome:
        return Outcome(tokens=new_tokens(settings.generate(model, prompt_1T, **more), prompt_1T))

    def count_passes(prompt_1T: Tensor) -> int:
        with counted_forwards(model) as calls:
            run(prompt_1T)
        return len(calls)

    return Method(name=name, run=run, count_passes=count_passes, promises=own_random_numbers(settings))


def draft_model(model: Any, draft: Any, settings: Settings, k: int | Literal["adaptive"] = DEFAULT_K) -> Method:
    """Speculative sampling with a draft model; `k` as `DraftModelDecoding` takes it."""
    decoding = DraftModelDecoding(draft, k)

    def run(prompt_1T: Tensor) -> Outcome:
        output = settings.generate(model, prompt_1T, custom_generate=decoding, return_dict_in_generate=True)
        return outcome_of(output, prompt_1T)

    name = "draft model" if k == DEFAULT_K else f"draft model, k={k}"
    return Method(name=name, run=run, promises=own_random_numbers(settings))


def tree(
    model: Any,
    token_heads: TokenHeads,
    settings: Settings,
    name: str,
    shape: TreeShape = None,
    lookup: int | None = None,
    compile: bool | None = None,
    rule: Literal["exact", "typical"] = "exact",
) -> Method:
    """Tree decoding with these heads; `shape`, `lookup`, `compile`, `rule` as `TreeDecoding` takes them."""
    decoding = TreeDecoding(token_heads, shape, lookup=lookup, compile=compile, rule=rule)

    def run(prompt_1T: Tensor) -> Outcome:
        output = settings.generate(model, prompt_1T, custom_generate=decoding, return_dict_in_generate=True)
        return outcome_of(output, prompt_1T)

    lossy = rule == "typical" and isinstance(settings, SampledSettings)  # greedy text is the same under any rule
    return Method(name=name, run=run, promises="lossy" if lossy else "same text")


def lookup_alone(
    model: Any,
    token_heads: TokenHeads,
    settings: Settings,
    num_tokens: int = DEFAULT_LOOKUP,
    compile: bool | None = None,
) -> Method:
    """Our decoder with the looked-up chain and without heads."""
    name = f"{LOOKUP_ALONE}, compiled" if compile else LOOKUP_ALONE
    return tree(model, token_heads, settings, name, Tree.root_only(), num_tokens, compile)


def dynamic(
    model: Any,
    token_heads: TokenHeads,
    settings: Settings,
    name: str,
    threshold: float,
    cooccurrence: Cooccurrence | None = None,
    top_k: int = 50,
) -> Method:
    """Dynamic decoding, lossy: each pass emits the likeliest n-gram that reaches the threshold."""
    decoding = DynamicDecoding(token_heads, threshold, cooccurrence, top_k=top_k)

    def run(prompt_1T: Tensor) -> Outcome:
        output = settings.generate(model, prompt_1T, custom_generate=decoding, return_dict_in_generate=True)
        return outcome_of(output, prompt_1T)

    return Method(name=name, run=run, promises="lossy")


def outcome_of(output: Any, prompt_1T: Tensor) -> Outcome:
    """The outcome of a decoding whose output has `stats`."""
    stats = output.stats
    return Outcome(tokens=new_tokens(output.sequences, prompt_1T), passes=stats.row_passes, seconds=dict(stats.seconds))


def new_tokens(sequences_1L: Tensor, prompt_1T: Tensor) -> list[int]:
    tokens: list[int] = sequences_1L[0, prompt_1T.shape[1] :].tolist()
    return tokens


def end_tokens(model: Any) -> list[int]:
    """The end-of-text tokens of the model's generation config: none, one or several."""
    named = model.generation_config.eos_token_id
    return [] if named is None else named if isinstance(named, list) else [named]


@contextlib.contextmanager
def counted_forwards(model: Any) -> Iterator[list[None]]:
    """Count the model's forward calls: the list grows by one with each call."""
    calls: list[None] = []
    forward = model.forward

    @functools.wraps(forward)  # generate reads the signature
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return forward(*args, **kwargs)

    with replaced(model, "forward", counted):
        yield calls


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Within the context, replace a method of one object; its class and other objects are unchanged."""
    before = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
