"""The model card of an exported or pushed folder: what the heads are, how they were made, and what was measured.

Everything in it comes from files: heads.json (family, data, recipe, agreement by head), the backbone's own card (its
licence), and files of measurements (heads/export/hub/measured.py). Heads alone come before heads with lookup, which
copies text as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from heads.checkpoint.remote import HUB_NAME
from heads.checkpoint.summary import describe, list_facts, measured_tokens_per_pass
from heads.export.hub.measured import read_measured
from heads.inside import find_inside

CARD, UNNAMED = "README.md", "FOLDER"
"""The card's file name, and the placeholder for the name of a folder that is not on the hub yet."""
TAGS = ["headway", "multi-token-prediction", "speculative-decoding"]
LICENCE = ("license", "license_name", "license_link")
PLAIN, ALONE = "plain", "heads alone"
BESIDE = "measured.json"
"""The file of measurements beside the heads, which is read if no other is given."""

SERVED = """\
Weights, tokenizer and heads in one folder. Headway's decoder drafts several tokens with the heads and verifies them in
one pass: greedy text is what plain `generate` writes, up to rounding below float64; sampled text follows the model's
distribution. It has to be installed where this is opened with `trust_remote_code`; without that, it is the plain model.
```
transformers serve {name} --trust-remote-code
```
```python
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
model.generate(**inputs, max_new_tokens=128)                # decodes with the heads
type(model).generate(model, **inputs, max_new_tokens=128)   # plain
```
With `--continuous-batching` the server leaves the heads aside."""
ALONE_IN_FOLDER = """\
Heads for {base}, without its weights. Headway's decoder drafts several tokens with them and verifies
them in one pass: greedy text is what plain `generate` writes, up to rounding below float64; sampled text follows the
model's distribution.
```python
import heads
model = AutoModelForCausalLM.from_pretrained("{base}")
token_heads = heads.load("{name}", model)
model.generate(**inputs, max_new_tokens=128, custom_generate=heads.TreeDecoding(token_heads))
```"""
WITH_BACKBONE = """\
Heads, and the backbone that was trained with them. Headway's decoder drafts several tokens with the
heads and verifies them in one pass: the text is what that backbone's plain `generate` writes.
```python
import heads
model, token_heads = heads.load_with_backbone("{name}")
model.generate(**inputs, max_new_tokens=128, custom_generate=heads.TreeDecoding(token_heads))
```"""


def write_card(
    out: Path,
    *,
    heads: Path,
    name: str = UNNAMED,
    served: bool = False,
    base: Path | None = None,
    measured: Sequence[str | Path] = (),
    license: str | None = None,
) -> None:
    """Write out/README.md.

    Args:
        heads: folder of the heads that are described.
        name: the folder's name on the hub.
        served: `out` is a model folder with heads inside, and not a folder of heads.
        base: folder of the backbone, whose own card names its licence.
        measured: files of `headway benchmark --json` and `headway evaluate`; none: measured.json beside the heads.
        license: identifier on the hub; None is the one of the card in `base`.

    Raises:
        ValueError: a file that is none of these.
    """
    if not measured and (heads / BESIDE).is_file():
        measured = [find_inside(heads, BESIDE)]
    found = describe(heads)
    head = metadata(found, base, license)
    text = "\n\n".join(paragraphs(found, name, served=served, measured=measured, license=head.license))
    (out / CARD).write_text(f"---\n{head.to_yaml()}\n---\n{text}\n", encoding="utf-8")


def named_card(folder: Path, name: str) -> str | None:
    """An exported folder's own card, with the name on the hub put in; None if it has none."""
    if not (folder / CARD).is_file():
        return None
    text = (folder / CARD).read_text(encoding="utf-8")
    return text.replace(SERVED.format(name=UNNAMED), SERVED.format(name=name))


def metadata(found: dict[str, Any], base: Path | None, license: str | None) -> ModelCardData:
    """The card's metadata, which the hub shows and searches."""
    backbone = found["backbone"]["name"]
    terms: dict[str, Any] = {"license": license} if license else read_licence(base)
    return ModelCardData(
        **terms,
        base_model=backbone if HUB_NAME.fullmatch(backbone) and not Path(backbone).exists() else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[*TAGS, found["family"]],
    )


def read_licence(base: Path | None) -> dict[str, str]:
    """The licence fields of a folder's own model card; empty without one."""
    if base is None or not (base / CARD).is_file():
        return {}
    try:
        data = ModelCard.load(base / CARD).data.to_dict()
    except (ValueError, OSError):  # a text without metadata, or with damaged metadata
        return {}
    return {field: str(data[field]) for field in LICENCE if data.get(field)}


def paragraphs(
    found: dict[str, Any], name: str, *, served: bool, measured: Sequence[str | Path], license: str | None
) -> Iterator[str]:
    base = found["backbone"]["name"]
    yield f"# {Path(base).name} with {found['family']} heads"
    trained = found["trained_backbone"] is not None
    usage = SERVED if served else WITH_BACKBONE if trained else ALONE_IN_FOLDER
    yield usage.format(name=name, base=base)
    yield "## What was measured"
    yield from measurements(found, measured)
    yield "## How it was made"
    facts = {key: value for key, value in list_facts(found).items() if key != "trained with them"}
    if trained:
        facts["backbone's weights"] = "trained together with the heads"
    yield table(("", ""), facts.items())
    yield f"Everything that the run recorded is in `{'heads/' if served else ''}heads.json`."
    if license is None:
        yield f"No licence of {base} is recorded here; its own terms hold for the weights."


def measurements(found: dict[str, Any], measured: Sequence[str | Path]) -> Iterator[str]:
    """Tables of the files, agreement by head, and what the run measured at its end."""
    per_pass = measured_tokens_per_pass(found["recipe"])
    if per_pass is not None:
        yield f"By the training run, on its held-out prompts, greedy, heads alone: {per_pass:.2f} tokens per pass."
    files = [read_measured(Path(file)) for file in measured]
    rows = [row for one in files for row in one.speeds]
    if rows:
        yield table(("", "tokens per pass", "× plain", "95 % over prompts", "same text", "settings"), sorted_rows(rows))
        if not any(row[0].endswith(ALONE) for row in rows):
            yield "These rows are with lookup, which copies from earlier text; heads alone were not measured in them."
    if accuracy := found["measured_accuracy"]:
        shares = [(str(k), f"{ranks[0]:.1%}", f"{sum(ranks[:5]):.1%}") for k, ranks in enumerate(accuracy, start=1)]
        yield "How often a head's candidate is the backbone's own next token, on held-out text:"
        yield table(("head", "likeliest", "one of five"), shares)
    for one in files:
        if one.held_out:
            yield one.title
            yield table(("", "value", "95 % over texts"), one.held_out)
    if not files and per_pass is None and not accuracy:
        yield "Nothing was measured yet; `headway benchmark HEADS --json FILE` does."


def sorted_rows(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Plain generation, then heads alone, then the rest, each once.

    >>> [row[0] for row in sorted_rows([("gru",), ("plain",), ("gru, heads alone",), ("plain",)])]
    ['plain', 'gru, heads alone', 'gru']
    """
    unique = list(dict.fromkeys(rows))
    return sorted(unique, key=lambda row: (row[0] != PLAIN, not row[0].endswith(ALONE)))


def table(header: Sequence[str], rows: Any) -> str:
    """A table in Markdown.

    >>> print(table(("a", "b"), [("1", "x|y")]))
    | a | b |
    |---|---|
    | 1 | x\\|y |
    """
    lines = [header, *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines]
    written = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([written[0], "|" + "---|" * len(header), *written[1:]])
