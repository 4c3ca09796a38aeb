"""Measure students of a reranker: SQuAD's questions against its paragraphs, halves of articles apart.

    python -m benchmarks.rerankers --data DATA [--only NAME]

`mini`, read as a classifier (without its pooling), becomes a cross-encoder on questions of half of SQuAD's
articles, each with its paragraph and one that `mini` found near. It scores these and further negatives, and
students learn the scores. All are measured on questions of the other articles: cross-encoders rank the
nearest paragraphs that `mini` finds, bi-encoders find their own. Some students begin with a slice, and some
with students of `mini`'s vectors of English Wikipedia, which are measured, too, or of the teacher's
relations over the pairs. One seed.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any, Final

import datasets
import torch
from sentence_transformers.cross_encoder import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
)
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

from benchmarks.pair_scores import POOLING
from benchmarks.report import add_to_result, cpu, read_result
from benchmarks.texts import records
from minilm_cache import DumpConfig, TrainConfig, dump_cache, train_students
from minilm_cache.evaluate.reranking import RerankScores, compare_rerankers, mine_negatives
from minilm_cache.evaluate.retrieval import RetrievalScores, compare_retrieval
from minilm_cache.evaluate.settings import EmbeddingsConfig, MineConfig, RerankConfig
from minilm_cache.models.locate import MINI, locate_teacher
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.train.run import TrainResult

MAX_LENGTH: Final = 128
QUERIES: Final = 300
"""Questions of the other articles that are ranked, evenly spaced."""
CANDIDATES: Final = 30
LEARNED: Final = 2
"""Every so many questions of the first articles are learned from."""
NEGATIVES: Final = 5
TUNED: Final[dict[str, Any]] = {
    "num_train_epochs": 1,
    "learning_rate": 5e-5,
    "per_device_train_batch_size": 32,
}
TUNED_NEGATIVES: Final = 1
_ARCHS: Final = ("3x384", "3x192")
_RECIPE: Final = {"steps": 500, "batch_size": 36, "lr": 3e-4, "dropout": "none", "precision": "bfloat16"}
_SLICE: Final = {**_RECIPE, "init": "slice", "arch": _ARCHS, "init_layers": "1,4,5"}
_LONGER: Final = {"steps": 1500, "lr": 1e-3}
CROSS: Final[dict[str, dict[str, Any]]] = {
    "score": {**_SLICE, "objective": "score"},
    "listwise": {**_SLICE, "objective": "listwise"},
    "listwise, from vectors": {**_RECIPE, **_LONGER, "objective": "listwise", "arch": _ARCHS[1:]},
}
"""Settings of the training of cross-encoders."""
BI: Final[dict[str, dict[str, Any]]] = {
    "vectors": {},
    "margin-mse": {**_SLICE, "objective": "margin-mse"},
    "margin-mse, from vectors": {**_RECIPE, "lr": 1e-4, "objective": "margin-mse", "arch": _ARCHS},
}
"""Settings of the training of bi-encoders: of `mini`'s vectors, of scores from a slice, and of both."""
VECTORS: Final = {**_SLICE, "objective": "embedding", "steps": 1000, "batch_size": 64, "lr": 5e-4}
RELATIONS: Final = {**_RECIPE, "objective": "minilm", "steps": 600, "lr": 1e-3}
AFTER_RELATIONS: Final = {**_RECIPE, "objective": "listwise", "steps": 600, "lr": 5e-4}
"""Settings of cross-encoders that learn the teacher's relations over the pairs, and then its scores."""
_LAST: Final = "listwise, from relations"
VECTOR_TOKENS: Final = 2_000_000
"""Tokens of text whose vectors students learn."""


