"""DynaMo's downstream tables as task names of lm-evaluation-harness, with their shots and the metrics that they print.

Source: DynaMo (Tuli et al., 2024), §4.1 and appendix C.3: tables 1 and 10 (common sense, zero-shot), 11 (TriviaQA,
five-shot), 12 (RACE and SQuAD 2.0, zero-shot), 13 (MMLU, five-shot), 14 (CrowS-Pairs, TruthfulQA). A name that is no
preset is a task of the harness, with the shots that its YAML asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from heads.validation import nearest


@dataclass(frozen=True, kw_only=True)
class TaskColumn:
    """One column of a table.

    Attributes:
        task: a task or group of the harness.
        metric: its name there, without the filter; None takes the task's first one.
        label: the column's title.
        group: the group of the harness that the task is run with, a column too; empty for one that is run by itself.
    """

    task: str
    metric: str | None = None
    label: str = ""
    group: str = ""

    @property
    def title(self) -> str:
        return self.label or self.task


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The columns of one table of the paper; `shots` None leaves the task's own."""

    columns: tuple[TaskColumn, ...]
    shots: int | None
    shows: str

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(column.task for column in self.columns))

    @property
    def runs(self) -> dict[str, list[str]]:
        """The names that the harness is given one by one, each with the tasks of the columns that it has figures of.

        The harness refuses a group beside one of its own groups, so `mmlu` stands for its four too.

        >>> PRESETS["mmlu-5"].runs.keys(), PRESETS["reading"].runs
        (dict_keys(['mmlu']), {'race': ['race'], 'squadv2': ['squadv2']})
        """
        found: dict[str, list[str]] = {}
        for column in self.columns:
            tasks = found.setdefault(column.group or column.task, [])
            if column.task not in tasks:
                tasks.append(column.task)
        return found


def columns(metric: str, labels: dict[str, str], group: str = "") -> tuple[TaskColumn, ...]:
    return tuple(TaskColumn(task=task, metric=metric, label=label, group=group) for task, label in labels.items())


COMMON_SENSE = {
    "arc_challenge": "ARC-c",
    "arc_easy": "ARC-e",
    "boolq": "BoolQ",
    "copa": "COPA",
    "hellaswag": "HellaSwag",
    "openbookqa": "OBQA",
    "piqa": "PIQA",
    "winogrande": "WinoG",
}
MMLU = {
    "mmlu_humanities": "Humanities",
    "mmlu_social_sciences": "Social Sciences",
    "mmlu_stem": "STEM",
    "mmlu_other": "Other",
    "mmlu": "Average",
}
BIAS = (
    TaskColumn(task="crows_pairs_english", metric="likelihood_diff", label="CrowS-Pairs likelihood diff."),
    TaskColumn(task="crows_pairs_english", metric="pct_stereotype", label="CrowS-Pairs % stereotype"),
    TaskColumn(task="truthfulqa_mc1", metric="acc", label="TruthfulQA MC1"),
    TaskColumn(task="truthfulqa_mc2", metric="acc", label="TruthfulQA MC2"),
)
READING = (
    TaskColumn(task="race", metric="acc", label="RACE"),
    TaskColumn(task="squadv2", metric="exact", label="SQuAD 2.0 exact"),
    TaskColumn(task="squadv2", metric="f1", label="SQuAD 2.0 F1"),
)

PRESETS = {
    "common-sense": Preset(columns=columns("acc", COMMON_SENSE), shots=0, shows="tables 1 and 10"),
    "triviaqa-5": Preset(columns=columns("exact_match", {"triviaqa": "TriviaQA"}), shots=5, shows="table 11"),
    "reading": Preset(columns=READING, shots=0, shows="table 12"),
    "mmlu-5": Preset(columns=columns("acc", MMLU, group="mmlu"), shots=5, shows="table 13"),
    "bias": Preset(columns=BIAS, shots=0, shows="table 14"),
}


def read_tasks(text: str, shots: int | None = None) -> list[Preset]:
    """Presets, and one more for the other task names of the list, which has commas between names.

    Args:
        shots: in place of the presets' own and the tasks' own.

    >>> [preset.tasks for preset in read_tasks("reading, my_task,lambada_openai")]
    [['race', 'squadv2'], ['my_task', 'lambada_openai']]

    Raises:
        ValueError: no name, one twice, or a task that a preset in the list has too.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"--tasks {text!r} was given; give different names with commas: {describe_presets()}.")
    found = [PRESETS[name] for name in names if name in PRESETS]
    others = tuple(TaskColumn(task=name) for name in names if name not in PRESETS)
    if others:
        found.append(Preset(columns=others, shots=None, shows="tasks of the harness"))
    counted = Counter(name for preset in found for name in preset.tasks)
    if twice := [name for name, times in counted.items() if times > 1]:
        raise ValueError(
            f"--tasks {text!r} was given, which has {', '.join(twice)} twice; leave the preset or the task out."
        )
    if shots is not None:
        found = [Preset(columns=preset.columns, shots=shots, shows=preset.shows) for preset in found]
    return found


def describe_presets() -> str:
    """The presets in words, for help and errors."""
    return ", ".join(f"{name} ({preset.shows})" for name, preset in PRESETS.items()) + ", or tasks of the harness"


def unknown_tasks(names: Sequence[str], known: Sequence[str]) -> str:
    """A sentence about names that the harness does not know; empty if it knows all.

    >>> unknown_tasks(["boolq"], ["boolq", "piqa"])
    ''
    >>> unknown_tasks(["bolq"], ["boolq", "piqa"])
    "The harness has no task 'bolq'; give its names, or a folder of your own tasks. Did you mean 'boolq'?"
    """
    for name in names:
        if name not in known:
            advice = "give its names, or a folder of your own tasks."
            return f"The harness has no task {name!r}; {advice}{nearest(name, [*known, *PRESETS])}"
    return ""
