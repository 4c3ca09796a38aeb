"""Scores of pairs, from records of queries with documents to cross-encoders and bi-encoders in use."""

import json
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoModel

from minilm_cache.cache import Cache, open_cache
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.inputs import texts_of_pair
from minilm_cache.objectives.check import choose_objective
from minilm_cache.objectives.config import LISTWISE, MARGIN_MSE, RANKNET, SCORE
from minilm_cache.settings import validated
from minilm_cache.storage_schema.states import LOGITS
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.config import TrainConfig, check_parts
from minilm_cache.train.sampler import plan_steps
from tests.fixtures import Command
from tests.integration.corpus.test_pairs import with_segments
from tests.integration.objectives.conftest import CPU, settings, trainer_of
from tests.integration.train.test_donors import save_donor
from tests.support import World, save_teacher, tiny_tokenizer, write_corpus, write_groups

GROUPS: dict[str, Any] = {"pair_columns": "query,right+wrong", "for": "listwise", "seed": 3}


@pytest.mark.parametrize("objective", ["listwise", "ranknet", "margin-mse"])
def test_a_part_of_a_step_with_one_pair_is_refused(objective: str) -> None:
    config = validated(
        TrainConfig, {"arch": "1x16", "objective": objective, "batch_size": 8, "accumulate": 8}
    )
    with pytest.raises(InvalidConfigError, match=f"--objective {objective} compares the texts of a part"):
        check_parts(config)


def test_a_cross_encoder_opens_with_the_length_that_it_learned(world: World) -> None:
    world.dump(**GROUPS)
    run = world.train("run", arch=("1x16",), objective="score", init="random", seed=4)
    opened = CrossEncoder(str(run.student_path("1x16")))

    assert opened.tokenizer.model_max_length == 32
    card = (run.student_path("1x16") / "README.md").read_text()
    assert "at most 32 tokens" in card
    assert "seed 4" in card


@pytest.mark.parametrize("encoder", ["cross", "bi"])
@pytest.mark.parametrize("own", ["some pieces", "another model's"])
def test_students_with_a_tokenizer_of_their_own_read_pairs_as_they_are_used(
    world: World, encoder: str, own: str
) -> None:
    """The held-out loss is the error of scores that sentence-transformers computes of the texts themselves.

    The other model's tokenizer has more tokens a text, so that documents of its pairs are cut.
    """
    is_other = own == "another model's"
    world.dump(**GROUPS, max_length=20 if is_other else 32)
    asked: dict[str, Any] = {"vocab": "30"}
    if is_other:
        asked = {"init_teacher": str(save_donor(world.root / "donor"))}
    run = world.train("run", objective="score", encoder=encoder, **asked)
    cache, folder = open_cache(world.root / "cache"), str(run.student_path("1x32"))
    held_out = texts_of(cache)[cache.manifest.num_train :]
    of_teacher = [float(each.states()[LOGITS][0]) for each in cache[cache.manifest.num_train :]]
    if encoder == "cross":
        scores = CrossEncoder(folder, device="cpu").predict(held_out)
    else:
        vectors: Any = SentenceTransformer(folder, device="cpu")
        scores = (vectors.encode([a for a, _ in held_out]) * vectors.encode([b for _, b in held_out])).sum(1)
    (student,) = run.record.students
    assert student.held_out_after is not None
    assert student.held_out_after["score"] == pytest.approx(np.square(scores - of_teacher).mean(), rel=1e-4)