def main() -> None:
    """Make what is missing, measure it, and write the scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("rerankers"))
    parser.add_argument("--only", action="append", help="names of rows; all without it")
    given = parser.parse_args()
    home, session = given.home, Session(given.home)
    home.mkdir(exist_ok=True)
    _write_halves(given.data, home)
    groups = _mined(home, session)
    teacher = _teacher(home, groups)
    cache = home / "cache"
    if not (cache / "manifest.json").exists():
        dumped = {"teacher": str(teacher), "corpus": str(groups), "pair_columns": "query,positive+negative"}
        config = validated(DumpConfig, {**dumped, "for": "listwise", "max_length": MAX_LENGTH})
        dump_cache(config, out=cache, session=session)
    for name in given.only or ["teacher", *CROSS, *BI, _LAST]:
        folders = {"teacher": teacher}
        if name == "vectors":
            folders = {
                f"{arch} {name}": _of_vectors(given.data, home, session).student_path(arch) for arch in _ARCHS
            }
        elif name == _LAST:
            folders = {
                f"{arch} {name}": _after_relations(arch, teacher, groups, session=session)
                for arch in _ARCHS[1:]
            }
        elif name in CROSS or name in BI:
            settings = {**(CROSS | BI)[name]}
            if "init" not in settings:
                settings["init"] = str(_of_vectors(given.data, home, session).path)
            elif name in BI:
                settings["init_teacher"] = str(locate_teacher(MINI).folder)
            run = train_students(validated(TrainConfig, settings), cache, out=home / name, session=session)
            folders = {f"{arch} {name}": run.student_path(arch) for arch in settings["arch"]}
        _measure(folders, home, session, retrieves=name in BI)


def _after_relations(arch: str, teacher: Path, groups: Path, *, session: Session) -> Path:
    """Return a student of the teacher's relations over the pairs, and then of its scores, from one cache."""
    cache = groups.with_name("relations.cache")
    if not (cache / "manifest.json").exists():
        dumped = {"teacher": str(teacher), "corpus": str(groups), "pair_columns": "query,positive+negative"}
        config = validated(DumpConfig, {**dumped, "for": ("minilm", "listwise"), "max_length": MAX_LENGTH})
        dump_cache(config, out=cache, session=session)
    first = validated(TrainConfig, {**RELATIONS, "arch": (arch,)})
    begun = train_students(first, cache, out=groups.with_name(f"relations-{arch}"), session=session)
    then = validated(TrainConfig, {**AFTER_RELATIONS, "arch": (arch,), "init": str(begun.path)})
    out = groups.with_name(f"after-relations-{arch}")
    return train_students(then, cache, out=out, session=session).student_path(arch)


def _of_vectors(data: Path, home: Path, session: Session) -> TrainResult:
    """Return the run of students of `mini`'s vectors, which know no question and no paragraph of SQuAD."""
    text, cache = home / "text.txt", home / "vectors.cache"
    if not text.exists():
        files = [data / name / "train.txt" for name in ("enwiki", "enwiki_core")]
        text.write_text("".join(f"{each}\n\n" for each in records(files, paragraphs=0.25, questions=0.1)))
    if not (cache / "manifest.json").exists():
        settings = {"teacher": MINI, "corpus": str(text), "for": "embedding", "max_tokens": VECTOR_TOKENS}
        dump_cache(validated(DumpConfig, {**settings, "max_length": MAX_LENGTH}), out=cache, session=session)
    return train_students(validated(TrainConfig, VECTORS), cache, out=home / "vectors", session=session)


def _measure(folders: dict[str, Path], home: Path, session: Session, *, retrieves: bool) -> None:
    """Add rows to the result: cross-encoders by what they rank, bi-encoders by what they find."""
    names, paths = ["first stage", *folders], list(map(str, folders.values()))
    common = {"retrieval": home / "test", "max_length": MAX_LENGTH}
    if retrieves:
        config = validated(EmbeddingsConfig, common)
        encoders = [str(locate_teacher(MINI).folder), *paths]
        measured = list(map(_row, compare_retrieval(config, encoders, session=session)))
    else:
        ranked = {**common, "first_stage": MINI, "candidates": CANDIDATES}
        measured = list(map(_row, compare_rerankers(validated(RerankConfig, ranked), paths, session=session)))
    rows: dict[str, Any] = read_result("rerankers").get("rows", {})
    rows |= dict(zip(names, measured, strict=True))
    settings = {"queries": QUERIES, "candidates": CANDIDATES, "max_length": MAX_LENGTH}
    add_to_result("rerankers", rows=rows, settings=settings, recipe=_RECIPE, cpu=cpu())


