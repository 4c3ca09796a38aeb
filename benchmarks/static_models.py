"""Measure a static model beside `mini`: a vector a piece, and a text is the mean of its pieces.

    python -m benchmarks.static_models --data DATA

The static model is made of `mini` by model2vec (`pip install 'model2vec[distill]'`), as its own documentation
does it, with 256 dimensions. STS-B and retrieval are measured as in `benchmarks/embeddings.py`; the time is
that of sentence-transformers' `encode` of one text and of 32 texts, each in turns with `mini`.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from model2vec.distill import distill
from sentence_transformers import SentenceTransformer

from benchmarks.embeddings import retrieval, similarity
from benchmarks.report import write_result
from minilm_cache.models.locate import MINI, locate_teacher

DIMENSIONS = 256
MAX_LENGTH = 128
TEXT = "a text of thirty two pieces " * 5
TURNS = 15


def main() -> None:
    """Make the static model, measure both, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("static-models"))
    given = parser.parse_args()
    teacher, static = locate_teacher(MINI).folder, given.home / "static"
    if not static.exists():
        distill(model_name=str(teacher), pca_dims=DIMENSIONS).save_pretrained(static)
    folders = {MINI: teacher, "static": static}
    encoders: dict[str, Any] = {
        name: SentenceTransformer(str(folder), device="cpu") for name, folder in folders.items()
    }
    encoders[MINI].max_seq_length = MAX_LENGTH
    rows = {}
    for name, folder in folders.items():
        encode = partial(encoders[name].encode, normalize_embeddings=True, show_progress_bar=False)
        rows[name] = {
            "bytes": (folder / "model.safetensors").stat().st_size,
            "stsb_spearman": similarity(encode, given.data),
            "squad_ndcg": retrieval(encode, given.data),
        }
    for count in (1, 32):
        passes = {name: _pass(encoder, [TEXT] * count) for name, encoder in encoders.items()}
        times: dict[str, list[float]] = {name: [] for name in passes}
        for _ in range(TURNS):
            for name, run in passes.items():
                times[name].append(run())
        for name in passes:
            rows[name][f"ms_of_{count}"] = round(1000 * median(times[name]), 3)
    write_result("static_models", {"dimensions": DIMENSIONS, "max_length": MAX_LENGTH, "models": rows})


def _pass(encoder: Any, texts: list[str]) -> Callable[[], float]:  # noqa: ANN401 - sentence-transformers' own
    """Return a function that encodes texts and returns the seconds that it took."""

    def run() -> float:
        begun = time.perf_counter()
        encoder.encode(texts, batch_size=32, show_progress_bar=False)
        return time.perf_counter() - begun

    return run


if __name__ == "__main__":
    main()
