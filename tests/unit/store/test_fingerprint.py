"""Hashes, against hashlib and xxhash used plainly."""

import hashlib
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm_cache.store.checked import digest_bytes, sha256_file, sha256_files, sha256_texts


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300))
def test_a_digest_is_the_size_and_both_hashes(content: bytes) -> None:
    digest = digest_bytes(content)

    assert digest.size == len(content)
    assert digest.sha256 == hashlib.sha256(content).hexdigest()
    assert digest.xxh3_128 == xxhash.xxh3_128(content).hexdigest()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=20), max_size=10))
def test_texts_are_hashed_with_their_lengths(texts: list[str]) -> None:
    framed = b"".join(len(text.encode()).to_bytes(8, "little") + text.encode() for text in texts)

    assert sha256_texts(iter(texts)) == hashlib.sha256(framed).hexdigest()


@settings(max_examples=50, deadline=None)
@given(st.text(min_size=1, max_size=20), st.data())
def test_where_a_text_is_cut_counts(text: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text)))

    assert sha256_texts([text[:cut], text[cut:]]) != sha256_texts([text])


def test_a_large_file_is_hashed_whole(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4096 + b"end"
    (tmp_path / "file").write_bytes(content)

    assert sha256_file(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_one_file_has_its_own_digest(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")

    assert sha256_files([tmp_path / "file"]) == hashlib.sha256(b"content").hexdigest()


@settings(max_examples=50, deadline=None)
@given(
    contents=st.dictionaries(st.text("abc", min_size=1, max_size=4), st.binary(max_size=8), min_size=2),
    chance=st.randoms(use_true_random=False),
)
def test_several_files_are_hashed_as_sha256sum_lists_them(
    tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes], chance: object
) -> None:
    folder = tmp_path_factory.mktemp("files")
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    listed = "".join(f"{hashlib.sha256(contents[n]).hexdigest()}  {n}\n" for n in sorted(contents))
    paths = [folder / name for name in contents]

    assert sha256_files(paths) == sha256_files(reversed(paths)) == hashlib.sha256(listed.encode()).hexdigest()


def test_the_folder_of_files_does_not_count_and_their_names_do(tmp_path: Path) -> None:
    for folder, names in {"here": "ab", "there": "ab", "renamed": "ac"}.items():
        (tmp_path / folder).mkdir()
        for name, content in zip(names, (b"1", b"2"), strict=True):
            (tmp_path / folder / name).write_bytes(content)
    here, there, renamed = (
        sha256_files((tmp_path / name).iterdir()) for name in ("here", "there", "renamed")
    )

    assert here == there != renamed
