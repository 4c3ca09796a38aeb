"""Several objectives at once: each alone, on the same student and batch, is the oracle."""

import json
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer

from minilm_cache.cache import open_cache
from minilm_cache.objectives.base import Losses
from minilm_cache.objectives.batch import UNITS, StudentBatch
from minilm_cache.objectives.spec import known_objective, parts_of
from minilm_cache.train.config import with_preset
from minilm_cache.train.trainer import StudentTrainer, read
from tests.fixtures import Command
from tests.integration.objectives.conftest import settings, trainer_of
from tests.support import World, save_teacher, write_corpus

VECTORS = ("--for", "minilm,embedding", "--pooling", "mean")


@pytest.fixture
def pooled(tmp_path: Path) -> World:
    """A cache of relations and of vectors of texts."""
    world = World(tmp_path, save_teacher(tmp_path / "teacher"), write_corpus(tmp_path / "corpus.txt"))
    world.dump(**{"for": "minilm,embedding"}, pooling="mean")
    return world


def encoder_of(trainer: StudentTrainer) -> torch.nn.Module:
    """Return a student without its head, which not every objective needs."""
    return trainer.model.model.base_model


def loss_of(trainer: StudentTrainer, batch: StudentBatch) -> tuple[Losses, dict[str, torch.Tensor]]:
    """Return a student's losses on a batch, and the gradient of each weight of the model."""
    objective = trainer.learner.objective.eval()
    trainer.model.model.eval()
    losses = objective.losses(objective(read(trainer.model, objective, batch), batch))
    trainer.model.model.zero_grad()
    losses.total.backward()
    named = encoder_of(trainer).named_parameters()
    return losses, {name: value.grad.clone() for name, value in named if value.grad is not None}


@pytest.mark.parametrize(
    ("kind", "objective", "arch"),
    [
        ("words", "minilm+hidden-mse=0.5", "2x32"),
        ("words", "tinybert=0.25+minilm", "2x32"),
        ("words", "minilm+tinybert=0.25", "2x32"),
        ("words", "minilm+bert-pkd", "2x32"),
        ("words", "value-mse=3+bert-pkd=0.01", "2x32"),
        ("classes", "tinybert+tinybert-prediction=2", "2x32"),
        ("pooled", "minilm=0.5+embedding=2", "2x16"),
    ],
)
def test_the_loss_is_the_weighted_sum_of_each_alone(
    request: pytest.FixtureRequest, kind: str, objective: str, arch: str
) -> None:
    """Value, parts, units and gradient."""
    world: World = request.getfixturevalue(kind)
    cache = open_cache(world.root / "cache")
    config = settings(objective, arch=(arch,))
    joint, batch = trainer_of(config, cache)
    total, gradients = torch.tensor(0.0), dict[str, torch.Tensor]()
    losses, found = loss_of(joint, batch)
    for number, (name, weight) in enumerate(parts_of(objective).items()):
        alone, own_batch = trainer_of(settings(name, arch=(arch,)), cache)
        assert torch.equal(own_batch.inputs.ids, batch.inputs.ids)
        encoder_of(alone).load_state_dict(encoder_of(joint).state_dict())
        of_joint = joint.learner.objective.get_submodule(f"_objectives.{number}")
        alone.learner.objective.load_state_dict(of_joint.state_dict())
        own, own_gradients = loss_of(alone, own_batch)
        for part, value in own.parts.items():
            torch.testing.assert_close(losses.parts[f"{name}/{part}"], value)
            assert losses.units[f"{name}/{part}"] == own.units[part]
        total = total + weight * own.total
        for key, gradient in own_gradients.items():
            gradients[key] = gradients.get(key, 0) + weight * gradient
    torch.testing.assert_close(losses.total, total)
    assert {key for key, value in found.items() if value.any()} == {
        key for key, value in gradients.items() if value.any()
    }
    for key, gradient in gradients.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-6)
    objective_of_joint = joint.learner.objective
    values = {name: float(value.detach()) for name, value in losses.parts.items()}
    assert objective_of_joint.total_of(values) == pytest.approx(float(total.detach()), rel=1e-5)
    halved = objective_of_joint.losses(losses.parts, dict.fromkeys(UNITS, 0.5))
    torch.testing.assert_close(halved.total, total / 2)


