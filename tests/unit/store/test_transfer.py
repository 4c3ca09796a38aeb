"""Work that goes on several at once, and sums of bytes."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event, Lock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm_cache.errors import InterruptedRunError, StorageError
from minilm_cache.session import never_stop
from minilm_cache.store.index import RecordedShards
from minilm_cache.store.layout import commit_path
from minilm_cache.store.reader import CacheReader
from minilm_cache.store.remote import TRANSFERS, for_each, num_bytes


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40))
def test_results_come_in_order_one_for_each_number(first: int, last: int) -> None:
    results = for_each(lambda n: n * n, range(first, last), should_stop=never_stop, place="here")

    assert results == [n * n for n in range(first, last)]


def test_as_many_go_on_at_once_as_are_allowed() -> None:
    """All meet at a barrier: with fewer threads it would break."""
    together, lock, at_work, most = Barrier(TRANSFERS, timeout=30), Lock(), 0, 0

    def work(number: int) -> None:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        together.wait()
        with lock:
            at_work -= 1

    for_each(work, range(3 * TRANSFERS), should_stop=never_stop, place="here")

    assert most == TRANSFERS


@pytest.mark.parametrize("failing", [0, 7, 199])
def test_a_failure_is_raised_and_what_waits_behind_it_is_not_begun(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that got ahead of the failing one wait until the work has been given up."""
    begun: list[int] = []
    given_up, shutdown = Event(), ThreadPoolExecutor.shutdown

    def work(number: int) -> None:
        begun.append(number)
        if number == failing:
            raise StorageError("the disk said no")
        if number > failing:
            assert given_up.wait(timeout=30)

    def telling_shutdown(
        self: ThreadPoolExecutor, wait: bool = True, *, cancel_futures: bool = False
    ) -> None:
        shutdown(self, wait=False, cancel_futures=cancel_futures)
        given_up.set()
        shutdown(self, wait=wait)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", telling_shutdown)
    with pytest.raises(StorageError):
        for_each(work, range(200), should_stop=never_stop, place="here")

    assert set(range(failing + 1)) <= set(begun)
    assert len(begun) <= failing + 1 + TRANSFERS


@pytest.mark.parametrize("allowed", [0, 1, 20])
def test_whoever_asks_to_stop_is_obeyed_before_more_is_begun(allowed: int) -> None:
    begun: list[int] = []
    lock, left = Lock(), iter(range(allowed))

    def should_stop() -> bool:
        with lock:
            return next(left, None) is None

    with pytest.raises(InterruptedRunError):
        for_each(begun.append, range(100), should_stop=should_stop, place="here")

    assert len(begun) <= allowed


def test_bytes_are_those_of_all_files_with_a_hash(complete: Path) -> None:
    reader = CacheReader(complete)
    listed = [*json.loads((complete / "manifest.json").read_text())["files"]]
    for shard in range(6):
        listed += json.loads((complete / commit_path(shard)).read_text())["files"]

    records = RecordedShards(complete, reader.manifest, reader.ranges)
    assert len(records) == len(reader.records) == 6
    for shards in (records, reader.records):
        size = sum((complete / path).stat().st_size for path in listed)
        assert num_bytes(reader.manifest, shards) == size
