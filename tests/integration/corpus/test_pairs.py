"""Pairs of texts as sequences: transformers' own tokenizers and models are the oracle."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import CrossEncoder
from tokenizers import processors
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from minilm_cache.cache import open_cache, refuse_no_pairs
from minilm_cache.corpus.load import load_corpus
from minilm_cache.corpus.pairs import PairColumns
from minilm_cache.corpus.records import read_rows
from minilm_cache.corpus.template import pair_template_of
from minilm_cache.errors import (
    CacheCorruptError,
    CorpusError,
    IdentityMismatchError,
    InvalidConfigError,
    TeacherError,
)
from minilm_cache.models.arch import parse_arch
from minilm_cache.models.inputs import Inputs, cut_pair
from minilm_cache.models.load import load_model
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.pooling import SentencePooler
from minilm_cache.models.student import build_student, shape_config
from minilm_cache.models.teacher import Teacher
from minilm_cache.report.compare import held_out_cosine
from minilm_cache.report.provenance import dump_command
from minilm_cache.slicing.cut import cut
from minilm_cache.slicing.forward import Calibration
from minilm_cache.storage_schema.identity import PairTemplate
from minilm_cache.storage_schema.states import LOGITS, POOLED
from tests.fixtures import Command
from tests.support import VOCABULARY, World, save_teacher, tiny_tokenizer

WORDS = VOCABULARY[5:29]


def pairs(count: int = 60) -> list[tuple[str, str]]:
    """Return pairs of texts, some of them longer than a sequence on one side or on both."""
    generator = np.random.default_rng(0)
    lengths = [(3, 5), (30, 4), (4, 30), (30, 28), (1, 1)]
    return [
        (" ".join(generator.choice(WORDS, first)), " ".join(generator.choice(WORDS, second)))
        for number in range(count)
        for first, second in [lengths[number % len(lengths)]]
    ]


def write_pairs(file: Path) -> list[tuple[str, str]]:
    """Write records of two texts and a label, and return the texts."""
    found = pairs()
    rows = [{"one": one, "label": at, "two": two} for at, (one, two) in enumerate(found)]
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif file.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(file))
    else:
        sign = "," if file.suffix == ".csv" else "\t"
        lines = [sign.join(map(str, row.values())) for row in rows]
        file.write_text("\n".join([sign.join(rows[0]), *lines]) + "\n")
    return found


def with_segments() -> PreTrainedTokenizerFast:
    """Return a tokenizer that gives the segments of texts, as BERT's does."""
    tokenizer = tiny_tokenizer()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names
    return tokenizer


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A BERT with segments that classifies, and pairs as its corpus."""
    teacher = save_teacher(tmp_path / "teacher", head="sequences", num_labels=1)
    with_segments().save_pretrained(teacher)
    write_pairs(tmp_path / "pairs.jsonl")
    return World(tmp_path, teacher, tmp_path / "pairs.jsonl")


PAIRS: dict[str, Any] = {"pair_columns": "one,two", "packing": "pairs"}


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_sequences_are_what_the_tokenizer_makes_of_pairs(world: World, ending: str) -> None:
    """The longer text is cut first, as by `truncation=True`; segments are the tokenizer's."""
    world = replace(world, corpus=world.root / f"pairs{ending}")
    found = write_pairs(world.corpus)
    cache, tokenizer = open_cache(world.dump(**PAIRS).path), AutoTokenizer.from_pretrained(world.teacher)
    expected = tokenizer([one for one, _ in found], [two for _, two in found], truncation=True, max_length=32)
    assert sorted(sequence.input_ids.tolist() for sequence in cache) == sorted(expected["input_ids"])
    of_ids = {
        tuple(ids): kinds
        for ids, kinds in zip(expected["input_ids"], expected["token_type_ids"], strict=True)
    }
    rows = [sequence.input_ids for sequence in cache]
    inputs = Inputs.of(rows, 0).paired(cache.manifest.identity.packing.pair)
    assert inputs.segments is not None
    for row, segments in zip(rows, inputs.segments, strict=True):
        assert segments[: len(row)].tolist() == of_ids[tuple(row.tolist())]
        assert not segments[len(row) :].any()


