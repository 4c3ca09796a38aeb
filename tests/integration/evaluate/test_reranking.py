"""Hard negatives and reranking: sentence-transformers' own mining and ranking are the oracles."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.util import mine_hard_negatives
from transformers import AutoModelForSequenceClassification

from tests.fixtures import Command
from tests.integration.evaluate.test_retrieval import models, questions, write_beir
from tests.support import World, save_teacher, write_corpus

__all__ = ["models"]
Models = tuple[Path, Path]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Forty questions, each with one right answer."""
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in questions()[:-1]))
    return path


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("margin", [None, 0.02])
def test_negatives_are_those_of_sentence_transformers(
    tmp_path: Path, models: Models, file: Path, command: Command, margin: float | None
) -> None:
    """The nearest ones, none of them right, and no nearer than the margin allows."""
    out = tmp_path / "groups.jsonl"
    words = () if margin is None else ("--margin", margin)
    sizes = ("--negatives", 5, "--among", 5, "--max-length", 32)
    code, printed, err = command(
        "mine", models[0], "--retrieval", file, "--out", out, *sizes, *words, "--json"
    )
    assert code == 0, err
    groups, asked = rows_of(out), rows_of(file)
    assert json.loads(printed)["pairs"] == sum(1 + len(group["negative"]) for group in groups)
    mined = mine_hard_negatives(
        datasets.Dataset.from_list(asked),
        SentenceTransformer(str(models[0]), device="cpu"),
        anchor_column_name="question",
        positive_column_name="answer",
        num_negatives=5,
        range_max=39,
        relative_margin=margin,
        sampling_strategy="top",
        output_format="n-tuple" if margin is None else "triplet",
        verbose=False,
    )
    expected: dict[str, list[str]] = {row["question"]: [] for row in asked}
    for row in mined:
        expected[row["question"]] += [text for name, text in row.items() if name.startswith("negative")]
    assert {group["query"]: group["negative"] for group in groups} == expected
    assert [group["positive"] for group in groups] == [[row["answer"]] for row in asked]


def test_what_is_right_in_other_letters_is_no_negative(
    tmp_path: Path, models: Models, command: Command
) -> None:
    """Nor is what is right for another query of the same words."""
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    texts = {"D0": "ba be", "D1": "Ba  be ", "D2": "bo bu", "D3": "BO BU", "D4": "da de di"}
    asked = {"Q0": "ba bo", "Q1": " Ba bo"}
    for name, rows in (("corpus", texts), ("queries", asked)):
        lines = (json.dumps({"_id": each, "text": text}) + "\n" for each, text in rows.items())
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "qrels/test.tsv").write_text("Q0\tD0\t1\nQ1\tD2\t1\n")
    words = ("mine", models[0], "--retrieval", folder, "--negatives", 5, "--max-length", 32)
    assert command(*words, "--out", tmp_path / "groups.jsonl")[0] == 0
    assert [row["negative"] for row in rows_of(tmp_path / "groups.jsonl")] == [["da de di"], ["da de di"]]


def test_a_reranker_that_tells_nothing_apart_ranks_by_chance(
    tmp_path: Path, models: Models, file: Path, command: Command
) -> None:
    """It does not keep the order of the first stage."""
    scorer = save_teacher(tmp_path / "scorer", head="sequences", num_labels=1)
    model = AutoModelForSequenceClassification.from_pretrained(scorer)
    torch.nn.init.zeros_(model.classifier.weight)
    model.save_pretrained(scorer)
    sizes = ("--candidates", 30, "--max-length", 32)
    words = ("rerank", scorer, "--retrieval", file, "--first-stage", models[0], *sizes, "--json")
    first, found = json.loads(command(*words)[1])["models"]
    assert found["ndcg_at_10"]["mean"] < first["ndcg_at_10"]["high"] / 2


def test_mined_groups_are_dumped_as_they_are(
    tmp_path: Path, models: Models, file: Path, command: Command
) -> None:
    """Drawn by the seed; the command that is printed names the columns that a dump takes."""
    write_beir(tmp_path / "beir", questions())
    texts = []
    for number, seed in enumerate((0, 0, 1)):
        out = tmp_path / f"{number}.jsonl"
        words = ("--retrieval", tmp_path / "beir", "--out", out, "--negatives", 2, "--max-length", 32)
        code, printed, err = command("mine", models[0], *words, "--seed", seed)
        assert code == 0, err
        texts.append(out.read_text())
    assert texts[0] == texts[1] != texts[2]
    assert "--pair-columns query,positive+negative" in printed
    teacher = save_teacher(tmp_path / "scorer", head="sequences", num_labels=1)
    world = World(tmp_path, teacher, tmp_path / "0.jsonl")
    cache = world.dump(pair_columns="query,positive+negative", **{"for": "listwise"})
    assert cache.manifest.identity.corpus.groups
    assert cache.manifest.num_sequences == sum(
        len({*row["positive"], *row["negative"]}) for row in rows_of(tmp_path / "0.jsonl")
    )


