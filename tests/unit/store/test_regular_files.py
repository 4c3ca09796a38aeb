"""First bytes of files that may be anything."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm_cache.store.durable import NotRegularError, regular_bytes


@settings(max_examples=50, deadline=None)
@given(content=st.binary(max_size=200), num_bytes=st.integers(0, 250))
def test_so_many_bytes_are_read_from_the_beginning(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, num_bytes: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "regular_bytes"
    file.write_bytes(content)

    assert regular_bytes(file, num_bytes) == content[:num_bytes]


MAKE: dict[str, Callable[[Path], object]] = {
    "pipe without a writer": os.mkfifo,
    "link to a file": lambda path: path.symlink_to(__file__),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", MAKE)
def test_what_is_no_file_of_its_own_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thing"
    MAKE[kind](path)
    with pytest.raises(NotRegularError) as caught:
        regular_bytes(path, 10)
    assert caught.value.filename == str(path)


def test_a_device_has_no_first_bytes() -> None:
    with pytest.raises(NotRegularError):
        regular_bytes(Path("/dev/zero"), 10)


def test_a_link_to_a_regular_file_will_do_where_links_may_be_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")

    assert regular_bytes(tmp_path / "link", 4, follow_links=True) == b"cont"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_a_link_that_may_be_followed_must_still_lead_to_a_file(tmp_path: Path, target: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(NotRegularError):
        regular_bytes(tmp_path / "link", 10, follow_links=True)


@pytest.mark.parametrize("follow_links", [False, True])
def test_a_file_that_is_not_there_is_told_as_the_system_tells_it(tmp_path: Path, follow_links: bool) -> None:
    with pytest.raises(FileNotFoundError):
        regular_bytes(tmp_path / "none", 10, follow_links=follow_links)


def test_reading_anything_leaves_no_descriptor_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - of names only
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError):  # noqa: PT011 - of whatever kind
            regular_bytes(path, 1)

    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_folder_is_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(NotRegularError):
        regular_bytes(tmp_path, 10)
