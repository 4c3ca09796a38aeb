"""Measure students of embeddings: similarity of sentences, retrieval, cost, and a peer.

    python -m benchmarks.embeddings --data DATA --steps 850 --seed 0 --seed 1 --student 3x384=teacher-layers
    python -m benchmarks.embeddings --data DATA --part peer --steps 300

`DATA` holds text in `enwiki/train.txt` and `enwiki_core/train.txt` (a paragraph a line), `glue/STS-B` and
`squad/dev-v1.1.reconstructed.json`. The training text is the sentences of enwiki, some of them as
questions, and a share of its paragraphs as they are (`benchmarks/texts.py`); nothing of STS-B or SQuAD is in
it. A second command adds to what `--home` and the
results hold. Parts:

- `students` trains students from cached vectors.
- `teacher` scores the teacher.
- `untrained` scores students before training, as the cache's sequences make them.
- `peer` trains a student with sentence-transformers' own loss and the teacher in its loop, too.
- `imported` trains a student from the same vectors after an export and an import.
- `batches` compares batches of texts of like lengths with shuffled ones.
"""

import argparse
import json
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MSELoss

from benchmarks.report import add_to_result, cpu, read_result
from benchmarks.texts import records
from minilm_cache import DumpConfig, TrainConfig, dump_cache, open_cache, train_students
from minilm_cache.cache import Cache
from minilm_cache.dump.config import ImportConfig
from minilm_cache.dump.imported import import_answers
from minilm_cache.evaluate.embeddings import sentence_encoder
from minilm_cache.evaluate.models import Evaluated
from minilm_cache.models.arch import parse_arch
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.pooling import SentenceModel
from minilm_cache.models.tokenizer import load_tokenizer
from minilm_cache.models.truncate import truncate
from minilm_cache.objectives.batch import StudentBatch
from minilm_cache.objectives.check import choose_objective
from minilm_cache.session import Session
from minilm_cache.settings import TruncateConfig, validated
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.initial import initial_weights
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.sampler import plan_steps
from minilm_cache.train.setup import build_trainers
from minilm_cache.train.trainer import StudentTrainer, learning_rate
from minilm_cache.workflows.export import export_vectors

MAX_LENGTH = 256
SHORT_LENGTH = 128
LAYERS = "1,3,5"
_Learner = tuple[StudentTrainer, Generator[StudentBatch], TrainConfig]
Encode = Callable[[list[str]], np.ndarray]
CPU = torch.device("cpu")
KEYS = (
    "arch",
    "init",
    "layers",
    "frozen",
    "steps",
    "lr",
    "precision",
    "loss",
    "first",
    "relations",
    "paragraphs",
    "questions",
    "max_length",
    "seed",
)
"""What tells one student from another."""


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("embeddings"))
    parser.add_argument("--part", choices=["students", *_ONCE], default="students")
    parser.add_argument("--student", action="append", default=[], help="ARCH=INIT, like 3x384=teacher-layers")
    parser.add_argument("--layers", help="layers of the teacher to begin with, like 0,2,5")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--frozen", choices=["none", "embeddings"], default="none", help="what is not trained"
    )
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--loss", action="append", help="what vectors are compared by, like similarity=10")
    parser.add_argument("--first", type=int, default=0, help="steps of relations before the vectors")
    parser.add_argument("--relations", action="store_true", help="the cache holds relations, too")
    parser.add_argument("--seed", type=int, action="append")
    parser.add_argument("--paragraphs", type=float, default=0.125, help="share of paragraphs kept whole")
    parser.add_argument("--questions", type=float, default=0.0, help="share of sentences made questions")
    parser.add_argument("--max-length", type=int, default=MAX_LENGTH, help="tokens that texts are cut at")
    parser.add_argument("--max-tokens", type=int, help="most tokens of the cache")
    given = parser.parse_args()
    cache = _cache(given)
    rows: list[dict[str, Any]] = read_result("embeddings").get("students", [])
    if given.part in _ONCE:
        add_to_result("embeddings", **{given.part: _ONCE[given.part](given, cache)})
        return
    for seed in given.seed or [0]:
        for name in given.student:
            arch, _, init = name.partition("=")
            row = _trained(given, cache, arch=arch, init=init, seed=seed)
            kept = [other for other in rows if any(other[key] != row[key] for key in KEYS)]
            rows = [*kept, row]
            add_to_result("embeddings", students=rows)


