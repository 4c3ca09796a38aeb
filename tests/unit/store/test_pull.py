"""A cache that arrives: each file checked before it is written, the folder there only when it is whole."""

import shutil
from pathlib import Path

import pytest

from minilm_cache.errors import CacheCorruptError, IdentityMismatchError, InterruptedRunError
from minilm_cache.session import Session
from minilm_cache.storage_schema.manifest import INDEX, TEACHER_PROMPTS, TEACHER_WEIGHTS
from minilm_cache.store.card import attach
from minilm_cache.store.checked import digest_bytes
from minilm_cache.store.index import open_shards
from minilm_cache.store.pull import Fetcher, pull
from minilm_cache.store.reader import CacheReader, read_manifest
from minilm_cache.store.remote import open_store
from tests.unit.store.support import GOLDEN, Recorder, files_below, shared_files

pytestmark = pytest.mark.slow


def fetcher_into(source: Path, folder: Path) -> Fetcher:
    return Fetcher(open_store(str(source)), folder, read_manifest(source))


def test_a_pulled_cache_is_the_same_to_the_byte_and_nothing_lies_beside_it(
    complete: Path, tmp_path: Path
) -> None:
    progress = Recorder()
    result = pull(str(complete), tmp_path / "out", session=Session(progress=progress))

    assert files_below(tmp_path / "out") == shared_files(complete)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (result.shards_copied, result.shards_kept) == (6, 0)
    assert progress.done == progress.totals


@pytest.mark.parametrize(
    "path", ["tokens/c/4", "teacher/config.json", "index/shards.parquet", "manifest.json"]
)
def test_a_cache_that_is_damaged_where_it_is_never_appears(cache: Path, tmp_path: Path, path: str) -> None:
    content = (cache / path).read_bytes()
    (cache / path).write_bytes(content[:-2] + b"!!")
    out = tmp_path / "out"
    with pytest.raises(CacheCorruptError):
        pull(str(cache), out, session=Session())
    assert not out.exists()
    (cache / path).write_bytes(content)
    pull(str(cache), out, session=Session())

    assert files_below(out) == shared_files(cache)


def test_an_interrupted_pull_is_no_cache_and_goes_on(complete: Path, tmp_path: Path) -> None:
    asked = iter([False] * 3)  # some of the shards
    with pytest.raises(InterruptedRunError):
        pull(str(complete), tmp_path / "out", session=Session(should_stop=lambda: next(asked, True)))
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("manifest.json"))
    result = pull(str(complete), tmp_path / "out", session=Session())

    assert (result.shards_copied, result.shards_kept) == (3, 3)
    assert files_below(tmp_path / "out") == shared_files(complete)


@pytest.mark.parametrize(
    "path", ["tokens/c/4", "teacher/config.json", "index/ranges.parquet", "manifest.json"]
)
@pytest.mark.parametrize("content", [b"!!", None])
def test_a_pulled_cache_that_was_damaged_since_is_repaired(
    complete: Path, tmp_path: Path, path: str, content: bytes | None
) -> None:
    """Only what is damaged or lacks is fetched; an interrupted repair goes on."""
    out = tmp_path / "out"
    pull(str(complete), out, session=Session())
    before = {file: file.stat().st_ino for file in out.rglob("*") if file.is_file()}
    if content is None:
        (out / path).unlink()
    else:
        (out / path).write_bytes(content)
    with pytest.raises(InterruptedRunError):
        pull(str(complete), out, session=Session(should_stop=lambda: True))
    result = pull(str(complete), out, session=Session())
    assert result.shards_copied == (1 if path.startswith("tokens") else 0)
    assert files_below(out) == shared_files(complete)
    fetched = {file for file, inode in before.items() if file.stat().st_ino != inode}
    made_anew = {out / "README.md", out / "manifest.json"}
    assert fetched - made_anew <= {out / path}


def test_a_damaged_manifest_beside_other_files_is_not_replaced(complete: Path, tmp_path: Path) -> None:
    """The folder may hold another cache."""
    out = tmp_path / "out"
    pull(str(complete), out, session=Session())
    (out / "manifest.json").write_bytes(b"!!")
    (out / "index/ranges.parquet").write_bytes(b"??")
    before = files_below(out)
    with pytest.raises(CacheCorruptError, match=r"manifest\.json is damaged, .* Choose another --out"):
        pull(str(complete), out, session=Session())
    assert files_below(out) == before


@pytest.mark.parametrize("golden", ["v1", "v1-vectors"])
@pytest.mark.parametrize("manifest", [b"!!", None])
def test_without_an_index_a_lost_manifest_proves_nothing(
    tmp_path: Path, golden: str, manifest: bytes | None
) -> None:
    """Two caches of format 1 may differ in nothing but their shards; neither overwrites the other."""
    out = tmp_path / "out"
    shutil.copytree(GOLDEN / golden, out)
    shard = next(file for file in sorted(out.rglob("*")) if file.is_file() and "/c/" in file.as_posix())
    shard.write_bytes(b"mine")
    (out / "manifest.json").unlink()
    if manifest is not None:
        (out / "manifest.json").write_bytes(manifest)
    before = files_below(out)
    with pytest.raises((CacheCorruptError, IdentityMismatchError)):
        pull(str(GOLDEN / golden), out, session=Session())
    assert files_below(out) == before


