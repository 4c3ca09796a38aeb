"""Labelled texts of one's own: the kept model, asked by transformers alone, is the oracle."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from minilm_cache.cache import open_cache
from minilm_cache.evaluate.run import evaluate_models
from minilm_cache.evaluate.settings import EvaluateConfig
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.storage_schema.states import LOGITS
from tests.encoders import save_encoder
from tests.fixtures import Command
from tests.support import WORDS, World, save_teacher
from tests.tasks import LEARNABLE, SHORT, evaluated, write_glue

NAMES = ("good", "bad, or worse")
Rows = list[dict[str, Any]]


def rows(count: int = 80, *, is_pair: bool = False) -> Rows:
    """Return texts whose class is the word that they are made of, every third of them twice."""
    drawn, found = random.Random(0), Rows()
    for number in range(count):
        text = " ".join([*[LEARNABLE[number % 2]] * drawn.randint(2, 5), WORDS[2 + number % 20]])
        found.append({"text": text, "label": NAMES[number % 2]} | ({"other": "ba"} if is_pair else {}))
    return [*found, *found[::3]]


def write(file: Path, found: Rows) -> Path:
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in found))
    elif file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(found), file)
    else:
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, found[0], delimiter="\t" if file.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(found)
    return file


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teacher(tmp_path_factory.mktemp("models") / "teacher")


TUNED = ("--lr", "1e-3", "--epochs", "6", "--batch-size", "8")


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
def test_classes_are_learned_from_any_file(
    teacher: Path, tmp_path: Path, command: Command, ending: str
) -> None:
    """The same trial from every kind of file; equal texts are not on both sides."""
    file = write(tmp_path / f"reviews.{ending}", rows())
    out = ("--out", tmp_path / "out", "--keep-models")
    (trial,) = evaluated(command, teacher, "--task", file, *TUNED, *out)["trials"]
    accuracy = trial["scores"]["dev"]["accuracy"]
    assert accuracy > 90
    assert trial["num_train"] + trial["num_scored"]["dev"] == len(rows())
    (folder,) = (tmp_path / "out" / file.name).iterdir()
    predicted = (folder / "predictions" / "dev.tsv").read_text().splitlines()[1:]
    assert {line.split("\t")[1] for line in predicted} == set(NAMES)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    with torch.no_grad():
        numbers = [int(model(**tokenizer(w, return_tensors="pt")).logits.argmax()) for w in LEARNABLE]
    assert [model.config.id2label[number] for number in numbers] == list(NAMES)


def test_a_classifier_is_scored_as_it_is(teacher: Path, tmp_path: Path, command: Command) -> None:
    """Its score is that of its fine-tuning, and classes go by their names."""
    file, dev = write(tmp_path / "a.csv", rows()), write(tmp_path / "b.csv", rows(30))
    out = ("--out", tmp_path / "out")
    words = (teacher, "--task", file, "--dev", dev, *TUNED, *out, "--keep-models")
    (tuned,) = evaluated(command, *words)["trials"]
    (folder,) = (tmp_path / "out" / "a.csv").iterdir()
    model = folder / "model"
    as_is = ("--task", file, "--dev", dev, "--as-is", *out)
    (trial,) = evaluated(command, model, *as_is)["trials"]
    assert trial["scores"] == tuned["scores"]
    config = json.loads((model / "config.json").read_text())
    config |= {"id2label": {"0": NAMES[0], "1": NAMES[1]}, "label2id": {NAMES[0]: 0, NAMES[1]: 1}}
    (model / "config.json").write_text(json.dumps(config))
    (trial,) = evaluated(command, model, *as_is)["trials"]
    assert trial["scores"]["dev"]["accuracy"] == pytest.approx(100 - tuned["scores"]["dev"]["accuracy"])
    (model / "config.json").write_text(json.dumps(config | {"output_hidden_states": True}))
    (answers_alone,) = evaluated(command, model, *as_is)["trials"]
    assert answers_alone["scores"] == trial["scores"]
    several = {"problem_type": "multi_label_classification"}
    (model / "config.json").write_text(json.dumps(config | several))
    command.fails("evaluate", *SHORT, *as_is, model, code=2, says="gives several labels to a text")
    config |= {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}
    (model / "config.json").write_text(json.dumps(config))
    command.fails(
        "evaluate", *SHORT, *as_is, model, code=2, says="which of them are bad, or worse, good is not"
    )
    config |= {"id2label": {"0": "no", "1": "yes"}}
    (model / "config.json").write_text(json.dumps(config))
    base = ("evaluate", *SHORT, *as_is)
    command.fails(*base, model, code=2, says="answers with no, yes, and a.csv is about bad, or worse, good")
    command.fails(*base, teacher, code=2, says="is no classifier")
    known, later = save_teacher(tmp_path / "known", head="sequences", num_labels=3), tmp_path / "later"
    names = {"0": NAMES[0], "1": NAMES[1], "2": "middling"}
    file = known / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"id2label": names}))
    (model / "config.json").write_text(json.dumps(config | {"id2label": {"0": NAMES[1], "1": NAMES[0]}}))
    command.fails(
        *(*base[:-1], later, model, known),
        code=2,
        says="middling, and a.csv is about bad, or worse, good. Give --task",
    )
    assert not later.exists()
    (model / "config.json").write_text(json.dumps(config))
    command.fails(*base, model, "--epochs", 2, code=2, says="--epochs is about fine-tuning")
    squad = ("--task", "squad", "--data", tmp_path, "--as-is")
    command.fails("evaluate", model, *squad, code=2, says="squad is about spans")


def test_classes_that_are_named_like_drawn_ones_are_known_by_their_names(
    teacher: Path, tmp_path: Path, command: Command
) -> None:
    named = [{**row, "label": f"LABEL_{NAMES.index(row['label'])}"} for row in rows()]
    file = write(tmp_path / "a.csv", named)
    words = ("--task", file, "--dev", file, "--out", tmp_path / "out")
    (tuned,) = evaluated(command, teacher, *words, *TUNED, "--keep-models")["trials"]
    (folder,) = (tmp_path / "out" / "a.csv").iterdir()
    (trial,) = evaluated(command, folder / "model", *words, "--as-is")["trials"]
    assert trial["scores"] == tuned["scores"]
    numbers = write(tmp_path / "b.csv", [{**row, "label": str(n % 5)} for n, row in enumerate(rows())])
    one = save_teacher(tmp_path / "one", head="sequences", num_labels=1)
    command.fails(
        *("evaluate", *SHORT, one, "--task", numbers, "--as-is"),
        code=2,
        says="give --metric pearson or spearman",
    )


def test_values_pairs_and_a_file_of_its_own_to_score(teacher: Path, tmp_path: Path, command: Command) -> None:
    """Values are predicted as they are, below the scale of GLUE's server, too."""
    scaled = [
        {"first": row["text"], "second": "ba", "stars": 10.5 if row["label"] == NAMES[0] else -7.25}
        for row in rows()
    ]
    train, dev = write(tmp_path / "train.csv", scaled), write(tmp_path / "dev.jsonl", scaled[:20])
    words = ("--text-columns", "first,second", "--label-column", "stars", "--dev", dev)
    out = ("--out", tmp_path / "out", "--card")
    found = evaluated(command, teacher, "--task", train, *words, *TUNED, *out)
    (trial,) = found["trials"]
    assert trial["scores"]["dev"]["pearson"] > 80
    assert trial["num_scored"] == {"dev": 20}
    (folder,) = (tmp_path / "out" / "train.csv").iterdir()
    lines = (folder / "predictions" / "dev.tsv").read_text().splitlines()[1:]
    values = np.array([float(line.split("\t")[1]) for line in lines])
    assert values.min() < 0
    assert "train.csv" in (teacher / "README.md").read_text()
    whole = [{**row, "label": int(row["label"] == NAMES[0])} for row in rows()]
    file = write(tmp_path / "whole.csv", whole)
    for metric, names in (("pearson", {"pearson"}), ("f1", {"f1"}), ("matthews", {"matthews"})):
        asked = (teacher, "--task", file, "--metric", metric, "--epochs", 1, "--out", tmp_path / "one")
        (trial,) = evaluated(command, *asked)["trials"]
        assert trial["scores"]["dev"].keys() == names