def loss_of_query(objective: str, mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return a loss of the documents of one query, in plain PyTorch."""
    if objective == LISTWISE:
        logs = mine.log_softmax(0), theirs.log_softmax(0)
        return torch.nn.functional.kl_div(*logs, reduction="sum", log_target=True)
    if objective == MARGIN_MSE:
        return ((mine[0] - mine[1:]) - (theirs[0] - theirs[1:])).square().mean()
    numbers = range(len(mine))
    better = [(one, two) for one in numbers for two in numbers if theirs[one] > theirs[two]]
    return torch.stack([torch.nn.functional.softplus(mine[two] - mine[one]) for one, two in better]).mean()


@pytest.mark.parametrize("objective", [LISTWISE, MARGIN_MSE, RANKNET])
def test_held_out_losses_compare_all_documents_of_a_query_whatever_the_size_of_batches(
    world: World, objective: str
) -> None:
    """sentence-transformers scores the held-out pairs, and plain PyTorch compares those of each query."""
    write_groups(world.corpus, 100, wrong=3)
    cache = open_cache(world.dump(**GROUPS).path)
    held_out, texts = cache[cache.manifest.num_train :], texts_of(cache)[cache.manifest.num_train :]
    theirs = torch.tensor([float(each.states()[LOGITS][0]) for each in held_out])
    for batch_size in (3, 64):
        settings: dict[str, Any] = {
            "objective": objective,
            "encoder": "cross",
            "batch_size": batch_size,
            "steps": 2,
        }
        run = world.train(f"run-{batch_size}", arch=("1x16",), init="random", **settings)
        student = CrossEncoder(
            str(run.student_path("1x16")), device="cpu", max_length=32, activation_fn=torch.nn.Identity()
        )
        mine, losses = torch.from_numpy(student.predict(texts)), []
        for _, group in groupby(range(len(texts)), key=lambda number: texts[number][0]):
            places = [*group]
            losses += [loss_of_query(objective, mine[places], theirs[places])] * len(places)
        (record,) = run.record.students
        assert len(losses) > 4  # more than one query
        assert record.held_out_after is not None
        assert record.held_out_after[objective] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-3)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A cross-encoder with segments, and queries with four documents each."""
    teacher = save_teacher(tmp_path / "teacher", head="sequences", num_labels=1)
    with_segments().save_pretrained(teacher)
    return World(tmp_path, teacher, write_groups(tmp_path / "groups.jsonl", wrong=3))


def rows_of(world: World) -> list[dict[str, Any]]:
    return [json.loads(line) for line in world.corpus.read_text().splitlines()]


def pairs_of(world: World) -> list[tuple[str, str]]:
    """Return all pairs, a query's one after the other, the relevant document first."""
    return [(row["query"], document) for row in rows_of(world) for document in (*row["right"], *row["wrong"])]


def texts_of(cache: Cache) -> list[tuple[str, str]]:
    """Return the two texts of each sequence."""
    tokenizer = tiny_tokenizer()
    found = []
    for sequence in cache:
        first, second, _ = str(tokenizer.decode(sequence.input_ids.tolist())).split("[SEP]")
        found.append((first.removeprefix("[CLS]").strip(), second.strip()))
    return found


def test_scores_are_those_of_the_teacher_and_pairs_of_a_query_stay_together(world: World) -> None:
    """Every pair once, its score the teacher's own; a query's pairs follow each other, also when held out."""
    cache = open_cache(world.dump(**GROUPS).path)
    found, expected = texts_of(cache), pairs_of(world)
    assert sorted(found) == sorted(expected)
    queries = [query for query, _ in found]
    assert sum(one != other for one, other in pairwise(queries)) == 39  # of 40 queries
    place = {pair: number for number, pair in enumerate(expected)}
    assert all(place[one] + 1 == place[other] for one, other in pairwise(found) if one[0] == other[0])
    num_train = cache.manifest.num_train
    assert cache.manifest.num_held_out > 0
    assert not {*queries[:num_train]} & {*queries[num_train:]}
    encoder = CrossEncoder(str(world.teacher), device="cpu", max_length=32, activation_fn=torch.nn.Identity())
    stored = [float(sequence.states()[LOGITS][0]) for sequence in cache]
    np.testing.assert_allclose(stored, encoder.predict(found), atol=1e-5)


def test_queries_of_the_same_words_are_held_out_together(world: World) -> None:
    again = [{**row, "query": row["query"].replace(" ", "  "), "wrong": ["ba ba"]} for row in rows_of(world)]
    world.corpus.write_text("".join(json.dumps(row) + "\n" for row in [*rows_of(world), *again]))
    cache = open_cache(world.dump(**GROUPS).path)
    queries, num_train = [query for query, _ in texts_of(cache)], cache.manifest.num_train
    assert len(queries) > num_train
    assert not {*queries[:num_train]} & {*queries[num_train:]}


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv", "tsv", "list"])
def test_groups_are_read_in_the_layouts_that_people_have(world: World, tmp_path: Path, ending: str) -> None:
    """Columns of texts or of lists, one of documents or several; a repeated document counts once."""
    expected, rows, columns = pairs_of(world), rows_of(world), "query,right+wrong"
    file = tmp_path / f"again.{'jsonl' if ending == 'list' else ending}"
    if ending == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(file))
    elif ending == "tsv":  # without a header, as MS MARCO has it
        columns = "0,1+2+3+4"
        lines = ["\t".join([row["query"], *row["right"], *row["wrong"]]) for row in rows]
        file.write_text("\n".join(lines) + "\n")
    elif ending == "csv":
        columns = "query,right+w0+w1+w2"
        lines = [",".join([row["query"], *row["right"], *row["wrong"]]) for row in rows]
        file.write_text("\n".join(["query,right,w0,w1,w2", *lines]) + "\n")
    else:
        columns = "query,documents" if ending == "list" else columns
        for row in rows:
            row["documents"] = [*row["right"], *row["wrong"], *row["wrong"]]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    again = World(world.root, world.teacher, file)
    cache = open_cache(again.dump("again", **{**GROUPS, "pair_columns": columns}).path)
    assert sorted(texts_of(cache)) == sorted(expected)
    assert cache.manifest.identity.corpus.groups


