"""Files of a shard while it is written: whole in the end, or gone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BufferedIOBase, BytesIO
from pathlib import Path

import pytest

from minilm_cache.errors import ShardBusyError, StorageError
from minilm_cache.store import shards as module
from minilm_cache.store.layout import commit_path
from minilm_cache.store.writer import CacheWriter
from tests.unit.store.support import begin, files_below, partials, plain_shard, plain_table, write_shard


class FullDisk(BytesIO):
    """A file that takes some bytes and then no more, not even when it is closed."""

    def write(self, content: object) -> int:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.write(b"")


@contextmanager
def full_disk(path: Path, *, durable: bool) -> Iterator[BufferedIOBase]:
    del path, durable
    file = FullDisk()
    try:
        yield file
    finally:
        file.close()


def append(writer: CacheWriter, source: Path) -> module.ShardWriter:
    files = writer.begin_shard(1)
    with ThreadPoolExecutor(2) as threads:
        files.append(plain_shard(source, 1), plain_table(source, 1), threads=threads)
    return files


def test_a_full_disk_is_named_though_closing_fails_too(
    complete: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = begin(complete, tmp_path / "out")
    monkeypatch.setattr(module, "new_file", full_disk)
    with writer.claim(1), pytest.raises(StorageError, match=r"No space left.*Free some space"):
        write_shard(writer, 1, plain_shard(complete, 1), table=plain_table(complete, 1))


def test_what_a_kill_between_segments_has_left_is_removed_by_the_next_attempt(
    complete: Path, tmp_path: Path
) -> None:
    writer = begin(complete, tmp_path / "out")
    with writer.claim(1):
        killed = append(writer, complete)
        left = partials(tmp_path / "out")
        assert left
        files = append(writer, complete)
        assert len(partials(tmp_path / "out")) == len(left)
        writer.commit_shard(files)
    assert not partials(tmp_path / "out")
    killed.abandon(RuntimeError())  # its files are gone


def test_a_shard_that_another_process_committed_meanwhile_is_not_touched(
    complete: Path, tmp_path: Path
) -> None:
    """As if the file system did not honour locks."""
    writer = begin(complete, tmp_path / "out")
    slow = append(writer, complete)
    write_shard(writer, 1, plain_shard(complete, 1), table=plain_table(complete, 1))
    before = files_below(tmp_path / "out")
    with pytest.raises(ShardBusyError, match="appeared while the shard was being written"):
        writer.commit_shard(slow)
    slow.abandon(RuntimeError())

    assert files_below(tmp_path / "out") == before
    assert (tmp_path / "out" / commit_path(1)).is_file()
