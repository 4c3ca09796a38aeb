"""Speeds, embeddings and ONNX files, beside what the libraries themselves say."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from minilm_cache.evaluate.embeddings import mteb_scores, sentence_encoder
from minilm_cache.evaluate.models import find_models
from tests.fixtures import Command
from tests.support import save_teacher
from tests.tasks import write_glue, write_lines

SHORT = ("--max-length", 32, "--device", "cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a teacher and a smaller model."""
    root = tmp_path_factory.mktemp("models")
    teacher = save_teacher(root / "teacher", num_hidden_layers=2)
    return teacher, save_teacher(root / "small", num_hidden_layers=1, hidden_size=16)


def _json(command: Command, *arguments: object) -> list[dict[str, Any]]:
    code, out, err = command(*arguments, "--json")
    assert code == 0, err
    found: list[dict[str, Any]] = json.loads(out)["models"]
    return found


def test_sweeps_beside_the_first_model(models: tuple[Path, Path], command: Command) -> None:
    sweep = ("--batch-size", 1, "--batch-size", 4, "--length", 8, "--length", 16, "--turns", 2)
    first, second = _json(command, "speed", *models, *sweep, "--device", "cpu")
    for one, folder in ((first, models[0]), (second, models[1])):
        assert one["size"]["num_parameters"] == sum(
            weight.numel() for weight in AutoModel.from_pretrained(folder).parameters()
        )
        assert [(run["batch_size"], run["length"]) for run in one["passes"]] == [
            (1, 8),
            (1, 16),
            (4, 8),
            (4, 16),
        ]
        for run in one["passes"]:
            tokens = run["batch_size"] * run["length"]
            assert run["tokens_per_s"] == pytest.approx(1000 * tokens / run["latency_ms"])
    assert [run["speedup"] for run in first["passes"]] == [1] * 4
    assert second["passes"][0]["speedup"] == pytest.approx(
        first["passes"][0]["latency_ms"] / second["passes"][0]["latency_ms"]
    )
    share = second["size"]["flops_per_token"] / first["size"]["flops_per_token"]
    assert second["flops_share"] == pytest.approx(share)
    code, out, _ = command("speed", *models, *sweep, "--device", "cpu", "--precision", "bfloat16")
    assert code == 0
    assert "speed is relative to teacher in torch" in out


