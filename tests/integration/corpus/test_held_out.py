"""Held-out text is held out: no document, and no copy of one, is on both sides."""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minilm_cache.cache import open_cache
from minilm_cache.corpus.load import Corpus, load_corpus
from minilm_cache.corpus.order import groups
from minilm_cache.corpus.records import COPIES_OF
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.corpus.tokenise import tokenise
from minilm_cache.dump import setup
from minilm_cache.dump.identity import identify
from minilm_cache.dump.recheck import recheck
from minilm_cache.dump.run import dump_cache
from minilm_cache.models.locate import locate_teacher
from minilm_cache.session import Session
from minilm_cache.storage_schema.identity import CorpusIdentity, Packing
from minilm_cache.store.reader import read_manifest
from tests.support import WORDS, World, tiny_tokenizer

HOME = TemporaryDirectory()
"""Home of the tokens of all tests of this file."""
ROOM = 6
"""Words of a sequence of 8 tokens."""


def corpus_of(sizes: Sequence[int], groups: Sequence[int]) -> Corpus:
    """Return a corpus of documents of so many words; each word says which document it is from."""
    texts = [" ".join([WORDS[number]] * size) for number, size in enumerate(sizes)]
    documents = datasets.Dataset.from_dict({"text": texts, COPIES_OF: [f"group {group}" for group in groups]})
    content = hashlib.sha256(repr((sizes, groups)).encode()).hexdigest()
    identity = CorpusIdentity(sha256=content, num_documents=len(texts), copies_sha256=content)
    return Corpus("test", identity, lambda: documents)


def table_of(
    corpus: Corpus,
    mode: Literal["packed", "records"],
    max_tokens: int | None = None,
    split: Literal["documents", "tokens"] | None = "tokens",
) -> SequenceTable:
    packing = Packing(mode=mode, max_length=ROOM + 2, max_tokens=max_tokens, seed=3, split=split)
    tokens = tokenise(corpus, tiny_tokenizer(), session=Session(Path(HOME.name)))
    return SequenceTable(tokens, packing)


def sides(table: SequenceTable) -> tuple[list[list[int]], list[list[int]]]:
    """Return the sequences to train on and those held out, as numbers of documents, one for each word."""
    read = table.read(0, table.num_sequences).ids
    found = [[token - 5 for token in ids.tolist() if token >= 5] for ids in read]
    num_train = len(found) - table.num_held_out
    return found[:num_train], found[num_train:]


@given(
    documents=st.lists(st.tuples(st.integers(1, 15), st.integers(0, 20)), min_size=1, max_size=60),
    mode=st.sampled_from(["packed", "records"]),
    max_tokens=st.one_of(st.none(), st.integers(8, 300)),
)
@settings(max_examples=50, deadline=None)
def test_no_copy_is_on_both_sides(
    documents: list[tuple[int, int]], mode: Literal["packed", "records"], max_tokens: int | None
) -> None:
    sizes, groups = zip(*documents, strict=True)
    table = table_of(corpus_of(sizes, groups), mode, max_tokens)
    train, held_out = sides(table)
    assert train
    if table.held_out_by == "documents":
        of_train = {groups[number] for sequence in train for number in sequence}
        assert held_out
        assert of_train.isdisjoint(groups[number] for sequence in held_out for number in sequence)
    assert table.num_tokens <= (max_tokens or 10**6)
    num_sequences = table.num_sequences
    lengths = [len(ids) for ids in table.read(0, num_sequences).ids]
    assert table.lengths(0, num_sequences).tolist() == lengths
    assert [table.tokens_before(n) for n in range(num_sequences + 1)] == [0, *np.cumsum(lengths).tolist()]
    for limit in range(sum(lengths) + 2):
        within = table.sequences_within(limit)
        assert sum(lengths[:within]) <= limit
        assert within == num_sequences or limit < sum(lengths[: within + 1])
    if max_tokens is None and mode == "packed":
        counts = np.bincount([n for sequence in train + held_out for n in sequence], minlength=len(sizes))
        assert counts.tolist() == list(sizes)