def _cache(given: argparse.Namespace) -> Cache:
    """Return the cache of vectors, which is dumped where it is missing."""
    text = given.home / "text.txt"
    if not text.exists():
        given.home.mkdir(parents=True, exist_ok=True)
        files = [given.data / name / "train.txt" for name in ("enwiki", "enwiki_core")]
        written = records(files, paragraphs=given.paragraphs, questions=given.questions)
        text.write_text("".join(f"{record}\n\n" for record in written))
    place = given.home / "cache"
    if not (place / "manifest.json").exists():
        settings: dict[str, Any] = {"teacher": "mini", "corpus": str(text), "for": "embedding"}
        if given.relations:
            settings["for"] = ("minilm", "embedding")
        settings |= {"max_length": given.max_length, "max_tokens": given.max_tokens}
        dump_cache(validated(DumpConfig, settings), out=place, session=Session(given.home))
    cache = open_cache(place)
    measured = cache.manifest.measured
    assert measured is not None
    (pooled,) = measured.states
    if not given.relations:
        texts, tokens = cache.manifest.num_sequences, cache.manifest.num_tokens
        bytes_per_text = round(pooled.bytes_per_token * tokens / texts, 1)
        add_to_result(
            "embeddings",
            cache={
                "texts": texts,
                "tokens": tokens,
                "bytes_per_text": bytes_per_text,
                "cosine": pooled.cosine,
            },
        )
    return cache


def _trained(given: argparse.Namespace, cache: Cache, *, arch: str, init: str, seed: int) -> dict[str, Any]:
    """Train one student, and return its scores."""
    name = f"{arch}-{init}-{given.layers or 'even'}-{given.steps}-{given.lr:g}-{given.first}-{seed}"
    name += "-frozen" if given.frozen != "none" else ""
    loss = tuple(given.loss or ["cosine"])
    name += f"-{'-'.join(loss)}" if given.loss else ""
    name += "-bfloat16" if given.precision == "bfloat16" else ""
    settings: dict[str, Any] = {"arch": (arch,), "seed": seed, "init": init, "init_layers": given.layers}
    settings |= {"frozen": given.frozen, "loss": loss, "precision": given.precision}
    if given.first:
        settings |= {"first": "minilm", "first_steps": given.first}
    settings |= {"objective": "embedding", "steps": given.steps, "lr": given.lr}
    out = given.home / "runs" / name
    result = train_students(
        validated(TrainConfig, settings), cache.reader.root, out=out, session=Session(given.home)
    )
    (student,) = result.record.students
    assert student.held_out_before is not None
    assert student.held_out_after is not None
    return {
        "arch": arch,
        "init": init,
        "layers": given.layers,
        "frozen": given.frozen,
        "steps": given.steps,
        "lr": given.lr,
        "precision": given.precision,
        "loss": ", ".join(loss),
        "first": given.first,
        "relations": given.relations,
        "paragraphs": given.paragraphs,
        "questions": given.questions,
        "max_length": given.max_length,
        "seed": seed,
        "num_parameters": student.num_parameters,
        "cpu": cpu(),
        "train_s": result.record.train_s,
        "threads": torch.get_num_threads(),
        "cosine_before": round(1 - student.held_out_before["cosine"], 4),
        "cosine_after": round(1 - student.held_out_after["cosine"], 4),
        **_scores(result.student_path(arch), given.data),
    }


def _scores(folder: Path, data: Path) -> dict[str, float]:
    """Return the Spearman correlation on STS-B's dev set and nDCG@10 on SQuAD's, all times 100.

    Retrieval is scored twice: with texts cut at `MAX_LENGTH` tokens and at `SHORT_LENGTH`.
    """
    scores = {"stsb_spearman": similarity(encoder_of(folder, MAX_LENGTH), data)}
    for name, length in (("squad_ndcg", MAX_LENGTH), ("squad_ndcg_128", SHORT_LENGTH)):
        scores[name] = retrieval(encoder_of(folder, length), data)
    return scores


