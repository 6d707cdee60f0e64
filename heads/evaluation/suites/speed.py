"""Suite `speed`: tokens per pass and tokens per second by category, and where drafts are accepted.

Grounded paper, §5.2 with figures 3 and 4, on any questions in the formats of MT-Bench, Spec-Bench and SPEED-Bench
(heads/evaluation/speed/questions.py); DynaMo, table 3, FLOPs per generated token.
"""
# T prompt position

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from heads.backbone.loading import max_positions
from heads.decoding.tree_decoding import TreeDecoding
from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.evaluation.methods import LOOKUP_ALONE, GreedySettings
from heads.evaluation.runs.task import SuiteTask
from heads.evaluation.same_text import SameText
from heads.evaluation.speed import figures
from heads.evaluation.speed.comparing import compare as compare
from heads.evaluation.speed.conversation import Prompter, choose_form
from heads.evaluation.speed.flops import count_flops, why_not_counted
from heads.evaluation.speed.measuring import Measurer
from heads.evaluation.speed.positions import measure_positions
from heads.evaluation.speed.questions import SHIPPED, Question, read_questions
from heads.evaluation.speed.report_sections import speed_sections
from heads.evaluation.speed.speakers import ALONE, PLAIN, WITH_LOOKUP, HeadsSpeaker, PlainSpeaker, Speaker, as_prompt
from heads.evaluation.tables import progress_bar
from heads.evaluation.throughput import clock_of
from heads.validation import validated, within


@validated
@dataclass(kw_only=True)
class Config:
    """Speed by category: plain generate, heads alone, lookup without heads, both; questions of one or several turns.

    Attributes:
        questions: .jsonl file of MT-Bench, Spec-Bench or SPEED-Bench rows; "shipped": beginnings of code.
        categories: only these, with commas between them; by default all.
        per_category: at most so many questions of each category.
        form: "chat" by the tokenizer's template, "text" as it stands; "auto" is chat where there is a template.
        max_new_tokens: most tokens of an answer.
        repeats: interleaved repeats, of which medians are taken.
        tree: file of paths or number of nodes; by default tree.json beside the heads.
        lookup: length of the looked-up chain; 0 measures heads alone only; by default as in tree.json.
        flops: whether one answer of each category is counted in FLOPs.
        position_texts: texts on which acceptance is measured against the position, a category after another, at most
            one of each question; 0: none.
        position_tokens: their length, at most what the backbone has positions for; by default all of these, but no
            more than 32,768; 0: all of these.
    """

    questions: str = "shipped"
    categories: list[str] = field(default_factory=list)
    per_category: int | None = within(1, default=None)
    form: Literal["auto", "chat", "text"] = "auto"
    max_new_tokens: int = within(1, default=64)
    repeats: int = within(1, default=3)
    tree: str | None = None
    lookup: int | None = within(0, default=None)
    flops: bool = True
    position_texts: int = within(0, default=2)
    position_tokens: int | None = within(0, default=None)


def run(task: SuiteTask, config: Config) -> dict[str, Any]:
    """Measure what `task.rows` does not hold yet, and sum up all rows."""
    shipped = config.questions == "shipped"
    questions = read_questions(SHIPPED if shipped else Path(config.questions), config.categories, config.per_category)
    measurer, drafting, deepest = build(task, config)
    fitting = [question for question in questions if measurer.fits(measurer.prompter.prompt(question, []))]
    if not fitting:
        raise ValueError(
            f"No question of {config.questions} fits the backbone's {max_positions(task.model)} positions with "
            f"{config.max_new_tokens} new tokens; lower --max-new-tokens, or take shorter questions."
        )
    with progress_bar(task.console, "questions", len(fitting)) as advance:
        rows = measure_questions(task, measurer, fitting, advance)
    uncounted = why_not_counted(task.model, task.token_heads) if config.flops else ""
    counted = count_by_category(task, measurer, fitting) if config.flops and not uncounted else {}
    methods = [speaker.name for speaker in measurer.speakers]
    ours = [method for method in methods if method != PLAIN]
    left_out = [f"{q.place or q.name} (all turns)" for q in questions if q not in fitting]
    left_out += [f"question {row['question_id']} from turn {len(row['turns']) + 1}" for row in rows if row["ended"]]
    return {
        "file": "the shipped questions" if shipped else config.questions,
        "form": measurer.prompter.form,
        "questions": len(fitting),
        "turns": sum(len(row["turns"]) for row in rows),
        "new_tokens": config.max_new_tokens,
        "repeats": config.repeats,
        "methods": methods,
        "drafting": drafting,
        "left_out": left_out,
        "flops_not_counted": uncounted,
        "categories": figures.by_category(rows, methods, counted),
        "depth": {method: depth_of(rows, method, deepest) for method in ours},
        "position": measure_positions(
            task, measurer, fitting, texts=config.position_texts, tokens=config.position_tokens
        ),
        "phases": {method: figures.by_phase(rows, method) for method in methods},
        "tree": figures.by_node(rows, ALONE),
        "requests": figures.requests_of(rows, methods, {one.name: one.depth for one in heads_of(measurer)}),
    }


