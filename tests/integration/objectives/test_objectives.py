"""Each objective beside the same loss written plainly on whole models, and in training."""

from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from minilm_cache.cache import Cache, open_cache
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.arch import parse_arch
from minilm_cache.models.locate import TeacherSource
from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.base import map_layers
from minilm_cache.objectives.batch import StudentBatch, WantedTargets
from minilm_cache.objectives.check import choose_objective
from minilm_cache.report.runs import TrainedRun
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.heldout import with_live_targets
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.setup import build_trainers
from minilm_cache.train.trainer import StudentTrainer
from tests.fixtures import Command
from tests.support import World

CPU = torch.device("cpu")
CHOICES: dict[str, tuple[dict[str, object], tuple[RelationKind, ...]]] = {
    "minilm": ({}, (RelationKind.ATTENTION, RelationKind.VALUE)),
    "no value relation": ({"value_relation": False}, (RelationKind.ATTENTION,)),
    "query and key": ({"query_key_relations": True}, tuple(RelationKind)),
    "last two": ({"layer_map": "last-two"}, (RelationKind.ATTENTION, RelationKind.VALUE)),
    "first and last": ({"layer_map": "first-last"}, (RelationKind.ATTENTION, RelationKind.VALUE)),
    "all": ({"layer_map": "all"}, (RelationKind.ATTENTION, RelationKind.VALUE)),
    "minilmv2 of all": (
        {"objective": "minilmv2", "relation_heads": 8, "layer_map": "all"},
        (RelationKind.QUERY, RelationKind.KEY, RelationKind.VALUE),
    ),
}
PAIRS = {
    "last": [(2, 1)],
    "last-two": [(1, 0), (2, 1)],
    "first-last": [(0, 0), (2, 1)],
    "all": [(1, 0), (2, 1)],
}
"""Teacher's and student's layers, written out for a teacher of three and a student of two."""


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory, shared_world: World) -> World:
    """Return a world with a cache of all layers."""
    world = World(tmp_path_factory.mktemp("layers"), shared_world.teacher, shared_world.corpus)
    world.dump(codec="vectors", layers="all", max_kl=0.005)
    return world


def settings(changes: dict[str, object]) -> TrainConfig:
    """Return settings of a student of two layers."""
    base = {"arch": ("2x32",), "steps": 40, "batch_size": 8, "lr": 5e-3, "device": "cpu"}
    return TrainConfig.model_validate(base | changes)


def trainer_of(config: TrainConfig, cache: Cache) -> StudentTrainer:
    """Return the student at its beginning."""
    objective = choose_objective(config, cache, arch=config.arch)
    shape = parse_arch("2x32", 4, split_into=objective.wanted.relation_heads)
    (trainer,) = build_trainers(
        config, cache, shapes=[shape], objective=objective, steps=40, ranks=Ranks.alone(CPU)
    )
    return trainer


