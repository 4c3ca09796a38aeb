"""Which shards a rank writes: its own first, then those that other ranks of the same folder have not begun.

Ranks divide the shards by number, so they begin without a word to each other. A rank that has written its own
goes on with the last of the others', so a slow, preempted or late rank delays the dump by a shard at most.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from filelock import FileLock

from minilm_cache.dump.config import DumpConfig
from minilm_cache.errors import InterruptedRunError, ShardBusyError
from minilm_cache.progress import Progress, ShouldStop
from minilm_cache.store.ranks import announce_rank, other_ranks
from minilm_cache.store.writer import CacheWriter
from minilm_cache.wording import counted

_POLL_S = 0.5
"""Seconds between two looks at shards that other ranks are writing."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A shard that this rank is to write, and the lock on it, which is held."""

    shard: int
    lock: FileLock


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """Claims shards for one rank."""

    writer: CacheWriter
    config: DumpConfig
    progress: Progress
    should_stop: ShouldStop

    def own(self, shards: list[int]) -> Iterator[Claim]:
        """Yield claims on those of this rank's shards that are not committed.

        Raises:
            ShardBusyError: another process holds one, and this rank is alone.
        """
        if self.config.world_size > 1:
            announce_rank(self.writer.root, self.config.rank)
        for shard in shards:
            try:
                claim = self._claim(shard)
            except ShardBusyError:
                if self.config.world_size == 1:
                    raise
                continue  # a rank that helps has it
            if claim is not None:
                yield claim

    def others(self) -> Iterator[Claim]:
        """Yield claims on shards that nobody writes, the last ones first, until every shard is committed.

        Yields none where no other rank has announced itself: then it has a folder of its own.

        Raises:
            InterruptedRunError: a stop was requested while other ranks wrote what was left.
        """
        if self.config.world_size == 1 or not other_ranks(self.writer.root, self.config.rank):
            return
        helps = waits = False
        while missing := self.writer.missing_shards():
            claim = next(filter(None, map(self._claim_if_free, reversed(missing))), None)
            if claim is not None:
                if not helps:
                    num_tokens = int(self.writer.ranges.num_tokens[missing].sum())
                    self.progress.start("dump for other ranks", num_tokens, "tokens")
                    helps = True
                yield claim
                continue
            if self.should_stop():
                raise InterruptedRunError(
                    f"interrupted: other ranks are writing {counted(len(missing), 'shard')} of "
                    f"{self.writer.root}, and this one has nothing left to write."
                )
            if not waits:
                self.progress.note(
                    f"waiting for {counted(len(missing), 'shard')} that other ranks are writing"
                )
                waits = True
            time.sleep(_POLL_S)

    def _claim_if_free(self, shard: int) -> Claim | None:
        try:
            return self._claim(shard)
        except ShardBusyError:
            return None

    def _claim(self, shard: int) -> Claim | None:
        """Claim a shard. None means that it is committed.

        Raises:
            ShardBusyError: another process holds it.
        """
        lock = self.writer.claim(shard)
        if self.writer.is_committed(shard):  # by another process in the meantime
            lock.release()
            return None
        return Claim(shard, lock)
