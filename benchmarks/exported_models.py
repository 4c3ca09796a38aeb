"""Measure exported models: bytes, latency, agreement, STS-B and retrieval of each form, beside torch.

    python -m benchmarks.exported_models --data DATA --text TEXT [NAME=]FOLDER ...

Each model is exported for onnxruntime and for OpenVINO, whole and in 8 bit, fitted to `TEXT` (a text a
paragraph). All forms of a model are timed in turns, with as many threads as torch has, and scored on STS-B's
dev set and on the first question of each paragraph of SQuAD's dev set, as in `benchmarks/embeddings.py`.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.report import add_to_result, cpu, read_result
from minilm_cache.deploy.config import ExportModelConfig
from minilm_cache.evaluate.embeddings import compare_embeddings
from minilm_cache.evaluate.retrieval import compare_retrieval
from minilm_cache.evaluate.settings import EmbeddingsConfig, SpeedConfig
from minilm_cache.evaluate.speed import compare_speed
from minilm_cache.models.locate import locate_teacher
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.workflows.export_model import export_model

MAX_LENGTH: Final = 128
FORMS: Final[dict[str, dict[str, bool]]] = {
    "onnx, float32": {"onnx": True},
    "onnx, int8": {"onnx": True, "int8": True},
    "openvino, float32": {"openvino": True},
    "openvino, int8": {"openvino": True, "int8": True},
}
_SWEEP: Final[dict[str, Any]] = {"batch_size": (1, 32), "length": (32, 128), "turns": 15, "device": "cpu"}


def main() -> None:
    """Export what is missing, measure it, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("exported-models"))
    parser.add_argument("models", nargs="+", help="[NAME=]FOLDER, or mini")
    given = parser.parse_args()
    session = Session(given.home)
    asked = _questions(given.data, given.home)
    for each in given.models:
        name, _, place = each.rpartition("=")
        folder = locate_teacher(place).folder
        forms = {"torch, float32": folder}
        for form, settings in FORMS.items():
            forms[form] = given.home / f"{name or place} {form}".replace(", ", "-").replace(" ", "-")
            if not forms[form].exists():
                fitted = {**settings, "corpus": str(given.text), "max_length": MAX_LENGTH, "min_cosine": 0.9}
                export_model(validated(ExportModelConfig, fitted), place, forms[form], session=session)
        rows = read_result("exported_models").get("models", {})
        rows[name or place] = _measured(forms, given.data, asked, session=session)
        settings_of = {"max_length": MAX_LENGTH, "threads": torch.get_num_threads(), "turns": _SWEEP["turns"]}
        add_to_result("exported_models", models=rows, settings=settings_of, cpu=cpu())


def _measured(forms: dict[str, Path], data: Path, asked: Path, *, session: Session) -> dict[str, Any]:
    names = list(map(str, forms.values()))
    common = {"data": str(data / "glue"), "retrieval": asked, "max_length": MAX_LENGTH, "device": "cpu"}
    config = validated(EmbeddingsConfig, common)
    similar = compare_embeddings(config, names, session=session)
    found = compare_retrieval(config, names, session=session)
    speeds = compare_speed(validated(SpeedConfig, _SWEEP), names, session=session)
    return {
        form: {
            "bytes": speed.num_bytes,
            "cosine": round(pairs.teacher_cosine or 0, 4),
            "stsb_spearman": round(pairs.spearman, 2),
            "squad_ndcg": round(retrieved.ndcg_at_10.mean, 2),
            "passes": [
                {key: asdict(each)[key] for key in ("batch_size", "length", "latency_ms", "speedup")}
                for each in speed.passes
            ],
        }
        for form, pairs, retrieved, speed in zip(forms, similar, found, speeds, strict=True)
    }


def _questions(data: Path, home: Path) -> Path:
    """Write the first question of each paragraph of SQuAD's dev set with that paragraph."""
    home.mkdir(parents=True, exist_ok=True)
    file = home / "questions.jsonl"
    articles = json.loads((data / "squad/dev-v1.1.reconstructed.json").read_text())["data"]
    rows = [
        {"question": paragraph["qas"][0]["question"], "answer": paragraph["context"]}
        for article in articles
        for paragraph in article["paragraphs"]
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


if __name__ == "__main__":
    main()
