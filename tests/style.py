"""The style that no linter checks: sizes of functions and modules, docstrings, modules outside rooms."""

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_FUNCTION = 60
MAX_MODULE = 600
MAX_LOOSE = 5
"""Most modules of `minilm_cache` that lie in no room."""


def modules() -> list[Path]:
    """Return every module of the product."""
    return sorted(
        path
        for folder in ("minilm_cache", "cli", "storage_schema")
        for path in (ROOT / folder).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    )


def _docstrings(tree: ast.AST) -> Iterator[tuple[bool, str]]:
    """Yield docstrings, and whether each stands below an assignment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield False, ast.get_docstring(node) or ""
        body = getattr(node, "body", None)
        for above, below in itertools.pairwise(body) if isinstance(body, list) else ():
            is_assignment = isinstance(above, ast.Assign | ast.AnnAssign)
            if is_assignment and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                yield True, str(below.value.value)


def faults(path: Path) -> Iterator[str]:
    """Yield what is wrong with a module."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    if text.count("\n") > MAX_MODULE:
        yield f"more than {MAX_MODULE} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            has_encoding = "encoding" in {keyword.arg for keyword in node.keywords}
            if node.func.attr in {"read_text", "write_text"} and not has_encoding:
                yield f'line {node.lineno}: say encoding="utf-8", or the locale of the machine decides'
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION:
            yield f"{node.name} has {MAX_FUNCTION} lines or more"
    for is_below, docstring in _docstrings(tree):
        begins_oddly = is_below and re.match(r"(As )?[Oo]f\b", docstring)
        is_terse = re.search(r"\b[Nn]one:", docstring) or re.search(r"^ +\w+: of\b", docstring, re.MULTILINE)
        if begins_oddly or is_terse:
            yield f"not a sentence: {docstring.splitlines()[0]}"


def main() -> None:
    """Print every fault, and end with 1 if there is one."""
    found = [f"{path.relative_to(ROOT)}: {fault}" for path in modules() for fault in faults(path)]
    loose = [path.name for path in (ROOT / "minilm_cache").glob("[!_]*.py")]
    if len(loose) > MAX_LOOSE:
        found.append(f"{len(loose)} modules lie in no room: {', '.join(loose)}")
    print("\n".join(found) or "style: nothing to mend")  # noqa: T201 - a script
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
