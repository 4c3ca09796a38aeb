"""Which sequences, in which order: a pure function of seed and epoch.

Shards are shuffled and taken a buffer at a time; within a buffer, sequences are shuffled across its shards. A
run is one endless stream of sequences, epoch after epoch, so its position is its step; or several streams,
which processes divide among themselves. Each epoch's shards are shuffled once for all streams, and their
sequences are dealt to the streams in equal runs, so every stream is in the same epoch, and no training
sequence is seen more than once more often than another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from minilm_cache.errors import InvalidConfigError
from minilm_cache.storage_schema.manifest import CacheManifest, ShardRange
from minilm_cache.train.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Sequences that are in memory together."""

    shards: tuple[int, ...]
    sequences: npt.NDArray[np.int64]
    """Numbers of the sequences of these shards, in the order in which they are taken."""
    epoch: int
    """Pass over the cache, counted from 0; it decides which masked reading of a sequence is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOrder:
    """The order of one run. Held-out sequences never come."""

    shards: tuple[ShardRange, ...]
    num_train: int
    """Sequences from this number on are held out."""
    seed: int
    buffer_shards: int
    """Shards whose sequences are shuffled together."""
    stream_number: int = 0
    num_streams: int = 1
    """Streams that an epoch's sequences are dealt to, at most as many as training sequences."""

    def num_sequences(self, num_epochs: int) -> int:
        """Return how many sequences this stream takes in its first epochs.

        Where sequences do not divide evenly, the streams take turns at the longer runs, so all have taken
        the same number, to one, after each epoch.
        """
        first, last = self.stream_number, self.stream_number + num_epochs
        return last * self.num_train // self.num_streams - first * self.num_train // self.num_streams

    def epoch(self, epoch: int) -> list[Buffer]:
        """Return this stream's buffers of an epoch; all streams' hold every training sequence once."""
        generator = np.random.default_rng([self.seed, epoch, 0])
        order = generator.permutation(self._trainable).tolist()
        if self.stream_number:  # the order of shards is that of all streams, what follows is this one's own
            generator = np.random.default_rng([self.seed, epoch, self.stream_number])
        runs = list(self._own_runs(order, (self.stream_number + epoch) % self.num_streams))
        buffers = []
        for at in range(0, len(runs), self.buffer_shards):
            some = runs[at : at + self.buffer_shards]
            sequences = np.concatenate([np.arange(first, last) for _, first, last in some])
            shards = tuple(shard for shard, _, _ in some)
            order_within = generator.permutation(sequences)
            buffers.append(Buffer(shards=shards, sequences=order_within, epoch=epoch))
        return buffers

    @property
    def _trainable(self) -> list[int]:
        """Shards that have training sequences."""
        return [number for number, one in enumerate(self.shards) if one.first_sequence < self.num_train]

    def _own_runs(self, order: Sequence[int], place: int) -> Iterator[tuple[int, int, int]]:
        """Yield shards, in order, with the first and the last sequence (exclusive) of each to take.

        Args:
            order: all shards with training sequences, as this epoch takes them.
            place: which of the equal runs of the epoch's sequences is this stream's.
        """
        begin = place * self.num_train // self.num_streams
        end = (place + 1) * self.num_train // self.num_streams
        before = 0
        for number in order:
            first = self.shards[number].first_sequence
            last = min(first + self.shards[number].num_sequences, self.num_train)
            own = (max(first, first + begin - before), min(last, first + end - before))
            if own[0] < own[1]:
                yield number, *own
            before += last - first

    def stream(self, position: int) -> Iterator[Buffer]:
        """Yield buffers for ever, from the `position`-th sequence of this stream on."""
        epoch = position * self.num_streams // self.num_train
        # The guess is one off at most: runs differ from their mean by less than one sequence.
        while self.num_sequences(epoch) > position:
            epoch -= 1
        while self.num_sequences(epoch + 1) <= position:
            epoch += 1
        skipped = position - self.num_sequences(epoch)
        while True:
            for buffer in self.epoch(epoch):
                rest = buffer.sequences[skipped:]
                skipped = max(0, skipped - len(buffer.sequences))
                if len(rest):
                    yield replace(buffer, sequences=rest)
            epoch += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one process takes at each step.

    A step's batch is cut into equal parts, gone through one after the other or by different processes. Part p
    comes from stream p modulo the number of streams, so the same parts make the same step whoever does them.
    """

    streams: tuple[SequenceOrder, ...]
    batch_size: int
    """Sequences of a step, of all processes."""
    num_parts: int
    own_parts: tuple[int, ...]
    """Parts of this process."""

    @property
    def part_size(self) -> int:
        """Sequences of a part."""
        return self.batch_size // self.num_parts


def check_parts(config: TrainConfig, num_ranks: int = 1) -> None:
    """Raise InvalidConfigError for a batch that does not divide into the parts of a step."""
    num_parts = config.accumulate * num_ranks
    if config.batch_size % num_parts:
        raise InvalidConfigError(
            f"--batch-size {config.batch_size} does not divide into {num_parts} parts (--accumulate times "
            f"the number of processes). Take a multiple of {num_parts}."
        )


def plan_steps(
    config: TrainConfig, manifest: CacheManifest, *, num_ranks: int = 1, rank: int = 0
) -> StepPlan:
    """Return what one of `num_ranks` processes takes at each step.

    Raises:
        InvalidConfigError: parts, streams and batch size do not divide, or there are too few sequences.
    """
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
    streams = tuple(
        SequenceOrder(
            shards=manifest.shards,
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
    )
