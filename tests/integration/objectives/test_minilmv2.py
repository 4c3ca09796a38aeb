"""Objective `minilmv2`: query, key and value relations on heads split anew."""

from typing import Any

import pytest
import torch
from transformers import AutoModel

from minilm_cache import open_cache
from minilm_cache.codecs.vectors import VectorsCodec
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.tap import Reading
from minilm_cache.objectives.base import LayerPair
from minilm_cache.objectives.check import choose_objective
from minilm_cache.objectives.relations import RelationObjective
from minilm_cache.relations.scores import Vectors
from minilm_cache.session import Session
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.run import train_students
from tests.integration.train.test_train import settings as train_settings
from tests.support import World


@pytest.mark.parametrize("relation_heads", [None, 2, 8])
def test_minilmv2_is_plain_torch_on_heads_split_anew(world: World, relation_heads: int | None) -> None:
    """Q-Q, K-K and V-V of a teacher of width 32 and a student of width 16, any number of relation heads."""
    cache = open_cache(world.dump(codec="vectors").path)
    config = train_settings(objective="minilmv2", relation_heads=relation_heads)
    objective = choose_objective(config, cache, arch=config.arch)
    heads = relation_heads or 4
    reader = BatchReader(cache, objective.wanted, pad_token=0, device=torch.device("cpu"))
    batch = next(iter(reader.held_out_batches(1, 1)))
    query, key, value = torch.randn(3, len(batch.inputs.ids), 4, batch.inputs.ids.shape[1], 4)
    own = RelationObjective(objective.wanted, [LayerPair(2, 0)])
    found = own(Reading([Vectors(query, key, value, None, 0.5)], {}, None), batch)
    assert isinstance(cache.codec, VectorsCodec)
    sequence = cache[cache.manifest.num_train]
    codes = torch.from_numpy(sequence._rows[cache.codec.codes_path][None])
    teacher = cache.codec.vectors(codes)
    length = len(sequence.input_ids)
    parts = {"query": (teacher.query, query), "key": (teacher.key, key), "value": (teacher.value, value)}
    for kind, (theirs, ours) in parts.items():
        wide = theirs[0].transpose(0, 1).reshape(length, heads, -1).transpose(0, 1).double()
        narrow = ours[0].transpose(0, 1).reshape(length, heads, -1).transpose(0, 1).double()
        target = (wide @ wide.mT / wide.shape[-1] ** 0.5).softmax(-1)
        log_student = (narrow @ narrow.mT / narrow.shape[-1] ** 0.5).log_softmax(-1)
        expected = torch.nn.functional.kl_div(log_student, target, reduction="sum") / (heads * length)

        torch.testing.assert_close(found[kind].double(), expected, atol=1e-4, rtol=1e-4)


def test_minilmv2_trains_students_with_heads_of_their_own(world: World) -> None:
    cache = world.dump(codec="vectors").path
    config = train_settings(arch=("2x16:h2", "1x32"), steps=40, objective="minilmv2", relation_heads=8)
    result = train_students(config, cache, out=world.root / "run", session=Session(world.home))

    for student in result.record.students:
        assert student.held_out_before is not None
        assert student.held_out_after is not None
        assert set(student.held_out_after) == {"query", "key", "value"}
        assert sum(student.held_out_after.values()) < sum(student.held_out_before.values())
    assert AutoModel.from_pretrained(result.student_path("2x16:h2")).config.num_attention_heads == 2


@pytest.mark.parametrize(
    ("changes", "codec", "message"),
    [
        ({}, {}, "needs the query and key relation, which a cache of codec topk does not hold"),
        ({"relation_heads": 3}, {"codec": "vectors"}, "--relation-heads 3: the teacher's width 32"),
        (
            {"arch": ("1x20",), "relation_heads": 8},
            {"codec": "vectors"},
            "is not divisible by 8 relation heads",
        ),
    ],
    ids=["topk", "teacher", "student"],
)
def test_minilmv2_says_what_does_not_fit(
    world: World, changes: dict[str, Any], codec: dict[str, Any], message: str
) -> None:
    cache = world.dump(**codec).path
    config = train_settings(objective="minilmv2", **changes)
    with pytest.raises(InvalidConfigError) as caught:
        train_students(config, cache, out=world.root / "run", session=Session(world.home))

    assert message in str(caught.value)
