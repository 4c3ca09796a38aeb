"""Figures of README and docs are those of the results files."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.report import RESULTS
from benchmarks.tables import PAGES, ROOT, TABLES, rendered

LINK = re.compile(r"\]\(([^)#]*results/[^)#]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_what_the_results_say(page: Path) -> None:
    assert rendered(page.read_text()) == page.read_text()


def test_every_table_stands_on_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)

    assert all(f"<!-- table {name} -->" in text for name in TABLES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_results_that_are_linked_are_there(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        assert (page.parent / link).resolve().is_file(), link


def test_every_results_file_has_its_command() -> None:
    """On the page of figures each file stands with the command that writes it."""
    text = (ROOT / "docs/figures.md").read_text()
    for file in RESULTS.glob("*.json"):
        assert file.name in text, file.name
        json.loads(file.read_text())
    for module in re.findall(r"python -m benchmarks\.(\w+)", text):
        place = ROOT / "benchmarks" / module
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module
