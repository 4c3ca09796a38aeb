"""Write shards: the teacher runs on one while the one before is written to disk."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from filelock import FileLock

from minilm_cache.codecs.base import RelationCodec
from minilm_cache.codecs.states import StatesCodec
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.reading import SequenceReader, sequences_at_once
from minilm_cache.errors import InterruptedRunError
from minilm_cache.models.padding import pad
from minilm_cache.progress import Progress, ShouldStop
from minilm_cache.relations.scores import mean_row_entropy
from minilm_cache.relations.states import WantedStates
from minilm_cache.storage_schema.arrays import array_specs, token_dtype
from minilm_cache.storage_schema.sequences import entropy_column
from minilm_cache.store.writer import CacheWriter

_Rows = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """What it takes to write a shard."""

    config: DumpConfig
    reader: SequenceReader
    codecs: Mapping[int, RelationCodec]
    """By the layers whose relations are written."""
    states: StatesCodec | None
    wanted: WantedStates
    """What is written beside relations."""
    sequences: SequenceTable
    writer: CacheWriter

    def write(self, shards: list[int], progress: Progress, should_stop: ShouldStop) -> None:
        """Write shards; while one is written to disk, the teacher runs on the next."""
        ranges = self.writer.manifest.shards
        progress.start("dump", sum(ranges[n].num_tokens for n in shards), "tokens")
        pending: Future[None] | None = None
        with ThreadPoolExecutor(max_workers=1) as disk:
            for shard in shards:
                lock = self.writer.claim(shard)
                if self.writer.is_committed(shard):  # by another process, since this one looked
                    lock.release()
                    continue
                try:
                    encoded = self._encode(shard, progress, should_stop)
                    if pending is not None:
                        pending.result()
                except BaseException:
                    lock.release()  # whoever keeps the error keeps this frame, and the lock with it
                    raise
                if encoded is None:
                    lock.release()
                    raise self._interrupted()
                rows, table = encoded
                pending = disk.submit(self._write, shard, rows, table=table, lock=lock)
            if pending is not None:
                pending.result()

    def _write(self, shard: int, rows: _Rows, *, table: pa.Table, lock: FileLock) -> None:
        try:
            self.writer.write_shard(shard, rows, table=table, rank=self.config.rank)
        finally:
            lock.release()

    def _interrupted(self) -> InterruptedRunError:
        total = len(self.writer.manifest.shards)
        return InterruptedRunError(
            f"interrupted: {total - len(self.writer.missing_shards())} of {total} shards of "
            f"{self.writer.root} are committed. Run the same command again to go on."
        )

    def _encode(
        self, shard: int, progress: Progress, should_stop: ShouldStop
    ) -> tuple[_Rows, pa.Table] | None:
        """Return a shard's rows and sequence table; none when asked to stop."""
        manifest = self.writer.manifest
        part = manifest.shards[shard]
        tokens = self.sequences.read(part.first_sequence, part.first_sequence + part.num_sequences)
        lengths = np.asarray([len(ids) for ids in tokens.ids])
        starts = np.cumsum(lengths) - lengths
        teacher = self.reader.teacher
        rows: _Rows = {
            spec.path: np.zeros((part.num_tokens, *spec.row_shape), dtype=spec.dtype)
            for spec in array_specs(manifest.identity, manifest.calibration)
            if not self.writer.takes_over(spec)
        }
        rows["tokens"] = np.concatenate(tokens.ids).astype(token_dtype(teacher.identity.vocab_size))
        # Those that are taken over have their entropies in a table that is taken over, too.
        kinds = manifest.identity.relations if self.codecs else ()
        entropy = {kind: np.zeros(len(lengths), dtype=np.float32) for kind in kinds}
        # Sequences of one length share a batch: the least padding, and the same batches in every run.
        by_length = np.argsort(lengths, kind="stable")
        size = sequences_at_once(manifest.identity, self.config.batch_size)
        for chosen in np.split(by_length, range(size, len(lengths), size)):
            if should_stop():
                return None
            batch, batch_lengths = pad(
                [torch.from_numpy(tokens.ids[n]) for n in chosen], teacher.tokenizer.pad_token_id
            )
            on_device = batch_lengths.to(teacher.device)
            numbers = (part.first_sequence + chosen).tolist()
            signals, states = self.reader.read(
                batch.to(teacher.device),
                on_device,
                numbers=numbers,
                layers=tuple(self.codecs),
                wanted=self.wanted,
            )
            encoded = [
                codec.encode(signal, numbers, lengths=on_device)
                for codec, signal in zip(self.codecs.values(), signals, strict=True)
            ]
            if self.states is not None:
                encoded.append(self.states.encode(states, numbers, lengths=on_device))
                more = self.wanted.of_masked_reading()
                for reading in range(1, self.states.parameters.num_readings if more else 1):
                    _, states = self.reader.read(
                        batch.to(teacher.device),
                        on_device,
                        numbers=numbers,
                        layers=(),
                        wanted=more,
                        reading=reading,
                    )
                    encoded.append(self.states.encode(states, numbers, lengths=on_device))
            for path, values in [item for found in encoded for item in found.items() if item[0] in rows]:
                for at, n in enumerate(chosen):
                    rows[path][starts[n] : starts[n] + lengths[n]] = values[at, : lengths[n]]
            for kind in kinds:
                probs = signals[0].probs(kind)  # relations are stored of one layer
                entropy[kind][chosen] = mean_row_entropy(probs, on_device).cpu().numpy()
            progress.advance(int(batch_lengths.sum()))
        table = {
            "sequence": np.arange(part.first_sequence, part.first_sequence + part.num_sequences),
            "offset": shard * manifest.shard_tokens + starts,
            "length": lengths,
            "document": tokens.documents,
        }
        return rows, pa.table(table | {entropy_column(kind): entropy[kind] for kind in kinds})