def test_a_document_of_a_query_counts_once_however_the_query_is_written(world: World) -> None:
    """In another record with other spaces; only a new document of that one is added."""
    expected, rows = pairs_of(world), rows_of(world)
    again = [
        {
            "query": f" {row['query'].replace(' ', '  ')}",
            "right": row["right"],
            "wrong": [*row["wrong"], "ba ba"],
        }
        for row in rows
    ]
    world.corpus.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *again]))
    found = texts_of(open_cache(world.dump(**GROUPS).path))
    assert sorted(found) == sorted([*expected, *((row["query"], "ba ba") for row in rows)])


def test_held_out_batches_are_whole_queries_and_a_last_one_that_goes_on_is_left_out(world: World) -> None:
    write_groups(world.corpus, 100, wrong=3)
    cache = open_cache(world.dump(**GROUPS).path)
    assert cache.manifest.num_held_out >= 8
    wanted = choose_objective(settings(LISTWISE), cache, arch=("1x16",)).wanted
    reader = BatchReader(cache, wanted, pad_token=0, device=CPU)
    read = {
        most: [len(batch.inputs.ids) for batch in reader.held_out_batches(5, most)] for most in (3, 4, 7, 8)
    }
    assert read == {3: [3], 4: [4], 7: [4], 8: [4, 4]}


def test_batches_hold_queries_with_their_documents(world: World) -> None:
    cache = open_cache(world.dump(**GROUPS, shard_tokens=512).path)
    config = settings(LISTWISE, batch_size=16, batches="by-query")
    wanted = choose_objective(config, cache, arch=config.arch).wanted
    reader, seen = BatchReader(cache, wanted, pad_token=0, device=CPU), []
    for batch in islice(reader.train_batches(plan_steps(config, cache.reader), 0), 9):
        assert batch.queries is not None
        assert batch.queries.tolist() == sorted(batch.queries.tolist())
        seen += [tuple(row.tolist()) for row in batch.inputs.ids.sort(1).values]
        # At most two queries of a batch are cut: the first and the last.
        sizes = torch.bincount(batch.queries).tolist()
        assert all(size == 4 for size in sizes[1:-1])
    resumed = islice(reader.train_batches(plan_steps(config, cache.reader), 5), 4)
    assert seen[5 * 16 :] == [
        tuple(row.tolist()) for batch in resumed for row in batch.inputs.ids.sort(1).values
    ]


@pytest.mark.parametrize("objective", [SCORE, LISTWISE, RANKNET, MARGIN_MSE])
def test_a_cross_encoder_that_is_the_teacher_has_no_loss(world: World, objective: str) -> None:
    world.dump(**GROUPS)
    changes: dict[str, Any] = {"encoder": "cross"} if objective == MARGIN_MSE else {}
    run = world.train(
        "run", arch=("3x32:ff64",), objective=objective, steps=1, lr=1e-9, warmup=0.0, **changes
    )
    before = run.record.students[0].loss_before
    assert before is not None
    if objective == RANKNET:  # its least value is not 0
        assert before < 0.7
    else:
        assert before < 1e-6


