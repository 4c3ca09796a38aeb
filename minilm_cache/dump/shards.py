"""Write shards: the teacher runs on one segment while the segment before it is written to disk."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from minilm_cache.codecs.base import RelationCodec, Rows
from minilm_cache.codecs.states import StatesCodec
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.dump.claims import Claim, Claims
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.reading import SequenceReader, sequences_at_once
from minilm_cache.errors import InterruptedRunError
from minilm_cache.models.padding import pad
from minilm_cache.progress import Progress, ShouldStop
from minilm_cache.relations.scores import TeacherSignal, mean_row_entropy
from minilm_cache.relations.states import WantedStates
from minilm_cache.storage_schema.arrays import array_specs, token_dtype
from minilm_cache.storage_schema.documents import ShardRange
from minilm_cache.storage_schema.sequences import entropy_column
from minilm_cache.store.durable import ShardLock, refuse_full_disk
from minilm_cache.store.segments import Segments
from minilm_cache.store.shard_writer import ShardWriter
from minilm_cache.store.writer import CacheWriter

_Rows = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """Writes the shards of a cache."""

    config: DumpConfig
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
        progress.start("dump", left, "tokens")
        written = self._write_claimed(claims.own(shards), progress, should_stop=should_stop, left=left)
        return written + self._write_claimed(claims.others(), progress, should_stop=should_stop, left=0)

    def _write_claimed(
        self, claims: Iterator[Claim], progress: Progress, *, should_stop: ShouldStop, left: int
    ) -> int:
        """Write claimed shards, of `left` tokens together, and return how many they are."""
        written = 0
        pending: Future[None] | None = None
        with ThreadPoolExecutor(max_workers=1) as disk:
            for claim in claims:
                files: ShardWriter | None = None
                try:
                    files = self.writer.begin_shard(claim.shard)
                    for encoded in self._encoded(claim.shard, progress, should_stop):
                        if pending is not None:
                            pending.result()
                        pending = disk.submit(files.append, *encoded)
                except BaseException as error:
                    disk.submit(_abandon, files, claim.lock, error)  # after what is still being written
                    raise
                left = max(0, left - self.writer.ranges[claim.shard].num_tokens)
                pending = disk.submit(self._commit, files, appended=pending, lock=claim.lock, left=left)
                written += 1
            if pending is not None:
                pending.result()
        return written

    def _encoded(
        self, shard: int, progress: Progress, should_stop: ShouldStop
    ) -> Iterator[tuple[_Rows, pa.Table]]:
        """Yield the rows and the sequence table of each segment of a shard.

        Raises:
            InterruptedRunError: a stop was requested.
        """
        segments = Segments.of(self.writer.manifest, self.writer.ranges)
        for sequences in filter(len, map(segments.sequences, segments.of_shard(shard))):
            encoded = self._encode(sequences, progress, should_stop)
            if encoded is None:
                raise self._interrupted()
            yield encoded

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
    ) -> tuple[_Rows, pa.Table] | None:
        """Return the rows and the table of sequences of one segment. None means that a stop was requested."""
        manifest = self.writer.manifest
        tokens = self.sequences.read(sequences.start, sequences.stop)
        lengths = np.asarray([len(ids) for ids in tokens.ids])
        starts = np.cumsum(lengths) - lengths
        part = ShardRange(
            first_sequence=sequences.start, num_sequences=len(sequences), num_tokens=int(lengths.sum())
        )
        teacher = self.reader.teacher
        specs = [
            spec
            for spec in array_specs(manifest.identity, manifest.calibration)
            if not self.writer.takes_over(spec)
        ]
        rows: _Rows = {
            spec.path: np.zeros((spec.num_rows(part), *spec.row_shape), dtype=spec.dtype) for spec in specs
        }
        by_sequence = {spec.path for spec in specs if spec.by_sequence}
        rows["tokens"] = np.concatenate(tokens.ids).astype(token_dtype(teacher.identity.vocab_size))
        # Relations that are linked or copied have their entropies in a table that is reused, too.
        kinds = manifest.identity.relations if self.codecs else ()
        entropy = {kind: np.zeros(len(lengths), dtype=np.float32) for kind in kinds}
        # Sequences of the same length share a batch: the least padding, and the same batches in every run.
        by_length = np.argsort(lengths, kind="stable")
        size = sequences_at_once(manifest.identity, self.config.batch_size)
        for chosen in np.split(by_length, range(size, len(lengths), size)):
            if should_stop():
                return None
            batch, batch_lengths = pad(
                [torch.from_numpy(tokens.ids[n]) for n in chosen], teacher.tokenizer.pad_token_id
            )
            on_device = batch_lengths.to(teacher.device)
            numbers = (sequences.start + chosen).tolist()
            signals, encoded = self._encode_batch(batch.to(teacher.device), on_device, numbers)
            for path, values in [item for arrays in encoded for item in arrays.items() if item[0] in rows]:
                if path in by_sequence:
                    rows[path][chosen] = values[:, 0]
                    continue
                for at, n in enumerate(chosen):
                    rows[path][starts[n] : starts[n] + lengths[n]] = values[at, : lengths[n]]
            for kind in kinds:
                probs = signals[0].probs(kind)  # rows of relations are stored for a single layer
                entropy[kind][chosen] = mean_row_entropy(probs, on_device).cpu().numpy()
            progress.advance(int(batch_lengths.sum()))
        ranges = self.writer.ranges
        shard = ranges.shard_of(sequences.start)
        before = self.sequences.tokens_before(int(ranges.first_sequences[shard]))
        first_row = shard * manifest.shard_tokens + self.sequences.tokens_before(sequences.start) - before
        table = {
            "sequence": np.asarray(sequences),
            "offset": first_row + starts,
            "length": lengths,
            "document": tokens.documents,
        }
        return rows, pa.table(table | {entropy_column(kind): entropy[kind] for kind in kinds})

    def _encode_batch(
        self, ids: Tensor, lengths: Tensor, numbers: list[int]
    ) -> tuple[list[TeacherSignal], list[Rows]]:
        """Run the teacher on a batch, and encode its relations and states.

        Args:
            ids: token ids `(batch, length)`, padded, on the teacher's device.
            lengths: tokens of each sequence `(batch,)`, on the same device.
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


def _abandon(files: ShardWriter | None, lock: ShardLock, error: BaseException) -> None:
    """Remove what an attempt at a shard has written, then let others have the shard."""
    if files is not None:
        files.abandon(error)
    # Whoever keeps the error keeps its frames, and would keep the lock with them.
    lock.release()
