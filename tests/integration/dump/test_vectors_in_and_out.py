"""Texts and vectors leave a cache for other tools, and come back as a cache of a teacher nobody can run."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from minilm_cache.cache import open_cache
from minilm_cache.dump.answers import read_vectors
from minilm_cache.dump.config import ImportConfig
from minilm_cache.dump.imported import import_answers
from minilm_cache.errors import CorpusError, InterruptedRunError, InvalidConfigError
from minilm_cache.report.provenance import dump_command
from minilm_cache.session import Session
from minilm_cache.storage_schema.states import POOLED
from minilm_cache.train.card import student_prompts
from minilm_cache.workflows.export import export_vectors
from tests.fixtures import Command
from tests.mutations import mutations
from tests.support import World, save_teacher

POOLED_ONLY: dict[str, Any] = {"codec": "none", "pooled": True, "pooling": "mean", "packing": "records"}


def write_vectors(world: World, /, width: int = 24, **columns: Any) -> Path:
    """Write the corpus's documents with vectors, some columns replaced."""
    texts = world.corpus.read_text().strip().split("\n\n")
    vectors = np.random.default_rng(0).normal(size=(len(texts), width))
    table = {"text": texts, "embedding": list(vectors.astype(np.float32)), **columns}
    pq.write_table(pa.table(table), world.root / "vectors.parquet")
    return world.root / "vectors.parquet"


def test_an_export_holds_what_the_cache_holds(world: World) -> None:
    world.dump(**POOLED_ONLY)
    out = world.root / "out.parquet"
    result = export_vectors(world.root / "cache", out)
    cache, rows = open_cache(world.root / "cache"), pq.read_table(out).to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(world.teacher)

    assert (result.num_rows, result.width) == (len(cache), 32)
    for number, row in enumerate(rows):
        sequence = cache[number]
        assert row["sequence"] == number
        assert row["input_ids"] == sequence.input_ids.tolist()
        assert row["text"] == tokenizer.decode(sequence.input_ids, skip_special_tokens=True)
        assert row["held_out"] == (number >= cache.manifest.num_train)
        torch.testing.assert_close(torch.tensor(row["embedding"]), sequence.states()[POOLED][0])


def test_unknown_words_and_both_texts_of_pairs_are_exported(world: World) -> None:
    """Texts that are read again are the sequences that the teacher read."""
    world.corpus.write_text("zzz qqq\nba zzz bo\n" + world.corpus.read_text())
    world.dump(**POOLED_ONLY, documents="lines")
    export_vectors(world.root / "cache", world.root / "out.parquet")
    settings = {"vectors": str(world.root / "out.parquet"), "tokenizer": str(world.teacher), "max_length": 32}
    again = import_answers(ImportConfig(**settings), out=world.root / "again").path
    first, second = (
        sorted(tuple(cache[n].input_ids.tolist()) for n in range(len(cache)))
        for cache in (open_cache(world.root / "cache"), open_cache(again))
    )
    assert {*first} == {*second}
    assert any(1 in ids for ids in first), "nothing was unknown"

    pairs = world.root / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"a": f"ba bo {n}", "b": "hi zzz"}) + "\n" for n in range(40)))
    pooled = {"codec": "none", "pooled": True, "pooling": "mean"}
    world.dump("pairs", **pooled, corpus=str(pairs), pair_columns="a,b")
    export_vectors(world.root / "pairs", world.root / "pairs.parquet")
    rows = pq.read_table(world.root / "pairs.parquet").to_pylist()
    assert {row["second"] for row in rows} == {"hi [UNK]"}
    assert {row["first"][:5] for row in rows} == {"ba bo"}
    with pytest.raises(CorpusError, match="holds vectors of pairs of texts"):
        import_answers(ImportConfig(**settings | {"vectors": str(world.root / "pairs.parquet")}))