def test_a_limit_of_tokens_holds_where_parts_cannot_be_cut() -> None:
    """Two beginnings of packed text may cost a token more than one."""
    for size in range(1, 14):
        for count in range(2, 9):
            for max_tokens in range(8, 8 * count, 11):
                table = table_of(corpus_of([size] * count, list(range(count))), "packed", max_tokens)
                assert table.num_tokens <= max_tokens


@pytest.mark.parametrize("mode", ["packed", "records"])
def test_any_range_reads_as_the_whole(mode: Literal["packed", "records"]) -> None:
    sizes = [1 + number % 13 for number in range(60)]
    table = table_of(corpus_of(sizes, [number // 3 for number in range(60)]), mode)
    assert table.held_out_by == "documents"
    whole = table.read(0, table.num_sequences)
    for first in range(table.num_sequences):
        for last in (first + 1, min(first + 7, table.num_sequences)):
            part = table.read(first, last)
            assert [ids.tolist() for ids in part.ids] == [ids.tolist() for ids in whole.ids[first:last]]
            assert part.documents.tolist() == whole.documents[first:last].tolist()


def test_one_long_document_is_cut_and_the_table_says_so() -> None:
    table = table_of(corpus_of([400], [0]), "packed")

    assert table.held_out_by == "sequences"
    assert table.num_held_out == 1


def test_the_split_of_the_first_releases_is_as_it_was() -> None:
    """The last sequences, wherever a document ends."""
    corpus = corpus_of([9] * 50, list(range(50)))
    table = table_of(corpus, "packed", split=None)
    order = np.random.default_rng(3).permutation(50)
    words = [sequence for part in sides(table) for sequence in part]
    flat = [number for sequence in words for number in sequence]

    assert list(dict.fromkeys(flat)) == order.tolist()
    assert table.num_held_out == round(table.num_sequences * 0.02)
    assert table.held_out_by is None


def write_copies(path: Path, num_documents: int, copies: int) -> Path:
    """Write what `augment` writes: each document and its copies, which differ."""
    lines = [
        {"text": " ".join([*[WORDS[number]] * 5, WORDS[50 + copy]]), "document": number}
        for number in range(num_documents)
        for copy in range(copies)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def held_out_values(cache: Path, values: list[Any]) -> tuple[set[Any], set[Any]]:
    """Return what the records to train on and those held out say."""
    manifest = read_manifest(cache)
    tables = [pq.read_table(file) for file in sorted((cache / "sequences").iterdir())]
    numbers = [number for table in tables for number in table["document"].to_pylist()]
    train = {values[number] for number in numbers[: manifest.num_train]}
    return train, {values[number] for number in numbers[manifest.num_train :]}


def test_copies_of_augmented_text_are_held_out_together(world: World) -> None:
    corpus = write_copies(world.root / "augmented.jsonl", 30, 20)
    world.dump(corpus=str(corpus), packing="records")
    values = [json.loads(line)["document"] for line in corpus.read_text().splitlines()]
    train, held_out = held_out_values(world.root / "cache", values)
    manifest = read_manifest(world.root / "cache")

    assert held_out
    assert train.isdisjoint(held_out)
    assert train | held_out == set(range(30))
    assert manifest.held_out_by == "documents"
    assert manifest.identity.corpus.copies_sha256 is not None


def groups_of(file: Path) -> list[int]:
    """Return the number of each document's group."""
    tokens = tokenise(load_corpus(str(file)), tiny_tokenizer(), session=Session(file.parent))
    return list(map(int, groups(tokens.keys)))


def test_equal_texts_are_held_out_together(tmp_path: Path) -> None:
    texts = [" ".join(WORDS[n % 25 : n % 25 + 4]) for n in range(200)]
    (tmp_path / "c.txt").write_text("\n\n".join(texts))
    numbers = groups_of(tmp_path / "c.txt")

    assert [texts[a] == texts[b] for a in range(200) for b in range(a)] == [
        numbers[a] == numbers[b] for a in range(200) for b in range(a)
    ]


def test_records_without_a_value_are_no_copies(tmp_path: Path) -> None:
    lines = [{"text": f"ba {n}", "document": None if n % 2 else "x"} for n in range(8)]
    (tmp_path / "c.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    numbers = groups_of(tmp_path / "c.jsonl")

    assert len(set(numbers[::2])) == 1
    assert len(set(numbers[1::2])) == 4


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_blank_or_a_nan_is_no_value(tmp_path: Path, ending: str) -> None:
    file, texts = tmp_path / f"c.{ending}", [f"ba {n}" for n in range(4)]
    if ending == "csv":
        file.write_text("text,document\n" + "".join(f"{text},{' ' * n}\n" for n, text in enumerate(texts)))
    elif ending == "jsonl":
        file.write_text("".join(f'{{"text": "{text}", "document": NaN}}\n' for text in texts))
    else:
        pq.write_table(pa.table({"text": texts, "document": [math.nan] * 4}), file)
    assert len(set(groups_of(file))) == 4
    assert list(load_corpus(str(file)).marks()) == [None] * 4


@pytest.mark.parametrize(
    "values",
    [np.array([3, 3, 4], "uint32"), np.array([3, 3, 4], "float64"), np.array([3, 3, 4], "datetime64[s]")],
)
def test_any_kind_of_value_names_copies(tmp_path: Path, values: npt.NDArray[Any]) -> None:
    pq.write_table(
        pa.table({"text": ["ba be", "be bi", "bi bo"], "document": values}), tmp_path / "c.parquet"
    )
    numbers = groups_of(tmp_path / "c.parquet")
    assert numbers[0] == numbers[1] != numbers[2]


def test_bytes_name_no_copies(tmp_path: Path) -> None:
    table = pa.table({"text": ["ba be", "be bi"], "document": [b"\xff", b"\xff"]})
    pq.write_table(table, tmp_path / "c.parquet")
    assert len(set(groups_of(tmp_path / "c.parquet"))) == 2


def test_files_without_the_column_are_next_to_files_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    copies = ["ba be", "be bi"]
    (folder / "a.jsonl").write_text("".join(f"{json.dumps({'text': t, 'document': 7})}\n" for t in copies))
    (folder / "b.txt").write_text("bi bo\n\nbo bu\n")
    numbers = groups_of(folder)
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == 3


@pytest.mark.parametrize("split", [None, "documents"])
def test_a_cache_of_an_earlier_release_keeps_its_split(
    world: World, monkeypatch: pytest.MonkeyPatch, split: Literal["documents"] | None
) -> None:
    """Repeated, added to, and checked against its text, it is what it was; anew, text is held out anew."""
    with monkeypatch.context() as patched:
        patched.setattr(
            setup, "identify", lambda c, t, corpus, **_: identify(c, t, corpus=corpus, split=split)
        )
        old = world.dump(codec="vectors").manifest
    again = world.dump(codec="vectors")
    more = dump_cache(
        world.config(codec="vectors", hidden="last"),
        out=world.root / "more",
        add=world.root / "cache",
        session=Session(world.home),
    )
    cache = open_cache(world.root / "cache")
    source, corpus = locate_teacher(str(world.teacher)), load_corpus(str(world.corpus))
    found = recheck(cache, source, corpus=corpus, device="cpu", session=Session())

    assert old.identity.packing.split == split
    assert ("split" in (world.root / "cache/manifest.json").read_text()) == (split is not None)
    assert (again.shards_written, again.manifest.fingerprint) == (0, old.fingerprint)
    assert found.identity == ()
    assert found.tokens == ()
    assert more.manifest.identity.packing.split == split
    assert world.dump("new", codec="vectors").manifest.identity.packing.split == "tokens"


@pytest.mark.parametrize("mode", ["records", "packed"])
def test_held_out_sequences_are_no_training_sequences_by_their_tokens(
    world: World, mode: Literal["records", "packed"]
) -> None:
    """Spaces, cut words and unknown words make other texts of the same tokens, all of which stay together."""
    texts = world.corpus.read_text().strip().split("\n\n")
    rows = [row for text in texts for row in (text, f" {text}  ", text.replace(" ", "  "))]
    rows += [f"{text} no{at} word{at}" for text in texts for at in range(2)]
    world.corpus.write_text("\n\n".join(rows) + "\n")
    cache = open_cache(world.dump(packing=mode, max_length=16).path)
    sequences = [tuple(sequence.input_ids.tolist()) for sequence in cache]
    num_train = cache.manifest.num_train
    assert cache.manifest.num_held_out
    assert not {*sequences[:num_train]} & {*sequences[num_train:]}