def encoder_of(folder: Path, max_length: int) -> Encode:
    """Return a function that makes vectors of texts, which are cut at `max_length` tokens."""
    encoder: Any = sentence_encoder(Evaluated(name=folder.name, folder=folder), max_length, "cpu")

    def encode(texts: list[str]) -> np.ndarray:
        return np.asarray(encoder.encode(texts, batch_size=64, show_progress_bar=False))

    return encode


def similarity(encode: Encode, data: Path) -> float:
    """Return the Spearman correlation on STS-B's dev set, times 100."""
    header, *lines = (data / "glue/STS-B/dev.tsv").read_text().rstrip("\n").split("\n")
    columns = header.split("\t")
    rows = [dict(zip(columns, line.split("\t"), strict=False)) for line in lines]
    first, second = (encode([row[f"sentence{n}"] for row in rows]) for n in (1, 2))
    spearman = spearmanr((first * second).sum(1), [float(row["score"]) for row in rows])[0]
    return round(100 * float(spearman), 2)


def retrieval(encode: Encode, data: Path) -> float:
    """Return nDCG@10 of the first question of each of SQuAD's paragraphs over all of them, times 100."""
    document = json.loads((data / "squad/dev-v1.1.reconstructed.json").read_text())
    paragraphs = [paragraph for article in document["data"] for paragraph in article["paragraphs"]]
    questions = encode([paragraph["qas"][0]["question"] for paragraph in paragraphs])
    scores = questions @ encode([paragraph["context"] for paragraph in paragraphs]).T
    places = (scores > scores.diagonal()[:, None]).sum(1)
    gains = np.where(places < 10, 1 / np.log2(places + 2), 0.0)
    return round(100 * float(gains.mean()), 2)


def _learner(given: argparse.Namespace, cache: Cache, **settings: object) -> _Learner:
    """Return a student that begins with the teacher's layers, and its endless batches."""
    values = {"arch": ("3x384",), "objective": "embedding", "steps": given.steps, "lr": given.lr}
    config = validated(TrainConfig, {**values, "init": "teacher-layers", **settings})
    objective = choose_objective(config, cache, arch=config.arch)
    shapes = [parse_arch(arch, cache.manifest.identity.relation_heads) for arch in config.arch]
    (trainer,) = build_trainers(
        config,
        cache,
        shapes=shapes,
        objective=objective,
        beginnings=initial_weights(config, cache, shapes=shapes, head=None, home=given.home),
        steps=given.steps,
        ranks=Ranks.alone(CPU),
    )
    reader = BatchReader(cache, objective.wanted, pad_token=0, device=CPU)
    return trainer, reader.train_batches(plan_steps(config, cache.reader), 0), config


def _start(given: argparse.Namespace) -> Path:
    """Return the folder of the teacher's layers that students begin with."""
    start: Path = given.home / "peer-start"
    if not start.exists():
        truncate(validated(TruncateConfig, {"teacher": "mini", "layers": LAYERS}), start)
    return start


def _peer(given: argparse.Namespace, cache: Cache) -> dict[str, Any]:
    """Train a student both ways on the same batches, in turns, and compare time and scores."""
    ours, stream, config = _learner(given, cache)
    start = _start(given)
    teacher, peer = _encoder(locate_teacher("mini").folder), _encoder(start)
    loss = MSELoss(peer)
    optimizer = torch.optim.AdamW(
        peer.parameters(), lr=given.lr, weight_decay=config.weight_decay, fused=True
    )
    times: dict[str, list[float]] = {"minilm-cache": [], "sentence-transformers": []}
    with closing(stream) as batches:
        for step in range(given.steps):
            started = time.perf_counter()
            batch = next(batches)
            ours.step(batch, step)
            times["minilm-cache"].append(time.perf_counter() - started)
            started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step, given.steps)
            features = _features(batch)
            with torch.no_grad():
                labels = teacher(dict(features))["sentence_embedding"]
            optimizer.zero_grad()
            loss([features], labels).backward()
            optimizer.step()
            times["sentence-transformers"].append(time.perf_counter() - started)
    folders = {"minilm-cache": given.home / "peer-ours", "sentence-transformers": given.home / "peer-theirs"}
    _saved(ours, folders["minilm-cache"])
    peer.save_pretrained(str(folders["sentence-transformers"]), create_model_card=False)
    return {
        "steps": given.steps,
        "models": {
            name: {"seconds_per_step": round(median(times[name]), 4), **_scores(folder, given.data)}
            for name, folder in folders.items()
        },
    }


