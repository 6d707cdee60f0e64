"""inspect-data shows counts and coloured samples, of data that training refuses too."""

import io
import json

import datasets
import pytest
from repository import DEMO
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from heads.data.chat import VICUNA_TEMPLATE, ChatEncoder
from heads.data.documents import DataConfig, SourceConfig
from train.data.inspect import SHOWN_TOKENS, InspectFlags, colour, show_data

BASE = DEMO / "base"
CHAT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello [bold]there[/bold]."}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(BASE)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def printed(tokenizer, config: DataConfig, colours: bool = False, **options) -> str:
    output = io.StringIO()
    console = Console(file=output, width=160, force_terminal=colours, color_system="standard" if colours else None)
    try:
        show_data(config, tokenizer, num_heads=3, vocab_size=2048, console=console, **options)
    except ValueError as error:
        return f"{output.getvalue()}REFUSED {error}"
    return output.getvalue()


def chat_config(tmp_path, lines: list[str], **settings) -> DataConfig:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return DataConfig(train=[SourceConfig(path=str(path))], block_size=32, **settings)


def test_supervised_tokens_are_green_and_the_others_dim(tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    text = colour(tokenizer, *ChatEncoder(tokenizer, VICUNA_TEMPLATE).encode(messages))
    parts = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    assert [style for _, style in parts] == ["dim", "green"]
    assert parts[0][0].endswith("USER: Hi ASSISTANT:")
    assert parts[1][0] == " Yes.<|endoftext|>"


def test_long_samples_are_cut_and_say_so(tokenizer):
    text = colour(tokenizer, [5] * (SHOWN_TOKENS + 7), [True] * (SHOWN_TOKENS + 7))
    assert text.plain == tokenizer.decode([5] * SHOWN_TOKENS) + " ... 7 more tokens"


@pytest.mark.parametrize("streaming", [False, True])
def test_counts_samples_and_blocks_are_shown(tokenizer, tmp_path, streaming):
    good = json.dumps({"conversations": CHAT})
    config = chat_config(tmp_path, [*[good] * 150, "{broken", *[good] * 49], streaming=streaming)
    shown = printed(tokenizer, config, samples=2)
    assert "REFUSED" not in shown
    assert "chat.jsonl line 151: not JSON" in shown
    cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in shown.splitlines() if line.startswith("│")]
    for heading, count in (("rows", "200"), ("bad", "1"), ("documents", "199")):
        assert [heading, count] in cells
    assert shown.count("ASSISTANT:⟦ Hello [bold]there[/bold].<|endoftext|>⟧") == 2  # text is never read as markup
    assert "sample 1 of" in shown
    assert "sample 3 of" not in shown
    if not streaming:
        assert "tail tokens dropped" in shown


def test_colours_reach_the_terminal(tokenizer, tmp_path):
    shown = printed(tokenizer, chat_config(tmp_path, [json.dumps({"conversations": CHAT})] * 20), colours=True)
    assert "\x1b[32m Hello [bold]there[/bold]." in shown
    assert "\x1b[2m<|endoftext|>A chat between" in shown


def test_refused_data_is_shown_before_it_is_refused(tokenizer, tmp_path):
    template = tmp_path / "all.jinja"
    template.write_text("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
    lines = [json.dumps({"conversations": CHAT})] * 20
    shown = printed(tokenizer, chat_config(tmp_path, lines, chat_template=str(template)))
    assert "100.0%" in shown
    assert "sample 1 of" in shown
    assert "REFUSED Everything is supervised" in shown

    shown = printed(tokenizer, chat_config(tmp_path, [*lines, "{broken"]))
    assert "line 21: not JSON" in shown
    assert "REFUSED 1 of 21 rows" in shown

    shown = printed(tokenizer, chat_config(tmp_path, [json.dumps({"conversations": []})] * 3))
    assert "REFUSED" in shown
    assert "no document of at least 5 tokens" in shown


def test_a_mask_is_readable_without_colour(tokenizer, tmp_path):
    lines = [json.dumps({"conversations": CHAT})] * 20
    shown = printed(tokenizer, chat_config(tmp_path, lines))
    assert "tokens in ⟦ ⟧ are targets of the heads" in shown
    assert "USER: Hi ASSISTANT:⟦ Hello [bold]there[/bold].<|endoftext|>⟧" in shown
    assert "⟦" not in printed(tokenizer, chat_config(tmp_path, lines), colours=True)


def test_what_is_done_to_conversations_is_counted(tokenizer, tmp_path):
    """Leading replies, turns of one role in a row, and roles that nobody named until the source says what they are."""
    greeting, further = {"from": "gpt", "value": "Welcome."}, {"from": "human", "value": "Are you there?"}
    odd = [{"from": "visitor", "value": "Hi"}, CHAT[1]]
    rows = [
        [greeting, *CHAT],
        [CHAT[0], further, CHAT[1]],
        *[odd] * 3,
        [{"from": "narrator", "value": "x"}],
        *[CHAT] * 20,
    ]
    config = chat_config(tmp_path, [json.dumps({"conversations": turns}) for turns in rows])
    shown = printed(tokenizer, config)
    cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in shown.splitlines() if line.startswith("│")]
    for heading, count in (("leading replies dropped", "1"), ("turns joined", "1"), ("bad", "4"), ("documents", "22")):
        assert [heading, count] in cells
    joined = " ".join(shown.split())  # the line names a file, whose path decides where it breaks
    assert "'visitor' in 3 rows, 'narrator' in 1 rows; say what they stand for" in joined
    assert "REFUSED 4 of 26 rows" in shown
    config.train[0].roles = {"visitor": "user", "narrator": "system"}
    shown = printed(tokenizer, config)
    assert "unknown roles" not in shown
    assert "REFUSED" not in shown
    with pytest.raises(ValueError, match=r"roles={'visitor': 'guest'} was given; allowed are mappings"):
        config.train[0].roles = {"visitor": "guest"}


def test_fewer_samples_than_none_are_refused():
    with pytest.raises(ValueError, match=r"samples=-1 was given; allowed are integers of at least 0"):
        InspectFlags(samples=-1)
    assert InspectFlags(samples=0).samples == 0
