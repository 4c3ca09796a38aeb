"""What a store holds: whole caches, caches that cannot be read and why, and nothing of other folders."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from minilm_cache.errors import (
    CacheCorruptError,
    CacheIncompleteError,
    CacheNotFoundError,
    MiniLMCacheError,
    UnsupportedFormatError,
)
from minilm_cache.store.catalogue import catalogue, find_cache, remote_manifest
from minilm_cache.store.layout import cache_name
from minilm_cache.store.reader import read_manifest
from minilm_cache.store.remote import open_store
from tests.unit.store.support import GOLDEN, VECTORS, unfinished

STATES: dict[str, type[MiniLMCacheError]] = {
    "incomplete": CacheIncompleteError,
    "damaged": CacheCorruptError,
    "newer": UnsupportedFormatError,
    "link": CacheCorruptError,
    "none": CacheNotFoundError,
}


def plant(folder: Path, state: str) -> Path:
    """Make a folder that holds no cache that can be read."""
    folder.mkdir()
    manifest = read_manifest(GOLDEN / "v1")
    if state == "link":
        (folder / "manifest.json").symlink_to(GOLDEN / "v1/manifest.json")
    elif state == "none":
        (folder / "notes.txt").touch()
    else:
        content = {
            "incomplete": unfinished(manifest).to_json(),
            "damaged": manifest.to_json().replace(b'"complete": true', b'"complete": false'),
            "newer": b'{"format_version": 3}',
        }[state]
        (folder / "manifest.json").write_bytes(content)
    return folder


@pytest.mark.parametrize("state", STATES)
def test_only_the_manifest_of_a_complete_cache_is_returned(tmp_path: Path, state: str) -> None:
    with pytest.raises(STATES[state]):
        remote_manifest(open_store(str(plant(tmp_path / "cache", state))))

    assert remote_manifest(open_store(str(GOLDEN / "v1"))) == read_manifest(GOLDEN / "v1")


def test_a_store_lists_its_caches_and_says_which_cannot_be_read(tmp_path: Path) -> None:
    for name in ("v1", "v1-vectors"):
        shutil.copytree(GOLDEN / name, tmp_path / name)
    for state in STATES:
        plant(tmp_path / state, state)
    (tmp_path / "file").touch()
    entries = {entry.url: entry for entry in catalogue(str(tmp_path))}

    assert entries.keys() == {
        str(tmp_path / name) for name in ("v1", "v1-vectors", *STATES) if name != "none"
    }
    for name in ("v1", "v1-vectors"):
        entry = entries[str(tmp_path / name)]
        assert (entry.manifest, entry.problem) == (read_manifest(GOLDEN / name), None)
    for state in STATES.keys() - {"none"}:
        entry = entries[str(tmp_path / state)]
        assert entry.manifest is None
        assert entry.problem is not None
        assert str(tmp_path / state) in entry.problem


def test_the_url_of_a_cache_lists_that_cache_alone(tmp_path: Path) -> None:
    (entry,) = catalogue(str(GOLDEN / "v1"))

    assert (entry.url, entry.manifest) == (str(GOLDEN / "v1"), read_manifest(GOLDEN / "v1"))
    assert catalogue(str(tmp_path)) == catalogue(str(tmp_path / "none")) == []


def test_a_cache_is_found_by_its_whole_fingerprint_under_any_name(tmp_path: Path) -> None:
    manifest = read_manifest(GOLDEN / "v1")
    name = cache_name(manifest.labels, manifest.identity)
    shutil.copytree(GOLDEN / "v1", tmp_path / "renamed" / f"another-{name}")
    shutil.copytree(GOLDEN / "v1", tmp_path / "elsewhere/other-name")
    lookalike = manifest.fingerprint[:12] + "0" * 52

    assert find_cache(str(tmp_path / "renamed"), manifest.fingerprint) == str(
        tmp_path / "renamed" / f"another-{name}"
    )
    assert find_cache(str(tmp_path / "renamed"), lookalike) is None
    assert find_cache(str(tmp_path / "elsewhere"), manifest.fingerprint) == str(
        tmp_path / "elsewhere/other-name"
    )
    assert find_cache(str(tmp_path / "none"), manifest.fingerprint) is None


@pytest.mark.parametrize("state", STATES)
def test_a_cache_that_cannot_be_read_is_not_found_and_hides_no_other(tmp_path: Path, state: str) -> None:
    manifest = read_manifest(GOLDEN / "v1")
    plant(tmp_path / f"a-{manifest.fingerprint[:12]}", state)
    assert find_cache(str(tmp_path), manifest.fingerprint) is None
    shutil.copytree(GOLDEN / "v1", tmp_path / f"b-{manifest.fingerprint[:12]}")

    assert find_cache(str(tmp_path), manifest.fingerprint) == str(tmp_path / f"b-{manifest.fingerprint[:12]}")


def test_a_manifest_is_parsed_in_the_context_that_it_is_given() -> None:
    entered: list[str] = []

    @contextmanager
    def context() -> Iterator[None]:
        entered.append("entered")
        yield
        entered.append("left")

    assert remote_manifest(open_store(str(VECTORS)), context()) == read_manifest(VECTORS)
    assert entered == ["entered", "left"]