def test_both_are_learned_and_the_command_is_repeated(pooled: World, command: Command) -> None:
    """Repeated options, commas and plus signs are the same run; the student makes vectors of texts."""
    train = ("train", pooled.root / "cache", "--arch", "2x16", "--batch-size", 8, "--init", "random")
    again = ("--lr", "5e-3", "--out", pooled.root / "run")
    code, _, err = command(
        *train, "--objective", "minilm=1", "--objective", "embedding=0.5", "--steps", 30, *again
    )
    assert code == 0, err
    lines = [json.loads(line) for line in (pooled.root / "run" / "log.jsonl").read_text().splitlines()]
    students = [line["students"]["2x16"] for line in lines if "students" in line]
    assert students[0].keys() >= {"minilm/attention", "minilm/value", "embedding/cosine"}
    assert students[-1]["embedding/cosine"] < students[0]["embedding/cosine"]
    assert students[-1]["minilm/attention"] < students[0]["minilm/attention"]
    code, _, err = command(*train, "--objective", "minilm,embedding=0.5", "--steps", 30, *again)
    assert code == 0, err  # the same run, which is finished
    code, printed, _ = command("info", pooled.root / "run")
    assert "minilm+embedding=0.5" in printed
    record = json.loads((pooled.root / "run" / "run.json").read_text())
    assert record["identity"]["objective"] == "minilm+embedding=0.5"
    assert record["identity"]["batch_size"] == 8
    student = SentenceTransformer(str(pooled.root / "run" / "students" / "2x16"), device="cpu")
    assert student.encode(["ba be bi"]).shape == (1, 32)
    code, printed, err = command("report", pooled.root / "run", "--out", pooled.root / "page.html")
    assert code == 0, err
    assert "--objective minilm+embedding=0.5" in (pooled.root / "page.html").read_text()


def test_names_have_one_form() -> None:
    assert known_objective("minilm=1.0, embedding=.50") == "minilm+embedding=0.5"
    assert known_objective("embedding") == "embedding"
    for weight in ("0.0001", "10000", "0.123456789", "3"):
        name = known_objective(f"minilm={weight}+embedding")
        assert known_objective(name) == name
        assert parts_of(name)["minilm"] == float(weight)
    kept = with_preset("minilmv2", {"objective": ["minilmv2"]})
    assert kept["relation_heads"] == 48


def test_what_cannot_be_learned_at_once_is_one_line(words: World, pooled: World, command: Command) -> None:
    train = ("train", pooled.root / "cache", "--arch", "2x16", "--batch-size", 8, "--init", "random")
    for objectives, says in (
        (("minilm", "minilm"), "objective minilm is given twice"),
        (("minilm=0", "embedding"), "the weight '0' of objective minilm is not a number from"),
        (("minilm=nan", "embedding"), "the weight 'nan' of objective minilm"),
        (("minilm=-1", "embedding"), "the weight '-1' of objective minilm"),
        (("minilm=0.00001", "embedding"), "is not a number from 0.0001 to 10000"),
        (("minilm=1e2", "embedding"), "the weight '1e2' of objective minilm"),
        (("minilm=2",), "leave it out"),
        (("minilm", "none"), "there is no objective none"),
        (("minilm", "=1"), "there is no objective"),
        (("minilm", "hidden-mse"), "needs states that this cache does not hold"),
    ):
        given = [word for name in objectives for word in ("--objective", name)]
        command.fails(*train, *given, code=2, says=says)
    both = ("--objective", "minilm", "--objective", "embedding")
    command.fails(*train, *both, "--layer-map", "all", code=2, says="--layer-map all needs layer")
    command.fails(*train, "--layer-map", "own", code=2, says="--layer-map own does not go with")
    of_answers = ("--objective", "tinybert-prediction,embedding", "--layer-map", "all")
    command.fails(*train, *of_answers, code=2, says="--layer-map all does not go with --objective tinybert-p")
    command.fails(*train, *both, "--teacher-layer", 1, code=2, says="--teacher-layer does not go with")
    command.fails(*train, *both, "--relation-heads", 4, code=2, says="--relation-heads goes with")
    command.fails(*train, *both, "--temperature", 2, code=2, says="--temperature goes with --loss neighbours")
    of_cosines = ("--objective", "embedding+bert-pkd", "--loss", "neighbours", "--temperature", 5)
    command.fails(*train, *of_cosines, code=2, says="--loss neighbours needs another one than answers do")
    parts = settings("embedding+tinybert-prediction", temperature=2.0).each
    assert [part.temperature for part in parts] == [None, 2]
    of_words = ("train", words.root / "cache", "--arch", "2x32", "--batch-size", 8, "--init", "random")
    for objectives, says in (
        (("minilm", "mlm-kd"), "some read sequences with masked tokens and some do not"),
        (("minilm", "minilmv2"), "they compare different heads"),
        (("mlm-kd", "distilbert"), "some predict masked tokens and some all of them"),
    ):
        given = [word for name in objectives for word in ("--objective", name)]
        command.fails(*of_words, *given, code=2, says=says)
