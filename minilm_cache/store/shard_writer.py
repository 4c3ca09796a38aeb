"""Write the files of one shard, a segment at a time, so that never more than a segment is in memory."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, wait
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from minilm_cache.storage_schema.arrays import ArraySpec
from minilm_cache.storage_schema.documents import FileDigest
from minilm_cache.store.durable import new_file, remove_partials, storage_errors
from minilm_cache.store.layout import below
from minilm_cache.store.shards import ShardEncoder


class ShardWriter:
    """The files of a shard that is being written. They are in their places after `finish`."""

    def __init__(self, root: Path, shard: int, *, specs: Iterable[ArraySpec], shard_tokens: int) -> None:
        """Begin the files.

        Args:
            root: folder of the cache.
            shard: number of the shard.
            specs: arrays to write, without `tokens`.
            shard_tokens: rows of a shard, slack included.

        Raises:
            StorageError: the file system refused.
        """
        self.shard = shard
        self._root = root
        self._tokens: list[npt.NDArray[np.generic]] = []
        self._tables: list[pa.Table] = []
        self._encoders: dict[str, tuple[str, ShardEncoder]] = {}
        self._files = ExitStack()
        with storage_errors("write", root):
            try:
                for spec in specs:
                    path = spec.shard_path(shard)
                    remove_partials(below(root, path))  # of attempts that were killed
                    file = self._files.enter_context(new_file(below(root, path), durable=False))
                    self._encoders[spec.path] = path, ShardEncoder(file, spec, shard_tokens)
            except BaseException as error:
                self.abandon(error)
                raise

    @property
    def tokens(self) -> npt.NDArray[np.generic]:
        """Token ids that have been appended, `(tokens,)`."""
        return np.concatenate(self._tokens)

    @property
    def table(self) -> pa.Table:
        """Sequence table of what has been appended."""
        return pa.concat_tables(self._tables)

    def append(
        self, rows: Mapping[str, npt.NDArray[np.generic]], table: pa.Table, *, threads: Executor
    ) -> None:
        """Write the next segment.

        Args:
            rows: array path to rows, `(tokens of the segment, ...)`, or one row for each sequence.
            table: sequence table of the segment.
            threads: threads that compress the chunks of all arrays, and write each file in order.

        Raises:
            StorageError: the file system refused.
        """
        with storage_errors("write", self._root):
            written = [
                encoder.append_by(threads, rows[path]) for path, (_, encoder) in self._encoders.items()
            ]
            wait(written)  # also after an error: nothing may write into files that are removed
            for file in written:
                file.result()
        self._tokens.append(rows["tokens"])
        self._tables.append(table)

    def finish(self) -> dict[str, FileDigest]:
        """Put the files in their places, and return what they are by path. They are not flushed to disk.

        Raises:
            StorageError: the file system refused.
        """
        with storage_errors("write", self._root):
            digests = {path: encoder.finish() for path, encoder in self._encoders.values()}
            self._files.close()
        return digests

    def abandon(self, error: BaseException) -> None:
        """Remove the files, because of an error. After `finish` it does nothing."""
        with suppress(OSError):  # what is still to be written of them does not fit on a full disk, either
            self._files.__exit__(type(error), error, error.__traceback__)
