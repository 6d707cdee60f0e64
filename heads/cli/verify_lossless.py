"""The command `headway verify-lossless`: is speculation really lossless, here or on a server?

Finished prompts are kept in the folder --out until the comparison is done, so that an interrupted one goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from heads.checkpoint.opening import Opened
from heads.cli.hub import BY_NAME
from heads.cli.option_groups import with_groups
from heads.cli.options import AskingOptions, JsonOption, LoadingOptions, PromptOptions, TreeOptions, print_aside
from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluation.lossless.answers import Asked, LocalSource, Source
from heads.evaluation.lossless.compare import GREEDY_ONLY, Comparison, as_dict, compare_sources
from heads.evaluation.lossless.endpoint import Endpoint
from heads.evaluation.lossless.prompts import asked_of, choose_prompts
from heads.evaluation.lossless.stored_answers import as_folder, describe_files, describe_prompts
from heads.evaluation.lossless.verdicts import Scorer
from heads.evaluation.methods import GreedySettings
from heads.evaluation.prompts import check_length
from heads.evaluation.runs.folder import RESULTS, ROWS
from heads.evaluation.runs.rows import Rows
from heads.evaluation.tables import describe_machine, progress_bar, versions, write_content

BUG, UNKNOWN = 1, 3  # exit codes
HELD_OUT_TOKENS = 64
UNCUT = 1_000_000  # prompts of a file are taken whole


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Servers."""

    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="An OpenAI-compatible server with speculation on: http://host:port/v1."),
    ] = None
    reference_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="The same server with speculation off.")
    ] = None
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name on both servers.")] = None


@dataclass(frozen=True, kw_only=True)
class WholePrompts(AskingOptions):
    """Prompts."""

    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A .txt or .jsonl file of texts or chats, taken whole; by default held-out text for heads, eight "
            "short texts for servers.",
        ),
    ] = None
    num_prompts: Annotated[int, typer.Option(metavar="N", min=1, help="Most prompts to use.")] = 8


@dataclass(frozen=True, kw_only=True)
class VerdictOptions:
    """Results."""

    json_file: JsonOption = None
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=f"Folder for {RESULTS} and, until it is written, finished prompts: after an interruption the same "
            "command goes on with the missing ones; by default evaluations/NAME/verify-lossless.",
        ),
    ] = None
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Ask anew what an interrupted call of the same settings has finished.")
    ] = False


@with_groups
def verify_lossless_command(
    heads: Annotated[
        list[Path] | None,
        typer.Argument(metavar="HEADS...", show_default=False, help="Folders or hub names; not with --endpoint."),
        BY_NAME,
    ] = None,
    *,
    servers: ServerOptions,
    prompts: WholePrompts,
    results: VerdictOptions,
    drafting: TreeOptions,
    loading: LoadingOptions,
) -> None:
    """Is it really lossless? Greedy texts with speculation on and off, and what explains each first difference.

    The verdict of a prompt is same, rounding (a local copy of the backbone scores both tokens within rounding of the
    best), bug (it does not), or unknown (a server without --backbone, or a backbone that is another model). With a
    server and --backbone give the server's dtype by --dtype, since rounding depends on it. The exit code is 1 for a bug
    and 3 for an unknown difference. Sampled decoding is not what this tests.
    """
    check_options(heads, servers, drafting, loading)
    if servers.endpoint is None:
        sides = local_sides(loading.open(*(heads or [])), heads or [], drafting, prompts)
    else:
        opened = None if loading.backbone is None else loading.open_any([], without_heads=True)
        sides = server_sides(servers, opened, prompts)
    name = as_folder(servers.model or "+".join(sides.sources))
    folder = results.out or Path("evaluations") / name / "verify-lossless"
    files = [*(heads or []), loading.backbone, drafting.tree, None if sides.opened is None else sides.opened.source]
    packed = {"pack": True} if loading.pack else {}
    settings = {**sides.describe(), **dataclasses.asdict(drafting), **packed, "files": describe_files(files)}
    rows = Rows(folder / ROWS, settings)
    if results.fresh:
        rows.forget()
    with explain_resuming(rows):
        comparisons = sides.compare(Console(), rows)
    content = as_dict(comparisons, sides.device, max_new_tokens=prompts.max_new_tokens, temperature=0)
    for file in (folder / RESULTS, results.json_file):
        if file is not None:
            write_content(file, content)
            print_aside(f"verdicts: {file}")
    rows.forget()
    raise typer.Exit(exit_code(comparisons))