def test_what_is_wrong_with_a_file_is_one_line(teacher: Path, tmp_path: Path, command: Command) -> None:
    good = write(tmp_path / "good.csv", rows())
    base = ("evaluate", teacher, "--max-length", 32, "--out", tmp_path / "out", "--task")
    command.fails(*base, tmp_path / "no.csv", code=1, says="no.csv is not a file")
    command.fails(
        *base,
        tmp_path / "no.txt",
        code=2,
        says="or a file of texts with labels, or with texts to generate (.csv, .tsv",
    )
    command.fails(*base, "sst2", code=2, says="--data is missing")
    several = tmp_path / "several.jsonl"
    several.write_text("".join(json.dumps({"text": f"ba {n}", "label": ["a", "b"]}) + "\n" for n in range(9)))
    command.fails(*base, several, code=1, says=("line 1", "is a list. A label is one class or one value"))
    data = write_glue(tmp_path / "glue")
    both = ("sst2", "--task", good, "--data", data, "--num-beams", 2)
    command.fails(*base, *both, code=2, says=("--num-beams", "is about generated texts"))
    command.fails(*base[:4], "--out", "/proc/no", "--task", good, code=1, says="/proc/no")
    command.fails(
        *base, "sst2", "--data", tmp_path, "--metric", "f1", code=2, says="is about a task of your own"
    )
    command.fails(
        *base, good, "--label-column", "stars", code=1, says=("no column 'stars'", "--label-column")
    )
    command.fails(*base, good, "--text-columns", "a,b,c", code=2, says="give one column, or two")
    command.fails(
        *base,
        good,
        "--text-columns",
        "label",
        "--label-column",
        "text",
        "--metric",
        "f1",
        code=2,
        says="two classes",
    )
    for change, says in (
        ({"text": " "}, "a text is empty"),
        ({"text": None}, "is not a text"),
        ({"text": 3}, "is not a text"),
        ({"label": None}, "label 'None' is not a class of the training set"),
        ({"label": ""}, "label '' is not a class of the training set"),
        ({"label": float("nan")}, "label 'nan' is not a class of the training set"),
    ):
        bad = write(tmp_path / "bad.jsonl", [*rows(), {"text": "ba be", "label": "good"} | change])
        assert str(bad) in command.fails(*base, bad, code=1, says=says)
    (tmp_path / "b").mkdir()
    again = write(tmp_path / "b" / "good.csv", rows())
    command.fails(*base, good, "--task", again, code=2, says="two tasks are files called good.csv")
    command.fails(*base, good, "--data", tmp_path, code=2, says="is a file of its own")


