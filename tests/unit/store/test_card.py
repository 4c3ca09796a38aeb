"""Cards: metadata that a hub can read, figures of the manifest, and names that stay names."""

import os
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm_cache.storage_schema.manifest import PREVIEW, TEACHER_WEIGHTS, CacheManifest
from minilm_cache.store.card import attach, cache_card
from minilm_cache.store.reader import read_manifest
from tests.unit.store.support import GOLDEN, VECTORS, partials


def front_matter(card: str) -> dict[str, Any]:
    """Return what a hub reads: the YAML between the first two lines of dashes."""
    first, *lines = card.splitlines()
    assert first == "---"
    content = yaml.safe_load("\n".join(lines[: lines.index("---")]))
    assert isinstance(content, dict)
    return content


def test_patterns_of_the_card_are_of_files_that_are_there(complete: Path) -> None:
    configs = front_matter((complete / "README.md").read_text())["configs"]
    files = {config["config_name"]: sorted(complete.glob(config["data_files"])) for config in configs}

    assert files == {"preview": [complete / PREVIEW], "sequences": sorted((complete / "sequences").iterdir())}
    assert [config["config_name"] for config in configs if config.get("default")] == ["preview"]


def test_a_preview_without_a_hash_is_not_shown(complete: Path) -> None:
    manifest = read_manifest(complete)
    files = {path: digest for path, digest in manifest.files.items() if path != PREVIEW}
    (config,) = front_matter(cache_card(manifest.model_copy(update={"files": files})))["configs"]

    assert config["config_name"] == "sequences"


def rows_of(card: str) -> list[list[str]]:
    """Return the cells of the card's tables, without headings and rules."""
    lines = [line for line in card.splitlines() if line.startswith("| ") and line[2] in "`0123456789"]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def test_figures_are_those_of_the_manifest(complete: Path) -> None:
    for root in (complete, GOLDEN / "v1", VECTORS):
        manifest = read_manifest(root)
        measured, card = manifest.measured, cache_card(manifest)
        assert measured is not None
        (layer,) = measured.fidelity
        table = {row[1]: row for row in rows_of(card)}
        assert table.keys() == {"attention", "value"}
        for kind, fidelity in layer.relations.items():
            cells = table[str(kind)]
            assert int(cells[0]) == layer.layer
            assert abs(float(cells[2]) - fidelity.kl_stored_to_teacher) <= 5e-5
            assert abs(float(cells[3]) - fidelity.mass_kept) <= 5e-4
            assert abs(float(cells[4]) - fidelity.cross_entropy_bias) <= 5e-5
        for text in (manifest.fingerprint, manifest.identity.corpus.sha256, f"{manifest.num_tokens:,}"):
            assert text in card


def test_every_stored_state_has_a_row() -> None:
    manifest = read_manifest(GOLDEN / "v1-states")
    assert manifest.measured is not None
    expected = {state.path: f"{state.bytes_per_token:.1f}" for state in manifest.measured.states}
    rows = {row[0]: row[1] for row in rows_of(cache_card(manifest)) if row[0] in expected}

    assert rows == expected != {}


def test_a_card_depends_on_nothing_but_the_manifest(complete: Path) -> None:
    content = (complete / "manifest.json").read_bytes()
    again = CacheManifest.model_validate_json(content)

    assert (complete / "README.md").read_text() == cache_card(again)


NAME = st.text(
    st.characters(codec="utf-8", min_codepoint=32, exclude_characters="\x7f"), min_size=1, max_size=40
)


@settings(max_examples=50, deadline=None)
@given(teacher=NAME, corpus=NAME)
def test_no_name_can_end_the_metadata_or_begin_a_line(teacher: str, corpus: str) -> None:
    manifest = read_manifest(GOLDEN / "v1")
    labels = manifest.labels.model_copy(update={"teacher": teacher, "corpus": corpus})
    plain, card = cache_card(manifest), cache_card(manifest.model_copy(update={"labels": labels}))
    content = front_matter(card)

    assert content["configs"] == front_matter(plain)["configs"]
    assert content["tags"] == front_matter(plain)["tags"]
    body, plain_body = (text.split("\n---\n", 1)[1].split("\n") for text in (card, plain))
    assert len(body) == len(plain_body)
    changed = [plain for line, plain in zip(body, plain_body, strict=True) if line != plain]
    assert len(changed) <= 3  # the heading, the teacher and the corpus


def test_what_a_killed_writer_has_left_of_a_file_goes_when_the_file_is_added(cache: Path) -> None:
    left = cache / f".{TEACHER_WEIGHTS}.0.partial"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    named = attach(cache, read_manifest(cache), path=TEACHER_WEIGHTS, content=b"whole")

    assert (cache / TEACHER_WEIGHTS).read_bytes() == b"whole"
    assert named.files[TEACHER_WEIGHTS].size == len(b"whole")
    assert partials(cache) == []