def _row(scores: RerankScores | RetrievalScores) -> dict[str, Any]:
    ndcg = scores.ndcg_at_10
    row: dict[str, Any] = {
        "ndcg_at_10": round(ndcg.mean, 2),
        "interval": [round(ndcg.low, 1), round(ndcg.high, 1)],
        "mrr_at_10": round(scores.mrr_at_10.mean, 2),
    }
    if isinstance(scores, RerankScores) and scores.pairs_per_s is not None:
        row["pairs_per_s"] = round(scores.pairs_per_s)
    return row


def _write_halves(data: Path, home: Path) -> None:
    """Write questions of half of the articles to learn from, and the other half in BEIR's layout."""
    articles = json.loads((data / "squad/dev-v1.1.reconstructed.json").read_text())["data"]
    with (home / "train.jsonl").open("w") as file:
        for paragraph in (each for article in articles[::2] for each in article["paragraphs"]):
            for asked in paragraph["qas"][::LEARNED]:
                row = {"question": asked["question"], "answer": paragraph["context"]}
                file.write(json.dumps(row) + "\n")
    folder = home / "test"
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    paragraphs = [paragraph for article in articles[1::2] for paragraph in article["paragraphs"]]
    documents = [{"_id": f"d{n}", "text": each["context"]} for n, each in enumerate(paragraphs)]
    asked = [(f"d{n}", each["question"]) for n, part in enumerate(paragraphs) for each in part["qas"]]
    chosen = asked[:: len(asked) // QUERIES][:QUERIES]
    queries = [{"_id": f"q{n}", "text": text} for n, (_, text) in enumerate(chosen)]
    for name, rows in (("corpus", documents), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    right = [f"q{n}\t{document}\t1" for n, (document, _) in enumerate(chosen)]
    (folder / "qrels/test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *right]) + "\n")


def _mined(home: Path, session: Session) -> Path:
    """Return the file of questions with their paragraphs and hard negatives."""
    groups = home / "groups.jsonl"
    if not groups.exists():
        config = {"retrieval": home / "train.jsonl", "negatives": NEGATIVES, "max_length": MAX_LENGTH}
        mine_negatives(validated(MineConfig, config), MINI, groups, session=session)
    return groups


def _teacher(home: Path, groups: Path) -> Path:
    """Return the folder of a cross-encoder that was trained on which paragraph is the right one."""
    plain, folder = home / "mini", home / "teacher"
    if folder.exists():
        return folder
    if not plain.exists():
        shutil.copytree(locate_teacher(MINI).folder, plain, ignore=shutil.ignore_patterns(*POOLING))
    torch.manual_seed(0)
    model = CrossEncoder(str(plain), num_labels=1, max_length=MAX_LENGTH, device="cpu")
    rows = []
    for line in groups.read_text().splitlines():
        group = json.loads(line)
        rows += [(group["query"], text, 1.0) for text in group["positive"]]
        rows += [(group["query"], text, 0.0) for text in group["negative"][:TUNED_NEGATIVES]]
    columns = dict(zip(("query", "document", "label"), map(list, zip(*rows, strict=True)), strict=True))
    arguments = CrossEncoderTrainingArguments(
        output_dir=str(home / "tuning"),
        **TUNED,
        warmup_steps=0.1,
        bf16=True,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        seed=0,
    )
    CrossEncoderTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(columns),
        loss=BinaryCrossEntropyLoss(model),
    ).train()
    model.save_pretrained(str(folder))
    return folder


if __name__ == "__main__":
    main()
