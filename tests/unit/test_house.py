"""Habits of the code that no linter checks: sizes, names, and how docstrings begin."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    path
    for folder in ("minilm_cache", "cli", "storage_schema")
    for path in (ROOT / folder).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)
MAX_FUNCTION = 60
MAX_MODULE = 600
ROOMS_TESTED = {
    "storage_schema": "storage_schema",
    "store": "minilm_cache/store",
    "codecs": "minilm_cache/codecs",
    "relations": "minilm_cache/relations",
}
"""Rooms whose tests have as many lines as their source: what everything else relies on."""

each_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))


def attribute_docstrings(tree: ast.AST) -> Iterator[str]:
    """Yield the strings below assignments."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for above, below in itertools.pairwise(body) if isinstance(body, list) else ():
            is_assignment = isinstance(above, ast.Assign | ast.AnnAssign)
            if is_assignment and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                yield str(below.value.value)


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Yield the docstrings of functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield ast.get_docstring(node) or ""


@each_module
def test_functions_fit_a_screen_and_modules_a_sitting(path: Path) -> None:
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION, node.name

    assert text.count("\n") <= MAX_MODULE


@each_module
def test_docstrings_are_sentences(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for text in attribute_docstrings(tree):
        assert not re.match(r"(As )?[Oo]f\b", text), text
        assert not re.search(r"\b[Nn]one:", text), text
    for text in docstrings(tree):
        assert not re.search(r"^ +\w+: of\b", text, re.MULTILINE), text
        assert not re.search(r"\bnone:", text), text


@each_module
def test_names_say_what_they_hold(path: Path) -> None:
    tree = ast.parse(path.read_text())
    fields = {id(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    names = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields
    }
    assert not names & {"one", "found"}


def test_few_modules_lie_outside_a_room() -> None:
    loose = [path.name for path in MODULES if path.parent.name == "minilm_cache" and path.name[0] != "_"]

    assert len(loose) <= 5, loose


@pytest.mark.parametrize("room", ROOMS_TESTED)
def test_what_everything_relies_on_has_as_many_lines_of_tests_as_of_source(room: str) -> None:
    def lines(*folders: Path) -> int:
        return sum(path.read_text().count("\n") for folder in folders for path in folder.glob("*.py"))

    tests = lines(ROOT / "tests/unit" / room, ROOT / "tests/integration" / room)
    assert tests >= lines(ROOT / ROOMS_TESTED[room])