def test_vectors_of_another_model_become_a_cache(world: World) -> None:
    file = write_vectors(world)
    config = ImportConfig(vectors=str(file), tokenizer=str(world.teacher), max_length=32, teacher="an api")
    result = import_answers(config, out=world.root / "imported")
    cache = open_cache(result.path)
    given = {row["text"]: row["embedding"] for row in pq.read_table(file).to_pylist()}
    tokenizer = AutoTokenizer.from_pretrained(world.teacher)
    stored = [cache[number].states()[POOLED][0] for number in range(len(cache))]
    texts = [
        tokenizer.decode(cache[number].input_ids, skip_special_tokens=True) for number in range(len(cache))
    ]
    short = [number for number, text in enumerate(texts) if text in given]

    assert len(short) > len(texts) / 2, "longer ones are cut"
    cosines = [torch.cosine_similarity(stored[n], torch.tensor(given[texts[n]]), 0) for n in short]
    assert min(cosines) > 0.99
    assert cache.manifest.labels.teacher == "an api"
    assert cache.manifest.identity.states is not None
    assert cache.manifest.identity.states.pooled is not None
    assert not cache.manifest.identity.states.pooled.normalize
    again = import_answers(config, out=world.root / "imported")
    assert again.shards_written == 0


def test_commands_export_import_and_train(world: World, command: Command) -> None:
    world.dump(**POOLED_ONLY)
    file = world.root / "v.parquet"
    assert command("export", world.root / "cache", file)[0] == 0
    command.fails("export", world.root / "cache", file, code=2, says="exists")
    imported = world.root / "imported"
    arguments = ("import", file, "--tokenizer", world.teacher, "--max-length", 32, "--out", imported)
    code, out, _ = command(*arguments, "--json")
    assert code == 0
    assert json.loads(out)["measured"]["states"][0]["cosine"] > 0.999
    train = ("--arch", "1x16:h2", "--objective", "embedding", "--steps", 2)
    assert command("train", imported, *train)[0] == 0
    assert command("verify", imported, "--full")[0] == 0
    command.fails("verify", imported, "--teacher", world.teacher, code=2, says="was imported")
    code, out, _ = command("info", imported)
    assert (code, "pooled vectors of width 32" in out) == (0, True)


def test_a_cache_without_vectors_is_not_exported(
    shared_world: World, command: Command, tmp_path: Path
) -> None:
    command.fails(
        "export",
        shared_world.root / "cache",
        tmp_path / "v.parquet",
        code=2,
        says=("no pooled vectors", "--for"),
    )


def of_row(number: int, value: object) -> list[object]:
    """Return 60 vectors of width 3, one of them replaced."""
    rows: list[object] = [[float(row), 1.0, 2.0] for row in range(60)]
    rows[number] = value
    return rows


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("embedding", of_row(5, [1.0, 2.0]), ("vector of row 5", "has 2 numbers", "has 3")),
        ("embedding", of_row(7, [1.0, float("nan"), 2.0]), ("row 7", "NaN")),
        ("embedding", of_row(9, None), ("row 9", "text without a vector")),
        ("embedding", ["a"] * 60, ("vectors are string",)),
        ("embedding", [["a"]] * 60, ("not lists of numbers",)),
        ("text", ["a"] * 60, ("rows 0 and 1", "same text and different vectors")),
        ("text", [f"ba be {n}" if n != 4 else None for n in range(60)], ("row 4", "vector without a text")),
        ("text", [f"ba be {n}" if n != 6 else " " for n in range(60)], ("row 6", "vector without a text")),
        ("text", pa.array([b"ba", b"\xff"] * 30, pa.binary()).view(pa.string()), ("UTF8",)),
    ],
)
def test_bad_rows_are_named(
    world: World, command: Command, column: str, values: Any, says: tuple[str, ...]
) -> None:
    columns: dict[str, Any] = {column: values}
    file = write_vectors(world, **columns)
    command.fails("import", file, "--tokenizer", world.teacher, code=1, says=says)