def test_the_second_text_alone_is_cut_where_that_is_asked_for(world: World, command: Command) -> None:
    rows = [json.loads(line) for line in world.corpus.read_text().splitlines()]
    rows = [row for row in rows if len(row["one"].split()) < 25]  # others leave no room for a second text
    rows.append({"one": " ".join(WORDS[:20]), "two": " ".join(WORDS[:20])})
    world.corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dumped, tokenizer = (
        world.dump(truncation="only_second", **PAIRS),
        AutoTokenizer.from_pretrained(world.teacher),
    )
    texts = [[row[name] for row in rows] for name in ("one", "two")]
    expected = tokenizer(*texts, truncation="only_second", max_length=32)["input_ids"]
    found = sorted(sequence.input_ids.tolist() for sequence in open_cache(dumped.path))
    assert found == sorted(expected)
    assert found != sorted(tokenizer(*texts, truncation=True, max_length=32)["input_ids"])
    assert "--truncation only_second" in dump_command(dumped.manifest)
    words = ("verify", dumped.path, "--teacher", world.teacher, "--corpus", world.corpus)
    code, _, err = command(*words)
    assert code == 0, err
    command.fails(*words, "--text-column", "one", code=2, says="holds pairs of one,two. Leave it out")


def test_what_is_cut_is_about_pairs_and_never_about_a_query(world: World, command: Command) -> None:
    words = ("dump", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", "32")
    command.fails(*words, "--truncation", "only_second", code=2, says="needs --pair-columns")
    rows = [{"query": WORDS[0], "documents": [WORDS[1], WORDS[2]]}]
    world.corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    paired = ("--pair-columns", "query,documents", "--truncation")
    weights = (world.teacher / "model.safetensors").rename(world.root / "moved")
    command.fails(
        *words, *paired, "longest_first", code=2, says="documents alone are cut"
    )  # loads no teacher
    weights.rename(world.teacher / "model.safetensors")
    command.fails(*words, *paired, "shortest", code=2, says="longest_first")


@settings(max_examples=300, deadline=None)
@given(first=st.integers(1, 40), second=st.integers(1, 40), room=st.integers(3, 60))
def test_pairs_are_cut_as_tokenizers_cut_them(first: int, second: int, room: int) -> None:
    tokenizer = tiny_tokenizer()
    one, two = " ".join([WORDS[0]] * first), " ".join([WORDS[1]] * second)
    whole = tokenizer(one, two)["input_ids"][1:-1]
    expected = tokenizer(one, two, truncation="longest_first", max_length=room + 2)["input_ids"]
    pair = PairTemplate(before=(2,), between=(3,), after=(3,), has_segments=False)
    found = cut_pair(np.asarray(whole), room, pair)
    assert [2, *found.tolist(), 3] == expected
    found = cut_pair(np.asarray(whole), room, pair.model_copy(update={"cut": "second"}))
    if len(whole) <= room or first < room - 1:
        expected = tokenizer(one, two, truncation="only_second", max_length=room + 2)["input_ids"]
    else:  # which tokenizers refuse: one token of the second text stays
        expected = [2, *whole[: room - 2], 3, whole[first + 1], 3]
    assert [2, *found.tolist(), 3] == expected


def test_relations_and_answers_are_those_of_pairs_read_with_their_segments(world: World) -> None:
    cache = open_cache(world.dump(**PAIRS, codec="dense", logits=True).path)
    model = AutoModelForSequenceClassification.from_pretrained(
        world.teacher, attn_implementation="eager"
    ).eval()
    pair, differs = cache.manifest.identity.packing.pair, False
    assert pair is not None
    for number in range(6):
        ids = cache[number].input_ids
        segments = (torch.arange(len(ids)) > ids.tolist().index(3)).long()
        with torch.no_grad():
            output = model(ids[None], token_type_ids=segments[None], output_attentions=True)
            flat = model(ids[None])
        torch.testing.assert_close(
            cache[number].relation("attention"), output.attentions[-1][0], rtol=0, atol=1e-3
        )
        torch.testing.assert_close(cache[number].states()[LOGITS][0], output.logits[0], rtol=1e-4, atol=1e-5)
        differs |= not torch.allclose(flat.logits, output.logits, atol=1e-3)
    assert differs  # segments matter to this teacher


def test_a_pair_cache_is_verified_shown_and_resumed(world: World, command: Command) -> None:
    path = world.dump(**PAIRS, codec="vectors", logits=True).path
    words = ("verify", path, "--full", "--teacher", world.teacher, "--corpus", world.corpus)
    code, _, err = command(*words)
    assert code == 0, err
    code, out, _ = command("info", path)
    assert code == 0
    assert "of columns one,two" in out
    code, out, err = command(
        *("dump", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32),
        *(
            "--pair-columns",
            "one,two",
            "--logits",
            "--codec",
            "vectors",
            "--shard-tokens",
            256,
            "--out",
            path,
        ),
    )
    assert code == 0, err
    assert "already complete" in err


@pytest.mark.parametrize("objective", ["minilm", "tinybert-prediction"])
def test_students_read_pairs_with_their_segments(world: World, objective: str) -> None:
    """A student that is the teacher has no loss: it read what the teacher read."""
    world.dump(**PAIRS, codec="dense", logits=True)
    run = world.train("run", arch=("3x32:ff64",), objective=objective, steps=1, lr=1e-9, warmup=0.0)
    (student,) = run.record.students
    assert student.loss_before is not None
    if objective == "minilm":
        assert student.loss_before < 1e-4
    else:  # the head is cut from the teacher's, too
        assert student.loss_before < 1e-3


def test_a_student_of_scores_is_a_cross_encoder(world: World) -> None:
    """Its scores are the logits: a sigmoid, which a CrossEncoder has by default, is not put over them."""
    world.dump(**PAIRS, codec="none", logits=True)
    run = world.train("run", arch=("2x32",), objective="tinybert-prediction", steps=80, batch_size=8, lr=3e-3)
    lines = [json.loads(line) for line in (run.path / "log.jsonl").read_text().splitlines()]
    losses = [sum(line["students"]["2x32"].values()) for line in lines if "students" in line]
    assert losses[-1] < 0.5 * losses[0]
    folder = run.student_path("2x32")
    encoder = CrossEncoder(str(folder), device="cpu", max_length=32)
    found = pairs()[:8]
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    read = tokenizer(
        [one for one, _ in found],
        [two for _, two in found],
        truncation=True,
        max_length=32,
        padding=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        expected = model(**read).logits[:, 0].numpy()
    np.testing.assert_allclose(encoder.predict(found), expected, atol=1e-5)


def test_vectors_of_pairs_are_compared_with_those_of_the_teacher(world: World) -> None:
    """The model of transformers reads the held-out pairs with their segments."""
    cache = world.dump(**PAIRS, codec="none", pooled=True, pooling="mean")
    run = world.train("run", arch=("2x32",), objective="embedding", steps=2)
    teacher = Teacher(locate_teacher(str(world.teacher)), torch.device("cpu"))
    (cosine,) = held_out_cosine(open_cache(cache.path), teacher, [run.student_path("2x32")])
    opened, separator = open_cache(cache.path), tiny_tokenizer().sep_token_id

    def vector(folder: Path, ids: torch.Tensor) -> torch.Tensor:
        ends = (ids == separator).long()
        read = {"input_ids": ids[None].long(), "token_type_ids": (ends.cumsum(0) - ends)[None]}
        with torch.no_grad():
            states: torch.Tensor = AutoModel.from_pretrained(folder).eval()(**read).last_hidden_state[0]
        return states.mean(0)

    expected = [
        torch.cosine_similarity(
            vector(run.student_path("2x32"), each.input_ids), vector(world.teacher, each.input_ids), dim=0
        )
        for each in opened[opened.manifest.num_train :]
    ]
    assert cosine == pytest.approx(1 - float(torch.stack(expected).mean()), abs=1e-5)
    SentencePooler("cls", normalize=False).save(world.teacher, hidden_size=32, max_length=32)
    other = Teacher(locate_teacher(str(world.teacher)), torch.device("cpu"))
    with pytest.raises(IdentityMismatchError, match="pools otherwise than when"):
        held_out_cosine(opened, other, [run.student_path("2x32")])
    with pytest.raises(InvalidConfigError, match=r"has no student 9x9. Its students: 2x32"):
        run.student_path("9x9")


def test_vectors_of_pairs_are_stored_where_an_objective_would_take_single_texts(
    world: World, command: Command
) -> None:
    words = ("dump", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32)
    given = (
        "--for",
        "embedding",
        "--pooling",
        "mean",
        "--pair-columns",
        "one,two",
        "--out",
        world.root / "x",
    )
    code, _, err = command(*words, *given)
    assert code == 0, err
    cache = open_cache(world.root / "x")
    assert cache.manifest.identity.packing.mode == "pairs"
    model, ids = AutoModel.from_pretrained(world.teacher).eval(), cache[0].input_ids
    segments = (torch.arange(len(ids)) > ids.tolist().index(3)).long()
    with torch.no_grad():
        vector = model(ids[None], token_type_ids=segments[None]).last_hidden_state[0].mean(0)
    assert float(torch.cosine_similarity(cache[0].states()[POOLED][0], vector, 0)) >= 0.999


def test_a_slice_is_fitted_to_pairs_with_their_segments(world: World) -> None:
    """A narrow student of sequences of two segments is nearer where its fit has read both."""
    cache = open_cache(world.dump(**PAIRS, codec="vectors").path)
    teacher = load_model(world.teacher).eval()
    config = shape_config(parse_arch("3x16", 4), teacher.config.to_dict(), "bert")
    rows, pair = [cache[number].input_ids for number in range(40)], cache.manifest.identity.packing.pair
    with_both, flat = Calibration.of(rows, 0, pair), Calibration.of(rows, 0)
    assert with_both.segments is not None
    errors = []
    for text in (with_both, flat):
        student = build_student(config, 0).eval()
        cut(teacher, student, layers=(0, 1, 2), calibration=text)
        inputs = Inputs.of(rows, 0).paired(pair)
        states = [
            model(inputs.ids, attention_mask=inputs.mask, token_type_ids=inputs.segments).last_hidden_state
            for model in (teacher, student)
        ]
        theirs, own = (state[inputs.valid].detach() for state in states)
        fitted = own @ torch.linalg.lstsq(own, theirs).solution
        errors.append(float((fitted - theirs).norm()))
    assert errors[0] < errors[1]


@pytest.mark.parametrize(
    ("pair", "between", "has_segments"),
    [
        ("[CLS] $A [SEP] $B:1 [SEP]:1", (3,), True),
        ("[CLS] $A [SEP] $B [SEP]", (3,), False),
        ("[CLS] $A [SEP] [SEP] $B [SEP]", (3, 3), False),
    ],
)
def test_templates_of_pairs_are_the_tokenizers(
    pair: str, between: tuple[int, ...], has_segments: bool
) -> None:
    tokenizer = with_segments()
    ids = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=ids
    )
    found = pair_template_of(tokenizer)
    assert (found.before, found.between, found.after, found.has_segments) == (
        (2,),
        between,
        (3,),
        has_segments,
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A $B [SEP]", special_tokens=ids
    )
    with pytest.raises(TeacherError, match="nothing, or too much, between two texts"):
        pair_template_of(tokenizer)


def test_a_strangers_cache_whose_sequences_are_no_pairs_is_refused(world: World) -> None:
    cache = open_cache(world.dump(**PAIRS).path)
    segment, pair = cache.reader.segment(0), cache.manifest.identity.packing.pair
    assert pair is not None
    refuse_no_pairs(segment, pair)
    tokens = segment.rows["tokens"].copy()
    place = int(segment.starts[1]) + tokens[int(segment.starts[1]) :].tolist().index(3)
    tokens[place] = 7  # what stood between the texts of the second sequence
    for damaged, form in (
        (replace(segment, rows={**segment.rows, "tokens": tokens}), pair),
        (segment, pair.model_copy(update={"between": (3,) * 16})),
        (segment, pair.model_copy(update={"before": (2,) * 16, "between": (3,) * 16})),
    ):
        with pytest.raises(CacheCorruptError, match="no pair of texts"):
            refuse_no_pairs(damaged, form)


def test_records_that_are_no_pairs_are_one_line(world: World, command: Command) -> None:
    words = ("dump", "--teacher", world.teacher, "--max-length", 32, "--out", world.root / "x")
    for row, columns, code, says in (
        ({"one": "ba", "two": "be"}, "one,three", 1, ("no column 'three'", "--pair-columns")),
        ({"one": "ba", "two": "be"}, "one", 2, "two different columns"),
        ({"one": "ba", "two": "be"}, "one,one", 2, "two different columns"),
        ({"one": "ba", "two": " "}, "one,two", 1, "lacks one of its two texts"),
        ({"one": "ba\x1e", "two": "be"}, "one,two", 1, "U+001E"),
        ({"one": "ba [SEP] be", "two": "be"}, "one,two", 1, "puts between texts"),
    ):
        world.corpus.write_text(json.dumps(row) + "\n")
        command.fails(*words, "--corpus", world.corpus, "--pair-columns", columns, code=code, says=says)
    text = world.root / "text.txt"
    text.write_text("ba be\n")
    command.fails(*words, "--corpus", text, "--pair-columns", "a,b", code=1, says="no columns")
    command.fails(*words, "--corpus", text, "--packing", "pairs", code=2, says="needs --pair-columns")
    both = ("--pair-columns", "a,b", "--text-column", "c")
    command.fails(*words, "--corpus", text, *both, code=2, says="give one of them")
    prompted = ("--pair-columns", "a,b", "--prompt", "c ")
    command.fails(*words, "--corpus", text, *prompted, code=2, says="--packing records")


def test_lists_that_were_written_as_text_are_refused(world: World, command: Command) -> None:
    file = world.root / "groups.csv"
    file.write_text("query,pos,neg\nba,be,\"['bi', 'bo']\"\n")
    words = ("dump", "--teacher", world.teacher, "--corpus", file, "--pair-columns", "query,pos+neg")
    command.fails(
        *words, code=1, says=("a list that was written as text in column 'neg'", ".jsonl or .parquet")
    )
    for row in ("['a one', 'b two']", '["it is", "more"]', "['a one', \"it's\"]"):
        with file.open("w", newline="") as opened:
            csv.writer(opened).writerows([["query", "documents"], ["ba", row]])
        command.fails(*words[:-1], "query,documents", code=1, says="written as text in column 'documents'")


def test_tables_without_a_header_begin_with_a_pair(tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    file.write_text("  ba be,bi\nbo,  bu\n")
    assert list(load_corpus(str(file), pair_columns="0,1").texts()) == ["  ba be\x1ebi", "bo\x1e  bu"]
    file.write_text("Query, document\nba,be\n")
    with pytest.raises(CorpusError, match=r"begins with Query, document, which are names of columns"):
        load_corpus(str(file), pair_columns="0,1")


def test_the_first_record_may_lack_documents(tmp_path: Path) -> None:
    """Whether records are groups is seen in the first one that has some."""
    file = tmp_path / "groups.jsonl"
    rows = [{"q": "ba", "d": None}, {"q": "be", "d": ["bi", "bo"]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert PairColumns.of("q,d").seen_in(file).are_groups


def test_a_file_without_a_header_may_begin_with_a_number_of_a_column(tmp_path: Path) -> None:
    """Labels are 0 and 1 in many files, and columns without names are named by number."""
    file = tmp_path / "a.tsv"
    file.write_text("ba be\tbi bo\t1\nda de\tdi do\t0\n")
    rows = [row for _, row in read_rows(file, ("0", "1", "2"))]

    assert [list(row.values()) for row in rows] == [["ba be", "bi bo", "1"], ["da de", "di do", "0"]]
    file.write_text("1\t0\nba\tbe\n")  # a header
    assert [row for _, row in read_rows(file, ("0", "1"))] == [{"0": "be", "1": "ba"}]


def test_groups_are_known_by_the_first_file_that_has_a_record(tmp_path: Path) -> None:
    rows = [{"query": f"ba {n}", "docs": ["bi", "bo"]} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows)[:0], tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    corpus = load_corpus(str(tmp_path), pair_columns="query,docs")
    assert (corpus.identity.num_documents, corpus.identity.groups) == (6, True)


def test_half_of_a_character_in_a_pair_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('{"a": "ba", "b": "bi"}\n{"a": "ba", "b": "\\ud800"}\n')
    with pytest.raises(CorpusError, match=r"line 2 of .* has half of a character"):
        load_corpus(str(file), pair_columns="a,b")