@pytest.mark.parametrize("objective", [MARGIN_MSE, LISTWISE])
def test_a_bi_encoder_reads_texts_apart_and_opens_with_its_scores(world: World, objective: str) -> None:
    """It reads what the tokenizer makes of single texts; in use, the score is the dot product it learned."""
    cache = open_cache(world.dump(**GROUPS).path)
    config = settings(objective, encoder="bi", arch=("2x32",), steps=150, lr=3e-3)
    trainer, batch = trainer_of(config, cache)
    tokenizer, first = tiny_tokenizer(), cache.manifest.num_train
    held_out = texts_of(cache)[first : first + 4]
    texts = [*dict.fromkeys(query for query, _ in held_out), *(document for _, document in held_out)]
    read = [row[:length].tolist() for row, length in zip(batch.inputs.ids, batch.inputs.lengths, strict=True)]
    assert read == tokenizer(texts)["input_ids"]
    del trainer
    run = world.train("run", **config.model_dump(exclude={"device"}, exclude_none=True))
    lines = [json.loads(line) for line in (run.path / "log.jsonl").read_text().splitlines()]
    losses = [line["students"]["2x32"][objective] for line in lines if "students" in line]
    assert losses[-1] < 0.7 * losses[0]
    encoder = SentenceTransformer(str(run.student_path("2x32")), device="cpu")
    assert encoder.similarity_fn_name == "dot"
    queries, documents = (encoder.encode([pair[side] for pair in held_out]) for side in (0, 1))
    model = AutoModel.from_pretrained(run.student_path("2x32")).eval()

    def plain(text: str) -> np.ndarray:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            return np.asarray(model(ids).last_hidden_state[0].mean(0))

    expected = [float(plain(query) @ plain(document)) for query, document in held_out]
    np.testing.assert_allclose((queries * documents).sum(1), expected, rtol=1e-4, atol=1e-5)


def test_long_queries_are_the_same_with_each_of_their_documents(world: World) -> None:
    """Documents alone are cut; a query that leaves no room is cut for all of them alike."""
    rows = rows_of(world)
    for number, row in enumerate(rows):
        row["query"] = " ".join([row["query"]] * (1 + number % 5))
        row["wrong"] = [" ".join([text] * (1 + number % 4)) for text in row["wrong"]]
    world.corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cache = open_cache(world.dump(**GROUPS, max_length=16).path)
    pair = cache.manifest.identity.packing.pair
    assert pair is not None
    assert pair.cut == "second"
    queries = [tuple(texts_of_pair(sequence.input_ids.numpy(), pair)[0].tolist()) for sequence in cache]
    sizes = [len(list(same)) for _, same in groupby(queries)]
    assert sizes == [4] * len(rows)
    assert max(map(len, queries)) == 16 - 4


def test_a_document_that_a_query_has_twice_counts_once(world: World) -> None:
    """Triples repeat the relevant document in every record of a query."""
    rows = rows_of(world)
    triples = [
        {"query": row["query"], "right": row["right"][0], "wrong": text}
        for row in rows
        for text in row["wrong"]
    ]
    world.corpus.write_text("".join(json.dumps(row) + "\n" for row in triples))
    cache = open_cache(world.dump(**GROUPS).path)
    expected = {(row["query"], text) for row in rows for text in (*row["right"], *row["wrong"])}
    found = texts_of(cache)
    assert sorted(found) == sorted(expected)
    assert sum(one != other for one, other in pairwise(query for query, _ in found)) == 39


def test_a_run_remembers_that_batches_go_by_query(world: World, command: Command) -> None:
    """Other batches are another run; the command that is printed repeats it."""
    world.dump(**GROUPS)
    sizes = ("--arch", "1x32", "--steps", 3, "--batch-size", 8, "--init", "random", "--device", "cpu")
    words = ("train", world.root / "cache", "--objective", "listwise", *sizes, "--out", world.root / "run")
    assert command(*words)[0] == 0
    document = json.loads((world.root / "run" / "run.json").read_text())
    assert document["identity"]["batches"] == "by-query"
    page = world.root / "page.html"
    assert command("report", world.root / "run", "--out", page)[0] == 0
    assert "--objective listwise" in page.read_text()
    assert "--batches shuffled" not in page.read_text()
    command.fails(*words, "--batches", "shuffled", code=1, says="batches")


