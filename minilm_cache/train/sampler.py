"""The order of training sequences, a pure function of seed and epoch.

Shards are shuffled, and so are the segments of each; they are taken a buffer at a time, and within a buffer
sequences are shuffled across its segments. The segments of a shard follow each other, so that its files are
fetched and read from disk once an epoch. A training reads one endless stream of sequences, epoch after epoch,
so the step gives the position in it; or several streams, which processes divide among themselves. Each
epoch's shards are shuffled once for all streams, and their sequences are dealt to the streams in equal spans,
so every stream is in the same epoch, and the numbers of times that two training sequences have been seen
differ by one at most.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from minilm_cache.errors import InvalidConfigError
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store.ranges import Segments
from minilm_cache.train.config import Batches, TrainConfig, check_batch, check_parts

_POOL_BATCHES = 32
"""Batches whose sequences are sorted by length together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Sequences that are in memory together."""

    segments: tuple[int, ...]
    """Numbers of the segments of shards."""
    sequences: npt.NDArray[np.int64]
    """Numbers of the sequences to take from these segments, in order."""
    epoch: int
    """Pass over the cache, counted from 0; it decides which masked reading of a sequence is used."""
    skipped: int = 0
    """Sequences at the beginning that a resumed run has taken."""

    def in_order(self, lengths: npt.NDArray[np.int64], batch_size: int, *, head: int) -> "Buffer":
        """Return the buffer with sequences of about the same length next to each other, batch by batch.

        Sequences are sorted by length within a few batches at a time, and these batches are shuffled, so
        texts of all lengths come in any order. It is a pure function of the buffer.

        Args:
            lengths: tokens of each of `sequences`, `(sequences,)`.
            batch_size: sequences of a batch.
            head: sequences at the beginning that complete the batch of the buffer before.
        """
        head = min(head, len(self.sequences))
        pools = [
            head + pool[np.argsort(lengths[head:][pool], kind="stable")]
            for pool in np.split(
                np.arange(len(self.sequences) - head),
                range(_POOL_BATCHES * batch_size, len(self.sequences) - head, _POOL_BATCHES * batch_size),
            )
        ]
        ordered = np.concatenate([np.arange(head), *pools])
        last = head + (len(ordered) - head) // batch_size * batch_size
        batches = ordered[head:last].reshape(-1, batch_size)
        shuffled = batches[
            np.random.default_rng([self.epoch, int(self.sequences[0])]).permutation(len(batches))
        ]
        ordered[head:last] = shuffled.ravel()
        return replace(self, sequences=self.sequences[ordered])

    def by_query(self, queries: npt.NDArray[np.int64]) -> "Buffer":
        """Return the buffer with pairs of the same query next to each other, in the order of the cache.

        Queries follow each other as the first of their pairs does here. It is a pure function of the buffer.

        Args:
            queries: number of the query of each of `sequences`, `(sequences,)`.
        """
        _, first, number = np.unique(queries, return_index=True, return_inverse=True)
        return replace(self, sequences=self.sequences[np.lexsort((self.sequences, first[number]))])


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOrder:
    """The order of the sequences of one stream. Held-out sequences are never taken."""

    segments: Segments
    """Sequences of each shard and of its segments."""
    num_train: int
    """Number of training sequences; sequences from this number on are held out."""
    seed: int
    buffer_shards: int
    """Segments whose sequences are shuffled together."""
    stream_number: int = 0
    """Number of this stream, counted from 0."""
    num_streams: int = 1
    """Streams that an epoch's sequences are dealt to, at most as many as training sequences."""

    def num_sequences(self, num_epochs: int) -> int:
        """Return how many sequences this stream takes in its first epochs.

        Where sequences do not divide evenly, the streams take turns at the longer spans, so after each epoch
        the numbers of two streams differ by one at most.
        """
        first, last = self.stream_number, self.stream_number + num_epochs
        return last * self.num_train // self.num_streams - first * self.num_train // self.num_streams

    def epoch(self, epoch: int) -> Iterator[Buffer]:
        """Yield this stream's buffers of an epoch; all streams together have each training sequence once."""
        generator = np.random.default_rng([self.seed, epoch, 0])
        order = generator.permutation(self._num_trainable).tolist()
        if self.stream_number:  # all streams have the same order of shards; the rest is drawn for each stream
            generator = np.random.default_rng([self.seed, epoch, self.stream_number])
        spans = self._own_spans(order, epoch, (self.stream_number + epoch) % self.num_streams)
        while buffered := list(islice(spans, self.buffer_shards)):
            sequences = np.concatenate([np.arange(span.start, span.stop) for _, span in buffered])
            segments = tuple(segment for segment, _ in buffered)
            order_within = generator.permutation(sequences)
            yield Buffer(segments=segments, sequences=order_within, epoch=epoch)

    @property
    def _num_trainable(self) -> int:
        """Number of shards that have training sequences, which are the first ones."""
        return int(np.searchsorted(self.segments.ranges.first_sequences, self.num_train))

    def _own_spans(self, order: Sequence[int], epoch: int, place: int) -> Iterator[tuple[int, range]]:
        """Yield the segments to read, in order, each with the sequences to take.

        Args:
            order: all shards with training sequences, as this epoch takes them.
            epoch: number of the epoch.
            place: which of the equal spans of the epoch's sequences is this stream's, counted from 0.
        """
        begin = place * self.num_train // self.num_streams
        end = (place + 1) * self.num_train // self.num_streams
        before, ranges = 0, self.segments.ranges
        firsts, counts = ranges.first_sequences.tolist(), ranges.num_sequences.tolist()
        for shard in order:
            count = min(counts[shard], self.num_train - firsts[shard])
            if begin < before + count and before < end:  # else none of it is this stream's
                yield from self._spans_of(shard, epoch, slice(max(0, begin - before), end - before))
            before += count

    def _spans_of(self, shard: int, epoch: int, taken: slice) -> Iterator[tuple[int, range]]:
        """Yield the segments of a shard, each with its sequences, as far as they are among those to take."""
        numbers = np.asarray(self.segments.of_shard(shard))
        if len(numbers) > 1:
            numbers = np.random.default_rng([self.seed, epoch, 0, shard + 1]).permutation(numbers)
        before = 0
        for number in numbers.tolist():
            sequences = self.segments.sequences(number)
            sequences = sequences[: max(0, self.num_train - sequences.start)]
            span = sequences[max(0, taken.start - before) : max(0, taken.stop - before)]
            if span:
                yield number, span
            before += len(sequences)

    def stream(self, position: int) -> Iterator[Buffer]:
        """Yield buffers without end, from the `position`-th sequence of this stream on, counted from 0."""
        epoch = position * self.num_streams // self.num_train
        # The guess is off by one epoch at most: spans differ from their mean by less than one sequence.
        while self.num_sequences(epoch) > position:
            epoch -= 1
        while self.num_sequences(epoch + 1) <= position:
            epoch += 1
        skipped = position - self.num_sequences(epoch)
        while True:
            for buffer in self.epoch(epoch):
                if skipped < len(buffer.sequences):
                    yield replace(buffer, skipped=skipped)
                skipped = max(0, skipped - len(buffer.sequences))
            epoch += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one process takes at each step.

    A step's batch is cut into equal parts, which are computed one after the other or by different processes.
    Part p comes from stream p modulo the number of streams, so a step does not depend on which process
    computes which part.
    """

    streams: tuple[SequenceOrder, ...]
    batch_size: int
    """Sequences of a step, summed over all processes."""
    num_parts: int
    """Parts of a step, summed over all processes."""
    own_parts: tuple[int, ...]
    """Numbers of the parts that this process takes."""
    batches: Batches = "shuffled"
    """Which sequences share a part."""

    @property
    def part_size(self) -> int:
        """Sequences of a part."""
        return self.batch_size // self.num_parts


@runtime_checkable
class Planned(Protocol):
    """What a plan needs of the reader of a cache."""

    @property
    def manifest(self) -> CacheManifest:
        """The manifest of the cache."""

    @property
    def segments(self) -> Segments:
        """Sequences of each shard and of its segments."""


def plan_steps(config: TrainConfig, reader: Planned, *, num_ranks: int = 1, rank: int = 0) -> StepPlan:
    """Return what process `rank` of `num_ranks` takes at each step.

    Raises:
        InvalidConfigError: parts, streams and batch size do not divide, or the sequences are too few.
    """
    manifest = reader.manifest
    num_parts = config.accumulate * num_ranks
    num_streams = num_ranks if config.streams is None else config.streams
    if num_streams > manifest.num_train:
        raise InvalidConfigError(
            f"--streams {num_streams} (default: the number of processes): the cache has {manifest.num_train} "
            "sequences to train on. Take at most as many."
        )
    if num_parts % num_streams:
        raise InvalidConfigError(
            f"--streams {num_streams} does not divide the {num_parts} parts of a step (--accumulate times "
            "the number of processes). Take a divisor."
        )
    check_parts(config, num_ranks)
    if config.batches == "by-query" and manifest.identity.packing.pair is None:
        raise InvalidConfigError(
            "--batches by-query is for pairs of texts, and this cache holds single texts. Leave it out."
        )
    check_batch(config, manifest)
    streams = tuple(
        SequenceOrder(
            segments=reader.segments,
            num_train=manifest.num_train,
            seed=config.seed,
            buffer_shards=config.buffer_shards,
            stream_number=number,
            num_streams=num_streams,
        )
        for number in range(num_streams)
    )
    return StepPlan(
        streams=streams,
        batch_size=config.batch_size,
        num_parts=num_parts,
        own_parts=tuple(range(rank, num_parts, num_ranks)),
        batches=config.batches,
    )
