"""The corpus `python-docs`: docstrings of Python's standard library and the topics of `pydoc`."""

import ast
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_NOT_DOCUMENTED: Final = frozenset(
    {"site-packages", "test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "__pycache__"}
)


def python_files() -> list[Path]:
    """Return the files that are read."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*.py"))
    return [file for file in files if _NOT_DOCUMENTED.isdisjoint(file.relative_to(root).parts)]


def python_docs() -> Iterator[str]:
    """Yield the docstrings of the standard library (parsed, not imported), then the topics of `pydoc`."""
    for file in python_files():
        yield from _docstrings(file)
    topics = pydoc_data.topics.topics
    for name in sorted(topics):
        yield topics[name]


def _docstrings(file: Path) -> Iterator[str]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, documented):
            text = ast.get_docstring(node)
            if text:
                yield text