def test_bi_encoders_have_no_head_and_are_compared_by_their_dot_products(
    world: World, command: Command
) -> None:
    """A folder without a head is no reranker, and `embeddings` ranks as its card says."""
    world.dump(**GROUPS)
    run = world.train("run", objective=MARGIN_MSE, arch=("2x32",), steps=40, batch_size=8, lr=3e-3)
    folder = run.student_path("2x32")
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertModel"]
    assert "each text alone" in (folder / "README.md").read_text()
    data = world.root / "questions.jsonl"
    rows = [{"question": row["query"], "answer": row["right"][0]} for row in rows_of(world)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--retrieval", data, "--max-length", 32)
    command.fails("rerank", folder, *words, "--first-stage", folder, code=2, says="scores no pairs")
    command.fails(
        "rerank", world.teacher, *words, "--first-stage", world.teacher, code=2, says="no sentence enc"
    )
    code, printed, err = command("embeddings", folder, *words, "--json")
    assert code == 0, err
    encoder = SentenceTransformer(str(folder), device="cpu")
    answers = [*dict.fromkeys(row["answer"] for row in rows)]
    questions = [*dict.fromkeys(row["question"] for row in rows)]
    scores = encoder.encode(questions) @ encoder.encode(answers).T
    ranks = [
        int((row > row[answers.index(right["answer"])]).sum()) + 1
        for row, right in zip(scores, rows, strict=True)
    ]
    expected = 100 * sum(1 / rank for rank in ranks if rank <= 10) / len(ranks)
    assert json.loads(printed)["retrieval"][0]["mrr_at_10"]["mean"] == pytest.approx(expected, abs=0.01)


def test_what_does_not_go_with_scores_is_one_line(world: World, command: Command, tmp_path: Path) -> None:
    dump = ("dump", "--teacher", world.teacher, "--max-length", 32, "--codec", "none", "--logits")
    bad = tmp_path / "bad.jsonl"
    group = {"query": "ba", "right": ["be"], "wrong": ["bi"]}
    for changes, columns, says in (
        ({"right": []}, "query,right+wrong", "no document in column 'right'"),
        ({"right": None}, "query,right+wrong", "no document in column 'right'"),
        ({"query": " "}, "query,right+wrong", "lacks one of its two texts"),
        ({"query": None}, "query,right+wrong", "holds nothing in column 'query'"),
        ({"wrong": [3]}, "query,right+wrong", "holds a number in column 'wrong'"),
        ({}, "query,right+more", "no column 'more'"),
    ):
        bad.write_text(json.dumps(group) + "\n" + json.dumps({**group, **changes}) + "\n")
        line = command.fails(
            *dump, "--corpus", bad, "--pair-columns", columns, "--out", tmp_path / "x", code=1, says=says
        )
        assert str(bad) in line
    bad.write_text(json.dumps({**group, "wrong": "bi"}) + "\n" + json.dumps(group) + "\n")
    words = ("--corpus", bad, "--pair-columns", "query,wrong", "--out", tmp_path / "x")
    command.fails(*dump, *words, code=1, says="holds a list in column 'wrong'")
    world.dump(**GROUPS)
    train = ("train", world.root / "cache", "--arch", "1x32", "--objective")
    for objective, option, value in (
        ("embedding", "--encoder", "bi"),
        ("score", "--teacher-temperature", "2"),
        ("margin-mse", "--temperature", "2"),
    ):
        command.fails(*train, objective, option, value, code=2, says=f"{option} goes with --objective")
    single = World(world.root, world.teacher, write_corpus(world.root / "text.txt"))
    single.dump("single", codec="none", logits=True, packing="records")
    train = ("train", world.root / "single", "--arch", "1x32", "--objective")
    command.fails(*train, "listwise", code=2, says="needs scores of pairs of texts")
    flat = write_groups(world.root / "flat.jsonl")
    rows = [
        {"query": row["query"], "text": row["right"][0]}
        for row in map(json.loads, flat.read_text().splitlines())
    ]
    flat.write_text("".join(json.dumps(row) + "\n" for row in rows))
    World(world.root, world.teacher, flat).dump("flat", pair_columns="query,text", **{"for": "score"})
    of_pairs = ("train", world.root / "flat", "--arch", "1x32", "--objective")
    command.fails(*of_pairs, "listwise", code=2, says="compares the documents of a query")
    command.fails(*train, "score", "--batches", "by-query", code=2, says="is for pairs of texts")
    early = ("dump", "--teacher", world.teacher, "--corpus", flat, "--max-length", 32, "--for", "ranknet")
    elsewhere = ("--out", tmp_path / "x")
    command.fails(
        *early, *elsewhere, "--pair-columns", "query,text", code=1, says="its records are single pairs"
    )
    command.fails(*early, *elsewhere, code=2, says="--pair-columns query,documents")
    three = save_teacher(world.root / "three", head="sequences", num_labels=3)
    with pytest.raises(InvalidConfigError, match=r"--for listwise .* answers with 3 classes"):
        World(world.root, three, world.corpus).dump("classes", **GROUPS)
    World(world.root, three, world.corpus).dump("classes", **{**GROUPS, "for": "score"})
    command.fails(
        *("train", world.root / "classes", "--arch", "1x32", "--objective", "ranknet"),
        code=2,
        says="answers with 3 classes",
    )