def test_labels_that_no_task_is_made_of(teacher: Path, tmp_path: Path, command: Command) -> None:
    good = write(tmp_path / "good.csv", rows())
    base = ("evaluate", teacher, "--max-length", 32, "--out", tmp_path / "out", "--task")
    one = write(tmp_path / "one.csv", [{**row, "label": "same"} for row in rows()])
    command.fails(*base, one, code=1, says="has 1 different labels to train on")
    other = write(tmp_path / "other.csv", [{"text": "ba", "label": "worst"}])
    command.fails(
        *base, good, "--dev", other, code=1, says="label 'worst' is not a class of the training set"
    )
    nan = write(tmp_path / "nan.csv", [{"text": "ba", "label": "1.5"}, {"text": "be", "label": "nan"}])
    command.fails(*base, nan, "--metric", "pearson", code=1, says="label 'nan' is not a number")
    for written in ("Infinity", "-Infinity"):
        infinite = tmp_path / "infinite.jsonl"
        infinite.write_text(f'{{"text": "ba", "label": 1}}\n{{"text": "be", "label": {written}}}\n')
        command.fails(*base, infinite, code=1, says="is no value and no class")
    alone = write(tmp_path / "alone.csv", [{"text": "ba", "label": "1"}])
    command.fails(*base, alone, code=1, says="has one text")


def test_values_with_decimal_commas_are_no_classes(teacher: Path, tmp_path: Path, command: Command) -> None:
    base = ("evaluate", teacher, "--max-length", 32, "--out", tmp_path / "out", "--task")
    labels = ("3", "0,5", "1,5", "2,5")
    comma = write(tmp_path / "comma.csv", [{"text": f"ba {label}", "label": label} for label in labels])
    command.fails(*base, comma, code=1, says=("label '0,5' has a decimal comma", "with a point"))
    thousand = [{"text": f"ba {label}", "label": label} for label in ("1,000", "2,000")]
    command.fails(*base, write(tmp_path / "t.csv", thousand[:1]), code=1, says="has one text")


def test_a_file_with_a_header_alone_is_one_line(teacher: Path, tmp_path: Path, command: Command) -> None:
    good, empty = write(tmp_path / "good.csv", rows()), tmp_path / "empty.csv"
    empty.write_text("text,label\n")
    base = ("evaluate", teacher, "--max-length", 32, "--out", tmp_path / "out", "--task")
    for words in ((empty, "--metric", "pearson"), (empty, "--as-is"), (good, "--dev", empty)):
        command.fails(*base, *words, code=1, says="empty.csv has no records")
    command.fails(
        *("generate", teacher, "--file", empty, "--text-columns", "text"), code=1, says="has no records"
    )


