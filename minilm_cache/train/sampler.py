"""The order of training sequences, a pure function of seed and epoch.

Shards are shuffled and taken a buffer at a time; within a buffer, sequences are shuffled across its shards. A
training reads one endless stream of sequences, epoch after epoch, so the step gives the position in it; or
several streams, which processes divide among themselves. Each epoch's shards are shuffled once for all
streams, and their sequences are dealt to the streams in equal spans, so every stream is in the same epoch,
and the numbers of times that two training sequences have been seen differ by one at most.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from minilm_cache.errors import InvalidConfigError
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store.ranges import ShardRanges
from minilm_cache.train.config import TrainConfig

_POOL_BATCHES = 32
"""Batches whose sequences are sorted by length together."""
_SMALL_BATCH = 64
"""Largest batch that any cache may be trained with: defaults have to work on a handful of texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Sequences that are in memory together."""

    shards: tuple[int, ...]
    """Numbers of the shards."""
    sequences: npt.NDArray[np.int64]
    """Numbers of the sequences to take from these shards, in order."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOrder:
    """The order of the sequences of one stream. Held-out sequences are never taken."""

    ranges: ShardRanges
    """Sequences of each shard."""
    num_train: int
    """Number of training sequences; sequences from this number on are held out."""
    seed: int
    buffer_shards: int
    """Shards whose sequences are shuffled together."""
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
        spans = list(self._own_spans(order, (self.stream_number + epoch) % self.num_streams))
        for at in range(0, len(spans), self.buffer_shards):
            buffered = spans[at : at + self.buffer_shards]
            sequences = np.concatenate([np.arange(first, last) for _, first, last in buffered])
            shards = tuple(shard for shard, _, _ in buffered)
            order_within = generator.permutation(sequences)
            yield Buffer(shards=shards, sequences=order_within, epoch=epoch)

    @property
    def _num_trainable(self) -> int:
        """Number of shards that have training sequences, which are the first ones."""
        return int(np.searchsorted(self.ranges.first_sequences, self.num_train))

    def _own_spans(self, order: Sequence[int], place: int) -> Iterator[tuple[int, int, int]]:
        """Yield the shards to read, in order, each with its first and its last sequence (exclusive) to take.

        Args:
            order: all shards with training sequences, as this epoch takes them.
            place: which of the equal spans of the epoch's sequences is this stream's, counted from 0.
        """
        begin = place * self.num_train // self.num_streams
        end = (place + 1) * self.num_train // self.num_streams
        before = 0
        firsts, counts = self.ranges.first_sequences.tolist(), self.ranges.num_sequences.tolist()
        for number in order:
            first = firsts[number]
            last = min(first + counts[number], self.num_train)
            span = (max(first, first + begin - before), min(last, first + end - before))
            if span[0] < span[1]:
                yield number, *span
            before += last - first

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
    by_length: bool = False
    """Whether sequences of about the same length share a part."""

    @property
    def part_size(self) -> int:
        """Sequences of a part."""
        return self.batch_size // self.num_parts


def check_parts(config: TrainConfig, num_ranks: int = 1) -> None:
    """Raise InvalidConfigError for a batch that does not divide into the parts of a step.

    Texts are compared with those of the same part, so a part of one text would teach `similarity` nothing.
    """
    num_parts = config.accumulate * num_ranks
    if config.batch_size % num_parts:
        raise InvalidConfigError(
            f"--batch-size {config.batch_size} does not divide into {num_parts} parts (--accumulate times "
            f"the number of processes). Take a multiple of {num_parts}."
        )
    compares_texts = bool(config.matryoshka) or any(text.startswith("similarity") for text in config.loss)
    if compares_texts and config.batch_size == num_parts:
        raise InvalidConfigError(
            f"--loss similarity and --matryoshka compare the texts of a part, and each of the {num_parts} "
            "parts has one. Take a larger --batch-size, or fewer --accumulate."
        )


@runtime_checkable
class Planned(Protocol):
    """What a plan needs of the reader of a cache."""

    @property
    def manifest(self) -> CacheManifest:
        """The manifest of the cache."""

    @property
    def ranges(self) -> ShardRanges:
        """Sequences and tokens of each shard."""


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
    most = max(manifest.num_train, _SMALL_BATCH)
    if config.batch_size > most:
        raise InvalidConfigError(
            f"--batch-size {config.batch_size}: the cache has {manifest.num_train} sequences to train on, "
            f"and a step that holds them several times teaches nothing. Take at most {most}."
        )
    streams = tuple(
        SequenceOrder(
            ranges=reader.ranges,
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
        by_length=config.batches == "by-length",
    )
