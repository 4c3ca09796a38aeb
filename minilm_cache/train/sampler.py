"""Which sequences, in which order: a pure function of seed and epoch.

Shards are shuffled and taken a buffer at a time; within a buffer, sequences are shuffled across its
shards. A run is one endless stream of sequences, epoch after epoch, so its position is its step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minilm_cache.storage_schema.manifest import ShardRange


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

    def epoch(self, epoch: int) -> list[Buffer]:
        """Return an epoch's buffers: together, every training sequence once."""
        generator = np.random.default_rng([self.seed, epoch])
        ranges = [shard for shard in self.shards if shard.first_sequence < self.num_train]
        order = generator.permutation(len(ranges)).tolist()
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
        """Yield buffers for ever, from the `position`-th sequence of the run on."""
        epoch, skipped = divmod(position, self.num_train)
        while True:
            for buffer in self.epoch(epoch):
                rest = buffer.sequences[skipped:]
                skipped = max(0, skipped - len(buffer.sequences))
                if len(rest):
                    yield Buffer(shards=buffer.shards, sequences=rest)
            epoch += 1