def test_a_sentence_encoder_that_was_fine_tuned_teaches_its_answers(tmp_path: Path, command: Command) -> None:
    """It answers from the vector that it pools; students are ordinary classifiers with the same classes."""
    encoder = save_teacher(tmp_path / "encoder")
    save_encoder(encoder, "mean", max_length=32)
    file, dev = write(tmp_path / "a.csv", rows()), write(tmp_path / "b.csv", rows(30))
    out = ("--out", tmp_path / "out")
    evaluated(command, encoder, "--task", file, "--dev", dev, *TUNED, *out, "--keep-models")
    (folder,) = (tmp_path / "out" / "a.csv").iterdir()
    world = World(tmp_path, folder / "model", file)
    cache = open_cache(world.dump(codec="none", logits=True, packing="records").path)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    texts = [tokenizer.decode(sequence.input_ids, skip_special_tokens=True) for sequence in cache]
    expected = SentenceTransformer(str(folder / "model"), device="cpu").encode(texts)
    stored = np.stack([sequence.states()[LOGITS][0].numpy() for sequence in cache])
    np.testing.assert_allclose(stored, expected, atol=1e-4)
    train = ("--objective", "tinybert-prediction", "--arch", "2x32", "--init", "slice", "--lr", "1e-3")
    sizes = ("--steps", 60, "--batch-size", 8, "--out", tmp_path / "run")
    code, _, err = command("train", cache.reader.root, *train, *sizes)
    assert code == 0, err
    (trial,) = evaluated(command, tmp_path / "run", "--task", file, "--dev", dev, "--as-is", *out)["trials"]
    assert trial["scores"]["dev"]["accuracy"] > 90
    modules = json.loads((folder / "model" / "config.json").read_text()) | {
        "id2label": dict(enumerate("abc"))
    }
    (folder / "model" / "config.json").write_text(json.dumps(modules))
    dump = ("dump", "--teacher", folder / "model", "--corpus", file, "--codec", "none", "--logits")
    more = ("--packing", "records", "--max-length", 32, "--out", tmp_path / "no")
    command.fails(
        *dump, *more, code=1, says="pools vectors of 2 numbers, and its config.json names 3 classes"
    )


def test_a_rare_class_is_learned(teacher: Path, tmp_path: Path, command: Command) -> None:
    """Whichever row it is: the tenth that is scored leaves some of every class to train on."""
    for at in (3, 16, 41):
        found = rows(60)[:60]
        found[at]["label"] = "rare"
        file = write(tmp_path / f"{at}.csv", found)
        asked = ("--task", file, "--lr", "1e-3", "--epochs", 1, "--max-length", 32)
        code, _, err = command("evaluate", teacher, *asked, "--out", tmp_path / "out")
        assert code == 0, err
        assert "3 classes" in err


def test_python_takes_one_name_and_a_folder_as_text(teacher: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", rows())
    config = validated(EvaluateConfig, {"task": file, "epochs": "1", "max_train": 8, "max_length": 32})
    found = evaluate_models(config, str(teacher), out=str(tmp_path / "out"), session=Session(tmp_path))

    assert len(found.trials) == 1


def test_a_word_among_values_is_no_class(teacher: Path, tmp_path: Path, command: Command) -> None:
    values = [{"text": f"{WORDS[n % 9]} {WORDS[n % 7]}", "label": n / 7} for n in range(40)]
    for number in (3, 11, 23):
        values[number]["label"] = "NA"
    file = write(tmp_path / "values.csv", values)
    words = ("evaluate", teacher, "--task", file, *SHORT, "--out", tmp_path / "out")
    said = command.fails(*words, code=1, says="labels are, on a scale")
    assert "record 3 (counted from 0): label 'NA' is not a number" in said
    assert not (tmp_path / "out").exists()


def test_predictions_name_records_of_the_file_and_texts_of_both_files_are_told(
    teacher: Path, tmp_path: Path, command: Command
) -> None:
    found = rows(40)
    file = write(tmp_path / "a.jsonl", found)
    evaluated(command, teacher, "--task", file, *TUNED, "--out", tmp_path / "out")
    (folder,) = (tmp_path / "out" / "a.jsonl").iterdir()
    lines = [line.split("\t") for line in (folder / "predictions" / "dev.tsv").read_text().splitlines()[1:]]
    scored = {found[int(index)]["text"] for index, _ in lines}
    assert len(lines) == sum(row["text"] in scored for row in found)
    assert sum(found[int(index)]["label"] == word for index, word in lines) > 0.9 * len(lines)

    dev = write(tmp_path / "dev.jsonl", found[:10])
    words = ("evaluate", teacher, "--task", file, "--dev", dev, *SHORT, "--out", tmp_path / "other")
    code, _, err = command(*words)
    assert code == 0, err
    assert "a.jsonl: 10 of the 10 texts that are scored are also trained on" in err
    assert "have one label" not in err
    write(dev, [row for row in found if row["label"] == found[0]["label"]])
    code, _, err = command(*words, "--metric", "matthews")
    assert code == 0, err
    assert "all examples of dev have one label" in err
