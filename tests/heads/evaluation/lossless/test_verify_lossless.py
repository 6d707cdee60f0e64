"""Two small servers and heads: the same text, rounding and a planted bug each get their verdict and exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import EOS, NUM_TOKENS, byte_tokenizer
from served import RefusedError, served
from tiny import tiny_model
from typer.testing import CliRunner

from heads.checkpoint import save_load
from heads.cli.main import app
from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluation.lossless.answers import END, Answer, LocalSource
from heads.evaluation.lossless.verdicts import Margins, Scorer, examine
from heads.evaluation.methods import GreedySettings
from heads.evaluation.prompts import encode
from heads.families import create

NEW = 16
NUM_PROMPTS = 3
LETTERS = [byte_tokenizer().convert_tokens_to_ids(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
TWINS = LETTERS[:13], LETTERS[13:]


def twin_model() -> Any:
    """Writes letters only; each of the first 13 has a twin among the rest, whose logit is the same but for rounding."""
    model = tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS)
    weight = model.lm_head.weight.data
    kept = torch.zeros(NUM_TOKENS, dtype=torch.bool)
    kept[TWINS[0]] = True
    weight[TWINS[1]] = weight[TWINS[0]] * (1 + 1e-7)
    kept[TWINS[1]] = True
    weight[~kept] = 0.0  # their logit is 0, and some letter's is above it
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = EOS
    model.config.eos_token_id = model.config.pad_token_id = EOS
    return model


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no --out is given, the command writes below the working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model() -> Any:
    return twin_model()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the backbone `base`, heads `medusa` on it, and prompts."""
    folder = tmp_path_factory.mktemp("lossless")
    model.save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    model.config.name_or_path = str(folder / "base")
    save_load.save(create("medusa", model, num_heads=2), folder / "medusa")
    texts = ["once", "upon a", "time there"]
    (folder / "prompts.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    chats = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    return folder


def greedy(model: Any, tokens: list[int], new_tokens: int) -> list[int]:
    prompt_1T = torch.tensor([tokens])
    settings = GreedySettings(new_tokens=new_tokens)
    return list(settings.generate(model, prompt_1T)[0, prompt_1T.shape[1] :].tolist())


def server_of(model: Any, change: Any = lambda tokens: tokens, *, with_ids: bool = True) -> Any:
    """Answers as plain `generate` does, with the tokens changed; `with_ids` as vLLM, else as a server that refuses the
    field."""

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["temperature"] == 0
        if asked.get("return_token_ids") and not with_ids:
            raise RefusedError(400, "unknown field return_token_ids")
        prompt = asked["messages"] if asked["path"].endswith("/chat/completions") else asked["prompt"]
        new = change(greedy(model, tokens_of(prompt), asked["max_tokens"]))
        ended = new[-1] == EOS
        text = byte_tokenizer().decode(new, skip_special_tokens=True)
        said = {"message": {"role": "assistant", "content": text}} if "messages" in asked else {"text": text}
        choice = {**said, "logprobs": None, "finish_reason": "stop" if ended else "length"}
        return choice | ({"token_ids": new} if with_ids else {})

    return answer


def tokens_of(prompt: Any) -> list[int]:
    """Of a text, of a chat's messages, or of token ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], dict):
        return list(encode(prompt, byte_tokenizer())[0].tolist())
    return list(prompt)


def twin_at(place: int) -> Any:
    """The token at a place becomes its twin; what follows is left out, since the model would write something else."""

    def change(tokens: list[int]) -> list[int]:
        token = tokens[place]
        twins = dict(zip(TWINS[0], TWINS[1], strict=True)) | dict(zip(TWINS[1], TWINS[0], strict=True))
        return [*tokens[:place], twins[token], *tokens[place + 1 :]]

    return change


def wrong_at(place: int) -> Any:
    """A draft that nobody verified."""

    def change(tokens: list[int]) -> list[int]:
        wrong = next(letter for letter in TWINS[0] if abs(TWINS[0].index(letter) - index_of(tokens[place])) > 2)
        return [*tokens[:place], wrong, *tokens[place + 1 :]]

    return change


def index_of(token: int) -> int:
    return (TWINS[0] if token in TWINS[0] else TWINS[1]).index(token)


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["verify-lossless", *map(str, arguments)])


def compare_servers(folder: Path, on: Any, off: Any, *more: Any) -> tuple[Any, dict[str, Any]]:
    found = folder / "found.json"
    with served(on) as url, served(off) as reference:
        asked = ["--endpoint", url, "--reference-endpoint", reference, "--model", "m", "--max-new-tokens", NEW]
        result = run(*asked, "--prompts", folder / "prompts.txt", "--json", found, *more)
    return result, json.loads(found.read_text()) if found.is_file() else {}


@pytest.mark.parametrize(
    ("change", "with_ids", "verdict", "code"),
    [
        (lambda tokens: tokens, False, "same", 0),
        (twin_at(NEW - 1), True, "rounding", 0),
        (twin_at(NEW - 1), False, "rounding", 0),
        (wrong_at(5), False, "bug", 1),
    ],
    ids=["same", "rounding", "rounding, text alone", "bug, text alone"],
)
@pytest.mark.parametrize("prompts", ["prompts.txt", "chats.jsonl"])
def test_servers_get_their_verdict(model, folder, change, verdict, code, with_ids, prompts):
    result, found = compare_servers(
        folder,
        server_of(model, change, with_ids=with_ids),
        server_of(model, with_ids=with_ids),
        *("--backbone", folder / "base", "--prompts", folder / prompts),
    )
    assert result.exit_code == code, result.output
    (compared,) = found["comparisons"]
    assert compared["counts"] == {"same": 0, "rounding": 0, "bug": 0, "unknown": 0} | {verdict: NUM_PROMPTS}
    places = {"same": None, "rounding": NEW - 1, "bug": 5}
    assert {prompt["position"] for prompt in compared["prompts"]} == {places[verdict]}
    assert "Sampled texts differ" in result.output


def test_a_bug_behind_a_tie_is_found(model, folder):
    """The on-server writes a twin, goes on rightly, and has a bug later: only a resumed reference shows it."""

    def change_of(bug: int | None) -> Any:
        def answer(asked: dict[str, Any]) -> dict[str, Any]:
            prompt = byte_tokenizer()(asked["prompt"])["input_ids"]
            begun = twin_at(3)(greedy(model, prompt, 4))
            new = [*begun, *greedy(model, prompt + begun, NEW - 4)]
            return {"text": "…", "token_ids": new if bug is None else wrong_at(bug)(new), "finish_reason": "length"}

        return answer

    off, backbone = server_of(model), ("--backbone", folder / "base")
    result, found = compare_servers(folder, change_of(None), off, *backbone)
    assert found["comparisons"][0]["counts"]["rounding"] == NUM_PROMPTS, result.output
    result, found = compare_servers(folder, change_of(9), off, *backbone)
    assert result.exit_code == 1
    assert [(p["verdict"], p["position"], p["excused"]) for p in found["comparisons"][0]["prompts"]] == [
        ("bug", 9, 1)
    ] * NUM_PROMPTS


def test_without_a_backbone_a_difference_is_unknown(model, folder):
    result, found = compare_servers(folder, server_of(model, wrong_at(5), with_ids=False), server_of(model))
    assert result.exit_code == 3
    assert {(p["verdict"], p["unit"], p["position"]) for p in found["comparisons"][0]["prompts"]} == {
        ("unknown", "character", 5)
    }
    assert "no local copy of the backbone was given" in result.output


def test_another_backbone_rules_on_nothing(model):
    """Both servers write what the local backbone never would: their difference is no bug and no rounding of its."""
    scorer = Scorer(model=model, settings=GreedySettings(new_tokens=NEW))
    prompt_1T = torch.tensor([byte_tokenizer()("once")["input_ids"]])
    first, second = ([5, 6, 7], [5, 6, 8])
    found = examine(
        1, Answer(text="a", tokens=first), Answer(text="b", tokens=second), prompt_1T=prompt_1T, scorer=scorer
    )
    assert found.verdict == "unknown"
    assert "another model" in found.why


def test_ends_are_compared_by_their_scores(model):
    scorer = Scorer(model=model, settings=GreedySettings(new_tokens=NEW))
    prompt_1T = torch.tensor([byte_tokenizer()("once")["input_ids"]])
    tokens = greedy(model, prompt_1T[0].tolist(), 4)
    early = Answer(text="a", tokens=[*tokens[:2], END], ended=True)
    found = examine(1, Answer(text="b", tokens=tokens), early, prompt_1T=prompt_1T, scorer=scorer)
    assert (found.verdict, found.position, found.other) == ("bug", 2, "end")
    cut = examine(1, Answer(text="b", tokens=tokens), Answer(text="a", tokens=tokens[:2]), scorer=scorer)
    assert cut.verdict == "bug"
    assert "shorter" in cut.why


def test_margins_need_both_tokens_near_the_best():
    assert Margins(gap=-3.0, behind_best=0.01, rounding=0.02).kind == "rounding"
    assert Margins(gap=0.05, behind_best=0.0, rounding=0.02).kind == "bug"
    assert Margins(gap=0.03, behind_best=0.03, rounding=0.02).kind == "bug"


def test_heads_are_compared_with_plain_generate(folder, monkeypatch):
    asked = folder / "medusa", "--prompts", folder / "prompts.txt", "--max-new-tokens", NEW, "--json", folder / "h.json"
    result = run(*asked)
    assert result.exit_code == 0, result.output
    (compared,) = json.loads((folder / "h.json").read_text())["comparisons"]
    assert compared["counts"]["bug"] == compared["counts"]["unknown"] == 0

    exact = TreeDecoding.__call__

    def planted(self: Any, model: Any, input_ids: Any, *arguments: Any, **more: Any) -> Any:
        output = exact(self, model, input_ids, *arguments, **more)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        place = input_ids.shape[1] + 5
        sequences[0, place:] = torch.tensor(wrong_at(5)(sequences[0, input_ids.shape[1] :].tolist())[5:])
        return output

    monkeypatch.setattr(TreeDecoding, "__call__", planted)
    result = run(*asked)
    assert result.exit_code == 1
    (compared,) = json.loads((folder / "h.json").read_text())["comparisons"]
    assert compared["counts"]["bug"] == NUM_PROMPTS


class Mortal:
    """A server that answers so many requests, and then none until it is started again."""

    def __init__(self, answer: Any, lives: int) -> None:
        self.answer, self.lives = answer, lives
        self.answered: list[str] = []

    def __call__(self, asked: dict[str, Any]) -> dict[str, Any]:
        if len(self.answered) == self.lives:
            raise RefusedError(503, "out of memory")
        self.answered.append(asked["prompt"])
        found: dict[str, Any] = self.answer(asked)
        return found


def test_a_server_that_died_is_asked_only_what_is_missing(model, folder, tmp_path):
    on = Mortal(server_of(model, twin_at(NEW - 1)), lives=2)
    off = Mortal(server_of(model), lives=100)
    out = tmp_path / "out"
    with served(on) as url, served(off) as reference:
        asked = ["--endpoint", url, "--reference-endpoint", reference, "--model", "m", "--max-new-tokens", NEW]
        asked += ["--prompts", folder / "prompts.txt", "--backbone", folder / "base", "--out", out]
        died = run(*asked)
        assert died.exit_code == 1
        assert "status 503" in died.stderr
        assert f"kept in {out / 'rows.jsonl'}; the same command goes on" in died.stderr
        assert not (out / "results.json").exists()
        assert (on.answered, off.answered) == (["once", "upon a"], ["once", "upon a", "time there"])

        on.lives = 100
        longer = run(*asked, "--max-new-tokens", NEW + 1)  # other settings: nothing of the above is theirs
        assert "are kept" not in longer.stderr
        assert len(on.answered) == 2 + NUM_PROMPTS

        on.answered, off.answered = [], []
        resumed = run(*asked)
        assert resumed.exit_code == 0, resumed.output
        assert "5 answers and verdicts of an interrupted call are kept" in resumed.stderr
        assert (on.answered, off.answered) == (["time there"], [])
        assert not (out / "rows.jsonl").exists()
        found = json.loads((out / "results.json").read_text())["comparisons"]

        again = run(*asked)  # a finished call is not resumed: the server may have changed
        assert "are kept" not in again.stderr
        assert (on.answered, off.answered[-1]) == (["time there", "once", "upon a", "time there"], "time there")
        assert again.stdout == resumed.stdout
        assert json.loads((out / "results.json").read_text())["comparisons"] == found


def test_an_interrupted_comparison_of_heads_goes_on(model, folder, tmp_path, monkeypatch):
    save_load.save(create("grounded", model, num_heads=2), folder / "grounded")
    asked = [folder / "medusa", folder / "grounded", "--prompts", folder / "prompts.txt", "--max-new-tokens", NEW]
    whole = run(*asked, "--json", tmp_path / "whole.json")
    assert whole.exit_code == 0, whole.output
    answer, drafted = LocalSource.answer, []
    interrupted_at = [NUM_PROMPTS + 1]

    def counted(self: Any, asked: Any) -> Answer:
        drafted.append(self.decoding is not None)
        if sum(drafted) == interrupted_at[0]:
            raise KeyboardInterrupt
        return answer(self, asked)

    monkeypatch.setattr(LocalSource, "answer", counted)
    kept_in = Path("evaluations/medusa+grounded/verify-lossless")
    result = run(*asked)
    assert result.exit_code == 130
    assert f"finished prompts are kept in {kept_in / 'rows.jsonl'}; the same command goes on" in result.stderr
    assert drafted == [False, True] * NUM_PROMPTS + [True]

    interrupted_at[0] = 100
    drafted.clear()
    resumed = run(*asked)
    assert drafted == [True] * NUM_PROMPTS  # those of the second heads; the reference's answers are kept
    assert resumed.stdout == whole.stdout
    both = [json.loads(path.read_text())["comparisons"] for path in (tmp_path / "whole.json", kept_in / "results.json")]
    assert both[0] == both[1]


def test_fresh_asks_anew(folder, monkeypatch):
    asked = [folder / "medusa", "--prompts", folder / "prompts.txt", "--max-new-tokens", NEW, "--out", "out"]
    answer, times = LocalSource.answer, [0]

    def dying(self: Any, asked: Any) -> Answer:
        times[0] += 1
        if times[0] == 4:
            raise KeyboardInterrupt
        return answer(self, asked)

    monkeypatch.setattr(LocalSource, "answer", dying)
    assert run(*asked).exit_code == 130
    result = run(*asked, "--fresh")
    assert (result.exit_code, times[0]) == (0, 4 + 2 * NUM_PROMPTS)
    assert "are kept" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "No heads were given, and no --endpoint, --reference-endpoint, --model"),
        (("--endpoint", "http://127.0.0.1:1/v1"), "no --reference-endpoint, --model"),
        (("heads", "--endpoint", "http://127.0.0.1:1/v1"), "Heads and --endpoint were given"),
        (("--endpoint", "a", "--reference-endpoint", "b", "--model", "m"), "give a URL such as"),
        (
            ("--endpoint", "a", "--reference-endpoint", "b", "--model", "m", "--pack"),
            "--pack packs a backbone",
        ),
        (
            ("--endpoint", "a", "--reference-endpoint", "b", "--model", "m", "--dtype", "bfloat16"),
            "--dtype bfloat16 is of a local backbone, and none is loaded",
        ),
        (("heads", "--pack", "--compile"), "--pack was given with --compile"),
    ],
)
def test_options_that_do_not_fit_end_in_a_sentence(arguments, said):
    result = run(*arguments)
    assert result.exit_code == 1
    assert said in result.output
    assert "Traceback" not in result.output


def test_a_server_that_does_not_answer_ends_in_a_sentence(model, folder):
    def no_model(asked: dict[str, Any]) -> dict[str, Any]:
        raise RefusedError(404, "no such model")

    result, _ = compare_servers(folder, no_model, server_of(model))
    assert result.exit_code == 1
    assert "status 404" in result.output
    with served(no_model) as closed:
        pass
    result = run("--endpoint", closed, "--reference-endpoint", closed, "--model", "m")
    assert result.exit_code == 1
    assert "cannot be reached" in result.output