def _imported(given: argparse.Namespace, cache: Cache) -> dict[str, Any]:
    """Train a student from the cache, and one from the same texts and vectors without their teacher."""
    file, place, start = given.home / "vectors.parquet", given.home / "imported", _start(given)
    if not file.exists():
        export_vectors(cache.reader.root, file)
    if not place.exists():
        settings: dict[str, Any] = {"vectors": str(file), "tokenizer": "mini", "max_length": MAX_LENGTH}
        import_answers(validated(ImportConfig, settings), out=place, session=Session(given.home))
    result: dict[str, Any] = {"steps": given.steps}
    for name, root in (("dumped", cache.reader.root), ("imported", place)):
        settings = {"arch": ("3x384",), "init": str(start), "objective": "embedding", "steps": given.steps}
        out = given.home / "runs" / f"{name}-{given.steps}"
        train_students(validated(TrainConfig, settings), root, out=out, session=Session(given.home))
        result[name] = _scores(out / "students" / "3x384", given.data)
    return result


def _batches(given: argparse.Namespace, cache: Cache) -> dict[str, float]:
    """Return tokens per second of training steps, with both kinds of batches in turns."""
    learners = {name: _learner(given, cache, batches=name) for name in ("shuffled", "by-length")}
    tokens, seconds = dict.fromkeys(learners, 0), dict.fromkeys(learners, 0.0)
    with ExitStack() as stack:
        for _, stream, _ in learners.values():
            stack.enter_context(closing(stream))
        for step in range(given.steps):
            for name, (trainer, stream, _) in learners.items():
                started = time.perf_counter()
                batch = next(stream)
                trainer.step(batch, step)
                seconds[name] += time.perf_counter() - started
                tokens[name] += int(batch.inputs.lengths.sum())
    return {name: round(tokens[name] / seconds[name]) for name in learners}


def _untrained(given: argparse.Namespace, cache: Cache) -> dict[str, Any]:
    """Score students as they begin: of whole layers, or cut from the teacher with the cache's sequences."""
    scores: dict[str, Any] = read_result("embeddings").get("untrained", {})
    for student in given.student:
        arch, _, init = student.partition("=")
        name = " ".join(filter(None, [arch, init, given.layers]))
        trainer, stream, _ = _learner(given, cache, arch=(arch,), init=init, init_layers=given.layers)
        stream.close()
        scores[name] = _scores(_saved(trainer, given.home / "untrained" / name), given.data)
    return scores


def _saved(trainer: StudentTrainer, folder: Path) -> Path:
    """Write a student as a folder of sentence-transformers, and return it."""
    pooler = trainer.learner.objective.sentence_pooler
    assert pooler is not None
    trainer.model.model.save_pretrained(folder)
    load_tokenizer(locate_teacher("mini").folder).save_pretrained(folder)
    pooler.save(folder, hidden_size=trainer.model.model.config.hidden_size, max_length=MAX_LENGTH)
    return folder


def _teacher(given: argparse.Namespace, cache: Cache) -> dict[str, float]:
    """Score the teacher."""
    folder = locate_teacher("mini").folder
    return {"num_parameters": SentenceModel(folder, MAX_LENGTH).num_parameters, **_scores(folder, given.data)}


_ONCE: dict[str, Callable[[argparse.Namespace, Cache], dict[str, Any]]] = {
    "teacher": _teacher,
    "untrained": _untrained,
    "peer": _peer,
    "imported": _imported,
    "batches": _batches,
}
"""Parts that are measured once."""


def _encoder(folder: Path) -> Any:  # noqa: ANN401 - a module of sentence-transformers
    """Return a model as sentence-transformers runs it, without dropout."""
    encoder: SentenceTransformer = sentence_encoder(
        Evaluated(name=folder.name, folder=folder), MAX_LENGTH, "cpu"
    )
    return encoder.eval()


def _features(batch: StudentBatch) -> dict[str, torch.Tensor]:
    """Return a batch as sentence-transformers takes it."""
    inputs = batch.inputs
    return {"input_ids": inputs.ids, "attention_mask": inputs.valid.to(torch.int64)}


if __name__ == "__main__":
    main()