def test_equal_vectors_are_imported_and_read(world: World, command: Command) -> None:
    file = write_vectors(world, embedding=[[1.0, 2.0, 3.0]] * 60)
    imported = world.root / "imported"
    arguments = ("--tokenizer", world.teacher, "--max-length", 32, "--out", imported)
    code, _, err = command("import", file, *arguments)
    assert code == 0, err
    assert command("verify", imported, "--full")[0] == 0
    stored = open_cache(imported)[0].states()[POOLED][0]
    torch.testing.assert_close(stored, torch.tensor([1.0, 2.0, 3.0]), atol=1e-2, rtol=0)


def test_an_import_has_bounds_and_stops(world: World) -> None:
    file = write_vectors(world, embedding=[[1.0, 2.0, 3.0]] * 60)
    config = ImportConfig(vectors=str(file), tokenizer=str(world.teacher), max_length=32)
    wide = write_vectors(world, width=70_000, text=["ba", "be", "bi"], embedding=list(np.eye(3, 70_000)))
    with pytest.raises(CorpusError, match=r"70,000 numbers are wider than any cache"):
        import_answers(config.model_copy(update={"vectors": str(wide)}))
    write_vectors(world, embedding=[[1.0, 2.0, 3.0]] * 60)
    with pytest.raises(InterruptedRunError):
        import_answers(config, out=world.root / "imported", session=Session(should_stop=lambda: True))
    rows = 4_000_000
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(rows, np.float32)), 1)
    texts = pa.array(["ba"]).take(pa.array(np.zeros(rows, np.int64)))
    pq.write_table(pa.table({"text": texts, "embedding": vectors}), file)
    with pytest.raises(CorpusError, match="would unpack to"):
        import_answers(config, out=world.root / "imported")


def test_positions_that_a_family_keeps_for_itself_are_known(world: World) -> None:
    """RoBERTa's first two positions are for padding, so 66 are room for 64 tokens."""
    roberta = save_teacher(world.root / "roberta", "roberta")
    file = write_vectors(world)
    for length, fits in ((64, True), (65, False)):
        config = ImportConfig(vectors=str(file), tokenizer=str(roberta), max_length=length)
        if fits:
            assert import_answers(config, out=world.root / "imported").shards_written
        else:
            with pytest.raises(InvalidConfigError, match="--max-length 65"):
                import_answers(config, out=world.root / "no")


def test_a_text_may_repeat_with_a_vector_that_was_rounded_otherwise(world: World, command: Command) -> None:
    """As in what `export` writes of a corpus that holds a text twice."""
    rows = of_row(1, [1e-3, 1.0, 2.0])
    texts = [f"ba be {max(number, 1)}" for number in range(60)]
    file = write_vectors(world, text=texts, embedding=rows)
    arguments = ("--tokenizer", world.teacher, "--max-length", 32, "--out", world.root / "imported")
    code, _, err = command("import", file, *arguments)

    assert code == 0, err


def test_bad_files_and_options(world: World, command: Command) -> None:
    file = write_vectors(world)
    arguments = ("--tokenizer", world.teacher)
    command.fails("import", world.corpus, *arguments, code=1, says=("corpus.txt", "Parquet"))
    command.fails("import", world.root / "no.parquet", *arguments, code=1, says="no.parquet")
    command.fails("import", file, *arguments, "--vector-column", "v", code=1, says=("'v'", "text, embedding"))
    command.fails("import", file, *arguments, "--max-length", 999, code=2, says="--max-length 999")
    command.fails("import", file, "--tokenizer", world.root / "nowhere", code=1, says="nowhere")


