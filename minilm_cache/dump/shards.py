"""Write shards: the teacher runs on one segment while the segment before it is written to disk."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minilm_cache.codecs.base import RelationCodec, Rows
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.dump.claims import Claim, Claims
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.reading import SequenceReader, sequences_at_once
from minilm_cache.dump.shard_output import TOKENS, Batch, Room, Segment, ShardOutput
from minilm_cache.errors import InterruptedRunError
from minilm_cache.models.inputs import Inputs
from minilm_cache.relations.scores import LayerRelations, mean_row_entropy
from minilm_cache.relations.signals import places_of
from minilm_cache.relations.transfer import Arrival, send
from minilm_cache.session import Session
from minilm_cache.signals.codec import SignalsCodec
from minilm_cache.signals.table import masked_part
from minilm_cache.storage_schema.arrays import array_specs, entropy_column, token_dtype
from minilm_cache.storage_schema.documents import ShardRange
from minilm_cache.storage_schema.states import SignalName
from minilm_cache.store.durable import own_cores
from minilm_cache.store.ranges import Segments
from minilm_cache.store.writer import CacheWriter

COMPILE: Final = "compile the teacher"
"""Task of a dump that compiles its teacher."""


class _StopRequestedError(Exception):
    """A stop was requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """Writes the shards of a cache."""

    config: DumpConfig
    batch_size: int
    """Sequences per forward pass of the teacher."""
    reader: SequenceReader
    codecs: Mapping[int, RelationCodec]
    """Codecs by the layers whose relations are written."""
    states: SignalsCodec | None
    """Codec of the states. None means that only relations are written."""
    wanted: tuple[SignalName, ...]
    """Signals that are written in addition to relations."""
    sequences: SequenceTable
    writer: CacheWriter
    room: Room = field(default_factory=Room)
    """Memory of segments."""

    def write(self, shards: list[int], session: Session) -> int:
        """Write this rank's shards, then those that other ranks have left, and return how many it wrote.

        While a segment is written to disk, the teacher runs on the next one.
        """
        claims = Claims(writer=self.writer, config=self.config, session=session)
        left = int(self.writer.ranges.num_tokens[shards].sum())
        claims.announce()
        if self.config.compiled and shards:
            self._compile(shards[0], session)
        session.progress.start("dump", left, "tokens")
        try:
            # Claims on shards in a store take requests, and the next claim on others' shards waits until this
            # rank's last one is committed.
            own = self._write_claimed(
                claims.own(shards), session, left=left, ends_shards=self.writer.is_remote
            )
            return own + self._write_claimed(claims.others(), session, left=0, ends_shards=True)
        except _StopRequestedError:
            raise self._interrupted() from None

    def _compile(self, shard: int, session: Session) -> None:
        """Encode the first and the last batch of a shard's first segment, and discard their rows.

        The teacher is compiled for both, so that the speed of the dump is not that of the compiler.
        """
        segment = self._begin(next(self._segments(shard)), ends_shard=False)
        batches = self._batches(segment.lengths)
        ends = batches[:1] + batches[1:][-1:]
        session.progress.start(COMPILE, len(ends), "batches")
        for chosen in ends:
            if session.should_stop():
                raise self._interrupted()
            self._encode_batch(segment, chosen).wait()
            session.progress.advance(1)

    def _write_claimed(
        self, claims: Iterable[Claim], session: Session, *, left: int, ends_shards: bool = False
    ) -> int:
        """Write claimed shards, of `left` tokens together, and return how many they are.

        Args:
            claims: claims on the shards.
            session: its progress shows their tokens. Its `should_stop` is asked before each batch.
            left: tokens that the disk must have room for.
            ends_shards: whether a shard is written to its end before the next one is claimed, instead of
                while the teacher runs on that.

        Raises:
            _StopRequestedError: a stop was requested.
        """
        with ThreadPoolExecutor(own_cores()) as encoders, ThreadPoolExecutor(max_workers=1) as disk:
            output = ShardOutput(
                self.writer, self.room, rank=self.config.rank, encoders=encoders, disk=disk, left=left
            )
            try:
                for claim in claims:
                    output.begin(claim)
                    for batch in self._encoded(claim.shard, session):
                        output.put(batch)
                        session.progress.advance(int(batch.segment.lengths[batch.chosen].sum()))
                    if ends_shards:
                        output.put(None)
                output.put(None)
                output.wait()
            except BaseException as error:
                output.abandon(error)
                raise
        return output.num_shards

    def _encoded(self, shard: int, session: Session) -> Iterator[Batch]:
        """Yield the batches of a shard, which the device may still be computing.

        Raises:
            _StopRequestedError: a stop was requested.
        """
        segments = list(self._segments(shard))
        for sequences in segments:
            segment = self._begin(sequences, ends_shard=sequences == segments[-1])
            batches = self._batches(segment.lengths)
            for number, chosen in enumerate(batches, 1):
                if session.should_stop():
                    raise _StopRequestedError
                yield Batch(
                    segment=segment,
                    chosen=chosen,
                    arriving=self._encode_batch(segment, chosen),
                    ends_segment=number == len(batches),
                )

    def _interrupted(self) -> InterruptedRunError:
        total = len(self.writer.ranges)
        return InterruptedRunError(
            f"interrupted: {total - len(self.writer.missing_shards())} of {total} shards of "
            f"{self.writer.root} are committed. Run the same command again to go on."
        )

    def _segments(self, shard: int) -> Iterator[range]:
        """Yield the numbers of the sequences of each segment of a shard."""
        segments = Segments.of(self.writer.manifest, self.writer.ranges)
        yield from filter(len, map(segments.sequences, segments.of_shard(shard)))

    def _batches(self, lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Return places in a segment, batch by batch: its shortest sequences come first.

        Sequences of the same length share a batch: the least padding, and the same batches in every run
        with this batch size.
        """
        fitting = sequences_at_once(self.writer.manifest.identity, self.batch_size)
        size = self.reader.teacher.at_once(fitting)
        return np.split(np.argsort(lengths, kind="stable"), range(size, len(lengths), size))

    def _begin(self, sequences: range, *, ends_shard: bool) -> Segment:
        """Return a segment whose rows are still to be encoded, except for its tokens."""
        manifest = self.writer.manifest
        tokens = self.sequences.read(sequences.start, sequences.stop)
        ranges = self.writer.ranges
        shard = ranges.shard_of(sequences.start)
        before = self.sequences.tokens_before(int(ranges.first_sequences[shard]))
        num_tokens = sum(map(len, tokens.ids))
        part = ShardRange(first_sequence=sequences.start, num_sequences=len(sequences), num_tokens=num_tokens)
        specs = [
            spec
            for spec in array_specs(manifest.identity, manifest.calibration)
            if not self.writer.takes_over(spec)
        ]
        rows: dict[str, npt.NDArray[np.generic]] = {
            spec.path: self.room.array(spec.path, (spec.num_rows(part), *spec.row_shape), spec.dtype)
            for spec in specs
            if spec.path != TOKENS
        }
        rows[TOKENS] = np.concatenate(tokens.ids).astype(token_dtype(manifest.identity.teacher.vocab_size))
        # Relations that are linked or copied have their entropies in a table that is reused, too.
        kinds = manifest.identity.relations if self.codecs else ()
        return Segment(
            first_sequence=sequences.start,
            tokens=tokens,
            first_row=shard * manifest.shard_tokens + self.sequences.tokens_before(sequences.start) - before,
            rows=rows,
            by_sequence=frozenset(spec.path for spec in specs if spec.by_sequence),
            entropy={kind: np.zeros(len(sequences), dtype=np.float32) for kind in kinds},
            ends_shard=ends_shard,
        )

    def _encode_batch(self, segment: Segment, chosen: npt.NDArray[np.int64]) -> Arrival:
        """Run the teacher on sequences of a segment, and begin to copy their encoded rows to the CPU."""
        teacher = self.reader.teacher
        rows = [torch.from_numpy(segment.tokens.ids[at]) for at in chosen]
        inputs = Inputs.of(rows, teacher.tokenizer.pad_token_id).paired(self.sequences.packing.pair)
        numbers = (segment.first_sequence + chosen).tolist()
        signals, encoded = self._read_and_encode(inputs, numbers)
        places = None if inputs.is_full else send(places_of(inputs.valid), teacher.device)
        wanted = {
            path: values[:, 0] if path in segment.by_sequence else _valid_rows(values, places)
            for arrays in encoded
            for path, values in arrays.items()
            if path in segment.rows
        }
        for kind in segment.entropy:  # rows of relations are stored for a single layer
            wanted[entropy_column(kind)] = mean_row_entropy(signals[0].probs(kind), signals[0].lengths)
        return Arrival(wanted)

    def _read_and_encode(self, inputs: Inputs, numbers: list[int]) -> tuple[list[LayerRelations], list[Rows]]:
        """Run the teacher on sequences, which are given on the CPU, and encode its relations and states.

        What is drawn depends on `numbers`, the sequences' numbers in the cache.

        Returns:
            Signals of the layers whose relations are written, and the rows of each codec and masked reading.
        """
        lengths = inputs.lengths
        signals, states = self.reader.read(
            inputs, numbers=numbers, layers=tuple(self.codecs), wanted=self.wanted
        )
        encoded = [
            codec.encode(signal, numbers, lengths=lengths)
            for codec, signal in zip(self.codecs.values(), signals, strict=True)
        ]
        if self.states is not None:
            encoded.append(self.states.encode(states, numbers, lengths=lengths))
            masked = masked_part(self.wanted)
            for reading in range(1, self.states.parameters.num_readings if masked else 1):
                _, states = self.reader.read(
                    inputs, numbers=numbers, layers=(), wanted=masked, reading=reading
                )
                encoded.append(self.states.encode(states, numbers, lengths=lengths))
        return signals, encoded


def _valid_rows(values: Tensor, places: Tensor | None) -> Tensor:
    """Return the rows of all tokens, `(batch, length, ...)` to `(tokens, ...)`; None means no padding."""
    flat = values.flatten(0, 1)
    return flat if places is None else flat.index_select(0, places)
