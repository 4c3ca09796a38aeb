"""The preview, and the seal: what a manifest names is there before the manifest is."""

import hashlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minilm_cache.storage_schema.manifest import PREVIEW
from minilm_cache.store.card import cache_card, has_damaged_preview, seal_with_preview
from minilm_cache.store.reader import read_manifest
from tests.unit.store.support import GOLDEN, partials

TABLE = pa.table({"text": ["a", "", "é\n"], "length": [3, 1, 4]})


def test_the_preview_is_the_table_and_the_manifest_names_its_hash(cache: Path) -> None:
    manifest = read_manifest(cache)
    named = seal_with_preview(cache, manifest, TABLE)
    content = (cache / PREVIEW).read_bytes()

    assert pq.read_table(cache / PREVIEW).equals(TABLE)
    assert named.files[PREVIEW].size == len(content)
    assert named.files[PREVIEW].sha256 == hashlib.sha256(content).hexdigest()
    assert named.model_copy(update={"files": manifest.files}) == manifest
    assert (cache / "manifest.json").read_bytes() == named.to_json()
    assert (cache / "README.md").read_text() == cache_card(named)
    assert partials(cache) == []


def test_the_manifest_is_the_last_file_of_a_seal(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    replace = Path.replace

    def record(self: Path, target: Path) -> Path:
        order.append(target.relative_to(cache).as_posix())
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", record)
    seal_with_preview(cache, read_manifest(cache), TABLE)

    assert order == [PREVIEW, "README.md", "manifest.json"]


@pytest.mark.parametrize("damage", ["none", "missing", "changed", "shorter", "a link to the same bytes"])
def test_a_preview_is_damaged_unless_it_is_what_was_written(cache: Path, tmp_path: Path, damage: str) -> None:
    file, content = cache / PREVIEW, (cache / PREVIEW).read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "a link to the same bytes":
        file.symlink_to(file.rename(tmp_path / "outside"))
    elif damage != "none":
        file.write_bytes(content[:-1] + (b"x" if damage == "changed" else b""))

    assert has_damaged_preview(cache, read_manifest(cache)) == (damage != "none")


def test_a_preview_that_no_manifest_names_cannot_be_damaged() -> None:
    """Caches of the first releases."""
    assert not has_damaged_preview(GOLDEN / "v1", read_manifest(GOLDEN / "v1"))