def test_files_that_are_others_in_the_store_are_fetched_and_those_that_it_lacks_stay(
    cache: Path, tmp_path: Path
) -> None:
    def with_prompts(text: str) -> None:
        content = f'{{"query": "{text}"}}'.encode()
        attach(cache, read_manifest(cache), path=TEACHER_PROMPTS, content=content)

    out, progress = tmp_path / "out", Recorder()
    with_prompts("one")
    pull(str(cache), out, session=Session())
    attach(out, read_manifest(out), path=TEACHER_WEIGHTS, content=b"weights")
    with_prompts("two")
    result = pull(str(cache), out, session=Session(progress=progress))

    assert (out / TEACHER_PROMPTS).read_bytes() == (cache / TEACHER_PROMPTS).read_bytes()
    assert (out / TEACHER_WEIGHTS).read_bytes() == b"weights"
    expected = read_manifest(cache).files | {TEACHER_WEIGHTS: digest_bytes(b"weights")}
    assert result.manifest.files == read_manifest(out).files == expected
    assert any(f"with another {TEACHER_PROMPTS} than the store" in note for note in progress.notes)
    pull(str(cache), out, session=Session(progress=progress))
    assert "nothing to do" in progress.notes[-1]


def test_another_dump_of_the_same_cache_is_not_mixed_with_the_stores(complete: Path, tmp_path: Path) -> None:
    """Two dumps of one identity may differ in single bytes."""
    out = tmp_path / "out"
    pull(str(complete), out, session=Session())
    manifest = read_manifest(out)
    index = manifest.files[INDEX].model_copy(update={"sha256": "0" * 64})
    other = manifest.model_copy(update={"files": manifest.files | {INDEX: index}})
    (out / "manifest.json").write_bytes(other.to_json())
    (out / "tokens/c/4").write_bytes(b"!!")
    with pytest.raises(IdentityMismatchError, match="of another dump"):
        pull(str(complete), out, session=Session())


def test_a_folder_of_other_things_is_left_alone_and_a_vacant_one_taken(
    complete: Path, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/notes.txt").write_text("mine")
    (tmp_path / "vacant").mkdir()
    (tmp_path / "vacant/.file.12.partial").touch()
    with pytest.raises(IdentityMismatchError):
        pull(str(complete), tmp_path / "taken", session=Session())
    pull(str(complete), tmp_path / "vacant", session=Session())

    assert files_below(tmp_path / "taken") == {"notes.txt": b"mine"}
    assert files_below(tmp_path / "vacant") == shared_files(complete)


def test_a_file_is_fetched_once_and_again_only_if_it_is_damaged_here(complete: Path, tmp_path: Path) -> None:
    fetcher = fetcher_into(complete, tmp_path)
    for path, digest in CacheReader(complete).records[3].files.items():
        assert fetcher.fetch(path, digest)
        assert not fetcher.fetch(path, digest)
        (tmp_path / path).write_bytes(b"damaged")
        assert fetcher.fetch(path, digest)
        assert (tmp_path / path).read_bytes() == (complete / path).read_bytes()


def test_a_file_is_as_long_as_its_array_can_need_or_is_not_asked_for(complete: Path, tmp_path: Path) -> None:
    """Two bytes for each of 256 tokens, and a mebibyte and an eighth more at most; the store has none."""
    fetcher = fetcher_into(complete, tmp_path / "out")
    good = digest_bytes((complete / "tokens/c/0").read_bytes())
    for size in (2**20 + 577, 2**40):
        with pytest.raises(CacheCorruptError):
            fetcher.fetch("tokens/c/0", good.model_copy(update={"size": size}))
    with pytest.raises(CacheCorruptError):
        fetcher.fetch("teacher/config.json", digest_bytes(bytes(100)), 99)

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_shards_are_those_of_the_cache_and_are_kept(tmp_path: Path, name: str) -> None:
    cache = Path(shutil.copytree(GOLDEN / name, tmp_path / "cache"))
    reader = CacheReader(cache)
    ranges = fetcher_into(cache, tmp_path / "out").tables(Session())
    shards = open_shards(tmp_path / "out", reader.manifest, ranges)
    assert ranges == reader.ranges
    assert dict(shards.items()) == dict(reader.records.items())
    tables = ["commits/00001.json"] if name == "v1" else ["index/ranges.parquet", "index/shards.parquet"]
    for number, path in enumerate(tables):
        assert (tmp_path / "out" / path).read_bytes() == (cache / path).read_bytes()
        (cache / path).write_bytes((cache / path).read_bytes()[:-1] + b"?")
        with pytest.raises(CacheCorruptError):
            fetcher_into(cache, tmp_path / f"again {number}").tables(Session())


def test_a_link_here_is_not_written_through(complete: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/tokens").symlink_to(outside)
    with pytest.raises(CacheCorruptError):
        fetcher_into(complete, tmp_path / "out").write("tokens/c/0", b"content")

    assert list(outside.iterdir()) == []
