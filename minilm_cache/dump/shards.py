"""Write shards: the teacher runs on one segment while the segment before it is written to disk."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from minilm_cache.codecs.base import RelationCodec, Rows
from minilm_cache.codecs.states import StatesCodec
from minilm_cache.corpus.sequences import SequenceTable, TokenBatch
from minilm_cache.dump.claims import Claim, Claims
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.reading import SequenceReader, sequences_at_once
from minilm_cache.errors import InterruptedRunError
from minilm_cache.models.padding import pad
from minilm_cache.progress import Progress, ShouldStop
from minilm_cache.relations.scores import TeacherSignal, key_mask, mean_row_entropy
from minilm_cache.relations.states import WantedStates, places_of
from minilm_cache.relations.transfer import Arrival, send
from minilm_cache.storage_schema.arrays import array_specs, token_dtype
from minilm_cache.storage_schema.documents import ShardRange
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.sequences import entropy_column
from minilm_cache.store.cores import own_cores
from minilm_cache.store.durable import ShardLock, refuse_full_disk
from minilm_cache.store.segments import Segments
from minilm_cache.store.shard_writer import ShardWriter
from minilm_cache.store.writer import CacheWriter

COMPILE: Final = "compile the teacher"
"""Task of a dump that compiles its teacher."""
_Rows = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """Writes the shards of a cache."""

    config: DumpConfig
    batch_size: int
    """Sequences per forward pass of the teacher."""
    reader: SequenceReader
    codecs: Mapping[int, RelationCodec]
    """Codecs by the layers whose relations are written."""
    states: StatesCodec | None
    """Codec of the states. None means that only relations are written."""
    wanted: WantedStates
    """States that are written in addition to relations."""
    sequences: SequenceTable
    writer: CacheWriter

    def write(self, shards: list[int], progress: Progress, should_stop: ShouldStop) -> int:
        """Write this rank's shards, then those that other ranks have left, and return how many it wrote.

        While a segment is written to disk, the teacher runs on the next one.
        """
        claims = Claims(writer=self.writer, config=self.config, progress=progress, should_stop=should_stop)
        left = int(self.writer.ranges.num_tokens[shards].sum())
        claims.announce()
        if self.config.compiled and shards:
            self._compile(shards[0], progress, should_stop)
        progress.start("dump", left, "tokens")
        written = self._write_claimed(claims.own(shards), progress, should_stop=should_stop, left=left)
        return written + self._write_claimed(claims.others(), progress, should_stop=should_stop, left=0)

    def _compile(self, shard: int, progress: Progress, should_stop: ShouldStop) -> None:
        """Encode the first and the last batch of a shard's first segment, and discard their rows.

        The teacher is compiled for both, so that the speed of the dump is not that of the compiler.
        """
        segment = self._begin(next(self._segments(shard)))
        batches = self._batches(segment.lengths)
        ends = batches[:1] + batches[1:][-1:]
        progress.start(COMPILE, len(ends), "batches")
        for chosen in ends:
            if should_stop():
                raise self._interrupted()
            self._encode_batch(segment, chosen).rows.wait()
            progress.advance(1)

    def _write_claimed(
        self, claims: Iterator[Claim], progress: Progress, *, should_stop: ShouldStop, left: int
    ) -> int:
        """Write claimed shards, of `left` tokens together, and return how many they are."""
        written = 0
        pending: Future[None] | None = None
        with ThreadPoolExecutor(own_cores()) as encoders, ThreadPoolExecutor(max_workers=1) as disk:
            for claim in claims:
                files: ShardWriter | None = None
                try:
                    files = self.writer.begin_shard(claim.shard)
                    for sequences in self._segments(claim.shard):
                        encoded = self._encode(sequences, progress, should_stop)
                        if pending is not None:
                            pending.result()
                        pending = disk.submit(files.append, *encoded, threads=encoders)
                except BaseException as error:
                    disk.submit(_abandon, files, claim.lock, error)  # after what is still being written
                    raise
                left = max(0, left - self.writer.ranges[claim.shard].num_tokens)
                pending = disk.submit(self._commit, files, appended=pending, lock=claim.lock, left=left)
                written += 1
            if pending is not None:
                pending.result()
        return written

    def _commit(
        self, files: ShardWriter, *, appended: Future[None] | None, lock: ShardLock, left: int
    ) -> None:
        """Commit a shard, and check that the disk has room for `left` tokens more.

        Args:
            files: the shard.
            appended: result of writing its last segment; an error of it is raised here.
            lock: lock on the shard, which is released.
            left: tokens that this rank has still to write.
        """
        try:
            if appended is not None:
                appended.result()
            written = self.writer.commit_shard(files, self.config.rank)
        except BaseException as error:
            _abandon(files, lock, error)
            raise
        lock.release()
        # Shards of other ranks are not counted: they may have disks of their own.
        expected = round(written / self.writer.ranges[files.shard].num_tokens * left)
        refuse_full_disk(self.writer.root, expected, "dump the shards that are left into")

    def _interrupted(self) -> InterruptedRunError:
        total = len(self.writer.ranges)
        return InterruptedRunError(
            f"interrupted: {total - len(self.writer.missing_shards())} of {total} shards of "
            f"{self.writer.root} are committed. Run the same command again to go on."
        )

    def _encode(
        self, sequences: range, progress: Progress, should_stop: ShouldStop
    ) -> tuple[_Rows, pa.Table]:
        """Return the rows and the table of sequences of one segment.

        Raises:
            InterruptedRunError: a stop was requested.
        """
        segment = self._begin(sequences)
        before: _Batch | None = None
        for chosen in self._batches(segment.lengths):
            if should_stop():
                raise self._interrupted()
            batch = self._encode_batch(segment, chosen)
            if before is not None:
                segment.take(before)  # while a GPU computes the batch after it
            before = batch
            progress.advance(int(segment.lengths[chosen].sum()))
        if before is not None:
            segment.take(before)
        return segment.rows, self._table(sequences, segment)

    def _segments(self, shard: int) -> Iterator[range]:
        """Yield the numbers of the sequences of each segment of a shard."""
        segments = Segments.of(self.writer.manifest, self.writer.ranges)
        yield from filter(len, map(segments.sequences, segments.of_shard(shard)))

    def _batches(self, lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Return places in a segment, batch by batch: its shortest sequences come first.

        Sequences of the same length share a batch: the least padding, and the same batches in every run
        with this batch size.
        """
        size = sequences_at_once(self.writer.manifest.identity, self.batch_size)
        return np.split(np.argsort(lengths, kind="stable"), range(size, len(lengths), size))

    def _begin(self, sequences: range) -> "_Segment":
        """Return a segment whose rows are still to be encoded, except for its tokens."""
        manifest = self.writer.manifest
        tokens = self.sequences.read(sequences.start, sequences.stop)
        lengths = np.asarray([len(ids) for ids in tokens.ids])
        part = ShardRange(
            first_sequence=sequences.start, num_sequences=len(sequences), num_tokens=int(lengths.sum())
        )
        specs = [
            spec
            for spec in array_specs(manifest.identity, manifest.calibration)
            if not self.writer.takes_over(spec)
        ]
        rows: _Rows = {
            spec.path: np.zeros((spec.num_rows(part), *spec.row_shape), dtype=spec.dtype) for spec in specs
        }
        rows["tokens"] = np.concatenate(tokens.ids).astype(token_dtype(manifest.identity.teacher.vocab_size))
        # Relations that are linked or copied have their entropies in a table that is reused, too.
        kinds = manifest.identity.relations if self.codecs else ()
        return _Segment(
            first_sequence=sequences.start,
            tokens=tokens,
            lengths=lengths,
            starts=np.cumsum(lengths) - lengths,
            rows=rows,
            by_sequence=frozenset(spec.path for spec in specs if spec.by_sequence),
            entropy={kind: np.zeros(len(lengths), dtype=np.float32) for kind in kinds},
        )

    def _table(self, sequences: range, segment: "_Segment") -> pa.Table:
        """Return the table of a segment's sequences."""
        ranges = self.writer.ranges
        shard = ranges.shard_of(sequences.start)
        before = self.sequences.tokens_before(int(ranges.first_sequences[shard]))
        shard_tokens = self.writer.manifest.shard_tokens
        first_row = shard * shard_tokens + self.sequences.tokens_before(sequences.start) - before
        table = {
            "sequence": np.asarray(sequences),
            "offset": first_row + segment.starts,
            "length": segment.lengths,
            "document": segment.tokens.documents,
        }
        return pa.table(table | {entropy_column(kind): values for kind, values in segment.entropy.items()})

    def _encode_batch(self, segment: "_Segment", chosen: npt.NDArray[np.int64]) -> "_Batch":
        """Run the teacher on sequences of a segment, and begin to copy their encoded rows to the CPU."""
        teacher = self.reader.teacher
        rows = [torch.from_numpy(segment.tokens.ids[at]) for at in chosen]
        ids, lengths = pad(rows, teacher.tokenizer.pad_token_id)
        numbers = (segment.first_sequence + chosen).tolist()
        signals, encoded = self._read_and_encode(ids, lengths, numbers)
        valid = key_mask(lengths, ids.shape[1])
        places = None if bool(valid.all()) else send(places_of(valid), teacher.device)
        wanted = {
            path: values[:, 0] if path in segment.by_sequence else _valid_rows(values, places)
            for arrays in encoded
            for path, values in arrays.items()
            if path in segment.rows
        }
        for kind in segment.entropy:  # rows of relations are stored for a single layer
            wanted[entropy_column(kind)] = mean_row_entropy(signals[0].probs(kind), signals[0].lengths)
        return _Batch(chosen=chosen, rows=Arrival(wanted))

    def _read_and_encode(
        self, ids: Tensor, lengths: Tensor, numbers: list[int]
    ) -> tuple[list[TeacherSignal], list[Rows]]:
        """Run the teacher on a batch, and encode its relations and states.

        Args:
            ids: token ids `(batch, length)`, padded, on the CPU.
            lengths: tokens of each sequence `(batch,)`, on the CPU.
            numbers: numbers of the sequences in the cache.

        Returns:
            Signals of the layers whose relations are written, and the rows of each codec and masked reading.
        """
        signals, states = self.reader.read(
            ids, lengths, numbers=numbers, layers=tuple(self.codecs), wanted=self.wanted
        )
        encoded = [
            codec.encode(signal, numbers, lengths=lengths)
            for codec, signal in zip(self.codecs.values(), signals, strict=True)
        ]
        if self.states is not None:
            encoded.append(self.states.encode(states, numbers, lengths=lengths))
            masked = self.wanted.of_masked_reading()
            for reading in range(1, self.states.parameters.num_readings if masked else 1):
                _, states = self.reader.read(
                    ids, lengths, numbers=numbers, layers=(), wanted=masked, reading=reading
                )
                encoded.append(self.states.encode(states, numbers, lengths=lengths))
        return signals, encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Sequences of a segment, and their encoded rows on the way to the CPU."""

    chosen: npt.NDArray[np.int64]
    """Places of the sequences in their segment."""
    rows: Arrival
    """Path of each array to the rows of the sequences' tokens, one sequence after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """The sequences of a segment, and their rows as they are stored."""

    first_sequence: int
    tokens: TokenBatch
    lengths: npt.NDArray[np.int64]
    """Tokens of each sequence."""
    starts: npt.NDArray[np.int64]
    """Row of each sequence's first token."""
    rows: _Rows
    """Path of each array to its rows."""
    by_sequence: frozenset[str]
    """Paths of the arrays that have a row for each sequence, and not for each token."""
    entropy: dict[RelationKind, npt.NDArray[np.float32]]
    """The teacher's mean row entropy of each sequence, nats."""

    def take(self, batch: _Batch) -> None:
        """Wait for a batch's rows, and put them where they belong."""
        arrived = batch.rows.wait()
        lengths = self.lengths[batch.chosen]
        ends = np.cumsum(lengths)
        places = np.repeat(self.starts[batch.chosen] - ends + lengths, lengths) + np.arange(ends[-1])
        for kind, values in self.entropy.items():
            values[batch.chosen] = arrived.pop(entropy_column(kind)).numpy()
        for path, rows in arrived.items():
            self.rows[path][batch.chosen if path in self.by_sequence else places] = rows.numpy()


def _valid_rows(values: Tensor, places: Tensor | None) -> Tensor:
    """Return the rows of all tokens, `(batch, length, ...)` to `(tokens, ...)`; None means no padding."""
    flat = values.flatten(0, 1)
    return flat if places is None else flat.index_select(0, places)


def _abandon(files: ShardWriter | None, lock: ShardLock, error: BaseException) -> None:
    """Remove what an attempt at a shard has written, then let others have the shard."""
    if files is not None:
        files.abandon(error)
    # Whoever keeps the error keeps its frames, and would keep the lock with them.
    lock.release()
