"""Measure students of a base-sized sentence encoder, of two teachers together, and of a decoder.

    python -m benchmarks.larger_teachers --data DATA --base DIR --crowded DIR --decoder DIR [--only NAME]

The teachers are all-mpnet-base-v2 (12 layers of width 768), the multilingual-e5-small that
`benchmarks.crowded` takes, and SmolLM2-135M (30 layers of width 576, last token). Students learn the vectors
of the text of `benchmarks.crowded`, cut from a teacher or from `mini`, whose tokenizer they then have; one
seed. Each row is scored on STS-B's dev and test sets and on SQuAD's questions, texts cut at 128 tokens.
"""

import argparse
from pathlib import Path
from typing import Any, Final

from benchmarks.crowded import scores_of, size_of, text_of
from benchmarks.embeddings import SHORT_LENGTH
from benchmarks.report import add_to_result, cpu, read_result
from minilm_cache import DumpConfig, TrainConfig, dump_cache, train_students
from minilm_cache.models.locate import MINI, locate_teacher
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.storage_schema.states import POOLED
from minilm_cache.store.reader import read_manifest

CACHES: Final[dict[str, dict[str, Any]]] = {
    "base": {"max_tokens": 700_000},
    "more": {"of": "base", "precision": "bfloat16"},
    "crowded": {"max_tokens": 700_000},
    "decoder": {"max_tokens": 120_000, "pooling": "lasttoken"},
}
"""Settings of the dump of each teacher; `of` names it where the cache has another name."""
_OF_MINI: Final = {"init_teacher": MINI, "init_layers": "1,4,5", "lr": 7e-4, "steps": 1000}
TRAINED: Final[dict[str, dict[str, Any]]] = {
    "base, cut from mini": {"cache": "base", **_OF_MINI},
    "both, cut from mini": {"cache": "crowded", "also": ("base",), **_OF_MINI},
    "base, 6x384 of mini": {
        "cache": "base",
        "arch": ("6x384",),
        "init_teacher": MINI,
        "lr": 5e-4,
        "steps": 500,
    },
    "base, cut from mini, more text": {"cache": "more", **_OF_MINI, "batch_size": 64, "steps": 4000},
    "base, 6x384 of mini, more text": {
        "cache": "more",
        "arch": ("6x384",),
        "init_teacher": MINI,
        "lr": 5e-4,
        "batch_size": 64,
        "steps": 2000,
    },
    "base, 6x768": {"cache": "more", "arch": ("6x768",), "lr": 3e-4, "batch_size": 64, "steps": 600},
    "base, 3x384": {"cache": "base", "lr": 5e-4, "steps": 600},
    "decoder, cut from mini": {"cache": "decoder", **_OF_MINI, "steps": 150},
}
"""Settings of each training; without a teacher to begin with, students are cut from that of the cache."""


def main() -> None:
    """Train what is missing, and write the scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    for name in ("base", "crowded", "decoder"):
        parser.add_argument(f"--{name}", type=Path, help=f"folder of the teacher {name}")
    parser.add_argument("--home", type=Path, default=Path("larger-teachers"))
    parser.add_argument("--only", action="append", help="names of rows; all without it")
    given = parser.parse_args()
    earlier = read_result("larger_teachers")
    rows: dict[str, dict[str, Any]] = earlier.get("rows", {})
    for name in given.only or ["base", "crowded", *TRAINED]:
        folder = _trained(name, given) if name in TRAINED else vars(given)[name]
        settings = {key: value for key, value in TRAINED.get(name, {}).items() if key != "init_layers"}
        rows[name] = {
            **settings,
            **scores_of(folder, given.data),
            "num_parameters": size_of(folder),
            "cpu": cpu(),
        }
        add_to_result("larger_teachers", rows=rows)
    made = {name: given.home / f"{name}.cache" for name in CACHES}
    described = {name: _described(path) for name, path in made.items() if path.is_dir()}
    add_to_result("larger_teachers", caches=earlier.get("caches", {}) | described)


def _trained(name: str, given: argparse.Namespace) -> Path:
    """Return the folder of a student, which is trained where it is missing."""
    changes = dict(TRAINED[name])
    cache = _cache(changes.pop("cache"), given)
    values: dict[str, Any] = {"objective": "embedding", "arch": ("3x384",), "init": "slice", **changes}
    values |= {
        "precision": "bfloat16",
        "also": tuple(str(_cache(each, given)) for each in changes.get("also", ())),
    }
    if values.get("init_teacher") == MINI:
        values["init_teacher"] = str(locate_teacher(MINI).folder)
    out = given.home / name.replace(", ", "-").replace(" ", "-")
    result = train_students(validated(TrainConfig, values), cache, out=out, session=Session(given.home))
    return result.student_path(values["arch"][0])


def _cache(name: str, given: argparse.Namespace) -> Path:
    """Return the cache of a teacher's vectors, which is dumped where it is missing."""
    path: Path = given.home / f"{name}.cache"
    if not (path / "manifest.json").exists():
        changes = dict(CACHES[name])
        dumped: dict[str, Any] = {
            "teacher": str(vars(given)[changes.pop("of", name)]),
            "corpus": str(text_of(given.home, given.data)),
        }
        dumped |= {"for": "embedding", "documents": "lines", "max_length": SHORT_LENGTH, **changes}
        dump_cache(validated(DumpConfig, dumped), out=path, session=Session(given.home))
    return path


def _described(path: Path) -> dict[str, float]:
    """Return how many texts a cache holds, and the bytes of the vector of one, stored and as float32."""
    manifest = read_manifest(path)
    states, measured = manifest.identity.states, manifest.measured
    assert states is not None
    assert states.pooled is not None
    assert measured is not None
    vector = next(state for state in measured.states if state.path == POOLED.folder)
    return {
        "texts": manifest.num_sequences,
        "tokens": manifest.num_tokens,
        "width": states.pooled.width,
        "bytes_of_vector": round(vector.bytes_per_token * manifest.num_tokens / manifest.num_sequences),
        "bytes_of_float32": 4 * states.pooled.width,
    }


if __name__ == "__main__":
    main()
