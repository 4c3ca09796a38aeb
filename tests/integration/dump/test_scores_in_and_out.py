"""Scores of another model: imported, learned from, and given to others as a data set."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from sentence_transformers import CrossEncoder
from transformers import AutoConfig

from minilm_cache.cache import Cache, open_cache
from minilm_cache.corpus.pairs import Known, PairColumns, pairs_of
from minilm_cache.errors import CorpusError
from minilm_cache.storage_schema.states import LOGITS
from tests.fixtures import Command
from tests.integration.objectives.test_scores import texts_of
from tests.support import World, save_teacher, write_corpus, write_groups

COLUMNS = ("--pair-columns", "query,right+wrong", "--score-columns", "right_scores+wrong_scores")


def write_scores(
    world: World, name: str = "scores.jsonl", **changes: Any
) -> tuple[Path, list[dict[str, Any]]]:
    """Write groups with scores, and return the file and its rows; `changes` are of the last row."""
    groups = write_groups(world.root / "groups.jsonl", wrong=3)
    rows = [json.loads(line) for line in groups.read_text().splitlines()]
    drawn = np.random.default_rng(0).normal(size=(len(rows), 4)).astype(np.float32)
    for row, scores in zip(rows, drawn.tolist(), strict=True):
        row |= {"right_scores": scores[:1], "wrong_scores": scores[1:]}
    rows[-1] |= changes
    file = world.root / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file, rows


def scores_of(cache: Cache) -> dict[tuple[str, str], float]:
    stored = [float(sequence.states()[LOGITS][0]) for sequence in cache]
    return dict(zip(texts_of(cache), stored, strict=True))


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        ([("ba be", 5.0), ("ba  be", 5.0), ("Ba be", 5.0)], [5.0]),
        ([("ba be", 5.0), ("Ba be", 7.5), ("Ba be", 7.5)], [5.0, 7.5]),
        ([("ba be", 5.0), ("ba  be", 7.5)], None),
        ([("ba be", 5.0), ("Ba be", 7.5), ("Ba be", 9.0)], None),
    ],
)
def test_scores_of_queries_in_other_words_are_compared(
    rows: list[tuple[str, float]], kept: list[float] | None
) -> None:
    """Spaces say nothing; capital letters may have another score. None means that scores contradict."""
    columns, known = PairColumns.of("query,right", "score"), Known.nothing()
    columns = columns._replace(are_groups=True)

    def read() -> list[float | None]:
        records = ({"query": query, "right": ["ba"], "score": [score]} for query, score in rows)
        found = (pairs_of(record, columns, "record", known=known) for record in records)
        return [pair.score for pair in chain.from_iterable(found)]

    if kept is None:
        with pytest.raises(CorpusError, match="for the second time, with the scores"):
            read()
    else:
        assert read() == kept


def imported(world: World, command: Command, file: Path, *words: object) -> Path:
    out = world.root / "imported"
    given = ("--tokenizer", world.teacher, "--max-length", 32, "--teacher", "an api", "--out", out)
    code, _, err = command("import", file, *given, *(words or COLUMNS))
    assert code == 0, err
    return out


def test_scores_of_another_model_become_a_cache_and_students(world: World, command: Command) -> None:
    """Every score is the given one, bit for bit; the student opens with logits as its scores."""
    file, rows = write_scores(world)
    out = imported(world, command, file)
    cache = open_cache(out)
    expected = {
        (row["query"], document): np.float32(score)
        for row in rows
        for side in ("right", "wrong")
        for document, score in zip(row[side], row[f"{side}_scores"], strict=True)
    }
    assert scores_of(cache) == {pair: float(score) for pair, score in expected.items()}
    assert cache.manifest.labels.teacher == "an api"
    assert cache.manifest.identity.corpus.groups
    code, printed, _ = command("info", out)
    assert "given in a file; no teacher ran" in printed
    train = ("--objective", "listwise", "--arch", "1x32", "--steps", 2, "--batch-size", 8, "--init", "random")
    code, _, err = command("train", out, *train, "--out", world.root / "run")
    assert code == 0, err
    student = CrossEncoder(str(world.root / "run" / "students" / "1x32"), device="cpu")
    assert type(student.activation_fn).__name__ == "Identity"
    assert 'CrossEncoder("FOLDER")' in (world.root / "run" / "students" / "1x32" / "README.md").read_text()
    again = World(world.root, world.teacher, write_scores(world, "other.jsonl", right_scores=[9.0])[0])
    words = ("import", again.corpus, "--tokenizer", world.teacher, "--max-length", 32, "--out", out, *COLUMNS)
    command.fails(*words, "--teacher", "an api", code=1, says=str(out))  # scores of another teacher


def test_scores_are_given_to_others_as_a_data_set(world: World, command: Command) -> None:
    """`load_dataset` opens it; imported again, it has the same scores."""
    out = imported(world, command, write_scores(world)[0])
    folder = world.root / "data"
    code, printed, err = command("export", out, folder, "--scores")
    assert code == 0, err
    assert "hf upload NAME" in printed
    loaded = datasets.load_dataset(str(folder), cache_dir=str(world.root / "hf"))
    cache = open_cache(out)
    found = {
        (row["query"], document): score
        for split in loaded.values()
        for row in split
        for document, score in zip(row["documents"], row["scores"], strict=True)
    }
    assert found == scores_of(cache)
    num_held_out = sum(len(row["documents"]) for row in loaded["validation"])
    assert num_held_out == cache.manifest.num_held_out
    card = (folder / "README.md").read_text()
    assert cache.manifest.fingerprint in card
    assert "--pair-columns query,documents --score-columns scores" in card
    words = ("--pair-columns", "query,documents", "--score-columns", "scores", "--tokenizer", world.teacher)
    again = world.root / "again"
    file = folder / "data" / "train.parquet"
    code, _, err = command("import", file, *words, "--max-length", 32, "--out", again)
    assert code == 0, err
    scores = scores_of(open_cache(again))
    assert scores == {pair: found[pair] for pair in scores}
    assert len(scores) == cache.manifest.num_train


def test_scores_of_all_documents_may_be_in_one_column(world: World, command: Command) -> None:
    """As sentence-transformers has them: a list of scores, in the order of the positives and negatives."""
    file, rows = write_scores(world)
    apart = scores_of(open_cache(imported(world, command, file)))
    joined = [{**row, "score": [*row["right_scores"], *row["wrong_scores"]]} for row in rows]
    other = world.root / "joined.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in joined))
    given = ("--tokenizer", world.teacher, "--max-length", 32, "--pair-columns", "query,right+wrong")
    words = ("import", other, *given, "--score-columns", "score", "--out", world.root / "together")
    code, _, err = command(*words)
    assert code == 0, err
    assert scores_of(open_cache(world.root / "together")) == apart
    joined[0]["score"] = joined[0]["score"][:-1]
    other.write_text("".join(json.dumps(row) + "\n" for row in joined))
    command.fails(*words, code=1, says="has 3 scores in column 'score' for 4 documents")


def test_unknown_words_stay_and_the_data_set_is_imported_again(world: World, command: Command) -> None:
    file, rows = write_scores(world)
    for row in rows[::2]:
        row["query"] += " zzz"
        row["wrong"][0] = "zzz"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = imported(world, command, file)
    assert command("export", out, world.root / "data", "--scores")[0] == 0
    words = ("--pair-columns", "query,documents", "--score-columns", "scores")
    (world.root / "imported").rename(world.root / "first")
    again = imported(world, command, world.root / "data" / "data" / "train.parquet", *words)
    first = open_cache(world.root / "first")
    known = {tuple(each.input_ids.tolist()): float(each.states()[LOGITS][0]) for each in first}
    for sequence in open_cache(again):
        assert known[tuple(sequence.input_ids.tolist())] == float(sequence.states()[LOGITS][0])


@pytest.mark.parametrize("is_pair", [True, False])
def test_answers_of_classes_keep_their_order_and_names(world: World, command: Command, is_pair: bool) -> None:
    teacher = save_teacher(world.root / "classes", head="sequences", num_labels=3)
    config = json.loads((teacher / "config.json").read_text())
    names = ["no", "perhaps", "yes"]
    config["id2label"] = {str(number): name for number, name in enumerate(names)}
    config["label2id"] = {name: number for number, name in enumerate(names)}
    (teacher / "config.json").write_text(json.dumps(config))
    groups = write_groups(world.root / "groups.jsonl", num_groups=20)
    corpus, more = write_corpus(world.root / "text.txt"), dict[str, Any]()
    if is_pair:
        corpus, more = groups, {"pair_columns": "query,right+wrong"}
    dumped = World(world.root, teacher, corpus).dump(
        "answers", codec="none", logits=True, packing="pairs" if is_pair else "records", **more
    )
    folder = world.root / "data"
    code, _, err = command("export", dumped.path, folder, "--scores")
    assert code == 0, err
    rows = datasets.load_dataset(str(folder), cache_dir=str(world.root / "hf"))
    assert rows["train"].column_names == (["first", "second", "logits"] if is_pair else ["text", "logits"])
    cache = open_cache(dumped.path)
    stored = [sequence.states()[LOGITS][0].tolist() for sequence in cache]
    assert [row["logits"] for split in rows.values() for row in split] == stored
    assert "in order: no, perhaps, yes" in (folder / "README.md").read_text()
    train = ("--objective", "tinybert-prediction", "--arch", "1x32", "--steps", 1, "--init", "random")
    code, _, err = command("train", dumped.path, *train, "--batch-size", 8, "--out", world.root / "run")
    assert code == 0, err
    student = AutoConfig.from_pretrained(world.root / "run" / "students" / "1x32")
    assert student.id2label == dict(enumerate(names))


def test_what_is_wrong_with_scores_is_one_line(world: World, command: Command) -> None:
    base = ("--tokenizer", world.teacher, "--max-length", 32, "--out", world.root / "imported")
    for changes, says in (
        ({"right_scores": [float("nan")]}, "has the score 'nan' in column 'right_scores'"),
        ({"right_scores": ["high"]}, "has the score 'high' in column 'right_scores'"),
        ({"right_scores": [True]}, "has the score 'True' in column 'right_scores'"),
        ({"right_scores": []}, "has 0 scores in column 'right_scores' for 1 documents"),
        ({"right_scores": None}, "has 0 scores in column 'right_scores' for 1 documents"),
        ({"right": [], "right_scores": []}, "has a query and no document in column 'right'"),
    ):
        file, _ = write_scores(world, **changes)
        command.fails("import", file, *base, *COLUMNS, code=1, says=says)
    first = write_scores(world)[1][0]
    file, _ = write_scores(world, **{**first, "right_scores": [7.5]})
    command.fails("import", file, *base, *COLUMNS, code=1, says="for the second time, with the scores")
    file, _ = write_scores(world, right=["ba"], right_scores=[5.0], wrong=["ba"], wrong_scores=[-3.0])
    command.fails("import", file, *base, *COLUMNS, code=1, says="with the scores 5 and -3")
    for odd in (1e25, "1_000", "\u0663"):
        file, _ = write_scores(world, right_scores=[odd])
        command.fails(
            "import", file, *base, *COLUMNS, code=1, says="which is not a number that a score can be"
        )
    file, _ = write_scores(world)
    pairs = ("--pair-columns", "query,right+wrong")
    command.fails("import", file, *base, *pairs, code=2, says="go together: give both, or neither")
    one = (*pairs, "--score-columns", "right_scores+wrong_scores+none")
    command.fails("import", file, *base, *one, code=2, says="give one column for each of right, wrong")
    command.fails("import", file, *base, *COLUMNS, "--pooling", "cls", code=2, says="is about vectors")
    words = (*pairs, "--score-columns", "right_scores+none")
    command.fails("import", file, *base, *words, code=1, says="no column 'none'")
    command.fails("import", world.root / "no.jsonl", *base, *COLUMNS, code=1, says="no.jsonl is not a file")
    assert not (world.root / "imported").exists()
    world.dump(codec="none", pooled=True, packing="records", pooling="mean")
    out = world.root / "out"
    command.fails("export", world.root / "cache", out, "--scores", code=2, says="holds no scores")
    assert not out.exists()