def test_rankings_are_those_of_cross_encoder(
    tmp_path: Path, models: Models, file: Path, command: Command
) -> None:
    """With one relevant document, nDCG is 1 / log2(1 + rank) and MRR 1 / rank, 0 below the tenth place."""
    scorers = [save_teacher(tmp_path / f"s{n}", seed=n, head="sequences", num_labels=1) for n in (0, 1)]
    words = ("--retrieval", file, "--first-stage", models[0], "--candidates", 12, "--max-length", 32)
    code, printed, err = command("rerank", *scorers, *words, "--json")
    assert code == 0, err
    first, *found = json.loads(printed)["models"]
    assert first["pairs_per_s"] is None
    asked, encoder = rows_of(file), SentenceTransformer(str(models[0]), device="cpu")
    answers = [row["answer"] for row in asked]
    similar = encoder.encode([row["question"] for row in asked]) @ encoder.encode(answers).T
    nearest = (-torch.from_numpy(similar)).argsort(dim=1, stable=True)[:, :12].tolist()
    rankings = [[[answers[at] for at in row] for row in nearest]]
    for folder in scorers:
        scorer = CrossEncoder(str(folder), device="cpu", max_length=32)
        rankings.append(
            [
                [str(each["text"]) for each in scorer.rank(row["question"], documents, return_documents=True)]
                for row, documents in zip(asked, rankings[0], strict=True)
            ]
        )
    for scores, ranking in zip((first, *found), rankings, strict=True):
        places = [
            documents.index(row["answer"]) + 1 if row["answer"] in documents[:10] else math.inf
            for row, documents in zip(asked, ranking, strict=True)
        ]
        gains = sum(1 / math.log2(1 + place) for place in places if place < math.inf) / len(places)
        assert scores["ndcg_at_10"]["mean"] == pytest.approx(100 * gains, abs=1e-6)
        ranks = sum(1 / place for place in places) / len(places)
        assert scores["mrr_at_10"]["mean"] == pytest.approx(100 * ranks, abs=1e-6)
    assert "cut at" not in err
    code, printed, err = command("rerank", scorers[0], *words[:-1], 12, "--max-queries", 5)
    assert code == 0
    assert "pairs/s" in printed
    assert "60 of 60 pairs are cut at 12 tokens" in err  # of 4 and 6 words, and 3 special tokens


def test_what_does_not_rank_is_one_line(tmp_path: Path, models: Models, file: Path, command: Command) -> None:
    classes = save_teacher(tmp_path / "classes", head="sequences", num_labels=3)
    scorer = save_teacher(tmp_path / "scorer", head="sequences", num_labels=1)
    own = ("--retrieval", file, "--max-length", 32)
    rerank, first = ("rerank", *own), ("--first-stage", models[0])
    command.fails(*rerank, classes, *first, code=2, says="answers with 3 classes")
    command.fails(*rerank, models[1], *first, code=2, says="scores no pairs")
    command.fails(*rerank, scorer, code=2, says="--first-stage")
    command.fails(*rerank, scorer, "--first-stage", tmp_path / "none", code=1, says="none")
    command.fails(*rerank, scorer, *first, "--candidates", 1, code=2, says="--candidates")
    mine, out = ("mine", models[0], *own, "--out"), tmp_path / "out.jsonl"
    command.fails(*mine, file, code=2, says=str(file))
    command.fails(*mine, out, "--negatives", 60, code=2, says="--among 50 is below --negatives 60")
    command.fails(
        "mine", models[0], "--retrieval", tmp_path / "no", "--out", out, code=1, says="does not exist"
    )
    assert not out.exists()
    world = World(tmp_path, models[0], write_corpus(tmp_path / "text.txt"))
    world.dump(packing="records", pooled=True, codec="none")
    world.train("run", objective="embedding", arch=("1x32", "2x32"), steps=1)
    command.fails(
        *("mine", tmp_path / "run", *own, "--out", out),
        code=2,
        says="is a run of 2 students. Name the folder",
    )


def test_what_is_mined_has_the_best_first_and_no_text_twice(
    tmp_path: Path, models: Models, command: Command
) -> None:
    rows = questions(6)
    write_beir(tmp_path / "beir", rows)
    qrels = tmp_path / "beir/qrels/test.tsv"
    answer, other = (row["answer"] for row in rows[:2])
    with (tmp_path / "beir/corpus.jsonl").open("a") as opened:
        opened.write(json.dumps({"_id": "again", "text": answer}) + "\n")
    qrels.write_text("Q0\tD0\t1\nQ0\tD1\t2\n")
    out = tmp_path / "mined.jsonl"
    words = ("--negatives", 4, "--among", 4, "--max-length", 32, "--out", out)
    code, _, err = command("mine", models[0], "--retrieval", tmp_path / "beir", *words)
    assert code == 0, err
    (group,) = rows_of(out)
    assert group["positive"] == [other, answer]
    assert answer not in group["negative"]