def test_onnx_files_answer_as_transformers_does(
    models: tuple[Path, Path], tmp_path: Path, command: Command
) -> None:
    one = ("--batch-size", 1, "--length", 8, "--turns", 1, "--device", "cpu", "--onnx", tmp_path / "onnx")
    found = _json(command, "speed", *models, *one)
    assert [[run["runtime"] for run in model["passes"]] for model in found] == [["torch", "onnx"]] * 2
    assert all(model["onnx_difference"] < 1e-4 for model in found)
    session = onnxruntime.InferenceSession(
        tmp_path / "onnx" / "small" / "model.onnx", providers=["CPUExecutionProvider"]
    )
    ids = torch.randint(5, 100, (3, 11))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    (states,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    with torch.no_grad():
        expected = AutoModel.from_pretrained(models[1]).eval()(input_ids=ids, attention_mask=mask)
    assert np.abs(states - expected.last_hidden_state.numpy())[mask.bool().numpy()].max() < 1e-4


def test_a_cross_encoder_is_exported_without_its_head(tmp_path: Path, command: Command) -> None:
    scorer = save_teacher(tmp_path / "scorer", head="sequences", num_labels=1, num_hidden_layers=1)
    one = ("--batch-size", 1, "--length", 8, "--turns", 1, "--device", "cpu", "--onnx", tmp_path / "onnx")
    (found,) = _json(command, "speed", scorer, *one)
    assert [run["runtime"] for run in found["passes"]] == ["torch", "onnx"]
    assert found["onnx_difference"] < 1e-4


def test_misuse_of_speed(models: tuple[Path, Path], tmp_path: Path, command: Command) -> None:
    command.fails(
        "speed", *models, "--length", 128, code=2, says="--length 128 is more than teacher has positions for"
    )
    command.fails("speed", *models, "--batch-size", 0, code=2, says="--batch-size")
    other = shutil.copytree(models[0], tmp_path / models[0].parent.name / "teacher")
    command.fails("speed", models[0], other, "--length", 8, code=2, says="two models are called")
    (tmp_path / "file").touch()
    command.fails(
        "speed", *models, "--onnx", tmp_path / "file" / "in", "--length", 8, code=2, says="file is a file"
    )


def _by_hand(folder: Path, texts: list[str]) -> np.ndarray:
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    found = []
    for text in texts:
        with torch.no_grad():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        found.append((mean / mean.norm()).numpy())
    return np.stack(found)


def test_embeddings_are_means_of_transformers_states(
    models: tuple[Path, Path], tmp_path: Path, command: Command
) -> None:
    data = write_glue(tmp_path / "glue")
    saved = tmp_path / "encoders"
    found = _json(command, "embeddings", *models, "--data", data, "--save", saved, *SHORT)
    rows = [line.split("\t") for line in (data / "STS-B" / "dev.tsv").read_text().splitlines()[1:]]
    people = np.array([float(row[4]) for row in rows])
    cosines = {}
    for one, folder in zip(found, models, strict=True):
        left, right = (_by_hand(folder, [row[column] for row in rows]) for column in (2, 3))
        cosines[one["model"]] = (left * right).sum(1)
        assert one["width"] == left.shape[1]
        assert one["pearson"] == pytest.approx(
            100 * np.corrcoef(cosines[one["model"]], people)[0, 1], abs=1e-2
        )
        opened = SentenceTransformer(one["path"], device="cpu")
        encoded = opened.encode([row[2] for row in rows], show_progress_bar=False)
        assert np.abs(np.asarray(encoded) - left).max() < 1e-5
    teacher, small = found
    assert (teacher["teacher_pearson"], teacher["cosine_error"]) == pytest.approx((100, 0))
    assert teacher["teacher_cosine"] == pytest.approx(1)
    assert small["teacher_cosine"] is None  # of another width
    assert small["cosine_error"] == pytest.approx(
        np.abs(cosines["small"] - cosines["teacher"]).mean(), abs=1e-5
    )
    command.fails(
        *("embeddings", *models, "--data", data, "--save", saved, *SHORT),
        code=2,
        says="Choose another --save",
    )


def test_what_is_given_twice_is_measured_once(models: tuple[Path, Path], command: Command) -> None:
    twice = ("--batch-size", 1, "--batch-size", 1, "--length", 8, "--turns", 1, "--device", "cpu")
    (only,) = _json(command, "speed", models[0], models[0], *twice)
    assert len(only["passes"]) == 1


def test_embeddings_of_bad_data(models: tuple[Path, Path], tmp_path: Path, command: Command) -> None:
    data = write_glue(tmp_path / "glue")
    readme = data / "STS-B" / "dev.tsv"
    command.fails(
        *("embeddings", *models, "--data", data, "--save", readme, *SHORT), code=2, says="dev.tsv is a file"
    )
    write_lines(data / "STS-B" / "dev.tsv", [("sentence1", "score"), ("ba", 1)])
    command.fails("embeddings", *models, "--data", data, *SHORT, code=1, says="has no column 'sentence2'")
    command.fails(
        "embeddings", *models, "--data", data / "STS-B" / "dev.tsv", *SHORT, code=1, says="no such folder"
    )


def _pairs() -> Any:
    """Return a task of mteb, which takes seconds to import, whose data are here."""
    from mteb import TaskMetadata  # noqa: PLC0415 - every process that collects tests would wait for it
    from mteb.abstasks.sts import AbsTaskSTS  # noqa: PLC0415

    class Pairs(AbsTaskSTS):
        metadata = TaskMetadata(
            name="Pairs",
            description="Pairs of words",
            reference=None,
            dataset={"path": "none", "revision": "none"},
            type="STS",
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
            date=None,
            domains=None,
            task_subtypes=None,
            license=None,
            annotations_creators=None,
            dialect=None,
            sample_creation=None,
            bibtex_citation=None,
        )

        def load_data(self, *_: object, **__: object) -> None:
            texts = ["ba be", "ba bi", "be bo", "bu bu", "ban ben", "ba ba"]
            rows = {"sentence1": texts, "sentence2": texts[::-1], "score": [1.0, 2.0, 3.0, 4.0, 5.0, 0.5]}
            self.dataset = {"test": Dataset.from_dict(rows)}
            self.data_loaded = True

    return Pairs()


@pytest.mark.filterwarnings("ignore")  # of mteb's own
def test_mteb_scores_a_student(models: tuple[Path, Path]) -> None:
    (model,) = find_models([str(models[1])], None, note=print)
    found = mteb_scores(sentence_encoder(model, 32, "cpu"), [_pairs()])
    assert set(found) == {"Pairs"}
    assert -1 <= found["Pairs"] <= 1


def test_mteb_knows_no_such_task(models: tuple[Path, Path], tmp_path: Path, command: Command) -> None:
    data = write_glue(tmp_path / "glue")
    command.fails(
        *("embeddings", *models, "--data", data, "--mteb", "NoSuchTask", *SHORT),
        code=2,
        says=("--mteb", "NoSuchTask"),
    )
