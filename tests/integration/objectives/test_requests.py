"""What objectives ask of caches and shapes, what they refuse, and what students begin with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from minilm_cache.cache import open_cache
from minilm_cache.errors import InvalidConfigError
from minilm_cache.objectives.spec import OBJECTIVES
from minilm_cache.report.runs import TrainedRun
from minilm_cache.train.config import with_preset
from tests.fixtures import Command
from tests.integration.objectives.conftest import settings, trainer_of
from tests.support import World, save_teacher


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != "minilm"])
def test_a_cache_that_lacks_something_names_the_flags_that_add_it(
    shared_world: World, command: Command, objective: str
) -> None:
    arch = "3x32:b16" if objective == "mobilebert" else "2x32"
    line = command.fails(
        *("train", shared_world.root / "cache", "--arch", arch, "--objective", objective, "--steps", 1),
        code=2,
        says=f"--objective {objective} needs",
    )
    needs = OBJECTIVES[objective].needs
    if needs.vectors:
        assert "--codec vectors" in line
    for option, is_needed in (
        ("--hidden", needs.hidden),
        ("--masked-hidden", needs.masked_hidden),
        ("--first-hidden", needs.first),
        ("--labels", needs.labels),
        ("--logits", needs.logits),
    ):
        if is_needed and not needs.vectors:
            assert option in line
            assert "--add" in line or "--pair-columns" in line


def test_students_that_cannot_learn_something_are_told_why(words: World, command: Command) -> None:
    say = ("train", words.root / "cache", "--steps", 1, "--arch")
    for objective in ("distilbert", "bert-pkd", "mobilebert"):
        command.fails(*say, "3x16", "--objective", objective, code=2, says="the teacher's 32")
    command.fails(*say, "2x32", "--objective", "mobilebert", code=2, says=("3x32:b8", "layer with layer"))
    command.fails(*say, "1x32", "--objective", "bert-pkd", code=2, says="students of 2 layers or more")
    command.fails(*say, "2x32:b12:h8", "--objective", "mlm-kd", code=2, says="divisible by 8 heads")
    command.fails(
        *say, "2x32", "--objective", "mlm-kd", "--layer-map", "all", code=2, says="does not go with"
    )
    command.fails(
        *say, "2x32", "--objective", "distilbert", "--teacher-layer", 1, code=2, says="does not go with"
    )
    command.fails(*say, "2x32", "--objective", "nothing", code=2, says="--objective nothing")
    command.fails(*say, "foo", "--objective", "tinybert", code=2, says="--arch foo: write LAYERSxHIDDEN")


def test_heads_are_free_where_no_heads_are_compared(words: World) -> None:
    for objective in ("mlm-kd", "distilbert", "bert-pkd"):
        trainer, _ = trainer_of(settings(objective, arch=("2x32:h8",)), open_cache(words.root / "cache"))
        assert trainer.model.model.config.num_attention_heads == 8
    with pytest.raises(InvalidConfigError, match="compares head with head"):
        trainer_of(settings("tinybert", arch=("2x32:h8",)), open_cache(words.root / "cache"))


def test_students_begin_with_the_teachers_layers(words: World, command: Command, tmp_path: Path) -> None:
    teacher: Any = AutoModel.from_pretrained(words.teacher)
    cache = open_cache(words.root / "cache")
    config = settings(
        "distilbert", arch=("2x32:ff64",), init="teacher-layers", init_teacher=str(words.teacher)
    )
    trainer, batch = trainer_of(config, cache)
    own: Any = trainer.model.model.base_model
    for number, there in ((0, 0), (1, 2)):  # evenly spaced, the last included
        expected = teacher.encoder.layer[there].state_dict()
        found = own.encoder.layer[number].state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(own.embeddings.word_embeddings.weight, teacher.embeddings.word_embeddings.weight)
    drawn, _ = trainer_of(settings("distilbert", arch=("2x32:ff64",)), cache)
    with torch.no_grad():
        begun, random = trainer.evaluate(batch).parts, drawn.evaluate(batch).parts
    assert float(begun["cosine"]) < float(random["cosine"])
    say = ("train", words.root / "cache", "--objective", "distilbert", "--steps", 1, "--arch")
    teacher_of = ("--init", "teacher-layers", "--init-teacher")
    other = save_teacher(tmp_path / "other", head="tokens", seed=3)
    command.fails(*say, "2x32", "--init-teacher", other, code=1, says="is not the teacher of this cache")
    command.fails(
        *say, "4x32:ff64", *teacher_of, words.teacher, code=2, says="more layers than the teacher's 3"
    )
    command.fails(*say, "2x32", "--init", tmp_path / "nowhere", code=2, says="no such folder")


def test_students_begin_with_students(words: World, command: Command, tmp_path: Path) -> None:
    base = ("train", words.root / "cache", "--steps", 2, "--batch-size", 4, "--device", "cpu")
    first = tmp_path / "first"
    assert command(*base, "--objective", "minilm", "--arch", "2x16", "--arch", "1x32", "--out", first)[0] == 0
    say = (*base, "--objective", "mlm-kd", "--init", first)
    assert command(*say, "--arch", "2x16", "--arch", "1x32", "--out", tmp_path / "second")[0] == 0
    config = settings("mlm-kd", init=str(first), arch=("2x16",))
    trainer, _ = trainer_of(config, open_cache(words.root / "cache"))
    begun, saved = trainer.model.model.base_model, AutoModel.from_pretrained(first / "students/2x16")
    there = saved.state_dict()
    assert all(torch.equal(value, there[name]) for name, value in begun.state_dict().items())
    record = TrainedRun.open(tmp_path / "second").record
    assert len(record.identity.init) == 64
    command.fails(*say, "--arch", "3x16", "--out", tmp_path / "x", code=2, says="has no student 3x16")
    single = (*base, "--objective", "mlm-kd", "--init", first / "students/2x16", "--out", tmp_path / "x")
    command.fails(*single, "--arch", "1x32", code=2, says="not of the same shape")


def test_bottlenecks_are_mobileberts(words: World) -> None:
    trainer, _ = trainer_of(settings("mobilebert"), open_cache(words.root / "cache"))
    config = trainer.model.model.config
    assert (config.model_type, config.hidden_size, config.true_hidden_size) == ("mobilebert", 32, 16)
    assert (config.num_hidden_layers, config.num_attention_heads, config.embedding_size) == (3, 4, 16)


def test_sequences_without_a_token_to_mask_do_no_harm(records: World, command: Command) -> None:
    out = records.root / "run"
    words = ("train", records.root / "cache", "--arch", "2x16", "--objective", "mlm-kd", "--steps", 30)
    code, _, err = command(*words, "--batch-size", 4, "--accumulate", 4, "--device", "cpu", "--out", out)
    assert code == 0, err


def test_an_encoder_without_a_head_begins_a_student_with_one(
    classes: World, words: World, tmp_path: Path
) -> None:
    config = settings("tinybert-prediction", arch=("3x32:ff64",), init=str(tmp_path / "encoder"))
    save_teacher(tmp_path / "encoder", seed=7)
    trainer, _ = trainer_of(config, open_cache(classes.root / "cache"))
    there = AutoModel.from_pretrained(tmp_path / "encoder").state_dict()
    begun = trainer.model.model.base_model.state_dict()
    assert all(torch.equal(value, there[name]) for name, value in begun.items())
    assert trainer.model.model.config.num_labels == 3
    with pytest.raises(InvalidConfigError, match="the number of heads"):
        trainer_of(
            settings("mlm-kd", arch=("3x32:ff64:h8",), init=str(tmp_path / "encoder")),
            open_cache(words.root / "cache"),
        )


def test_seeds_of_students_are_those_of_their_projections_too(words: World) -> None:
    cache = open_cache(words.root / "cache")
    drawn = [
        trainer_of(settings("hidden-mse", arch=(arch,)), cache)[0].learner.objective.state_dict()
        for arch in ("2x16:s1", "2x16:s2", "2x16:s1")
    ]
    (name,) = drawn[0]
    assert torch.equal(drawn[0][name], drawn[2][name])
    assert not torch.equal(drawn[0][name], drawn[1][name])


def test_bottlenecks_have_vectors_of_their_own_width(words: World, command: Command) -> None:
    say = ("train", words.root / "cache", "--objective", "minilmv2", "--steps", 1, "--arch", "3x32:b12")
    command.fails(*say, "--relation-heads", 8, code=2, says="width 12 is not divisible by 8 relation heads")


def test_settings_without_an_effect_are_refused(world: World, command: Command) -> None:
    world.dump(codec="none", first_hidden="all")
    train = ("train", world.root / "cache", "--arch", "2x32", "--objective", "bert-pkd", "--out")
    for option, value, says in (
        ("--temperature", 3, "--temperature 3: this cache has no logits"),
        ("--patience", 0, "--patience 0 leaves nothing to learn"),
        ("--patience", 1e9, "--patience 1000000000.0: give at most"),
        ("--temperature", 1e-40, "--temperature"),
    ):
        command.fails(*train, world.root / "run", option, value, code=2, says=says)
    for loss in ("cosine=", "cosine=1000000", "cosine=0"):
        words = ("train", world.root / "cache", "--arch", "2x32", "--objective", "embedding", "--loss", loss)
        command.fails(*words, code=2, says="with a weight like similarity=10")
    both = ("--first", "embedding+minilm", "--objective", "minilm+embedding")
    command.fails(
        "train", world.root / "cache", "--arch", "2x32", *both, code=2, says="is the objective itself"
    )


def test_a_preset_keeps_its_relation_heads_among_several_objectives() -> None:
    given = {"objective": "minilmv2+embedding"}
    assert with_preset("minilmv2", given)["relation_heads"] == 48
    assert "relation_heads" not in with_preset("minilmv2", {"objective": "minilm"})


def test_teachers_of_several_labels_are_refused_and_values_stay_values(
    world: World, tmp_path: Path, command: Command
) -> None:
    teacher = save_teacher(tmp_path / "labels", head="sequences", num_labels=3)
    edited = json.loads((teacher / "config.json").read_text()) | {
        "problem_type": "multi_label_classification"
    }
    (teacher / "config.json").write_text(json.dumps(edited))
    text = ("--corpus", world.corpus, "--max-length", 32)
    words = ("dump", "--teacher", teacher, *text, "--out", tmp_path / "no")
    command.fails(
        *words,
        "--for",
        "tinybert-prediction",
        "--packing",
        "records",
        code=2,
        says="gives several labels to a text",
    )

    value = save_teacher(tmp_path / "value", head="sequences", num_labels=1)
    told = World(tmp_path, value, world.corpus)
    told.dump(codec="none", logits=True, packing="records")
    run = told.train("run", objective="score", steps=1)
    assert json.loads((run.student_path("1x32") / "config.json").read_text())["problem_type"] == "regression"
