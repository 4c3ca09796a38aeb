"""`minilm-cache trim`: a model with fewer pieces answers texts of these pieces as the whole one does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from minilm_cache.models.pooling import SentencePooler
from minilm_cache.session import Session
from minilm_cache.settings import TrimConfig, validated
from minilm_cache.workflows.trim import trim
from tests.encoders import save_encoder
from tests.fixtures import Command
from tests.support import SPECIAL, VOCABULARY, World, save_teacher

KEPT = "ba be bi do du"
TEXTS = ["ba be do", "du", "bi bi bi be"]


def write_text(folder: Path) -> Path:
    """Return a file of some of the words that the tokenizer knows."""
    file = folder / "few.txt"
    file.write_text("\n".join([KEPT, *TEXTS, "ba", "be", "do", "do bi", "ba ba", "du be"]))
    return file


def test_a_sentence_encoder_keeps_its_vectors(world: World, tmp_path: Path, command: Command) -> None:
    SentencePooler("mean", normalize=True).save(world.teacher, hidden_size=32, max_length=32)
    prompts = {"prompts": {"query": "ba ", "document": ""}, "default_prompt_name": None}
    (world.teacher / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    text, out = write_text(tmp_path), tmp_path / "small"
    words = ("trim", world.teacher, "--corpus", text, "--documents", "lines")
    code, printed, err = command(*words, "--out", out, "--json")
    assert code == 0, err
    found = json.loads(printed)

    num_kept = len(KEPT.split()) + len(SPECIAL)
    whole = AutoModel.from_pretrained(world.teacher)
    assert (found["num_pieces"], found["pieces_before"]) == (num_kept, whole.config.vocab_size)
    assert found["parameters_before"] - found["num_parameters"] == 32 * (whole.config.vocab_size - num_kept)
    assert found["coverage"] == {"texts": 1.0, "tokens": 1.0, "unknown": 0.0}
    teacher, small = (SentenceTransformer(str(folder), device="cpu") for folder in (world.teacher, out))
    assert small.prompts == prompts["prompts"]
    for name in (None, "query"):
        vectors: Any = small.encode(TEXTS, prompt_name=name)
        torch.testing.assert_close(vectors, teacher.encode(TEXTS, prompt_name=name), atol=1e-6, rtol=1e-5)
    assert f"{num_kept} pieces" in (out / "README.md").read_text()
    assert "100.0% of texts are cut as before" in (out / "README.md").read_text()
    command.fails(*words, "--out", out, code=2, says="exists")
    command.fails(*words, "--vocab", "3", "--out", tmp_path / "x", code=2, says="6 pieces")
    command.fails(*words, "--vocab", "none.txt", "--out", tmp_path / "x", code=2, says="no such file")
    command.fails(
        "trim", tmp_path / "no", *words[2:], "--out", tmp_path / "x", code=1, says="unknown teacher"
    )
    assert not (tmp_path / "x").exists()


def test_a_trimmed_teacher_is_a_teacher(world: World, tmp_path: Path, command: Command) -> None:
    text = write_text(tmp_path)
    assert command("trim", world.teacher, "--corpus", text, "--out", tmp_path / "small")[0] == 0
    listed = tmp_path / "pieces.txt"
    listed.write_text("\n".join(KEPT.split()))
    code, _, err = command("trim", world.teacher, "--vocab", listed, "--out", tmp_path / "listed")
    assert code == 0, err
    assert "--corpus" not in err  # no text is read
    pieces = len(AutoTokenizer.from_pretrained(world.teacher))
    code, _, err = command(
        "trim", world.teacher, "--vocab", pieces, "--corpus", world.corpus, "--out", tmp_path / "whole"
    )
    assert code == 0, err
    assert f"all {pieces} pieces are kept: the model is a copy" in err
    small = World(tmp_path / "own", tmp_path / "small", text)
    assert small.dump().manifest.identity.teacher.vocab_size == len(KEPT.split()) + len(SPECIAL)


def test_a_model_that_needs_more_than_pieces_is_refused(tmp_path: Path, command: Command) -> None:
    """X-MOD asks for a language."""
    teacher = save_teacher(tmp_path / "teacher")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    config = AutoConfig.for_model("xmod", vocab_size=len(VOCABULARY), languages=["en"], **sizes)
    AutoModel.from_config(config).save_pretrained(teacher)
    words = ("trim", teacher, "--corpus", write_text(tmp_path), "--out", tmp_path / "out")
    command.fails(*words, code=1, says="cannot run a model of the family xmod on word pieces alone")


def test_prompts_keep_their_pieces(world: World, tmp_path: Path, command: Command) -> None:
    SentencePooler("mean", normalize=True).save(world.teacher, hidden_size=32, max_length=32)
    prompts = {"prompts": {"query": "tun kan "}, "default_prompt_name": "query"}
    (world.teacher / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    out = tmp_path / "small"
    assert command("trim", world.teacher, "--corpus", write_text(tmp_path), "--out", out)[0] == 0
    teacher, small = (SentenceTransformer(str(folder), device="cpu") for folder in (world.teacher, out))
    torch.testing.assert_close(small.encode(TEXTS), teacher.encode(TEXTS), atol=1e-6, rtol=1e-5)


def test_no_head_is_lost_without_a_word(tmp_path: Path, command: Command) -> None:
    text = ("--corpus", write_text(tmp_path))
    spans, tags = (save_teacher(tmp_path / name) for name in ("spans", "tags"))
    config = AutoConfig.from_pretrained(spans)
    AutoModelForQuestionAnswering.from_config(config).save_pretrained(spans)
    assert command("trim", spans, *text, "--out", tmp_path / "small")[0] == 0
    whole, small = (AutoModelForQuestionAnswering.from_pretrained(at) for at in (spans, tmp_path / "small"))
    assert torch.equal(small.qa_outputs.weight, whole.qa_outputs.weight)
    AutoModelForTokenClassification.from_config(config).save_pretrained(tags)
    command.fails("trim", tags, *text, "--out", tmp_path / "x", code=2, says="whose head would be lost")
    document = json.loads((tags / "config.json").read_text())
    save_teacher(tags)
    (tags / "config.json").write_text(json.dumps(document | {"architectures": ["BertForMaskedLM"]}))
    assert command("trim", tags, *text, "--out", tmp_path / "bare")[0] == 0
    assert AutoConfig.from_pretrained(tmp_path / "bare").architectures == ["BertModel"]
    (tags / "config.json").write_text(
        json.dumps(document | {"architectures": ["BertForTokenClassification"]})
    )
    layers = ("truncate", "--teacher", tags, "--layers", 0, "--out", tmp_path / "one")
    assert command(*layers)[0] == 0  # its folder names a head that it does not hold
    words = ("trim", tags, *text, "--vocab", "cache", "--out", tmp_path / "x")
    command.fails(*words, code=2, says="goes with train")


def test_a_file_of_pieces_needs_no_text(tmp_path: Path, command: Command) -> None:
    model, pieces = save_teacher(tmp_path / "model"), tmp_path / "pieces.txt"
    pieces.write_text("ba\nbe\n")
    words = ("trim", model, "--vocab", pieces, "--out", tmp_path / "small")
    command.fails(*words, "--text-column", "body", code=2, says="--text-column: ")
    code, _, err = command(*words)
    assert code == 0, err
    assert "no --corpus given" not in err


def test_a_tokenizer_with_more_words_than_embeddings_is_refused(tmp_path: Path, command: Command) -> None:
    model = save_teacher(tmp_path / "model")
    save_encoder(model, "mean", max_length=32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["zzz"])
    tokenizer.save_pretrained(model)
    text = ("--corpus", write_text(tmp_path))
    for words in (
        ("trim", model, *text, "--out", tmp_path / "x"),
        ("truncate", "--teacher", model, "--layers", 0, "--out", tmp_path / "x"),
        ("search-text", model, "ba zzz", *text),
    ):
        command.fails(
            *words, code=1, says=("Save the tokenizer that it was trained with", "tokens, and the model")
        )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("vocab", ["file", "8"])
def test_a_head_for_masked_tokens_becomes_smaller_too(tmp_path: Path, vocab: str) -> None:
    teacher = save_teacher(tmp_path / "teacher", head="tokens")
    text, pieces = write_text(tmp_path), tmp_path / "pieces.txt"
    pieces.write_text("ba\nbe\nbi\n")
    settings = {"model": str(teacher), "corpus": str(text), "documents": "lines"}
    settings["vocab"] = str(pieces) if vocab == "file" else vocab
    result = trim(validated(TrimConfig, settings), tmp_path / "small", session=Session(tmp_path / "home"))
    assert result.num_pieces == len(SPECIAL) + 3
    assert (result.coverage is None) == (vocab == "file")

    whole, small = (AutoModelForMaskedLM.from_pretrained(folder) for folder in (teacher, result.path))
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (teacher, result.path))
    kept = [old.get_vocab()[piece] for piece in sorted(new.get_vocab(), key=new.get_vocab().__getitem__)]
    before = whole(**old("be ba be", return_tensors="pt")).logits[..., kept]
    after = small(**new("be ba be", return_tensors="pt")).logits
    torch.testing.assert_close(after, before)
    assert new("zz", add_special_tokens=False)["input_ids"] == [new.unk_token_id]
