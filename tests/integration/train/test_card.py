"""The card of a student: its code runs, and it names the model of the hub that it was distilled from."""

import re
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from minilm_cache.cache import open_cache
from minilm_cache.session import Session
from minilm_cache.train.card import student_card
from minilm_cache.train.run import train_students
from tests.encoders import save_encoder
from tests.integration.train.test_train import settings
from tests.support import World

CODE = re.compile(r"```python\n(.*?)\n```", re.DOTALL)


@pytest.mark.parametrize(
    ("objective", "stored"), [("minilm", {}), ("embedding", {"codec": "none", "pooled": True})]
)
def test_the_code_on_a_card_runs(world: World, objective: str, stored: dict[str, Any]) -> None:
    save_encoder(world.teacher, "mean")
    world.dump(packing="records", **stored)
    config = settings(arch=("2x16",), objective=objective, steps=1)
    result = train_students(config, world.root / "cache", out=world.root / "run", session=Session(world.home))
    folder = result.student_path("2x16")
    (code,) = CODE.findall((folder / "README.md").read_text())
    *begin, last = code.replace('"FOLDER"', repr(str(folder))).splitlines()
    names: dict[str, object] = {}
    exec("\n".join(begin), names)  # noqa: S102 - what a reader of the card would do
    output = torch.as_tensor(eval(last, names))  # noqa: S307

    assert output.isfinite().all()
    assert output.shape == ((2, 32) if objective == "embedding" else (1, output.shape[1], 16))


BASE_MODELS = {
    "mini": "sentence-transformers/all-MiniLM-L6-v2",
    "bert-base": "google-bert/bert-base-uncased",
    "team/encoder": "team/encoder",
    "teacher": None,
    "../elsewhere": None,
    "a/b/c": None,
}


def test_the_teacher_is_the_base_model_where_it_is_on_the_hub(world: World) -> None:
    manifest = world.dump().manifest
    config = settings(arch=("2x16",), steps=1)
    result = train_students(config, world.root / "cache", out=world.root / "run", session=Session(world.home))
    (student,) = result.record.students
    for teacher, base_model in BASE_MODELS.items():
        labels = manifest.labels.model_copy(update={"teacher": teacher})
        named = manifest.model_copy(update={"labels": labels})
        card = student_card(named, result.record.identity, record=student, untrained=[], head=None)
        data: Any = ModelCard(card).data
        assert data.base_model == base_model
        known = teacher in {"mini", "bert-base"}
        assert (data.license, data.language) == (("apache-2.0", "en") if known else (None, None))


def test_a_card_names_the_step_of_its_weights(world: World) -> None:
    world.dump()
    config = settings(arch=("1x16",), steps=3)
    result = train_students(config, world.root / "cache", out=world.root / "run", session=Session(world.home))
    (student,) = result.record.students
    manifest = open_cache(world.root / "cache").manifest
    for step, is_named in ((None, False), (3, False), (2, True)):
        record = student.model_copy(update={"best_step": step})
        card = student_card(manifest, result.record.identity, record=record, untrained=[], head=None)
        assert (
            "seed 0; the weights are those of step 2, whose held-out loss was the least\n" in card
        ) == is_named
        assert ("seed 0\n- begun with" in card) == (not is_named)
