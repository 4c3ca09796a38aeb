"""Which sequences, in which order: a pure function of seed and epoch.

Shards are shuffled and taken a buffer at a time; within a buffer, sequences are shuffled across its
shards. A run is one endless stream of sequences, epoch after epoch, so its position is its step; or several
streams, each of shards of its own, which processes divide among themselves.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minilm_cache.config import TrainConfig
from minilm_cache.errors import InvalidConfigError
from minilm_cache.storage_schema.manifest import CacheManifest, ShardRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Sequences that are in memory together."""

    shards: tuple[int, ...]
    sequences: npt.NDArray[np.int64]
    """Numbers of the sequences of these shards, in the order in which they are taken."""


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
    """This stream takes each `num_streams`-th shard."""

    @property
    def own_shards(self) -> list[int]:
        """Shards of this stream that have training sequences."""
        mine = range(self.stream_number, len(self.shards), self.num_streams)
        return [number for number in mine if self.shards[number].first_sequence < self.num_train]

    @property
    def num_sequences(self) -> int:
        """Training sequences of this stream."""
        ranges = [self.shards[number] for number in self.own_shards]
        return sum(
            min(one.first_sequence + one.num_sequences, self.num_train) - one.first_sequence for one in ranges
        )

    def epoch(self, epoch: int) -> list[Buffer]:
        """Return an epoch's buffers: together, every training sequence of this stream once."""
        generator = np.random.default_rng([self.seed, epoch, self.stream_number])
        ranges = self.shards
        order = generator.permutation(self.own_shards).tolist()
        buffers = []
        for at in range(0, len(order), self.buffer_shards):
            shards = tuple(order[at : at + self.buffer_shards])
            sequences = np.concatenate(
                [
                    np.arange(first, min(first + ranges[n].num_sequences, self.num_train))
                    for n in shards
                    for first in [ranges[n].first_sequence]
                ]
            )
            buffers.append(Buffer(shards=shards, sequences=generator.permutation(sequences)))
        return buffers

    def stream(self, position: int) -> Iterator[Buffer]:
        """Yield buffers for ever, from the `position`-th sequence of this stream on."""
        epoch, skipped = divmod(position, self.num_sequences)
        while True:
            for buffer in self.epoch(epoch):
                rest = buffer.sequences[skipped:]
                skipped = max(0, skipped - len(buffer.sequences))
                if len(rest):
                    yield Buffer(shards=buffer.shards, sequences=rest)
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


def plan_steps(config: TrainConfig, manifest: CacheManifest, num_ranks: int = 1, rank: int = 0) -> StepPlan:
    """Return what one of `num_ranks` processes takes at each step.

    Raises:
        InvalidConfigError: parts, streams and batch size do not divide, or there are too few shards.
    """
    num_parts = config.accumulate * num_ranks
    trainable = sum(one.first_sequence < manifest.num_train for one in manifest.shards)
    num_streams = num_ranks if config.streams is None and num_ranks <= trainable else config.streams or 1
    if num_streams > trainable:
        raise InvalidConfigError(
            f"--streams {num_streams}: the cache has {trainable} shards to train on. Take at most as many, "
            "or dump with smaller --shard-tokens."
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
