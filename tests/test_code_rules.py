"""Rules that no linter knows: what tests may replace, and that names of classes and of test files are unique."""

import ast
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REPLACING = {"setattr", "delattr", "patch", "object"}
"""monkeypatch.setattr and delattr, mock.patch and patch.object: their first texts name what is replaced."""


def trees(*folders):
    for path in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def replaced_names(tree):
    """Names that a test replaces in other objects, by calls and by assignments; a test's own classes say `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in REPLACING:
            texts = [argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant)]
            yield from ((node.lineno, text.rpartition(".")[2]) for text in texts[:1] if isinstance(text, str))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)) and not is_own(node.value):
            yield node.lineno, node.attr


def is_own(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_tests_replace_no_private_name():
    """A private name may go with the next version of a library, or with the next change of our own module."""
    found = [
        f"{path}:{line}: {name}"
        for path, tree in trees("tests")
        for line, name in replaced_names(tree)
        if name.startswith("_") and not name.endswith("__")
    ]
    assert not found


ONE_IN_EACH = {
    "Config": "what a file of a family, a format or a suite is configured by: the file's name says which",
    "Heads": "the heads of a family: the file's name is the family's in YAML",
}
"""Classes of one name by design: each is found by its file, one a file."""


@pytest.mark.parametrize("packages", [("heads", "train"), ("benchmarks",)])
def test_a_class_name_stands_for_one_thing(packages):
    places = defaultdict(list)
    for path, tree in trees(*packages):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name not in ONE_IN_EACH:
                places[node.name].append(f"{path}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


ONE_ALIAS = {
    "Counts": "how often n-grams were counted: an array in the tables, a mapping in the plain reference",
    "Shape": "a tree's measures, and torch.Size in the formulas of FLOPs, whose pages would have to be measured again",
}
"""Names of types that stand for one thing in two forms, or have two owners."""


@pytest.mark.parametrize("package", ["heads", "train"])
def test_a_name_of_a_type_stands_for_one_thing(package):
    """Names that are assigned a type, as in `Ids = list[int]`, beside each other and beside classes."""
    means = defaultdict(set)
    for path, tree in trees(package):
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                means[node.name].add(f"a class of {path}")
            elif (name := assigned_type(node)) and name not in ONE_ALIAS:
                means[name].add(ast.unparse(node))
    assert {name: found for name, found in means.items() if len(found) > 1 and name not in ONE_IN_EACH} == {}


def assigned_type(node):
    """The name that a module's statement assigns, if it is written as classes are; else None."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    name = getattr(target, "id", "")
    return name if name[:1].isupper() and not name.isupper() and "_" not in name else None


def test_no_two_files_of_tests_have_the_same_name():
    """Tests are no packages, so pytest imports them by their names alone, and refuses the second file of one name."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
