"""Retrieval on data of one's own: sentence-transformers' evaluator is the oracle."""

import json
import re
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from transformers import AutoModel

from minilm_cache.errors import CorpusError
from minilm_cache.evaluate.embeddings import sentence_encoder
from minilm_cache.evaluate.models import find_models
from minilm_cache.evaluate.own_data import OwnData, read_own_data
from minilm_cache.evaluate.retrieval import measured, values_of
from minilm_cache.evaluate.settings import RetrievalData
from tests.encoders import save_encoder
from tests.fixtures import Command
from tests.support import VOCABULARY, save_teacher
from tests.tasks import write_glue


def questions(count: int = 40) -> list[dict[str, str]]:
    """Return questions with an answer that shares words with them, some of it with another question."""
    generator = np.random.default_rng(0)
    words = VOCABULARY[5:29]
    rows = []
    for number in range(count):
        answer = list(generator.choice(words, 6))
        question = [*generator.choice(answer, 2), generator.choice(words)]
        rows.append({"question": f"{' '.join(question)} {words[number % 24]}", "answer": " ".join(answer)})
    return [*rows, {"question": rows[0]["question"], "answer": rows[1]["answer"]}]


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Two sentence encoders of one width."""
    made = []
    for name, seed in (("teacher", 0), ("other", 1)):
        folder = save_teacher(tmp_path / name, seed=seed)
        save_encoder(folder, "mean", max_length=32)
        made.append(folder)
    return made[0], made[1]


def write_beir(folder: Path, rows: list[dict[str, str]]) -> None:
    """Write questions and answers in BEIR's layout, with documents and queries that nothing is said of."""
    answers = list(dict.fromkeys(row["answer"] for row in rows))
    asked = list(dict.fromkeys(row["question"] for row in rows))
    (folder / "qrels").mkdir(parents=True)
    corpus = [{"_id": f"D{at}", "title": "", "text": text} for at, text in enumerate([*answers, "ba ba ba"])]
    queries = [{"_id": f"Q{at}", "text": text} for at, text in enumerate([*asked, "bu"])]
    for name, content in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    lines = [f"Q{asked.index(row['question'])}\tD{answers.index(row['answer'])}\t1" for row in rows]
    lines += ["Q0\tD0\t0"] if len(answers) < 3 else ["Q0\tD2\t0"]
    (folder / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n")


def test_scores_are_those_of_sentence_transformers(
    tmp_path: Path, models: tuple[Path, Path], command: Command
) -> None:
    rows = questions()
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_beir(tmp_path / "beir", rows)
    for place in (file, tmp_path / "beir"):
        code, out, err = command("embeddings", *models, "--retrieval", place, "--max-length", 32, "--json")
        assert code == 0, err
        found = json.loads(out)["retrieval"]
        data = read_own_data(RetrievalData(retrieval=place))
        right = {query: set(grades) for query, grades in data.right.items()}
        for row, folder in zip(found, models, strict=True):
            evaluator = InformationRetrievalEvaluator(
                dict(data.queries),
                dict(data.documents),
                right,
                ndcg_at_k=[10],
                mrr_at_k=[10],
                accuracy_at_k=[1],
                precision_recall_at_k=[100],
                map_at_k=[10],
                show_progress_bar=False,
            )
            encoder = SentenceTransformer(str(folder), device="cpu")
            expected = evaluator(encoder)
            for name, key in (
                ("ndcg_at_10", "ndcg@10"),
                ("mrr_at_10", "mrr@10"),
                ("recall_at_100", "recall@100"),
            ):
                assert row[name]["mean"] == pytest.approx(100 * expected[f"cosine_{key}"], abs=1e-4)
                assert row[name]["low"] <= row[name]["mean"] <= row[name]["high"]
        assert found[0]["teachers_index"] is None
        assert found[1]["teachers_index"]["mean"] != found[1]["ndcg_at_10"]["mean"]
    copy = shutil.copytree(models[0], tmp_path / "copy")
    words = ("--retrieval", file, "--max-length", 32)
    code, out, _ = command("embeddings", models[0], copy, *words, "--json")
    itself = json.loads(out)["retrieval"][1]
    assert itself["teachers_index"] == itself["ndcg_at_10"]  # its own queries in its own index
    code, out, _ = command("embeddings", *models, *words)
    assert code == 0
    assert "nDCG@10" in out


def test_a_collection_is_searched_beside_the_answers(
    tmp_path: Path, models: tuple[Path, Path], command: Command
) -> None:
    """As if every text of the collection were a document that is right for nothing."""
    rows, further = questions(12), ["ba be bi", "bo bu da", "de di do"]
    file, texts = tmp_path / "questions.jsonl", tmp_path / "texts.txt"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts.write_text("\n".join([*further, rows[0]["answer"], further[0]]) + "\n")
    write_beir(tmp_path / "beir", rows)
    with (tmp_path / "beir" / "corpus.jsonl").open("a") as corpus:
        corpus.writelines(
            json.dumps({"_id": f"F{at}", "text": text}) + "\n" for at, text in enumerate(further)
        )
    words = ("embeddings", *models, "--max-length", 32, "--json", "--retrieval")
    code, out, err = command(*words, file, "--corpus", texts, "--documents", "lines")
    assert code == 0, err
    assert f"searched in {len({row['answer'] for row in rows}) + 3} texts" in err
    found = [row["ndcg_at_10"]["mean"] for row in json.loads(out)["retrieval"]]
    texts.write_text("\n\n".join([*further, rows[0]["answer"]]) + "\n")  # the last one ends with a line
    code, out, _ = command(*words, file, "--corpus", texts)
    assert [row["ndcg_at_10"]["mean"] for row in json.loads(out)["retrieval"]] == found
    assert "stand in longer" not in err
    texts.write_text(f"{rows[0]['answer']} be\n\n{further[0]}\n")
    assert "questions.jsonl stand in longer ones" in command(*words, file, "--corpus", texts)[2]
    code, out, _ = command(*words, tmp_path / "beir")
    beir = [row["ndcg_at_10"]["mean"] for row in json.loads(out)["retrieval"]]
    assert found == pytest.approx(beir, abs=2.0)  # it has one more text, "ba ba ba"
    code, out, _ = command(*words, file)
    alone = [row["ndcg_at_10"]["mean"] for row in json.loads(out)["retrieval"]]
    assert sum(found) < sum(alone)


def test_files_of_queries_documents_and_judgements_may_stand_anywhere(
    tmp_path: Path, models: tuple[Path, Path], command: Command
) -> None:
    folder = tmp_path / "beir"
    write_beir(folder, questions(12))
    files = {
        "--queries": Path(shutil.copy(folder / "queries.jsonl", tmp_path / "asked.jsonl")),
        "--corpus": Path(shutil.copy(folder / "corpus.jsonl", tmp_path / "texts.jsonl")),
        "--qrels": Path(shutil.copy(folder / "qrels/test.tsv", tmp_path / "right.tsv")),
    }
    named = list[Any](chain.from_iterable(files.items()))
    in_folder: list[Any] = ["--retrieval", folder]
    cut = ("--max-length", 32)
    judge = save_teacher(tmp_path / "judge", head="sequences", num_labels=1)
    compared: list[list[Any]] = [["embeddings", *models], ["rerank", judge, "--first-stage", models[0]]]
    for start in compared:
        found = []
        for words in (named, in_folder):
            code, out, err = command(*start, *cut, *words, "--json")
            assert code == 0, err
            found.append(re.sub(r'"pairs_per_s": [0-9.]+', "", out))
        assert found[0] == found[1]
    mined = [tmp_path / f"{name}-groups.jsonl" for name in ("files", "folder")]
    for groups, words in zip(mined, (named, in_folder), strict=True):
        code, _, err = command("mine", models[0], *cut, *words, "--out", groups)
        assert code == 0, err
    assert mined[0].read_text() == mined[1].read_text()

    start = ["embeddings", models[0], *cut]
    together = "--queries, --corpus and --qrels go together"
    for lacking in files:
        others = chain.from_iterable(option for option in files.items() if option[0] != lacking)
        command.fails(*start, *others, code=2, says=together)
    command.fails(*start, *named, "--retrieval", folder, code=2, says="Leave out one of them")
    command.fails(*start, *named, "--text-column", "text", code=2, says="--corpus beside --retrieval")
    files["--qrels"].write_text("Q0\tD99\t1\n")
    command.fails(*start, *named, code=1, says=("right.tsv, line 1", "no document 'D99' in texts.jsonl"))
    files["--qrels"].write_text("Q0\tD0\t0\n")
    command.fails(*start, *named, code=1, says=("--qrels", "right.tsv: no query has a relevant document"))
    for option in ("--queries", "--corpus", "--qrels"):
        files[option].unlink()
        command.fails(*start, *named, code=1, says=("cannot read", files[option].name, "No such file"))


def test_the_interval_holds_the_mean_of_most_resamples() -> None:
    """For 200 values of 0 or 1, the interval is about 1.96 standard errors to each side."""
    values = [1.0] * 60 + [0.0] * 140
    found = measured(values)
    error = 100 * (0.3 * 0.7 / 200) ** 0.5
    assert found.mean == pytest.approx(30)
    assert found.low == pytest.approx(30 - 1.96 * error, abs=1)
    assert found.high == pytest.approx(30 + 1.96 * error, abs=1)


@pytest.mark.parametrize("weight", [3e38, 0.0])
def test_vectors_without_a_direction_are_no_figures(
    tmp_path: Path, models: tuple[Path, Path], command: Command, weight: float
) -> None:
    """Neither of retrieval, nor of a first stage or of STS-B; no hard negatives are drawn by them."""
    teacher, other = models
    weights = load_file(other / "model.safetensors")
    for name in weights:
        weights[name] = torch.full_like(weights[name], weight)
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    rows, file, cut = questions(), tmp_path / "questions.jsonl", ("--max-length", 32)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    says = ("other gives", "NaN, infinite or of length 0", "Get its weights again")
    command.fails("embeddings", teacher, other, "--retrieval", file, *cut, code=1, says=says)
    command.fails(
        "embeddings", teacher, other, "--data", write_glue(tmp_path / "glue"), *cut, code=1, says=says
    )
    mined = ("mine", other, "--retrieval", file, "--out", tmp_path / "mined.jsonl", *cut)
    command.fails(*mined, code=1, says=says)
    assert not (tmp_path / "mined.jsonl").exists()


def test_saved_folders_read_as_many_tokens_as_their_models(
    tmp_path: Path, models: tuple[Path, Path], command: Command
) -> None:
    plain = save_teacher(tmp_path / "plain", "roberta")  # which keeps positions back
    data = ("--data", write_glue(tmp_path / "glue"), "--max-length", 16, "--save", tmp_path / "saved")
    assert command("embeddings", models[0], plain, *data)[0] == 0
    saved = {path.name: SentenceTransformer(str(path)) for path in (tmp_path / "saved").iterdir()}
    assert saved["teacher"].max_seq_length == 32
    assert saved["plain"].max_seq_length == plain_length(plain)
    for model in saved.values():
        model.encode(["ba be " * 80])


def plain_length(folder: Path) -> int:
    """Return how many tokens a model of transformers reads before its positions end."""
    model = AutoModel.from_pretrained(folder)
    lengths = range(1, model.config.max_position_embeddings + 1)
    return max(length for length in lengths if reads(model, length))


def reads(model: Any, length: int) -> bool:
    try:
        model(torch.full((1, length), 7))
    except (IndexError, RuntimeError):
        return False
    return True


def test_queries_that_nothing_answers_are_left_out_aloud(
    tmp_path: Path, models: tuple[Path, Path], command: Command
) -> None:
    rows = questions()
    write_beir(tmp_path / "beir", rows)
    before = command("embeddings", models[0], "--retrieval", tmp_path / "beir", "--max-length", 32, "--json")
    with (tmp_path / "beir/qrels/test.tsv").open("a") as file:
        file.write(f"Q{len({row['question'] for row in rows})}\tD1\t0\n")
    code, out, err = command(
        "embeddings", models[0], "--retrieval", tmp_path / "beir", "--max-length", 32, "--json"
    )
    assert code == 0
    assert re.search(r"beir.*: 1 of 41 judged queries have no relevant document, and are left out", err)
    assert json.loads(out)["retrieval"] == json.loads(before[1])["retrieval"]
    assert "cut at" not in err
    _, _, err = command("embeddings", models[0], "--retrieval", tmp_path / "beir", "--max-length", 7)
    assert "documents are cut at 7 tokens. Give a greater --max-length" in err  # those of six words
    assert re.search("quer(y is|ies are) cut at", err) is None


def test_bad_data_is_one_line(tmp_path: Path, models: tuple[Path, Path], command: Command) -> None:
    file = tmp_path / "questions.jsonl"
    words = ("embeddings", models[0], "--max-length", 32, "--retrieval")
    bad: list[tuple[Any, str]] = [
        ({"question": "ba"}, "lacks answer; it has question. Name its texts"),
        ({"question": "ba", "answer": " "}, "has no text 'answer'"),
        ([1], "where a record"),
        (1, "where a record"),
        ({"question": "ba \ud800", "answer": "be"}, "half of a character"),
    ]
    for row, says in bad:
        file.write_text(json.dumps(row) + "\n")
        command.fails(*words, file, code=1, says=says)
    file.write_text(json.dumps({"question": "ba", "answer": "be"}) + '\n{"question": "b\n')
    command.fails(*words, file, code=1, says="line 2 is not JSON: Invalid control character")
    file.write_text("")
    command.fails(*words, file, code=1, says="no query has a relevant document")
    command.fails(*words, tmp_path / "nothing", code=1, says="does not exist")
    command.fails("embeddings", models[0], code=2, says="give --data (STS-B), --retrieval")
    command.fails(*words, file, "--mteb", "STS12", code=2, says="go with --data")
    folder = tmp_path / "beir"
    write_beir(folder, questions(3))
    qrels = folder / "qrels" / "test.tsv"
    whole = qrels.read_text()
    for line, says in (
        ("Q0\tD99\t1", "no document 'D99'"),
        ("Q99\tD0\t1", "no query 'Q99'"),
        ("Q0\tD0", "a query, a document and a whole grade"),
        ("Q0\tD0\t\u00b2", "a query, a document and a whole grade"),
        ("Q0\tD0\t1.0", "a query, a document and a whole grade"),
    ):
        qrels.write_text(f"{whole}{line}\n")
        command.fails(*words, folder, code=1, says=says)
    qrels.write_text(whole)
    documents = (folder / "corpus.jsonl").read_text()
    for row, says in (
        ({"_id": "D5\0", "text": "ba"}, "control character in its _id"),
        ({"_id": "D5", "title": "A \ud83d", "text": "ba"}, "half of a character"),
        ({"_id": "D5", "title": ["x"], "text": "ba"}, "has no text 'title'"),
    ):
        (folder / "corpus.jsonl").write_text(f"{documents}{json.dumps(row)}\n")
        command.fails(*words, folder, code=1, says=("corpus.jsonl, line", says))
    (folder / "corpus.jsonl").write_text(f'{documents}{{"_id": "D5", "text": "ba", "text": "be"}}\n')
    command.fails(*words, folder, code=1, says="has column 'text' twice")
    (folder / "corpus.jsonl").write_text(documents)
    (folder / "corpus.jsonl").rename(folder / "texts.jsonl")
    command.fails(*words, folder, code=1, says=("cannot read", "corpus.jsonl"))
    qrels.unlink()
    command.fails(*words, folder, code=1, says=("cannot read", "BEIR's layout"))


def test_a_query_that_is_a_document_finds_others(
    tmp_path: Path, models: tuple[Path, Path], command: Command
) -> None:
    """As in ArguAna and Quora, whose evaluation leaves out a document with the name of the query."""
    rows, folder = questions()[:-1], tmp_path / "beir"
    write_beir(folder, rows)
    words = ("embeddings", models[0], "--max-length", 32, "--retrieval", folder, "--json")
    code, printed, err = command(*words)
    assert code == 0, err
    plain = json.loads(printed)["retrieval"][0]["ndcg_at_10"]["mean"]
    with (folder / "corpus.jsonl").open("a") as opened:
        for at, row in enumerate(rows):
            opened.write(json.dumps({"_id": f"Q{at}", "title": "", "text": row["question"]}) + "\n")
    found = read_own_data(RetrievalData(retrieval=folder))
    evaluator = InformationRetrievalEvaluator(
        dict(found.queries),
        dict(found.documents),
        {query: {*right} for query, right in found.right.items()},
        ndcg_at_k=[10],
        write_csv=False,
    )
    with_itself = 100 * evaluator(SentenceTransformer(str(models[0]), device="cpu"))["cosine_ndcg@10"]
    measured_here = json.loads(command(*words)[1])["retrieval"][0]["ndcg_at_10"]["mean"]
    assert with_itself < measured_here <= plain
    out = tmp_path / "groups.jsonl"
    mine = ("mine", models[0], "--retrieval", folder, "--negatives", 3, "--among", 3, "--max-length", 32)
    assert command(*mine, "--out", out)[0] == 0
    groups = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(group["query"] not in group["negative"] for group in groups)


def test_a_model_that_tells_nothing_apart_ranks_by_chance(
    tmp_path: Path, models: tuple[Path, Path], command: Command
) -> None:
    """Names of documents say which ones are right, and must not decide between equal scores."""
    with torch.no_grad():
        model = AutoModel.from_pretrained(models[0])
        last = model.encoder.layer[-1].output.LayerNorm
        last.weight.zero_()
        last.bias.fill_(1)
    model.save_pretrained(models[0])
    rows = [
        {"question": f"ba bi {VOCABULARY[5 + at]}", "answer": f"ca {VOCABULARY[5 + at]}"} for at in range(8)
    ]
    file, texts = tmp_path / "questions.jsonl", tmp_path / "texts.txt"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = np.random.default_rng(1).choice(VOCABULARY[5:29], (192, 5))
    texts.write_text("\n".join(sorted({" ".join(row) for row in drawn})) + "\n")
    words = ("--retrieval", file, "--corpus", texts, "--documents", "lines", "--max-length", 32, "--json")
    code, out, err = command("embeddings", models[0], *words)
    assert code == 0, err
    (found,) = json.loads(out)["retrieval"]
    assert found["ndcg_at_10"]["mean"] < 15
    assert found["mrr_at_10"]["mean"] < 15
    assert found["recall_at_100"]["mean"] < 90


def test_measures_agree_on_the_order_of_equal_scores() -> None:
    """The first of ten documents of one score is the right one, whatever they are called."""
    documents = {name: name for name in ("b", "a", "c")}
    data = OwnData(queries={"q": "?"}, documents=documents, right={"q": {"b": 1}})
    for place, order in enumerate((["b", "a", "c"], ["a", "b", "c"], ["c", "a", "b"]), 1):
        values = values_of(data, {"q": dict.fromkeys(order, 0.5)})
        at = order.index("b") + 1
        assert at == place
        assert values["mrr_at_10"] == [pytest.approx(1 / at)]
        assert values["ndcg_at_10"] == [pytest.approx(1 / np.log2(1 + at))]


def test_a_text_is_read_as_far_as_the_folder_reads_it(tmp_path: Path) -> None:
    folder = save_teacher(tmp_path / "short")
    save_encoder(folder, "mean", max_length=6)
    texts = [" ".join(VOCABULARY[5:25])]
    (model,) = find_models([str(folder)], None, note=print)
    own = SentenceTransformer(str(folder), device="cpu").encode(texts, normalize_embeddings=True)
    assert sentence_encoder(model, 32, "cpu").encode(texts) == pytest.approx(own, abs=1e-6)
    shorter = sentence_encoder(model, 4, "cpu").encode(texts)
    assert np.abs(shorter - own).max() > 1e-3


def test_names_of_several_texts_and_marks(tmp_path: Path) -> None:
    write_beir(tmp_path / "beir", questions(6))
    beir = RetrievalData(retrieval=tmp_path / "beir")
    whole = read_own_data(beir)
    qrels = tmp_path / "beir/qrels/test.tsv"
    qrels.write_bytes(b"\xef\xbb\xbf" + qrels.read_bytes())
    assert read_own_data(beir) == whole
    for name, again in (
        ("corpus", {"_id": "D0", "text": "other"}),
        ("queries", {"_id": "Q0", "text": "other"}),
    ):
        file = tmp_path / "beir" / f"{name}.jsonl"
        rows = file.read_text()
        file.write_text(rows + rows.split("\n", 1)[0] + "\n")  # the same text once more says nothing else
        assert read_own_data(beir) == whole
        file.write_text(rows + json.dumps(again) + "\n")
        number = len(rows.splitlines()) + 1
        with pytest.raises(
            CorpusError, match=rf"{name}.jsonl, line {number}: _id '{again['_id']}' was that of"
        ):
            read_own_data(beir)
        file.write_text(rows)