def plain_vectors(model: PreTrainedModel, batch: StudentBatch, mask: Tensor) -> list[dict[str, Tensor]]:
    """Return queries, keys and values of every layer, `(batch, length, width)`, from hooks on its modules."""
    found: list[dict[str, Tensor]] = [{} for _ in range(model.config.num_hidden_layers)]
    hooks = [
        model.get_submodule(f"encoder.layer.{number}.attention.self.{name}").register_forward_hook(
            lambda _module, _inputs, output, own=own, name=name: own.__setitem__(name, output)
        )
        for number, own in enumerate(found)
        for name in ("query", "key", "value")
    ]
    model(input_ids=batch.inputs.ids, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    return found


def plain_loss(
    teacher: dict[str, Tensor], student: dict[str, Tensor], kind: str, heads: int, batch: StudentBatch
) -> Tensor:
    """Return the mean KL of one relation over heads and rows that are not padding, one sequence at a time."""
    losses = []
    for row, length in enumerate(batch.inputs.lengths.tolist()):
        logs = []
        for vectors in (teacher, student):
            left, right = ("query", "key") if kind == "attention" else (kind, kind)
            parts = [vectors[side][row, :length].unflatten(-1, (heads, -1)) for side in (left, right)]
            scores = torch.einsum("qhd,khd->hqk", *parts) / parts[0].shape[-1] ** 0.5
            logs.append(scores.log_softmax(-1))
        losses.append(F.kl_div(logs[1], logs[0], reduction="sum", log_target=True) / heads)
    return torch.stack(losses).sum() / batch.inputs.lengths.sum()


@pytest.mark.parametrize("choice", CHOICES)
def test_the_loss_is_that_of_a_plainly_written_twin(layered: World, choice: str) -> None:
    changes, kinds = CHOICES[choice]
    config = settings(changes)
    cache = open_cache(layered.root / "cache")
    objective = choose_objective(config, cache, arch=config.arch)
    reader = BatchReader(cache, WantedTargets(kinds=()), pad_token=0, device=CPU)
    teacher = Teacher(TeacherSource(name="t", folder=layered.teacher), CPU, layers=objective.wanted.layers)
    (live,) = islice(with_live_targets(reader.held_out_batches(4, 4), teacher, objective.wanted), 1)
    (stored,) = islice(
        BatchReader(cache, objective.wanted, pad_token=0, device=CPU).held_out_batches(4, 4), 1
    )
    trainer = trainer_of(config, cache)
    with torch.no_grad():
        found, cached = trainer.evaluate(live), trainer.evaluate(stored)
        mask = live.inputs.valid.long()
        whole = AutoModel.from_pretrained(layered.teacher).eval()
        sides = [plain_vectors(model, live, mask) for model in (whole, trainer.model.model)]
        heads = config.relation_heads or 4
        pairs = PAIRS[config.layer_map]
        expected = {}
        for kind in kinds:
            losses = [plain_loss(sides[0][t], sides[1][s], kind, heads, live) for t, s in pairs]
            expected[kind] = torch.stack(losses).mean()

    assert found.parts.keys() == expected.keys()
    for kind in kinds:
        torch.testing.assert_close(found.parts[kind], expected[kind], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(cached.parts[kind], expected[kind], atol=0.03, rtol=0.1)
    torch.testing.assert_close(found.total, torch.stack(list(expected.values())).sum(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_objective_trains_from_one_cache(layered: World, command: Command, choice: str) -> None:
    config = settings(CHOICES[choice][0])
    flags: dict[str, list[object]] = {
        "objective": ["--objective", config.objective],
        "relation_heads": ["--relation-heads", config.relation_heads],
        "layer_map": ["--layer-map", config.layer_map],
        "value_relation": ["--no-value-relation"],
        "query_key_relations": ["--query-key-relations"],
    }
    words = [word for name in CHOICES[choice][0] for word in flags[name]]
    out = layered.root / f"run-{choice.replace(' ', '-')}"
    code, _, err = command(
        *("train", layered.root / "cache", "--arch", "2x32", "--steps", 40, "--batch-size", 8, "--lr", 5e-3),
        *("--device", "cpu", "--out", out, *words),
    )
    students = TrainedRun.open(out).record.students

    assert code == 0, err
    before, after = students[0].held_out_before, students[0].held_out_after
    assert before is not None
    assert after is not None
    assert before.keys() == after.keys() == set(CHOICES[choice][1])
    assert sum(after.values()) < 0.9 * sum(before.values())


@pytest.mark.parametrize(
    ("layer_map", "layers", "teacher", "expected"),
    [
        ("last", 3, 12, [(11, 2)]),
        ("last-two", 3, 12, [(10, 1), (11, 2)]),
        ("first-last", 3, 12, [(0, 0), (11, 2)]),
        ("all", 3, 12, [(3, 0), (7, 1), (11, 2)]),
        ("all", 4, 6, [(1, 0), (2, 1), (4, 2), (5, 3)]),
        ("all", 6, 6, [(number, number) for number in range(6)]),
        ("all", 1, 12, [(11, 0)]),
    ],
)
def test_layer_maps(layer_map: str, layers: int, teacher: int, expected: list[tuple[int, int]]) -> None:
    assert map_layers(layer_map, layers, teacher) == expected  # type: ignore[arg-type]


def test_what_a_cache_does_not_hold_is_named_with_the_flags_that_add_it(
    layered: World, shared_world: World, command: Command
) -> None:
    last = ("train", shared_world.root / "cache", "--steps", 1, "--arch")
    every = ("train", layered.root / "cache", "--steps", 1, "--arch")
    command.fails(*last, "2x32", "--layer-map", "all", code=2, says="--codec vectors --layers 1,2")
    command.fails(*last, "2x32", "--query-key-relations", code=2, says="needs the query and key relation")
    command.fails(*every, "1x32", "--layer-map", "last-two", code=2, says="students of 2 to 3 layers")
    command.fails(*every, "4x32", "--layer-map", "all", code=2, says="students of 1 to 3 layers")
    command.fails(
        *every, "2x32", "--layer-map", "all", "--teacher-layer", 1, code=2, says="goes with --layer-map last"
    )
    command.fails(
        *every,
        "2x32",
        "--objective",
        "minilmv2",
        "--no-value-relation",
        code=2,
        says="goes with --objective minilm",
    )
    with pytest.raises(InvalidConfigError):
        map_layers("all", 5, 3)
