"""Models that say how they pool: fine-tuned, exported and timed as sentence-transformers would run them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import AutoTokenizer

from minilm_cache.models.classifier import PooledClassifier
from minilm_cache.models.exported import ExportedModel
from minilm_cache.models.tokenizer import load_tokenizer
from tests.encoders import save_encoder
from tests.fixtures import Command
from tests.support import save_teacher, write_groups
from tests.tasks import evaluated, write_glue, write_sst2

TEXTS = ["ba be bi", "bo", "ban ben bun ba be bi bo"]


def encoder_in(folder: Path, mode: str = "mean", dense: nn.Module | None = None) -> Path:
    """Return the folder of a tiny sentence encoder."""
    save_encoder(save_teacher(folder, num_hidden_layers=1), mode, dense=dense)
    return folder


def opened(folder: Path) -> Any:
    """Return a folder as sentence-transformers opens it."""
    return SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize(("mode", "dense"), [("mean", None), ("max", nn.Tanh())])
def test_a_kept_classifier_answers_in_sentence_transformers(
    mode: str, dense: nn.Module | None, tmp_path: Path, command: Command
) -> None:
    model = encoder_in(tmp_path / "encoder", mode, dense)
    data = write_sst2(tmp_path / "SST-2")
    asked = ("--task", "sst2", "--data", data, "--lr", "1e-3", "--epochs", 4, "--batch-size", 8)
    (trial,) = evaluated(command, model, *asked, "--keep-models", "--out", tmp_path / "out")["trials"]

    (folder,) = (tmp_path / "out/sst2").iterdir()
    rows = [line.split("\t") for line in (data / "dev.tsv").read_text().splitlines()[1:]]
    logits = opened(folder / "model").encode([text for text, _ in rows])
    right = logits.argmax(1) == [int(label) for _, label in rows]
    assert logits.shape == (len(rows), 2)
    assert trial["scores"]["dev"]["accuracy"] == pytest.approx(100 * right.mean())
    assert right.mean() > 0.9


def test_values_of_pairs_are_those_of_sentence_transformers(tmp_path: Path, command: Command) -> None:
    model = encoder_in(tmp_path / "encoder")
    data = write_glue(tmp_path / "glue")
    asked = ("--task", "stsb", "--data", data, "--lr", "1e-3", "--epochs", 2, "--batch-size", 4)
    (trial,) = evaluated(command, model, *asked, "--keep-models", "--out", tmp_path / "out")["trials"]

    (folder,) = (tmp_path / "out/stsb").iterdir()
    rows = [line.split("\t") for line in (data / "STS-B/dev.tsv").read_text().splitlines()[1:]]
    values = opened(folder / "model").encode([(row[2], row[3]) for row in rows])
    expected = spearmanr(values[:, 0], [float(row[4]) for row in rows])[0]
    assert trial["scores"]["dev"]["spearman"] == pytest.approx(100 * expected, abs=1e-3)


def test_another_task_gets_a_layer_of_its_own(tmp_path: Path, command: Command) -> None:
    """The layer of a model that answers a task goes on with as many answers, and is left out otherwise."""
    data = write_glue(tmp_path / "glue")
    model, tuned = encoder_in(tmp_path / "encoder"), ("--data", data, "--epochs", 1, "--keep-models")
    evaluated(command, model, "--task", "stsb", *tuned, "--out", tmp_path / "out")
    (folder,) = (tmp_path / "out/stsb").iterdir()
    for labels, widths in ((("a", "b", "c"), [(32, 3)]), ((), [(32, 1)])):
        begun = PooledClassifier.begin(folder / "model", labels, max_length=32, untrained=False)
        layers = [layer.linear for layer in begun.encoder.pooler.dense]
        assert [(layer.in_features, layer.out_features) for layer in layers] == widths
    kept = opened(folder / "model").encode(TEXTS)
    inputs = load_tokenizer(folder / "model")(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = begun.eval()(inputs["input_ids"], inputs["attention_mask"]).logits
    np.testing.assert_allclose(logits, kept, atol=1e-5)


def test_a_trial_belongs_to_a_pooling(tmp_path: Path, command: Command) -> None:
    """The same weights with another pooling, or untrained, are other trials; the same again is not run."""
    data = write_sst2(tmp_path / "SST-2")
    asked = ("--task", "sst2", "--data", data, "--epochs", 1, "--out", tmp_path / "out", "--untrained")
    for mode in ("mean", "cls", "mean"):
        evaluated(command, encoder_in(tmp_path / "encoder", mode, nn.Identity()), *asked)

    records = [json.loads(file.read_text()) for file in (tmp_path / "out").rglob("trial.json")]
    assert len(records) == 4
    assert sum(record["identity"]["untrained"] for record in records) == 2


def test_speed_and_onnx_measure_the_pooling_too(tmp_path: Path, command: Command) -> None:
    model = encoder_in(tmp_path / "encoder", "mean", nn.Tanh())
    short = ("--batch-size", 1, "--length", 8, "--turns", 1, "--device", "cpu")
    code, out, err = command("speed", model, *short, "--onnx", tmp_path / "onnx", "--json")
    assert code == 0, err
    (measured,) = json.loads(out)["models"]

    code, _, err = command("speed", model, *short, "--precision", "bfloat16")
    assert code == 0, err
    plain = opened(model)
    assert measured["size"]["num_parameters"] == sum(weight.numel() for weight in plain.parameters())
    assert measured["onnx_difference"] < 1e-4
    file = tmp_path / "onnx/encoder/model.onnx"
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    inputs = plain.tokenizer(TEXTS, padding=True, return_tensors="np")
    (vectors,) = session.run(
        ["sentence_embedding"], {name: inputs[name] for name in ("input_ids", "attention_mask")}
    )
    np.testing.assert_allclose(vectors, plain.encode(TEXTS), atol=1e-5)


def test_answers_are_taken_for_no_vectors(tmp_path: Path, command: Command) -> None:
    """What a fine-tuned encoder pools are logits; exports are judged by them, centred, and of pairs."""
    model, data = encoder_in(tmp_path / "encoder"), write_glue(tmp_path / "glue")
    asked = ("--task", "stsb", "--data", data, "--lr", "1e-3", "--epochs", 2, "--batch-size", 4)
    evaluated(command, model, *asked, "--keep-models", "--out", tmp_path / "out")
    (folder,) = (tmp_path / "out/stsb").iterdir()
    tuned, says = folder / "model", "was fine-tuned to answer a task"
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"question": "ba be", "answer": "bi bo"}) + "\n")
    (tmp_path / "texts.txt").write_text("ba be\n\nbo bi\n")
    short = ("--max-length", 32)
    command.fails("search-text", tuned, "ba", "--corpus", tmp_path / "texts.txt", code=2, says=says)
    command.fails("embeddings", tuned, "--retrieval", own, *short, code=2, says=says)
    cross = save_teacher(tmp_path / "cross", head="sequences", num_labels=1)
    command.fails("embeddings", cross, "--retrieval", own, *short, code=2, says=says)
    mine = ("mine", tuned, "--retrieval", own, *short, "--out", tmp_path / "mined")
    command.fails(*mine, code=2, says=says)

    pairs = tmp_path / "pairs.jsonl"
    words = [f"{TEXTS[at % 3]} {' bo' * (at % 7)}" for at in range(40)]
    rows = [{"a": one, "b": other} for one, other in zip(words, reversed(words), strict=True)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tuned / "tokenizer_config.json"
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | names))
    export = ("export-model", tuned, "--onnx", "--int8", "--corpus", pairs, "--pair-columns", "a,b", *short)
    code, out, err = command(*export, "--texts", 20, "--out", tmp_path / "shipped", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["least_cosine"] is None
    assert found["cosine"] < 1
    shipped = ExportedModel(tmp_path / "shipped", "onnx")
    encoded = AutoTokenizer.from_pretrained(tuned)("ba be", "bi bo", return_tensors="pt")
    told_apart = shipped(**encoded).last_hidden_state
    alike = shipped(**encoded | {"token_type_ids": encoded["token_type_ids"] * 0}).last_hidden_state
    assert float((told_apart - alike).abs().max()) > 1e-3
    command.fails(*export, "--min-cosine", 1, "--out", tmp_path / "none", code=1, says="--min-cosine is 1")
    measured = ("--retrieval", own, "--out", tmp_path / "none")
    command.fails(*export, *measured, code=2, says="are about vectors")


def test_a_student_for_search_of_a_tuned_encoder_gives_vectors(tmp_path: Path, command: Command) -> None:
    """Its teacher answers, and what its configuration says of a task is not the student's."""
    model, data = encoder_in(tmp_path / "encoder"), write_glue(tmp_path / "glue")
    asked = ("--task", "stsb", "--data", data, "--lr", "1e-3", "--epochs", 2, "--batch-size", 4)
    evaluated(command, model, *asked, "--keep-models", "--out", tmp_path / "out")
    (folder,) = (tmp_path / "out/stsb").iterdir()
    groups = write_groups(tmp_path / "groups.jsonl")
    dump = ("dump", "--teacher", folder / "model", "--corpus", groups, "--max-length", 32)
    pairs = ("--pair-columns", "query,right+wrong", "--for", "margin-mse", "--out", tmp_path / "cache")
    assert command(*dump, *pairs)[0] == 0
    train = ("train", tmp_path / "cache", "--objective", "margin-mse", "--arch", "1x16", "--steps", 2)
    code, _, err = command(*train, "--batch-size", 8, "--device", "cpu", "--out", tmp_path / "run")
    assert code == 0, err
    own = tmp_path / "own.jsonl"
    pairs_of_own = [{"question": "ba be", "answer": "bi bo"}, {"question": "bo", "answer": "ba ben"}]
    own.write_text("".join(json.dumps(row) + "\n" for row in pairs_of_own))
    rerank = ("rerank", folder / "model", "--retrieval", own, "--first-stage", model, "--max-length", 32)
    code, out, err = command(*rerank, "--json")
    assert code == 0, err
    assert [scorer["model"] for scorer in json.loads(out)["models"]][-1] == folder.name
    code, _, err = command("embeddings", model, tmp_path / "run", "--retrieval", own, "--max-length", 32)
    assert code == 0, err
    assert opened(tmp_path / "run/students/1x16").encode(TEXTS).shape == (3, 16)