def test_no_negative_is_given_twice_under_two_names(tmp_path: Path, models: Models, command: Command) -> None:
    rows = questions(12)
    write_beir(tmp_path / "beir", rows)
    with (tmp_path / "beir/corpus.jsonl").open("a") as opened:
        for at, row in enumerate(rows):
            opened.write(json.dumps({"_id": f"again-{at}", "text": row["answer"].upper()}) + "\n")
    words = ("--negatives", 8, "--among", 8, "--max-length", 32, "--out", tmp_path / "mined.jsonl")
    code, _, err = command("mine", models[0], "--retrieval", tmp_path / "beir", *words)
    assert code == 0, err
    for group in rows_of(tmp_path / "mined.jsonl"):
        negatives = [text.lower() for text in group["negative"]]
        assert len(set(negatives)) == len(negatives) == 8


def test_how_weights_are_stored_changes_no_figure(
    tmp_path: Path, models: Models, file: Path, command: Command
) -> None:
    """Every command computes in float32, whatever a model was saved in."""
    scorer = save_teacher(tmp_path / "scorer", head="sequences", num_labels=1)
    for folder in (scorer, models[0]):
        other = shutil.copytree(folder, tmp_path / f"{folder.name}-bfloat16")
        weights = load_file(folder / "model.safetensors")
        halves = {name: weight.bfloat16() for name, weight in weights.items()}
        save_file(halves, other / "model.safetensors", metadata={"format": "pt"})
        floats = {name: weight.float() for name, weight in halves.items()}
        save_file(floats, folder / "model.safetensors", metadata={"format": "pt"})
        settings = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}))
    sizes = ("--candidates", 30, "--max-length", 32)
    words = ("--retrieval", file, "--first-stage", models[0], *sizes, "--json")
    _, one, other_one = json.loads(command("rerank", scorer, f"{scorer}-bfloat16", *words)[1])["models"]
    assert one["ndcg_at_10"] == other_one["ndcg_at_10"]
    both = ("embeddings", models[0], f"{models[0]}-bfloat16", "--retrieval", file, "--max-length", 32)
    one, other_one = json.loads(command(*both, "--json")[1])["retrieval"]
    assert one["ndcg_at_10"] == other_one["ndcg_at_10"]


@pytest.mark.parametrize("lacking", ["classifier.weight", "classifier.bias"])
def test_a_head_that_is_not_whole_is_refused_everywhere(
    tmp_path: Path, models: Models, file: Path, command: Command, lacking: str
) -> None:
    """Transformers would draw what is missing at random, or drop what is left."""
    folder = save_teacher(tmp_path / "reranker", head="sequences", num_labels=1)
    weights = load_file(folder / "model.safetensors")
    del weights[lacking]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ranking = ("--retrieval", file, "--first-stage", models[0], "--max-length", 32)
    command.fails("rerank", folder, *ranking, code=1, says=f"{lacking} is not among its weights")
    corpus = write_corpus(tmp_path / "corpus.txt", 8)
    for words in (("trim", folder, "--corpus", corpus), ("truncate", "--teacher", folder, "--layers", "0,1")):
        says = ("lacks a part of its head", lacking)
        command.fails(*words, "--out", tmp_path / "out", code=1, says=says)
    assert not (tmp_path / "out").exists()


def test_what_finds_no_negative_writes_nothing(
    tmp_path: Path, models: Models, file: Path, command: Command
) -> None:
    words = ("mine", models[0], "--retrieval", file, "--max-length", 32, "--out", tmp_path / "groups.jsonl")
    command.fails(*words, "--margin", 0.99, code=2, says=("no query has a hard negative", "--margin 0.99"))
    assert not (tmp_path / "groups.jsonl").exists()


@pytest.mark.parametrize("option", ["--retrieval", "--qrels", "--queries"])
def test_a_pipe_is_no_retrieval_data(tmp_path: Path, models: Models, command: Command, option: str) -> None:
    pipe = tmp_path / ("pipe.tsv" if option == "--qrels" else "pipe.jsonl")
    os.mkfifo(pipe)
    (tmp_path / "qrels.tsv").write_text("q\td\t1\n")
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"_id": "d", "text": "ba"}) + "\n")
    given = {"--queries": tmp_path / "corpus.jsonl", "--corpus": tmp_path / "corpus.jsonl"}
    given |= {"--qrels": tmp_path / "qrels.tsv", option: pipe}
    words = (
        ("--retrieval", pipe)
        if option == "--retrieval"
        else [part for pair in given.items() for part in pair]
    )
    asked = ("embeddings", models[0], "--max-length", 32, *words)
    command.fails(*asked, code=1, says="it is not a regular file")


def test_retrieval_data_of_other_kinds_are_named(tmp_path: Path, models: Models, command: Command) -> None:
    table = tmp_path / "questions.csv"
    table.write_text("question,answer\nba,be\n")
    words = ("embeddings", models[0], "--max-length", 32, "--retrieval")
    command.fails(*words, table, code=1, says=("neither a .jsonl file", "Convert it"))
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels/test.tsv").write_text("q 0 d 1\n")
    command.fails(*words, tmp_path, code=1, says=("q 0 d 1", "TREC's second column"))