sections = speed_sections


def build(task: SuiteTask, config: Config) -> tuple[Measurer, str, int]:
    """The speakers with their shared settings, a sentence about what they draft, and how deep heads do."""
    shape: str | int | None = int(config.tree) if config.tree is not None and config.tree.isdecimal() else config.tree
    asked = TreeDecoding(task.token_heads, shape, lookup=config.lookup, compile=False)
    speakers: list[Speaker] = [PlainSpeaker(task.model)]
    kinds = ((ALONE, shape, 0), (LOOKUP_ALONE, Tree.root_only(), asked.lookup), (WITH_LOOKUP, shape, asked.lookup))
    for name, drafted, lookup in kinds:
        if name == ALONE or lookup:
            speakers.append(HeadsSpeaker(name, task.model, task.token_heads, drafted, lookup, None))
    settings = GreedySettings(new_tokens=config.max_new_tokens)
    measurer = Measurer(
        speakers=speakers,
        prompter=Prompter(tokenizer=task.tokenizer, form=choose_form(task.tokenizer, config.form)),
        settings=settings,
        repeats=config.repeats,
        model=task.model,
        same_text=SameText(model=task.model, settings=settings),
        clock=clock_of(task.model.device),
    )
    deepest = task.token_heads.num_heads if asked.tree.depth is None else asked.tree.depth
    compiled = describe_compiled(heads_of(measurer))
    return measurer, f"{describe_tree(asked.tree)}; looked-up chain: {asked.lookup or 'none'}.{compiled}", deepest


def heads_of(measurer: Measurer) -> list[HeadsSpeaker]:
    return [speaker for speaker in measurer.speakers if isinstance(speaker, HeadsSpeaker)]


def describe_tree(tree: Tree | DynamicTree) -> str:
    """
    >>> describe_tree(Tree([[0], [0, 0]]))
    'Heads draft a static tree of 2 tokens, 2 deep'
    """
    if isinstance(tree, DynamicTree):
        return f"Heads draft a dynamic tree: {tree}"
    return f"Heads draft a static tree of {tree.num_nodes - 1} tokens, {tree.depth} deep"


def describe_compiled(speakers: Sequence[HeadsSpeaker]) -> str:
    """A sentence about methods whose passes are compiled; empty where none are."""
    names = " and of ".join(speaker.name for speaker in speakers if speaker.compiled)
    said = f" As the tree's file says, passes of {names} are compiled; all others, plain generation's too, are not."
    return said if names else ""


def measure_questions(task: SuiteTask, measurer: Measurer, questions: Sequence[Question], advance: Any) -> list[Any]:
    warm = False
    rows = []
    for question in questions:
        name = f"question {question.name}"
        row = task.rows.get(name)
        if row is None:
            if not warm:
                measurer.warm_up(question)
                warm = True
            row = measurer.measure(question)
            task.rows.put(name, row)
        rows.append({**row, "digest": question.digest})
        advance()
    return rows


def count_by_category(task: SuiteTask, measurer: Measurer, questions: Sequence[Question]) -> dict[str, dict[str, Any]]:
    """FLOPs of the first question's first answer of each category."""
    first = {question.category: question for question in reversed(questions)}
    found: dict[str, dict[str, Any]] = {}
    with progress_bar(task.console, "counting FLOPs", len(first)) as advance:
        for category, question in first.items():
            name = f"FLOPs of {category}"  # rows named "flops …" lack attention and products with packed weights
            row = task.rows.get(name)
            if row is None:
                prompt_1T = as_prompt(measurer.prompter.prompt(question, []))
                row = {one.name: count_flops(one, prompt_1T, measurer.settings) for one in measurer.speakers}
                task.rows.put(name, row)
            found[category] = dict(row)
            advance()
    return found


def depth_of(rows: Sequence[Any], method: str, deepest: int) -> dict[str, Any]:
    """Heads alone to the tree's depth, beyond which nothing is drafted; a looked-up chain as far as any reached."""
    accepted = figures.accepted_of(rows, method)
    return figures.by_depth(accepted, deepest if method == ALONE else max([deepest, *accepted]))
