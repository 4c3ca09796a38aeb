"""Folders elsewhere: one behaviour for a folder of this machine and for a real S3 server."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import LocalStore

from minilm_cache.errors import CacheCorruptError, CacheNotFoundError, InvalidConfigError, StorageError
from minilm_cache.store.object_store import BucketFiles
from minilm_cache.store.remote import RemoteFolder, open_store
from minilm_cache.store.urls import is_url, without_secrets
from tests.s3 import tamper


@pytest.fixture(params=["path", "file", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteFolder:
    """Return an empty folder of each kind."""
    if request.param == "s3":
        return open_store(request.getfixturevalue("store"))
    return open_store(str(tmp_path) if request.param == "path" else f"file://{tmp_path}")


@pytest.mark.parametrize("content", [b"", b"x", bytes(range(256)) * 300], ids=["empty", "short", "long"])
def test_what_is_written_is_read(folder: RemoteFolder, content: bytes) -> None:
    for _ in range(2):
        folder.write("a/b/file", content)
        assert folder.read("a/b/file", len(content)) == content
        assert folder.below("a").below("b").read("file", 2**20) == content
    folder.write("a/b/file", b"new")
    assert folder.read("a/b/file", 3) == b"new"


def test_no_file_is_longer_than_it_may_be(folder: RemoteFolder) -> None:
    folder.write("file", b"12345")
    for max_bytes in (0, 1, 4):
        with pytest.raises(CacheCorruptError):
            folder.read("file", max_bytes)
        with pytest.raises(CacheCorruptError):
            folder.read_if_there("file", max_bytes)


def test_what_is_not_there_is_told_apart_from_what_is_empty(folder: RemoteFolder) -> None:
    folder.write("empty", b"")
    with pytest.raises(CacheNotFoundError):
        folder.read("none", 10)

    assert (folder.read_if_there("none", 10), folder.read_if_there("empty", 10)) == (None, b"")


def test_a_file_is_created_once_and_its_content_left_alone(folder: RemoteFolder) -> None:
    assert folder.create("claims/0", b"first")
    assert not folder.create("claims/0", b"second")
    assert folder.read("claims/0", 10) == b"first"


def test_files_are_removed_beside_those_that_are_not_there(folder: RemoteFolder, tmp_path: Path) -> None:
    for _ in range(2):  # as an object store that ends at the first one that is missing, the second time
        names = [f"file-{number}" for number in range(5)]
        for name in names[1:]:
            folder.write(name, b"x")
        folder.remove(names)
        assert folder.sizes() == {}
        files = BucketFiles(LocalStore(tmp_path))
        folder = RemoteFolder(str(tmp_path), files, "objects")


def test_of_many_that_claim_exactly_one_gets_it(folder: RemoteFolder) -> None:
    with ThreadPoolExecutor(8) as threads:
        created = list(threads.map(lambda n: folder.create("claim", b"%d" % n), range(8)))

    assert created.count(True) == 1
    assert folder.read("claim", 10) == b"%d" % created.index(True)


def test_sizes_and_folders_are_those_below_and_of_no_neighbour(folder: RemoteFolder) -> None:
    names = {"a/x": 1, "a/b/y": 2, "ab/z": 3, "c": 4}
    for name, size in names.items():
        folder.write(name, bytes(size))

    assert folder.sizes() == names
    assert folder.below("a").sizes() == {"x": 1, "b/y": 2}
    assert folder.folders() == ["a", "ab"]
    assert folder.below("a").folders() == ["b"]
    assert folder.below("none").sizes() == {}
    assert folder.below("none").folders() == []


def test_a_slash_at_the_end_of_a_url_changes_nothing(folder: RemoteFolder) -> None:
    again = open_store(f"{folder.url}//")
    folder.write("a/file", b"content")

    assert again.url == folder.url
    assert again.read("a/file", 10) == b"content"
    assert again.sizes() == {"a/file": 7}


def test_nobody_believes_what_a_store_says_of_sizes(server: str, store: str) -> None:
    """A file that is replaced by a longer one after it was listed is not fetched whole."""
    folder = open_store(store)
    folder.write("file", b"12")
    size = folder.sizes()["file"]
    tamper(server, f"{store}/file", bytes(2**16))
    with pytest.raises(CacheCorruptError):
        folder.read("file", size)


def test_a_local_store_holds_plain_files_and_no_leftovers(tmp_path: Path) -> None:
    folder = open_store(str(tmp_path / "store"))
    folder.write("a/b", b"content")
    folder.create("a/c", b"claim")
    folder.create("a/c", b"again")

    assert {path.name: path.read_bytes() for path in (tmp_path / "store/a").iterdir()} == {
        "b": b"content",
        "c": b"claim",
    }


@pytest.mark.timeout(20)
def test_links_and_pipes_of_a_local_store_are_damage(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(__file__)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(CacheCorruptError):
            open_store(str(tmp_path)).read(name, 2**20)


@pytest.mark.parametrize("way", ["write", "create"])
def test_a_file_where_a_folder_is_needed_is_a_refusal(tmp_path: Path, way: str) -> None:
    (tmp_path / "file").write_bytes(b"content")
    folder = open_store(str(tmp_path / "file"))
    with pytest.raises(StorageError):
        getattr(folder, way)("x", b"")

    assert (tmp_path / "file").read_bytes() == b"content"


WORD = st.text("abcXYZ019-_.~%", min_size=1, max_size=12)


@settings(max_examples=50, deadline=None)
@given(user=WORD, password=WORD, host=WORD, path=WORD, query=WORD)
def test_a_url_is_shown_without_what_is_secret(
    user: str, password: str, host: str, path: str, query: str
) -> None:
    plain = f"s3://{host}/{path}"

    assert without_secrets(plain) == plain
    for secret in (f"s3://{user}:{password}@{host}/{path}", f"{plain}?sig={query}", f"{plain}#{query}"):
        assert without_secrets(secret) == plain
        with pytest.raises(InvalidConfigError) as caught:
            open_store(secret)
        assert plain in str(caught.value)
        assert f":{password}@" not in str(caught.value)
        assert f"sig={query}" not in str(caught.value)


@settings(max_examples=50, deadline=None)
@given(st.text("ab/:?#@. ", max_size=20))
def test_a_path_is_no_url_and_is_shown_as_it_is(place: str) -> None:
    assert is_url(place) == (place.find("://") >= 0)
    if not is_url(place):
        assert without_secrets(place) == place


@pytest.mark.parametrize("url", ["file://home/x", "file://localhost/x", "file://me:word@x", "file:///x?word"])
def test_a_file_url_is_that_of_a_whole_path(url: str) -> None:
    """Others would be folders below the one that a command runs in."""
    with pytest.raises(InvalidConfigError, match="file:// stands before a whole path") as raised:
        open_store(url)
    assert "word" not in str(raised.value)


@pytest.mark.parametrize("url", ["s3://", "s3:///", "s3:///folder", "gs://", "hf:///", "file://", "file:///"])
def test_a_url_without_a_bucket_is_no_folder_of_this_machine(url: str) -> None:
    """As where a variable in it is not set."""
    with pytest.raises(InvalidConfigError, match="it names no bucket and no folder"):
        open_store(url)
