"""What a dump has computed on its way to disk: batches arrive in segments, which are appended to shards."""

from collections import deque
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from minilm_cache.codecs.transform import LOST
from minilm_cache.corpus.sequences import TokenBatch
from minilm_cache.dump.claims import Claim
from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.relations.transfer import Arrival
from minilm_cache.storage_schema.arrays import entropy_column
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.states import OTHERS_FOLDER, STATES_FOLDER
from minilm_cache.store.durable import ShardLock, refuse_full_disk
from minilm_cache.store.shards import ShardWriter
from minilm_cache.store.writer import CacheWriter

TOKENS: Final = "tokens"
"""Path of the token ids, which a shard's files keep until they are committed."""
_AS_THEY_ARE: Final = (STATES_FOLDER, OTHERS_FOLDER)
"""Folders of arrays whose numbers, where they are floats, are those that the teacher gave."""


class Room:
    """Memory for the rows of segments, which is used again once they are written.

    The first touch of new memory takes longer than to copy a batch into memory that was used before.
    """

    def __init__(self) -> None:
        """Begin without memory."""
        self._free: dict[str, list[npt.NDArray[np.generic]]] = {}

    def array(self, path: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Return an array for the rows of a path, with whatever it holds."""
        free = self._free.setdefault(path, [])
        used = free.pop() if free else None
        if used is None or len(used) < shape[0]:
            return np.empty(shape, dtype)
        return used[: shape[0]]

    def give_back(self, path: str, rows: npt.NDArray[np.generic]) -> None:
        """Take the rows of a path that are written; nobody may use them any more."""
        whole = rows.base if isinstance(rows.base, np.ndarray) else rows
        self._free.setdefault(path, []).append(whole)


_Places = slice | npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The sequences of a segment, and their rows as they are stored."""

    first_sequence: int
    tokens: TokenBatch
    first_row: int
    """Row of its first token in the arrays of the cache."""
    rows: dict[str, npt.NDArray[np.generic]]
    """Path of each array to its rows."""
    by_sequence: frozenset[str]
    """Paths of the arrays that have a row for each sequence, and not for each token."""
    entropy: dict[RelationKind, npt.NDArray[np.float32]]
    """The teacher's mean row entropy of each sequence, nats."""
    ends_shard: bool
    """Whether it is the last one of its shard."""

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sequence."""
        return np.asarray([len(ids) for ids in self.tokens.ids])

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Row of each sequence's first token, counted from the segment's first row."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def table(self) -> pa.Table:
        """Table of its sequences."""
        columns = {
            "sequence": self.first_sequence + np.arange(len(self.lengths)),
            "offset": self.first_row + self.starts,
            "length": self.lengths,
            "document": self.tokens.documents,
        }
        return pa.table(columns | {entropy_column(kind): values for kind, values in self.entropy.items()})

    def take(self, chosen: npt.NDArray[np.int64], arriving: Arrival) -> None:
        """Wait for a batch's rows, and put them where they belong.

        Args:
            chosen: places of the batch's sequences in the segment.
            arriving: path of each array to the rows of their tokens, one sequence after the other.

        Raises:
            TeacherError: a number that is stored as it is is not finite. It is looked for here, so that no
                device waits.
        """
        arrived = arriving.wait()
        sequences, tokens = self._places(chosen)
        for kind, values in self.entropy.items():
            entropy = arrived.pop(entropy_column(kind))
            if not entropy.isfinite().all():
                raise TeacherError(
                    f"relation {kind} would have NaN. Check the teacher's weights and --precision."
                )
            values[sequences] = entropy.numpy()
        for path, rows in arrived.items():
            if rows.shape[1:] != self.rows[path].shape[1:]:  # numpy would repeat a row of one number
                raise InvalidConfigError(
                    f"{path}: rows of {tuple(rows.shape[1:])} numbers are given, and "
                    f"{self.rows[path].shape[1:]} are declared. Change the signal's `values` or its `width`."
                )
            if rows.dtype == torch.int16 and rows.numel() and int(rows.amin()) == LOST:
                raise TeacherError(
                    f"{path} would have NaN or infinity. Check the teacher's weights and --precision."
                )
            if rows.is_floating_point() and path.startswith(_AS_THEY_ARE) and not rows.isfinite().all():
                raise TeacherError(
                    f"{path} would have NaN, infinity or a number that {rows.dtype} cannot hold. Check the "
                    "teacher's weights. Leave this state out, or let a signal of your own have dtype float32."
                )
            self.rows[path][sequences if path in self.by_sequence else tokens] = rows.numpy()

    def _places(self, chosen: npt.NDArray[np.int64]) -> tuple[_Places, _Places]:
        """Return where the rows of sequences and those of their tokens are.

        Sequences that follow each other, as sequences of one length do, are one piece, which is copied
        several times as fast as single rows.
        """
        first, last = int(chosen[0]), int(chosen[-1])
        lengths = self.lengths[chosen]
        if np.array_equal(chosen, np.arange(first, last + 1)):
            start = int(self.starts[first])
            return slice(first, last + 1), slice(start, start + int(lengths.sum()))
        ends = np.cumsum(lengths)
        return chosen, np.repeat(self.starts[chosen] - ends + lengths, lengths) + np.arange(ends[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences of a segment, and their encoded rows on the way to the CPU."""

    segment: Segment
    chosen: npt.NDArray[np.int64]
    """Places of the sequences in their segment."""
    arriving: Arrival
    ends_segment: bool
    """Whether it is the last one of its segment."""


@dataclass(slots=True)
class _OpenShard:
    """A shard that is being written, and the claim on it."""

    claim: Claim
    files: ShardWriter | None = None
    """Its files. None means that they could not be begun."""


class ShardOutput:
    """Takes batches in order, and commits each shard after its last one.

    A batch waits until the next one is there: a GPU computes that while the rows of the one before are
    taken, also where a segment or a shard ends. Another thread writes a segment while the next one is filled.
    """

    def __init__(
        self, writer: CacheWriter, room: Room, *, rank: int, encoders: Executor, disk: Executor, left: int
    ) -> None:
        """Begin with nothing.

        Args:
            writer: the cache.
            room: where memory of segments goes that are written.
            rank: rank of this process.
            encoders: threads that compress chunks.
            disk: one thread, which writes.
            left: tokens that this rank has to write.
        """
        self._writer = writer
        self._room = room
        self._written: Segment | None = None
        self._rank = rank
        self._encoders = encoders
        self._disk = disk
        self._left = left
        self._open: deque[_OpenShard] = deque()
        self._before: Batch | None = None
        self._pending: Future[None] | None = None
        self.num_shards = 0
        """Shards whose last segment has been given to the thread that writes."""

    def begin(self, claim: Claim) -> None:
        """Begin a shard. Batches of the shard before may still be on their way.

        Raises:
            StorageError: the file system refused.
            ShardBusyError: the shard is committed already.
        """
        shard = _OpenShard(claim)
        self._open.append(shard)
        shard.files = self._writer.begin_shard(claim.shard)

    def put(self, batch: Batch | None) -> None:
        """Take the batch before this one. None means that none follows for now.

        Raises:
            StorageError: the file system refused to write what came before.
        """
        before, self._before = self._before, None  # if it fails, `abandon` must not go on after it
        if before is not None:
            segment, ends_segment = before.segment, before.ends_segment
            segment.take(before.chosen, before.arriving)
            del before  # and the memory of its rows, which may be a whole segment's
            if ends_segment:
                self._append(segment)
        self._before = batch

    def wait(self) -> None:
        """Wait until everything that was given to the thread that writes is written."""
        if self._pending is not None:
            self._pending.result()

    def abandon(self, error: BaseException) -> None:
        """Commit a shard whose last batch has been computed; give up those that are incomplete."""
        before = self._before
        try:
            if before is not None and before.ends_segment and before.segment.ends_shard:
                del before
                with suppress(Exception):  # `error` came first
                    self.put(None)
        finally:
            for shard in self._open:
                # After what is being written.
                self._disk.submit(_abandon, shard.files, shard.claim.lock, error)

    def _append(self, segment: Segment) -> None:
        shard = self._open[0]
        assert shard.files is not None
        self.wait()  # whole segments in memory: this one and the next, which a GPU may have computed
        if self._written is not None:
            for path in self._written.rows.keys() - {TOKENS}:
                self._room.give_back(path, self._written.rows[path])
        self._written = segment
        self._pending = self._disk.submit(
            shard.files.append, segment.rows, segment.table, threads=self._encoders
        )
        if segment.ends_shard:
            self._open.popleft()
            self._left = max(0, self._left - self._writer.ranges[shard.claim.shard].num_tokens)
            self._pending = self._disk.submit(
                self._commit, shard.files, appended=self._pending, lock=shard.claim.lock, left=self._left
            )
            self.num_shards += 1

    def _commit(self, files: ShardWriter, *, appended: Future[None], lock: ShardLock, left: int) -> None:
        """Commit a shard, and check that the disk has room for `left` tokens more.

        Args:
            files: the shard.
            appended: result of writing its last segment; an error of it is raised here.
            lock: lock on the shard, which is released.
            left: tokens that this rank has still to write.
        """
        try:
            appended.result()
            written = self._writer.commit_shard(files, self._rank)
        except BaseException as error:
            _abandon(files, lock, error)
            raise
        lock.release()
        # Shards of other ranks are not counted: they may have disks of their own.
        expected = round(written / self._writer.ranges[files.shard].num_tokens * left)
        refuse_full_disk(self._writer.root, expected, "dump the shards that are left into")


def _abandon(files: ShardWriter | None, lock: ShardLock, error: BaseException) -> None:
    """Remove what an attempt at a shard has written, then let others have the shard."""
    if files is not None:
        files.abandon(error)
    # Whoever keeps the error keeps its frames, and would keep the lock with them.
    lock.release()
