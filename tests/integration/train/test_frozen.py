"""`train --frozen embeddings`: word embeddings stay as students begin with them."""

import json

import pytest
import torch
from safetensors.torch import load_file

from minilm_cache.session import Session
from minilm_cache.train.run import train_students
from tests.fixtures import Command
from tests.integration.train.test_train import settings, stop_after
from tests.support import World

WORDS = "embeddings.word_embeddings.weight"


@pytest.mark.parametrize("objective", ["minilm", "embedding"])
def test_word_embeddings_are_the_teachers_after_training(world: World, objective: str) -> None:
    pooled = {"for": "embedding", "pooling": "mean"} if objective == "embedding" else {}
    cache = world.dump(**pooled, codec="none" if pooled else "topk").path
    common = {"arch": ("2x32",), "objective": objective, "steps": 5, "init": "slice"}
    teacher = load_file(world.teacher / "model.safetensors")
    trained = {}
    for frozen in ("none", "embeddings"):
        config = settings(**common, init_teacher=str(world.teacher), frozen=frozen)
        result = train_students(config, cache, out=world.root / frozen, session=Session(world.home))
        trained[frozen] = load_file(result.student_path("2x32") / "model.safetensors")
        assert result.record.identity.frozen == (None if frozen == "none" else "embeddings")
        card = (result.student_path("2x32") / "README.md").read_text()
        assert ("word embeddings kept as they began" in card) == (frozen == "embeddings")
        assert "`embeddings.word_embeddings`" not in card  # that would say: fine-tune before you use it

    assert torch.equal(trained["embeddings"][WORDS], teacher[WORDS])
    assert not torch.equal(trained["none"][WORDS], teacher[WORDS])
    layer = "encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(trained["embeddings"][layer], teacher[layer])


def test_a_run_that_is_interrupted_goes_on_with_frozen_embeddings(world: World) -> None:
    cache = world.dump().path
    config = settings(
        arch=("2x32",), steps=8, frozen="embeddings", init="slice", init_teacher=str(world.teacher)
    )
    whole = train_students(config, cache, out=world.root / "whole", session=Session(world.home))
    with pytest.raises(Exception, match="interrupted"):
        train_students(
            config, cache, out=world.root / "cut", session=Session(world.home, should_stop=stop_after(4))
        )
    resumed = train_students(config, cache, out=world.root / "cut", session=Session(world.home))

    for name, weight in load_file(whole.student_path("2x32") / "model.safetensors").items():
        assert torch.equal(load_file(resumed.student_path("2x32") / "model.safetensors")[name], weight)


def test_random_embeddings_are_not_frozen(world: World, command: Command) -> None:
    cache = world.dump().path
    arguments = ("train", cache, "--arch", "2x32", "--frozen", "embeddings", "--out", world.root / "run")
    code, _, err = command(*arguments, "--init", "random")

    assert code == 2
    assert err.splitlines()[-1] == (
        "error: --frozen embeddings: 2x32 begins with random weights. Leave it out, or choose another --init."
    )
    code, _, err = command(
        *arguments, "--steps", 60, "--batch-size", 4, "--init-teacher", world.teacher, "--json"
    )
    assert code == 0, err
    assert json.loads((world.root / "run/run.json").read_text())["identity"]["frozen"] == "embeddings"
