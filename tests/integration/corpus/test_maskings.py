"""Several masked readings of each sequence: drawn, stored, checked, and trained on in turn."""

from collections.abc import Collection
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM

from minilm_cache.cache import open_cache, row_checker
from minilm_cache.errors import InvalidConfigError
from minilm_cache.objectives.check import choose_objective
from minilm_cache.session import Session
from minilm_cache.storage_schema.states import SignalName, StateFamily
from minilm_cache.store.reader import Segment
from minilm_cache.store.verify import verify
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.sampler import plan_steps
from tests.integration.codecs.conftest import outputs, relative, world_of

CPU = torch.device("cpu")


def test_epochs_take_the_masked_readings_in_turn(tmp_path: Path) -> None:
    """Three readings, masked anew: each epoch trains on another one, and the fourth on the first again."""
    world = world_of(tmp_path, "tokens", "bert")
    world.dump(**{"for": "distilbert"}, maskings=3, k=2, max_error=0.1)
    cache = open_cache(world.root / "cache")
    model = AutoModelForMaskedLM.from_pretrained(world.teacher)
    name = SignalName(StateFamily.MASKED, 3)
    for number in (0, 1):
        readings = [cache[number].states(reading) for reading in range(3)]
        masked = [one.masked for one in readings if one.masked is not None]
        assert len({tuple(one.ids[0].tolist()) for one in masked}) == 3
        assert len({int(one.chosen.sum()) for one in masked}) == 1
        for states, one in zip(readings, masked, strict=True):
            said = outputs(model, one.ids[0])["hidden"][3]
            assert relative(said, states[name][0]) < 0.2
    config = TrainConfig(arch=("2x32",), objective="distilbert", batch_size=1, steps=1)
    wanted = choose_objective(config, cache, arch=config.arch).wanted
    num_train = cache.manifest.num_train
    stream = BatchReader(cache, wanted, pad_token=0, device=CPU).train_batches(
        plan_steps(config, cache.reader), 0
    )
    seen: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    with closing(stream):
        for batch in islice(stream, 4 * num_train):
            assert batch.signals.masked is not None
            assert batch.counts["chosen"] == int(batch.signals.masked.chosen.sum())
            read = tuple(batch.signals.masked.ids[0].tolist())
            seen.setdefault(tuple(batch.inputs.ids[0].tolist()), []).append(read)

    assert len(seen) == num_train
    for ids, reads in seen.items():
        assert len(set(reads[:3])) == 3 or len(ids) < 8  # short sequences have few ways to be masked
        assert reads[3] == reads[0]
    with pytest.raises(InvalidConfigError, match="no reading 3"):
        cache[0].states(3)


def test_an_epoch_reads_its_own_reading_alone(tmp_path: Path) -> None:
    world = world_of(tmp_path, "tokens", "bert")
    world.dump(labels=True, maskings=4, k=2)
    cache = open_cache(world.root / "cache")
    config = TrainConfig(arch=("2x32",), objective="mlm-kd", batch_size=1, steps=1)
    asked: list[set[str]] = []
    segment = cache.reader.segment

    def reading(number: int, paths: Collection[str] | None = None) -> Segment:
        asked.append({path for path in paths or () if path.endswith("labels/index")})
        return segment(number, paths)

    cache.reader.segment = reading  # type: ignore[method-assign]
    wanted = choose_objective(config, cache, arch=config.arch).wanted
    stream = BatchReader(cache, wanted, pad_token=0, device=CPU).train_batches(
        plan_steps(config, cache.reader), 0
    )
    with closing(stream):
        for _ in islice(stream, 3 * cache.manifest.num_train):
            pass

    assert all(len(one) == 1 for one in asked)
    assert set.union(*asked) >= {"labels/index", "readings/1/labels/index", "readings/2/labels/index"}


def test_more_files_than_a_commit_record_can_name_are_refused(tmp_path: Path) -> None:
    world = world_of(tmp_path, "tokens", "bert")
    with pytest.raises(InvalidConfigError, match=r"files, more than .* Store fewer"):
        world.dump(labels=True, masked_hidden="all", maskings=60, k=2)


def test_other_readings_are_read_damaged_and_checked_as_the_first(tmp_path: Path) -> None:
    world = world_of(tmp_path, "tokens", "bert")
    world.dump(labels=True, masked_hidden="last", maskings=2, k=2)
    root = world.root / "cache"
    manifest = open_cache(root).manifest
    assert manifest.identity.states is not None
    assert manifest.identity.states.num_readings == 2
    file = root / "readings/1/labels/index/c/0/0"
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(bytes(content))
    verdict = verify(root, full=True, num_threads=1, check_rows=row_checker, session=Session())

    assert any("readings/1/labels/index" in str(damage) for damage in verdict.damage)
    assert world.dump(labels=True, masked_hidden="last", maskings=2, k=2).shards_written == 1