def test_prompts_of_the_model_with_the_tokenizer_are_not_those_of_the_vectors(
    world: World, command: Command
) -> None:
    prompts = {"prompts": {"query": "ba "}, "default_prompt_name": None}
    (world.teacher / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    out = world.root / "imported"
    words = ("import", write_vectors(world), "--tokenizer", world.teacher, "--max-length", 32, "--out", out)
    code, _, err = command(*words)
    assert code == 0, err
    assert student_prompts(open_cache(out).reader).by_name == {}


@pytest.mark.parametrize("name", [b"text", b"embedding"])
def test_names_of_columns_that_are_no_text_are_one_line(world: World, name: bytes) -> None:
    file = write_vectors(world)
    file.write_bytes(file.read_bytes().replace(name, b"\xf1" + name[1:]))
    config = ImportConfig(vectors=str(file), tokenizer=str(world.teacher), max_length=32)
    with pytest.raises(CorpusError, match=r"cannot read .*\.parquet"):
        read_vectors(config)


@pytest.mark.timeout(900)
def test_a_prompt_of_an_import_is_read_by_students_and_named_in_their_folder(
    world: World, command: Command
) -> None:
    words = ("import", write_vectors(world), "--tokenizer", world.teacher, "--max-length", 32)
    assert command(*words, "--prompt", "ba bo ", "--out", world.root / "prompted")[0] == 0
    cache, tokenizer = open_cache(world.root / "prompted"), AutoTokenizer.from_pretrained(world.teacher)
    texts = [str(tokenizer.decode(cache[number].input_ids, skip_special_tokens=True)) for number in (0, 1)]
    assert all(text.startswith("ba bo ") for text in texts)
    assert "--prompt 'ba bo '" in dump_command(cache.manifest)
    train = (
        "train",
        world.root / "prompted",
        "--objective",
        "embedding",
        "--arch",
        "1x16",
        "--init",
        "random",
    )
    assert command(*train, "--steps", 2, "--batch-size", 4, "--out", world.root / "run")[0] == 0
    student = SentenceTransformer(str(world.root / "run/students/1x16"), device="cpu")
    assert student.prompts["prompt"] == "ba bo "
    scores = ("--pair-columns", "a,b", "--score-columns", "c", "--prompt", "ba ")
    command.fails(*words, *scores, code=2, says="--prompt is about vectors")


def test_mutated_vectors_are_read_or_one_line(world: World) -> None:
    """No other error, and no signal."""
    file = write_vectors(world)
    config = ImportConfig(vectors=str(file), tokenizer=str(world.teacher), max_length=32)
    errors = []
    for content in mutations(file.read_bytes(), 150, near_end=0.7):
        file.write_bytes(content)
        try:
            read = read_vectors(config)
        except CorpusError as error:
            errors.append(str(error))
        else:
            assert np.isfinite(read.vectors).all()
    assert errors
    assert not [error for error in errors if "\n" in error]


def test_marks_at_the_beginning_of_texts_are_no_text(world: World) -> None:
    texts = world.corpus.read_text().strip().split("\n\n")
    plain = ImportConfig(vectors=str(write_vectors(world)), tokenizer=str(world.teacher), max_length=32)
    expected = import_answers(plain, out=world.root / "plain")
    marked = write_vectors(world, text=[f"\ufeff{texts[0]}", *texts[1:]])
    found = import_answers(plain.with_changes(vectors=str(marked)), out=world.root / "marked")
    assert open_cache(found.path)[0].input_ids.tolist() == open_cache(expected.path)[0].input_ids.tolist()
    alone = write_vectors(world, text=["\ufeff", *texts[1:]])
    with pytest.raises(CorpusError, match=r"row 0 .* has a vector without a text"):
        import_answers(plain.with_changes(vectors=str(alone)), out=world.root / "alone")


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"embedding": [[True, False]] * 60}, "lists of bool"),
        ({"embedding": [[1e30, 1.0]] * 60}, "has a length of 1e+30"),
        ({"embedding": [[1e-30, 0.0]] * 60}, "has a length of 1e-30"),
        ({"text": list(range(60))}, "the text of row 0 (counted from 0) is a number"),
        ({"text": [b"ba"] * 60}, "the text of row 0 (counted from 0) is"),
    ],
)
def test_columns_of_other_kinds_are_named(world: World, columns: dict[str, Any], says: str) -> None:
    file = write_vectors(world, **columns)
    with pytest.raises(CorpusError, match=re.escape(says)):
        read_vectors(ImportConfig(vectors=str(file), tokenizer=str(world.teacher)))
