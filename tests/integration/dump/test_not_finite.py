"""A teacher that overflows on a rare word: nothing of it is stored, whatever is asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification

from minilm_cache.codecs.transform import LOST, TransformCode, cosine_error
from minilm_cache.dump import identity, reading
from minilm_cache.errors import TeacherError
from minilm_cache.store.index import committed_shards
from tests.support import VOCABULARY, WORDS, World, save_teacher

RARE = WORDS[-1]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A teacher whose word embedding of one word is finite, and whose sums are not; one text has the word."""
    for name in ("CALIBRATION_TOKENS", "STATE_CALIBRATION_TOKENS"):
        monkeypatch.setattr(identity, name, 256)
    monkeypatch.setattr(identity, "CALIBRATION_SEQUENCES", 32)
    teacher = save_teacher(tmp_path / "teacher", head="sequences")
    model: Any = AutoModelForSequenceClassification.from_pretrained(teacher)
    model.get_input_embeddings().weight.data[VOCABULARY.index(RARE)] = 3e38
    model.save_pretrained(teacher)
    texts = [" ".join(WORDS[(number + at) % (len(WORDS) - 1)] for at in range(6)) for number in range(300)]
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join([*texts, f"{RARE} ba be"]))
    return World(tmp_path, teacher, corpus)


SETTINGS: list[dict[str, Any]] = [
    {"codec": "vectors", "max_kl": 0.05},
    {"codec": "topk", "k": 4},
    {"codec": "dense"},
    {"codec": "none", "hidden": "last"},
    {"codec": "none", "pooled": True, "pooling": "mean"},
    {"codec": "none", "logits": True},
    {"codec": "none", "first_hidden": "last"},
]


@pytest.mark.parametrize(
    ("settings", "waits"),
    [
        *((settings, True) for settings in SETTINGS),
        *((settings, False) for settings in SETTINGS if settings["codec"] != "topk"),
    ],
)
def test_a_text_with_numbers_that_are_none_ends_the_dump(
    world: World, monkeypatch: pytest.MonkeyPatch, *, settings: dict[str, Any], waits: bool
) -> None:
    """On a CPU the text is named; of a device that is not waited for, what arrives is looked at.

    Such a device draws the entries of `topk` by a kernel, which is not tried here.
    """
    states = AutoModel.from_pretrained(world.teacher)(torch.tensor([[VOCABULARY.index(RARE)]]))
    assert not states.last_hidden_state.isfinite().all()
    if not waits:
        monkeypatch.setattr(reading, "_refuse_not_finite", lambda *_, **__: None)
    says = r"gives NaN or infinity for sequence \d+ of this text" if waits else "would have NaN"
    with pytest.raises(TeacherError, match=says):
        world.dump(packing="records", shard_tokens=4096, batch_size=4, **settings)
    assert list(committed_shards(world.root / "cache", 1)) == []


def test_no_code_stands_for_what_is_no_number() -> None:
    ones = torch.ones(2)
    code = TransformCode(
        mean=0 * ones, basis=torch.eye(2).half(), step=ones, analysis=torch.eye(2).half(), gain=ones
    )
    rows: Tensor = torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [torch.inf, 0.0]])
    assert code.codes(rows).tolist() == [[1, 2], [LOST] * 2, [LOST] * 2]
    assert not cosine_error(rows[1:2], rows[:1], ones) <= 1
