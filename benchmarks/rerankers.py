"""Measure students of a reranker: SQuAD's questions against its paragraphs, halves of articles apart.

    python -m benchmarks.rerankers --data DATA [--only NAME]

`mini`, read as a classifier (without its pooling), becomes a cross-encoder on questions of half of SQuAD's
articles, each with its paragraph and one that `mini` found near. It scores these and further negatives, and
students learn the scores. All are measured on questions of the other articles: cross-encoders rank the
nearest paragraphs that `mini` finds, bi-encoders find their own. Students begin with a slice, with students
of the teacher's relations over the pairs (cross-encoders), or with students of `mini`'s vectors of English
Wikipedia (bi-encoders), which are measured, too. `speed` times the teacher and a student of each shape, one
after the other. One seed.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
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
TIMED_QUERIES: Final = 60
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
_CONTINUED: Final = {**_RECIPE, "arch": _ARCHS}
_AFTER_RELATIONS: Final = {**_CONTINUED, "lr": 5e-4}
RELATIONS: Final = {**_RECIPE, "objective": "minilm", "steps": 600, "lr": 1e-3, "arch": _ARCHS}
"""Settings of students that learn the teacher's relations over the pairs, before its scores."""
VECTORS: Final = {**_SLICE, "objective": "embedding", "steps": 1000, "batch_size": 64, "lr": 5e-4}
"""Settings of students that learn `mini`'s vectors of other texts."""
SPEED: Final = "speed"
BY_SCORE: Final = "cross score, from relations"
ROWS: Final[dict[str, dict[str, Any]]] = {
    "cross score": {**_SLICE, "objective": "score"},
    "cross listwise": {**_SLICE, "objective": "listwise"},
    BY_SCORE: {**_CONTINUED, "objective": "score", "batches": "shuffled", "lr": 2e-4, "max_grad_norm": 1.0},
    "cross margin-mse, from relations": {**_AFTER_RELATIONS, "objective": "margin-mse", "encoder": "cross"},
    "cross listwise, from relations": {**_AFTER_RELATIONS, "objective": "listwise"},
    "bi margin-mse": {**_SLICE, "objective": "margin-mse"},
    "bi embedding": {},
    "bi margin-mse, from vectors": {**_CONTINUED, "lr": 1e-4, "objective": "margin-mse"},
}
"""Settings of the training of cross-encoders and bi-encoders, by what they are and begin with; `bi embedding`
are the students of vectors themselves."""
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
    for name in given.only or ["teacher", *ROWS, SPEED]:
        if name == SPEED:
            _time(given.data, home, session)
            continue
        if name == "teacher":
            folders = {name: _teacher(given.data, home, session)}
        else:
            run = trained(name, given.data, home, session=session)
            folders = {f"{arch} {name}": run.student_path(arch) for arch in _ARCHS}
        _measure(folders, home, session, retrieves=name.startswith("bi "))


def trained(name: str, data: Path, home: Path, *, session: Session) -> TrainResult:
    """Return the run of a row's students, and make what is missing for it."""
    _teacher(data, home, session)
    settings = {**ROWS[name]}
    if not settings:
        return _of_vectors(data, home, session)
    if name.endswith("from vectors"):
        settings["init"] = str(_of_vectors(data, home, session).path)
    elif name.endswith("from relations"):
        config, cache = validated(TrainConfig, RELATIONS), _cache(home, session, relations=True)
        settings["init"] = str(train_students(config, cache, out=home / "relations", session=session).path)
    elif name.startswith("bi "):
        settings["init_teacher"] = str(locate_teacher(MINI).folder)
    config, cache = validated(TrainConfig, settings), _cache(home, session)
    return train_students(config, cache, out=home / name, session=session)


def _cache(home: Path, session: Session, *, relations: bool = False) -> Path:
    """Return the cache of the teacher's scores of all pairs, or the one of its relations over them."""
    cache = home / ("relations.cache" if relations else "cache")
    if not (cache / "manifest.json").exists():
        groups, teacher = str(home / "groups.jsonl"), str(home / "teacher")
        dumped = {"teacher": teacher, "corpus": groups, "pair_columns": "query,positive+negative"}
        wanted = {"for": "minilm" if relations else "listwise", "max_length": MAX_LENGTH}
        dump_cache(validated(DumpConfig, {**dumped, **wanted}), out=cache, session=session)
    return cache


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
    if retrieves:
        config = validated(EmbeddingsConfig, {"retrieval": home / "test", "max_length": MAX_LENGTH})
        encoders = [str(locate_teacher(MINI).folder), *paths]
        measured = list(map(_row, compare_retrieval(config, encoders, session=session)))
    else:
        measured = list(map(_row, rank(paths, home, session=session)))
    rows: dict[str, Any] = read_result("rerankers").get("rows", {})
    rows |= dict(zip(names, measured, strict=True))
    settings = {"queries": QUERIES, "candidates": CANDIDATES, "max_length": MAX_LENGTH}
    add_to_result("rerankers", rows=rows, settings=settings, recipe=_RECIPE, cpu=cpu())


def rank(
    models: Sequence[str], home: Path, *, session: Session, most: int | None = None
) -> Sequence[RerankScores]:
    """Return the scores of the first stage and of cross-encoders on questions of the other articles.

    Args:
        models: names or folders of the cross-encoders.
        home: folder of the questions.
        session: shows progress.
        most: maximum number of questions. None means all of them.
    """
    settings = {"retrieval": home / "test", "max_length": MAX_LENGTH, "first_stage": MINI}
    config = validated(RerankConfig, {**settings, "candidates": CANDIDATES, "max_queries": most})
    return compare_rerankers(config, models, session=session)


def _row(scores: RerankScores | RetrievalScores) -> dict[str, Any]:
    ndcg = scores.ndcg_at_10
    return {
        "ndcg_at_10": round(ndcg.mean, 2),
        "interval": [round(ndcg.low, 1), round(ndcg.high, 1)],
        "mrr_at_10": round(scores.mrr_at_10.mean, 2),
    }


def _time(data: Path, home: Path, session: Session) -> None:
    """Add the pairs that the teacher and a student of each shape score in a second."""
    run = trained(BY_SCORE, data, home, session=session)
    folders = {"teacher": home / "teacher", **{arch: run.student_path(arch) for arch in _ARCHS}}
    measured = rank(list(map(str, folders.values())), home, session=session, most=TIMED_QUERIES)[1:]
    rates = {name: row.pairs_per_s for name, row in zip(folders, measured, strict=True)}
    add_to_result("rerankers", pairs_per_s=rates)


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


def _teacher(data: Path, home: Path, session: Session) -> Path:
    """Return the folder of a cross-encoder that was trained on which paragraph is the right one."""
    plain, folder = home / "mini", home / "teacher"
    if folder.exists():
        return folder
    home.mkdir(exist_ok=True)
    _write_halves(data, home)
    groups = _mined(home, session)
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