@dataclass(frozen=True, kw_only=True)
class Sides:
    """What is compared with what: sources by name, beside one reference, on the same prompts."""

    opened: Opened | None
    asked: list[Asked]
    reference_name: str
    reference: Source
    sources: Mapping[str, Source]
    settings: GreedySettings
    model_name: str | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.opened is None else self.opened.model.device

    def describe(self) -> dict[str, Any]:
        """All that answers and verdicts depend on, but for files: a call goes on with prompts of the same settings."""
        return {
            "sources": list(self.sources),
            "reference": self.reference_name,
            "model": self.model_name,
            "prompts": describe_prompts(self.asked),
            "new_tokens": self.settings.new_tokens,
            "dtype": None if self.opened is None else str(self.opened.model.dtype),
            "machine": describe_machine(self.device),
            "versions": versions(),
        }

    def compare(self, console: Console, rows: Rows) -> list[Comparison]:
        """Compare under a progress bar, and print tables."""
        scorer = None if self.opened is None else Scorer(model=self.opened.model, settings=self.settings)
        with progress_bar(console, "comparing", len(self.asked) * len(self.sources)) as advance:
            comparisons = [
                compare_sources(
                    name,
                    source,
                    self.reference_name,
                    self.reference,
                    self.asked,
                    scorer=scorer,
                    tokenizer=None if self.opened is None else self.opened.tokenizer,
                    rows=rows,
                    advance=advance,
                )
                for name, source in self.sources.items()
            ]
        for comparison in comparisons:
            console.print(comparison.table())
        for comparison in comparisons:
            console.print(comparison.summary(), highlight=False, soft_wrap=True)
        console.print(GREEDY_ONLY, highlight=False, soft_wrap=True)
        return comparisons


@contextmanager
def explain_resuming(rows: Rows) -> Iterator[None]:
    """Say which prompts an earlier call has finished, and what to do if this one is interrupted too."""
    if rows.resumed:
        print_aside(f"{rows.resumed} answers and verdicts of an interrupted call are kept; --fresh asks anew")
    try:
        yield
    except (KeyboardInterrupt, Exception):
        if len(rows):
            print_aside(f"finished prompts are kept in {rows.path}; the same command goes on")
        raise


def local_sides(opened: Opened, heads: Sequence[Path], drafting: TreeOptions, prompts: WholePrompts) -> Sides:
    """Each folder of heads beside plain `generate` of its backbone."""
    length = HELD_OUT_TOKENS if prompts.prompts is None else UNCUT
    found = PromptOptions(**vars(prompts), prompt_tokens=length).read(opened, heads=heads[0])
    settings = GreedySettings(new_tokens=prompts.max_new_tokens)
    plain = LocalSource(model=opened.model, tokenizer=opened.tokenizer, settings=settings)
    decodings = {
        name: TreeDecoding(token_heads, drafting.shape, lookup=drafting.lookup, compile=drafting.compile)
        for name, token_heads in opened.token_heads.items()
    }
    return Sides(
        opened=opened,
        asked=[Asked(prompt=opened.tokenizer.decode(prompt_1T[0]), prompt_1T=prompt_1T) for prompt_1T in found],
        reference_name="plain generate",
        reference=plain,
        sources={name: replace(plain, decoding=decoding) for name, decoding in decodings.items()},
        settings=settings,
    )


def server_sides(servers: ServerOptions, opened: Opened | None, prompts: WholePrompts) -> Sides:
    """A server with speculation beside one without.

    Args:
        opened: a local copy of the backbone, which rules on differences.
    """
    url, reference_url, model = servers.endpoint or "", servers.reference_endpoint or "", servers.model or ""
    new_tokens = prompts.max_new_tokens
    tokenizer = None if opened is None else opened.tokenizer
    asked = asked_of(choose_prompts(prompts.prompts, prompts.num_prompts), tokenizer)
    if opened is None:
        print_aside("no --backbone was given: differences are found, but nothing rules on them")
    else:
        check_length(opened.model, [one.prompt_1T for one in asked if one.prompt_1T is not None], new_tokens)
    return Sides(
        opened=opened,
        asked=asked,
        reference_name=reference_url,
        reference=Endpoint(url=reference_url, model=model, new_tokens=new_tokens),
        sources={url: Endpoint(url=url, model=model, new_tokens=new_tokens)},
        settings=GreedySettings(new_tokens=new_tokens),
        model_name=model,
    )


def check_options(
    heads: list[Path] | None, servers: ServerOptions, drafting: TreeOptions, loading: LoadingOptions
) -> None:
    """Either heads, or two servers and the model's name.

    Raises:
        ValueError: both, neither, or a part of the second; or options that would have no effect.
    """
    given = {
        "--endpoint": servers.endpoint,
        "--reference-endpoint": servers.reference_endpoint,
        "--model": servers.model,
    }
    missing = [name for name, value in given.items() if value is None]
    if heads and len(missing) < len(given):
        raise ValueError(f"Heads and {', '.join(set(given) - set(missing))} were given; give heads, or servers.")
    if heads:
        drafting.refuse_packing(loading)
        return
    if missing:
        raise ValueError(
            f"No heads were given, and no {', '.join(missing)}; give a folder of heads, or all of {', '.join(given)}."
        )
    if drafting.any_given:
        raise ValueError("--tree, --lookup and --compile are about heads here; leave them out with a server.")
    if loading.pack and loading.backbone is None:
        raise ValueError("--pack packs a backbone, and none is loaded; give --backbone MODEL too, or leave --pack out.")
    if loading.dtype != "auto" and loading.backbone is None:
        raise ValueError(
            f"--dtype {loading.dtype} is of a local backbone, and none is loaded; give --backbone MODEL too, or leave "
            f"--dtype out."
        )


def exit_code(comparisons: Sequence[Comparison]) -> int:
    """1 for a bug, 3 for a difference that nothing rules on, 0 otherwise."""
    verdicts = {kind for comparison in comparisons for kind, count in comparison.counts.items() if count}
    return BUG if "bug" in verdicts else UNKNOWN if "unknown" in verdicts else 0
