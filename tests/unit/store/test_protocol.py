"""The commit protocol with several actors, in any order that Hypothesis thinks of.

Writers claim, write, fail, die and come back, and withdraw damaged shards; readers look at any time. The
model is a set: the shards that were committed and not withdrawn. Whatever happened, exactly these are there,
whole, and never with another content.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minilm_cache.cache import row_checker
from minilm_cache.errors import ShardBusyError, StorageError
from minilm_cache.session import ALONE
from minilm_cache.store.durable import remove_abandoned
from minilm_cache.store.layout import commit_path
from minilm_cache.store.reader import CacheReader
from minilm_cache.store.verify import unsound_shards
from minilm_cache.store.writer import CacheWriter
from tests.unit.store.support import begin, failing_sync, partials, plain_shard, plain_table, write_shard

ACTORS = st.integers(0, 2)
SHARDS = st.integers(0, 5)


class Protocol(RuleBasedStateMachine):
    """Three writers of one cache."""

    source: ClassVar[Path]
    """A complete cache, of which the writers make a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.root = self.folder / "cache"
        self.writers: dict[int, CacheWriter] = {}
        self.claims: dict[int, tuple[int, Any]] = {}
        """Shards that are claimed: by which actor, and the lock."""
        self.committed: set[int] = set()
        self.rows = {shard: plain_shard(self.source, shard) for shard in range(6)}

    @initialize()
    def first_actor(self) -> None:
        self.writers[0] = begin(self.source, self.root)

    @rule(actor=ACTORS)
    def arrives(self, actor: int) -> None:
        """A process begins, or begins again after it died."""
        if actor not in self.writers:
            self.writers[actor] = begin(self.source, self.root)

    @rule(actor=ACTORS, shard=SHARDS)
    def claims_a_shard(self, actor: int, shard: int) -> None:
        if actor not in self.writers:
            return
        if shard in self.claims:
            with pytest.raises(ShardBusyError):
                self.writers[actor].claim(shard)
        else:
            self.claims[shard] = (actor, self.writers[actor].claim(shard))

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), fails_at=st.none() | st.integers(0, 12))
    def writes_what_it_has_claimed(self, data: Any, fails_at: int | None) -> None:
        """It commits; or the disk fails at one fsync, and the shard is there or not."""
        shard = data.draw(st.sampled_from(sorted(self.claims)))
        actor, lock = self.claims.pop(shard)
        try:
            with failing_sync(10**6 if fails_at is None else fails_at):
                table = plain_table(self.source, shard)
                write_shard(self.writers[actor], shard, self.rows[shard], table=table, rank=actor)
            self.committed.add(shard)
        except ShardBusyError:
            assert shard in self.committed
        except StorageError:
            assert fails_at is not None
            if (self.root / commit_path(shard)).is_file():  # the disk failed behind the commit
                self.committed.add(shard)
        lock.release()

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def dies(self, data: Any) -> None:
        """A process is killed in the middle of a shard: its locks end with it, its partial files stay."""
        shard = data.draw(st.sampled_from(sorted(self.claims)))
        actor, _ = self.claims[shard]
        if shard not in self.committed:
            self.writers[actor].begin_shard(shard)
        for held, (holder, lock) in list(self.claims.items()):
            if holder == actor:
                lock.release()
                del self.claims[held]
        del self.writers[actor]

    @rule(actor=ACTORS, shard=SHARDS)
    def withdraws_a_shard(self, actor: int, shard: int) -> None:
        if actor in self.writers and shard in self.committed and shard not in self.claims:
            with self.writers[actor].claim(shard):
                self.writers[actor].withdraw(shard)
            self.committed.discard(shard)

    @invariant()
    def exactly_what_was_committed_is_there(self) -> None:
        if not self.writers:
            return
        there = {shard for shard in range(6) if (self.root / commit_path(shard)).is_file()}
        assert there == self.committed
        for writer in self.writers.values():
            assert set(writer.missing_shards()) == set(range(6)) - self.committed

    @invariant()
    def readers_see_whole_shards(self) -> None:
        if self.committed:
            shard = min(self.committed)
            read = CacheReader(self.root, partial=True).segment(shard).rows
            assert all(np.array_equal(read[path], values) for path, values in self.rows[shard].items())

    def teardown(self) -> None:
        """Whatever happened, one writer finishes the cache, and nothing is left over."""
        for _, lock in self.claims.values():
            lock.release()
        writer = begin(self.source, self.root)
        for shard in writer.missing_shards():
            with writer.claim(shard):
                write_shard(writer, shard, self.rows[shard], table=plain_table(self.source, shard))
        remove_abandoned(self.root.rglob(".*.partial"))
        assert partials(self.root) == []
        assert unsound_shards(self.root, shards=range(6), check_rows=row_checker, session=ALONE) == []
        shutil.rmtree(self.folder)


def test_no_order_of_claims_writes_deaths_and_withdrawals_breaks_a_cache(complete: Path, soak: int) -> None:
    class OfThisCache(Protocol):
        source = complete

    run_state_machine_as_test(
        OfThisCache, settings=settings(max_examples=8 * soak, stateful_step_count=25, deadline=None)
    )
