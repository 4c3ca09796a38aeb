"""Which shards a rank writes: its own first, then those that other ranks of the same folder have not begun.

Ranks divide the shards by number, so they begin without a word to each other. A rank that has written its own
goes on with the last of the others', so a slow, preempted or late rank delays the dump by a shard at most.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from minilm_cache.dump.config import DumpConfig
from minilm_cache.errors import ShardBusyError
from minilm_cache.session import Session
from minilm_cache.store.durable import ShardLock
from minilm_cache.store.writer import CacheWriter
from minilm_cache.wording import counted

_POLL_S = 0.5
"""Seconds between two looks at shards that other ranks are writing."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A shard that this rank is to write, and the lock on it, which is held."""

    shard: int
    lock: ShardLock


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """Claims shards for one rank."""

    writer: CacheWriter
    config: DumpConfig
    session: Session

    def announce(self) -> None:
        """Announce this rank to other ranks, which then leave its shards to it or help it with them."""
        if self.config.world_size > 1:
            self.writer.announce(self.config.rank)

    def own(self, shards: list[int]) -> Iterator[Claim]:
        """Yield claims on those of this rank's shards that are not committed.

        Raises:
            ShardBusyError: another process holds one, and this rank is alone.
            StorageError: the file system refused.
        """
        for shard in shards:
            try:
                claim = self._claim(shard)
            except ShardBusyError:
                if self._is_alone:
                    raise
                continue  # a rank that helps has it
            if claim is not None:
                yield claim

    def others(self) -> Iterator[Claim]:
        """Yield claims on what other ranks of this folder have not begun, until all of theirs is committed.

        Their last shards come first. Shards of ranks that have not announced themselves here are left: those
        ranks come later, or write into another folder.

        Raises:
            InterruptedRunError: a stop was requested while other ranks wrote what was left.
        """
        waits = False
        while missing := self._left():
            helps = False
            for shard in reversed(missing):
                claim = self._claim_if_free(shard)
                if claim is not None:
                    if not helps:
                        num_tokens = int(self.writer.ranges.num_tokens[missing].sum())
                        self.session.progress.start("dump for other ranks", num_tokens, "tokens")
                        helps = True
                    yield claim
            if helps:
                continue
            left = counted(len(missing), "shard")
            self.session.stop_if_asked(
                f"interrupted: other ranks are writing {left} of {self.writer.root}, and this one has "
                "nothing left to write."
            )
            if not waits:
                self.session.progress.note(f"waiting for {left} that other ranks are writing")
                waits = True
            time.sleep(_POLL_S)

    def _left(self) -> list[int]:
        """Return the shards that are not committed and that this rank may write."""
        if self._is_alone:
            return []
        return self.writer.left_for(self.config.rank, self.config.world_size)

    @property
    def _is_alone(self) -> bool:
        """Whether no other process is to write this cache; into a store, any may at any time."""
        return self.config.world_size == 1 and not self.writer.is_remote

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
