"""`train --vocab`: students with fewer pieces learn what those with all pieces learn."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from minilm_cache.cache import open_cache
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.pooling import SentencePooler
from minilm_cache.storage_schema.states import LOGITS
from tests.fixtures import Command
from tests.support import SPECIAL, WORDS, World, save_teacher, write_corpus, write_groups

FEW = WORDS[:12]


@pytest.fixture
def few(world: World) -> World:
    """Return a world with a text of few words, whose cache holds relations and vectors."""
    draw = random.Random(0)
    lines = [" ".join(draw.choices(FEW, k=2 + n % 7)) for n in range(80)]
    world.corpus.write_text("\n\n".join(lines))
    SentencePooler("mean", normalize=True).save(world.teacher, hidden_size=32, max_length=32)
    world.dump(**{"for": "minilm,embedding"})
    return world


@pytest.mark.parametrize("objective", ["minilm", "embedding"])
def test_students_learn_the_same_where_all_pieces_are_kept(few: World, objective: str) -> None:
    whole, small = (
        few.train(name, objective=objective, vocab=vocab) for name, vocab in (("a", None), ("b", "cache"))
    )
    (before,), (after,) = whole.record.students, small.record.students
    for name in ("held_out_before", "held_out_after"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), abs=1e-5)
    vocabulary = small.record.vocabulary
    assert vocabulary is not None
    assert (vocabulary.asked, vocabulary.pieces) == ("cache", len(SPECIAL) + len(FEW))
    assert (vocabulary.texts, vocabulary.tokens, vocabulary.unknown) == (1, 1, 0)

    folders = [result.student_path("1x32") for result in (whole, small)]
    models, tokenizers = (
        [kind.from_pretrained(folder) for folder in folders] for kind in (AutoModel, AutoTokenizer)
    )
    texts = [" ".join(FEW[:5]), FEW[-1]]
    states = [
        model(**tokenizer(texts, padding=True, return_tensors="pt")).last_hidden_state[:, 0]
        for model, tokenizer in zip(models, tokenizers, strict=True)
    ]
    torch.testing.assert_close(states[1], states[0], rtol=1e-3, atol=1e-4)
    assert models[1].config.vocab_size == len(tokenizers[1]) == len(SPECIAL) + len(FEW)
    assert after.num_parameters == models[1].num_parameters()
    card = (folders[1] / "README.md").read_text()
    assert f"vocabulary: {len(SPECIAL) + len(FEW)} of" in card


def test_lost_words_are_unknown_or_spelled(few: World, command: Command) -> None:
    """This tokenizer is of whole words, so that a lost word is unknown."""
    small = few.train("small", objective="embedding", vocab="9", arch=("1x16",))
    vocabulary = small.record.vocabulary
    assert vocabulary is not None
    assert vocabulary.pieces == 9
    assert vocabulary.tokens is not None
    assert vocabulary.unknown == pytest.approx(1 - vocabulary.tokens)
    vectors: Any = SentenceTransformer(str(small.student_path("1x16")), device="cpu").encode([FEW[0]])
    assert vectors.shape == (1, 32)
    saved = json.loads((small.student_path("1x16") / "tokenizer.json").read_text())
    assert saved["truncation"] is None  # what training cut its last texts to says nothing of the student

    code, printed, _ = command("info", small.path)
    assert code == 0
    assert "vocabulary" in printed
    assert "9 of" in printed
    report = few.root / "page.html"
    code, _, err = command("report", small.path, "--teacher", few.teacher, "--out", report)
    assert code == 0, err
    assert "another vocabulary than the teacher" in report.read_text()
    assert "--vocab 9" in report.read_text()


def test_students_go_on_with_the_pieces_that_they_have(few: World) -> None:
    """What they learned is there when they begin again, on other text, too; other pieces are refused."""
    first = few.train("first", objective="embedding", vocab="9")
    words: dict[str, Any] = {"objective": "embedding", "init": str(first.path)}
    folder = str(first.student_path("1x32"))
    for name, vocab in (("second", "9"), ("third", folder)):
        second = few.train(name, vocab=vocab, **words)
        (before,), (after,) = first.record.students, second.record.students
        assert after.held_out_before == pytest.approx(before.held_out_after, abs=1e-6)
        assert AutoModel.from_pretrained(second.student_path("1x32")).config.vocab_size == 9
    for refused in ("8", "cache", None):
        with pytest.raises(InvalidConfigError, match=f"add --vocab {folder}"):
            few.train(f"refused-{refused}", vocab=refused, **words)
    write_corpus(few.corpus, 80, seed=1)
    other = replace(few, root=few.root / "other")
    other.dump(**{"for": "embedding"})
    with pytest.raises(InvalidConfigError, match="add --vocab"):  # other pieces are the nine most frequent
        other.train("refused", vocab="9", **words)
    third = other.train("third", vocab=folder, **words)
    assert tokenizer_pieces(third.student_path("1x32")) == tokenizer_pieces(Path(folder))


def tokenizer_pieces(folder: Path) -> dict[str, int]:
    pieces: dict[str, int] = AutoTokenizer.from_pretrained(folder).get_vocab()
    return pieces


def test_a_stopped_run_ends_as_one_that_was_not(few: World) -> None:
    found = few.resumes_the_same("1x32", objective="embedding", vocab="cache")
    assert json.loads((found.path / "run.json").read_text())["identity"]["vocab"]


def test_what_cannot_be_asked_for(few: World, tmp_path: Path, command: Command) -> None:
    for vocab, says in (("texts", "goes with trim"), ("none.txt", "no such file"), ("2", "5 pieces")):
        with pytest.raises(InvalidConfigError, match=says):
            few.train("x", vocab=vocab)
    few.train("all", objective="minilm,embedding", vocab="cache")
    with pytest.raises(InvalidConfigError, match="cut into other pieces where whole texts are"):
        few.train("x", objective="minilm,embedding", vocab="9")
    assert not (few.root / "x").exists()
    words = ("chain", "--teacher", few.teacher, "--corpus", few.corpus, "--max-length", 32)
    more = ("--assistant", "2x32", "--vocab", "cache", "--arch", "1x16", "--out", tmp_path / "chain")
    command.fails(*words, *more, code=2, says="trim the last students")


def test_objectives_in_the_teachers_pieces_are_refused(world: World) -> None:
    save_teacher(world.teacher, head="tokens")
    world.dump(**{"for": "mlm-kd"})
    with pytest.raises(InvalidConfigError, match=r"--vocab: objective mlm-kd .* trim the student"):
        world.train("x", objective="mlm-kd", vocab="cache", init="random")


def test_answers_to_texts_are_learned_as_texts_are_read_in_use(tmp_path: Path) -> None:
    """The held-out loss is what transformers computes of the texts, some of whose words are unknown."""
    teacher = save_teacher(tmp_path / "teacher", head="sequences", num_labels=3)
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt"))
    cache = open_cache(world.dump(codec="none", logits=True, packing="records").path)
    run = world.train("run", objective="tinybert-prediction", vocab="9")
    folder, read = run.student_path("1x32"), AutoTokenizer.from_pretrained(teacher)
    assert len(tokenizer_pieces(folder)) < len(read)
    student = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer, losses = AutoTokenizer.from_pretrained(folder), []
    for sequence in cache[cache.manifest.num_train :]:
        text = str(read.decode(sequence.input_ids, skip_special_tokens=True))
        inputs = tokenizer(text, truncation=True, max_length=32, return_tensors="pt")
        answer = sequence.states()[LOGITS].softmax(-1)
        losses.append(-(answer * student(**inputs).logits.detach().log_softmax(-1)).sum())
    (found,) = run.record.students
    assert found.held_out_after is not None
    expected = float(torch.stack(losses).mean())
    assert found.held_out_after["prediction"] == pytest.approx(expected, rel=1e-4)


def test_pieces_of_pairs_go_with_a_first_training(tmp_path: Path, command: Command) -> None:
    teacher, pairs = save_teacher(tmp_path / "teacher"), write_groups(tmp_path / "pairs.jsonl")
    code, _, err = command(
        *("dump", "--teacher", teacher, "--corpus", pairs, "--pair-columns", "query,right+wrong"),
        *("--pooled", "--pooling", "mean", "--max-length", "32", "--out", tmp_path / "cache"),
    )
    assert code == 0, err
    code, _, err = command(
        *("train", tmp_path / "cache", "--first", "minilm", "--objective", "embedding", "--vocab", "30"),
        *("--arch", "1x16", "--steps", "2", "--out", tmp_path / "run"),
    )
    assert code == 0, err
    assert len(tokenizer_pieces(tmp_path / "run/students/1x16")) < len(tokenizer_pieces(teacher))
