"""Searching a corpus with a student, beside sentence-transformers."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from minilm_cache.errors import InterruptedRunError, InvalidConfigError
from minilm_cache.models.student import seconds_in_turns
from minilm_cache.report.config import ReportConfig
from minilm_cache.settings import validated
from minilm_cache.storage_schema.manifest import PROMPTS_FILE
from minilm_cache.store.urls import place_of
from minilm_cache.train.folder import RunFolder
from minilm_cache.train.record import load_record
from tests.encoders import save_encoder
from tests.fixtures import Command
from tests.support import WORDS, World, save_teacher

TEXTS = [" ".join(WORDS[number : number + 4]) for number in range(14)]


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    folder = save_teacher(tmp_path / "encoder", hidden_size=64)
    save_encoder(folder, "mean", width=64, max_length=64)
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text("\n\n".join(TEXTS))
    return file


@pytest.mark.parametrize(
    ("prompts", "default", "normalize"),
    [
        ({}, None, True),
        ({}, None, False),
        ({"query": f"{WORDS[1]} ", "document": f"{WORDS[2]} {WORDS[3]} "}, None, True),
        ({"query": "", "document": "", "other": f"{WORDS[1]} "}, "other", True),
    ],
)
def test_the_nearest_texts_are_those_of_sentence_transformers(
    tmp_path: Path,
    corpus: Path,
    command: Command,
    prompts: dict[str, str],
    default: str | None,
    normalize: bool,
) -> None:
    encoder = save_teacher(tmp_path / "plain", hidden_size=64)
    save_encoder(encoder, "mean", width=64, max_length=64, normalize=normalize)
    if prompts:
        content = {"prompts": prompts, "default_prompt_name": default}
        (encoder / PROMPTS_FILE).write_text(json.dumps(content))
    questions = [TEXTS[3], f"{WORDS[0]} {WORDS[9]}"]
    code, out, err = command("search-text", encoder, *questions, "--corpus", corpus, "--top", 4, "--json")
    assert code == 0, err
    model = SentenceTransformer(str(encoder), device="cpu")
    scores = model.similarity(model.encode_query(questions), model.encode_document(TEXTS)).numpy()
    for found, row in zip(json.loads(out)["questions"], scores, strict=True):
        nearest = np.argsort(-row)[:4]
        assert [each["number"] for each in found["found"]] == nearest.tolist()
        assert [each["score"] for each in found["found"]] == pytest.approx(row[nearest].tolist(), abs=1e-5)
        assert [each["text"] for each in found["found"]] == [TEXTS[number] for number in nearest]


def test_texts_that_are_cut_are_counted(encoder: Path, corpus: Path, command: Command) -> None:
    for most, says in (
        (5, "14 of 14 texts are cut at 5 tokens"),
        (6, None),
    ):  # of 4 words, and 2 special tokens
        code, _, err = command("search-text", encoder, "ba", "--corpus", corpus, "--max-length", most)
        assert code == 0, err
        assert "cut at" not in err if says is None else says in err


def test_a_run_stands_for_its_best_student(world: World, encoder: Path, command: Command) -> None:
    world = replace(world, teacher=encoder)
    world.dump(codec="none", pooled=True, packing="records")
    run = world.root / "run"
    shapes = ("--arch", "1x16", "--arch", "2x64")
    trained = command(
        "train", world.root / "cache", *shapes, "--steps", 2, "--objective", "embedding", "--out", run
    )
    assert trained[0] in (0, 1), trained[2]
    losses = {each.arch: each.loss_after or 0 for each in load_record(run).students}
    best = RunFolder(path=run).student(min(losses, key=lambda arch: losses[arch]))
    asked = (TEXTS[2], "--corpus", world.corpus, "--max-texts", 9, "--json")
    code, out, err = command("search-text", run, *asked)
    assert code == 0, err
    assert "searching the first 9 of" in err
    assert out == command("search-text", best, *asked)[1]


def test_a_run_without_students_yet_is_to_be_finished(world: World, command: Command) -> None:
    world.dump(**{"for": "embedding", "pooling": "mean"})
    with pytest.raises(InterruptedRunError):
        world.train("run", stop_at=2, objective="embedding", checkpoint_steps=2)
    for words in (
        ("search-text", world.root / "run", "ba"),
        ("speed", world.teacher, world.root / "run", "--length", 16),
    ):
        command.fails(*words, code=1, says="is not complete, and its students are not written yet")


def test_mistakes(encoder: Path, corpus: Path, command: Command, tmp_path: Path) -> None:
    plain = save_teacher(tmp_path / "plain")
    asked = ("--corpus", corpus)
    command.fails("search-text", encoder, " ", *asked, code=2, says="give a question")
    command.fails("search-text", tmp_path / "no", "ba", *asked, code=1, says="no")
    command.fails(
        "search-text", encoder, "ba", "--corpus", tmp_path / "no.txt", code=1, says="does not exist"
    )
    command.fails("search-text", plain, "ba", *asked, code=2, says="gives no vectors of texts")
    assert command("search-text", encoder, "ba", *asked)[0] == 0


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_folder_that_names_more_tokens_than_positions_is_read_as_far_as_they_go(
    tmp_path: Path, corpus: Path, command: Command, family: str
) -> None:
    folder = save_teacher(tmp_path / "short", family)
    save_encoder(folder, "mean", max_length=512)
    longer = " ".join(WORDS[at % 20] for at in range(90))
    code, _, err = command("search-text", folder, longer, "--corpus", corpus)
    assert code == 0, err


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_texts_are_read_as_far_as_the_model_reads_them(
    tmp_path: Path, corpus: Path, command: Command, family: str
) -> None:
    """A model of fewer positions than --max-length, whose folder says that it reads fewer still."""
    folder = save_teacher(tmp_path / "short", family)
    save_encoder(folder, "mean", max_length=12)
    longer = " ".join(WORDS[at % 20] for at in range(90))
    code, out, err = command("search-text", folder, longer, "--corpus", corpus, "--top", 1, "--json")
    assert code == 0, err
    model = SentenceTransformer(str(folder), device="cpu")
    scores = model.similarity(model.encode_query([longer]), model.encode_document(TEXTS)).numpy()
    (found,) = json.loads(out)["questions"][0]["found"]
    assert found["score"] == pytest.approx(float(scores.max()), abs=1e-5)


def test_a_text_that_is_not_utf_8_is_one_line(
    tmp_path: Path, corpus: Path, encoder: Path, command: Command
) -> None:
    """As bytes of another encoding come in through a command line."""
    odd = "ba \udcff"
    for words in (
        ("search-text", encoder, odd, "--corpus", corpus),
        ("generate", encoder, odd),
        ("generate", encoder, "ba", "--answer", odd),
    ):
        command.fails(*words, code=2, says="no text in UTF-8")
    for settings in ({"teacher": "mini", "text": (odd,)}, {"title": odd}):
        with pytest.raises(InvalidConfigError, match="no text in UTF-8"):
            validated(ReportConfig, settings).refuse_page(tmp_path / "page.html")


def test_vectors_without_numbers_have_no_order(corpus: Path, encoder: Path, command: Command) -> None:
    weights = load_file(encoder / "model.safetensors")
    name = next(name for name in weights if name.endswith("intermediate.dense.weight"))
    weights[name] = torch.full_like(weights[name], 3e38)
    save_file(weights, encoder / "model.safetensors", metadata={"format": "pt"})
    command.fails("search-text", encoder, "ba be", "--corpus", corpus, code=1, says="NaN or infinity")


def test_numbers_that_nothing_is_counted_up_to_are_one_line(
    tmp_path: Path, corpus: Path, encoder: Path, command: Command
) -> None:
    for words in (
        ("search-text", encoder, "ba", "--corpus", corpus, "--max-texts"),
        ("train", tmp_path, "--arch", "1x16", "--buffer-shards"),
        ("evaluate", encoder, "--task", "sst2", "--batch-size"),
        ("speed", encoder, "--batch-size"),
        ("speed", encoder, "--turns"),
        ("search", tmp_path, "--out", tmp_path / "search", "--pass-texts"),
        ("rerank", encoder, "--retrieval", corpus, "--first-stage", encoder, "--max-queries"),
    ):
        command.fails(*words, 10**30, code=2, says=("--", "give at most"))


def test_a_comparison_of_speeds_is_stopped_between_its_turns() -> None:
    turns = list[int]()

    def stop() -> None:
        if len(turns) == 3:
            raise InterruptedRunError("stopped")

    with pytest.raises(InterruptedRunError):
        seconds_in_turns({"x": lambda: turns.append(1)}, torch.device("cpu"), 1000, before_each=stop)
    assert len(turns) == 3


def test_a_path_that_no_record_can_name_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="is not UTF-8"):
        place_of(os.fsdecode(b"caches/\xff"))
