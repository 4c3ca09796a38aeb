"""Tasks whose answers are generated: layouts, fine-tuning, scores, kept models, and bad data."""

import itertools
import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from nltk.translate.bleu_score import corpus_bleu
from nltk.translate.meteor_score import meteor_score

from minilm_cache import TextGenerator
from minilm_cache.errors import CorpusError, InvalidConfigError
from minilm_cache.evaluate.files import Source
from minilm_cache.evaluate.generation import generation_scores, has_wordnet
from minilm_cache.evaluate.generation_data import read_generation_task
from minilm_cache.evaluate.tasks import TASKS, GenerationTask
from minilm_cache.models.decoding import GENERATION_FILE, Decoding
from minilm_cache.session import Silent
from tests.fixtures import Command
from tests.support import WORDS, save_teacher, tiny_tokenizer, write_hub
from tests.tasks import write_squad, write_sst2

SHORT = ("--max-length", 24, "--max-new-tokens", 6, "--num-beams", 2)
FAST = (*SHORT, "--epochs", 1, "--batch-size", 8)
XSUM = next(task for task in TASKS.values() if isinstance(task, GenerationTask) and task.name == "xsum")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teacher(tmp_path_factory.mktemp("models") / "teacher", hidden_size=64)


def _rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return texts whose target is their first word, twice."""
    drawn = random.Random(seed)
    texts = [drawn.choices(WORDS[:12], k=3) for _ in range(count)]
    return [{"src": " ".join(words), "tgt": f"{words[0]} {words[0]}"} for words in texts]


def _write(file: Path, rows: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _trial(command: Command, *arguments: object) -> dict[str, Any]:
    code, out, err = command("evaluate", *arguments, "--device", "cpu", "--json")
    assert code == 0, err
    trials: list[dict[str, Any]] = json.loads(out)["trials"]
    assert len(trials) == 1
    return trials[0]


def test_a_model_learns_to_generate_and_is_kept(teacher: Path, tmp_path: Path, command: Command) -> None:
    """The kept model generates the trial's texts again, scores the same as it is, and resumes."""
    file = _write(tmp_path / "own.jsonl", _rows(480))
    dev = _write(tmp_path / "dev.jsonl", _rows(24, seed=1))
    asked = ("--task", file, "--dev", dev, *SHORT, "--lr", "3e-3", "--epochs", 25, "--out", tmp_path / "out")
    trial = _trial(command, teacher, *asked, "--keep-models")
    assert trial["scores"]["dev"]["rougeL"] > 80  # a model that knows nothing of the source has 8
    folder = Path(trial["folder"])
    written = [json.loads(line) for line in (folder / "predictions" / "dev.jsonl").read_text().splitlines()]
    assert [row["tgt"] for row in written] == [row["tgt"] for row in _rows(24, seed=1)]
    generated = TextGenerator.load(folder / "model").generate([row["src"] for row in written])
    assert generated == [row["generated"] for row in written]
    assert trial["headline"] == trial["scores"]["dev"]["rougeL"]

    again = _trial(command, teacher, *asked, "--keep-models")
    assert again["train_s"] == trial["train_s"]  # it was not run again
    as_is = _trial(
        command, folder / "model", "--task", file, "--dev", dev, *SHORT, "--as-is", "--out", tmp_path / "2"
    )
    assert as_is["scores"] == trial["scores"]
    bare = _trial(command, folder / "model", "--task", file, "--dev", dev, "--as-is", "--out", tmp_path / "3")
    assert bare["scores"] == trial["scores"]  # as it was tuned, not as tasks are by default
    code, _, err = command("generate", folder / "model", "ba", "--answer", "be")
    assert (code, "was tuned on single texts" in err) == (2, True)

    code, printed, err = command(
        *("speed", teacher, folder / "model", "--generate", 4, "--batch-size", 2, "--length", 16),
        *("--turns", 1, "--device", "cpu", "--json"),
    )
    assert code == 0, err
    passes = {run["runtime"]: run for run in json.loads(printed)["models"][1]["passes"]}
    assert passes["generate"]["tokens_per_s"] * passes["generate"]["latency_ms"] == pytest.approx(8e3)
    assert passes["generate"]["speedup"] == 1
    code, _, err = command("speed", teacher, "--generate", 4, "--length", 16)
    assert (code, "none of the models was fine-tuned" in err) == (2, True)

    out = tmp_path / "questions.jsonl"
    code, printed, err = command("generate", folder / "model", "--file", dev, "--out", out)
    assert code == 0, err
    assert [json.loads(line)["generated"] for line in out.read_text().splitlines()] == generated
    code, printed, err = command("generate", folder / "model", written[0]["src"], written[1]["src"])
    assert code == 0, err
    assert printed.splitlines() == generated[:2]
    assert "cut" not in err
    code, _, err = command("generate", folder / "model", "ba", "ba " * 40)
    assert (code, "1 of 2 texts is cut at 24 tokens" in err) == (0, True), err


def test_other_settings_are_other_trials(teacher: Path, tmp_path: Path, command: Command) -> None:
    file, out = _write(tmp_path / "own.jsonl", _rows(16)), tmp_path / "out"
    first = _trial(command, teacher, "--task", file, *FAST, "--out", out)
    assert first["identity"]["generation"]["decoding"]["num_beams"] == 2
    for changed in (
        ("--num-beams", 3),
        ("--label-smoothing", 0.0),
        ("--target-mask-prob", 0.5),
        ("--no-repeat-ngram-size", 2),
    ):
        other = _trial(command, teacher, "--task", file, *FAST, *changed, "--out", out)
        assert other["folder"] != first["folder"]


def test_a_short_model_reads_long_texts_by_copied_positions(
    teacher: Path, tmp_path: Path, command: Command
) -> None:
    rows = [{"src": " ".join(WORDS[number : number + 12] * 8), "tgt": "ba"} for number in range(12)]
    asked = ("--task", _write(tmp_path / "own.jsonl", rows), *FAST, "--max-length", 90, "--device", "cpu")
    out = ("--out", tmp_path / "out")
    code, _, err = command("evaluate", teacher, *asked, *out)
    assert (code, "has 66. Lower one of them, or fine-tune with --positions copied" in err) == (2, True)
    code, printed, err = command(
        "evaluate", teacher, *asked, *out, "--positions", "copied", "--keep-models", "--json"
    )
    assert code == 0, err
    assert "teacher has 66 positions; 30 more are copies of the first ones" in err
    folder = Path(json.loads(printed)["trials"][0]["folder"]) / "model"
    generator = TextGenerator.load(folder)
    assert generator.model.config.max_position_embeddings == 96
    assert (generator.tokenizer.model_max_length, generator.decoding.max_source) == (96, 90)
    code, _, err = command("generate", folder, rows[0]["src"], "--max-length", 91)
    assert code == 2
    code, _, err = command("evaluate", folder, *asked[:2], "--as-is", "--positions", "copied", *out)
    assert (code, "--positions is about fine-tuning" in err) == (2, True)


def test_questions_of_squad_from_passages_and_answers(
    teacher: Path, tmp_path: Path, command: Command
) -> None:
    data = write_squad(tmp_path / "SQuAD", "1.1")
    trial = _trial(
        command,
        teacher,
        "--task",
        "squad-qg",
        "--data",
        tmp_path,
        *FAST,
        "--keep-models",
        "--out",
        tmp_path / "o",
    )
    assert trial["num_train"] == 24
    rows = (Path(trial["folder"]) / "predictions" / "dev.jsonl").read_text().splitlines()
    questions = [
        question["question"]
        for article in json.loads((data / "dev-v1.1.json").read_text())["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]
    assert [json.loads(row)["tgt"] for row in rows] == questions
    code, _, err = command("generate", Path(trial["folder"]) / "model", "ba be bi")
    assert (code, "was tuned on passages with answers" in err) == (2, True)
    code, printed, err = command(
        "generate", Path(trial["folder"]) / "model", "ba be bi", "--answer", "be", "--json"
    )
    assert code == 0, err
    assert json.loads(printed)["texts"][0]["answer"] == "be"


def _source(folder: Path, *, tests: bool = False) -> Source:
    return Source(folder=folder, hub=None, tests=tests, note=Silent().note)


def test_scores_that_some_trials_lack_are_left_out(teacher: Path, tmp_path: Path, command: Command) -> None:
    """WordNet, and with it METEOR, may be installed between two seeds."""
    file, out = _write(tmp_path / "own.jsonl", _rows(16)), tmp_path / "out"
    first = _trial(command, teacher, "--task", file, *FAST, "--out", out)
    record = Path(first["folder"]) / "trial.json"
    content = json.loads(record.read_text())
    content["scores"]["dev"]["METEOR"] = 1.0
    record.write_text(json.dumps(content))
    asked = ("--task", file, *FAST, "--out", out, "--seeds", 2, "--device", "cpu", "--json")
    code, printed, err = command("evaluate", teacher, *asked)
    assert code == 0, err
    (summary,) = json.loads(printed)["summaries"]
    assert set(summary["scores"]["dev"]) == {"BLEU-4", "rouge1", "rouge2", "rougeL"}


def test_texts_that_are_trained_on_and_scored_are_counted(
    teacher: Path, tmp_path: Path, command: Command
) -> None:
    """Targets that are cut, too: the model learns to end where they were."""
    rows = [*_rows(16), {"src": "ba", "tgt": "ba " * 9}, {"src": "ba " * 30, "tgt": "ba " * 9}]
    dev = _write(tmp_path / "dev.jsonl", [*_rows(16)[:3], {"src": "bo", "tgt": "ba " * 9}])
    file = _write(tmp_path / "own.jsonl", rows)
    words = ("evaluate", teacher, "--task", file, "--dev", dev, *FAST, "--device", "cpu", "--json")
    code, printed, err = command(*words, "--out", tmp_path / "out")
    assert code == 0, err
    assert "own.jsonl: 3 of the 4 texts that are scored are also trained on" in err
    found = json.loads(printed)
    assert [trial["num_cut"] for trial in found["trials"]] == [{"train": 2}]  # those of dev sets are whole
    (cut,) = (line for line in found["remarks"] if "cut" in line)
    said = "own.jsonl, train: 2 of 18 texts are cut at 24 tokens, or targets at 6 (--max-new-tokens)"
    assert said in cut


def test_columns_may_be_named_without_the_target(teacher: Path, tmp_path: Path, command: Command) -> None:
    rows = [{**row, "answer": row["src"].split()[0]} for row in _rows(16)]
    file = _write(tmp_path / "own.jsonl", rows)
    trial = _trial(
        command, teacher, "--task", file, "--text-columns", "src,answer", *FAST, "--out", tmp_path / "o"
    )
    written = (Path(trial["folder"]) / "predictions" / "dev.jsonl").read_text()
    assert " [SEP] " in written


def test_published_layouts_are_read_alike(tmp_path: Path) -> None:
    rows = {"train": _rows(5), "dev": _rows(3, seed=1), "test": _rows(2, seed=2)}
    for name, split in rows.items():
        _write(tmp_path / "unilm" / f"{name}.json", split)
        val = {"dev": "val"}.get(name, name)
        for folder, ends in (("bart", (".source", ".target")), ("giga", (".article.txt", ".title.txt"))):
            (tmp_path / folder).mkdir(exist_ok=True)
            for column, end in zip(("src", "tgt"), ends, strict=True):
                lines = "".join(row[column] + "\n" for row in split)
                (tmp_path / folder / f"{val}{end}").write_text(lines)
    (tracks,) = zip(
        *(
            read_generation_task(XSUM, _source(tmp_path / name, tests=True))
            for name in ("unilm", "bart", "giga")
        ),
        strict=True,
    )
    assert tracks[0] == tracks[1] == tracks[2]
    assert [example.target for example in tracks[0].test["test"]] == [row["tgt"] for row in rows["test"]]
    (without,) = read_generation_task(XSUM, _source(tmp_path / "bart"))
    assert not without.test


@pytest.mark.parametrize("name", ["squad-qg", "xsum", "cnndm", "gigaword"])
def test_columns_of_the_hub(name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    assert isinstance(task, GenerationTask)
    columns = (*task.hub_sources, task.hub_target)
    rows = Dataset.from_dict({column: [f"{column} {number}" for number in range(3)] for column in columns})
    splits = dict.fromkeys(("train", "validation", "test"), rows)
    hub = write_hub(tmp_path / "hub", {task.hub_configuration: splits})
    asked = Source(folder=None, hub=str(hub), tests=True, note=Silent().note)
    (track,) = read_generation_task(task, asked)
    assert track.dev["dev"][1].source == tuple(f"{column} 1" for column in task.hub_sources)
    assert [example.target for example in track.test["test"]] == [f"{columns[-1]} {n}" for n in range(3)]
    other = write_hub(
        tmp_path / "other", {task.hub_configuration: {"train": rows.remove_columns(columns[0])}}
    )
    with pytest.raises(CorpusError, match=f"has no column '{columns[0]}'"):
        read_generation_task(task, replace(asked, hub=str(other)))


def test_meteor_is_nltks_and_needs_wordnet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary without synonyms stands for WordNet: words and stems are compared."""

    class NoSynonyms:
        def synsets(self, _: str) -> list[object]:
            return []

    targets = ["The cats sat on the mat .", "Who wrote it ?"]
    assert "METEOR" not in generation_scores(targets, targets) or has_wordnet()
    module = "minilm_cache.evaluate.generation"
    monkeypatch.setattr(f"{module}.has_wordnet", lambda: True)
    monkeypatch.setattr(f"{module}.meteor_score", partial(meteor_score, wordnet=NoSynonyms()))
    same = generation_scores(targets, targets)["METEOR"]
    assert same > 95  # one chunk of all words costs a little
    other = generation_scores(targets, ["the cat sat on the mat .", "who wrote it ?"])["METEOR"]
    assert other == pytest.approx(same, abs=1)  # by its stem
    assert generation_scores(targets, ["nothing alike", "at all"])["METEOR"] == 0


def _lcs(first: list[str], second: list[str]) -> int:
    table = np.zeros((len(first) + 1, len(second) + 1), int)
    for i, word in enumerate(first):
        for j, other in enumerate(second):
            table[i + 1, j + 1] = table[i, j] + 1 if word == other else max(table[i, j + 1], table[i + 1, j])
    return int(table[-1, -1])


def test_scores_by_counting() -> None:
    """BLEU-4 against nltk's, ROUGE by longest common subsequences and counted n-grams."""
    targets = ["What did the big dog bring home today ?", "Who wrote the long red book of cats ?"]
    generated = ["what did the big cat bring home today ?", "who wrote the red book of cats ?"]
    found = generation_scores(targets, generated)
    split = [[text.lower().split() for text in texts] for texts in (targets, generated)]
    assert found["BLEU-4"] == pytest.approx(
        100 * corpus_bleu([[one] for one in split[0]], split[1]), abs=1e-6
    )
    words = [[text.lower().replace("?", "").split() for text in texts] for texts in (targets, generated)]

    def f1(count: int, first: int, second: int) -> float:
        return 100 * 2 * count / (first + second)

    longest = [f1(_lcs(a, b), len(a), len(b)) for a, b in zip(*words, strict=True)]
    assert found["rougeL"] == pytest.approx(np.mean(longest))
    pairs = [[Counter(itertools.pairwise(text)) for text in texts] for texts in words]
    twos = [f1((a & b).total(), a.total(), b.total()) for a, b in zip(*pairs, strict=True)]
    assert found["rouge2"] == pytest.approx(np.mean(twos))
    cats = (["the cats were running home"] * 3, ["a cat runs home"] * 3)
    alone, beside = generation_scores(*cats), generation_scores(cats[0] + ["привет"], cats[1] + ["привет"])
    assert beside["rouge1"] == pytest.approx((3 * alone["rouge1"] + 100) / 4)  # stems are still counted
    for text in ("привет мир друг мой хороший", "東京は日本の首都"):
        same = generation_scores([text], [text])
        assert [same[name] for name in ("rouge1", "rouge2", "rougeL")] == pytest.approx([100] * 3)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"src": "ba"}], "there is no 'tgt'; it has src"),
        ([{"src": "ba", "tgt": " "}], "tgt is empty"),
        ([{"src": "", "tgt": "ba"}], "src is empty"),
        ([{"src": 3, "tgt": "ba"}], "is not a text"),
        ([["ba", "be"]], "not a JSON object"),
    ],
)
def test_bad_records_are_named(rows: list[Any], named: str, tmp_path: Path) -> None:
    for name in ("train", "dev"):
        _write(tmp_path / f"{name}.jsonl", rows)
    with pytest.raises(CorpusError, match=f"train.jsonl, line 1.*{named}"):
        read_generation_task(XSUM, _source(tmp_path))


def test_bad_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.source").write_text("ba\nbe\n")
    with pytest.raises(CorpusError, match=r"train\.source has no train\.target beside it"):
        read_generation_task(XSUM, _source(tmp_path))
    (tmp_path / "train.target").write_text("ba\n")
    with pytest.raises(CorpusError, match=r"has 2 lines, and train\.target 1"):
        read_generation_task(XSUM, _source(tmp_path))
    (tmp_path / "train.target").write_text("ba\nbe\n")
    with pytest.raises(CorpusError, match=r"has no dev set of xsum.*dev\.jsonl"):
        read_generation_task(XSUM, _source(tmp_path))


def test_misuse_is_one_line(teacher: Path, tmp_path: Path, command: Command) -> None:
    own = _write(tmp_path / "own.jsonl", _rows(8))
    labelled = _write(tmp_path / "l.jsonl", [{"text": f"ba {n}", "label": n % 2} for n in range(8)])
    one = _write(tmp_path / "one.jsonl", [{"src": "ba"}] * 4)
    sst2 = write_sst2(tmp_path / "SST-2").parent
    written = save_teacher(tmp_path / "bert")
    modern = save_teacher(tmp_path / "modern", "modernbert")
    cases: list[tuple[tuple[object, ...], str]] = [
        (("evaluate", teacher, "--task", own, "--max-length", 64), "need 112 positions"),
        (
            ("evaluate", teacher, "--task", own, *SHORT, "--min-new-tokens", 6),
            "is not below --max-new-tokens 6",
        ),
        (
            ("evaluate", teacher, "--task", "sst2", "--data", sst2, "--num-beams", 2),
            "texts that are generated",
        ),
        (("evaluate", teacher, "--task", labelled, "--num-beams", 2), "is about generated texts"),
        (("evaluate", teacher, "--task", one, "--text-columns", "src", "--target-column", "tgt"), "tgt"),
        (("evaluate", teacher, "--task", "squad-qg"), "--data is missing"),
        (("evaluate", teacher, modern, "--task", own, *SHORT), "keeps no keys and values"),
        (("evaluate", teacher, "--task", own, "--target-column", "tgt", "--metric", "f1"), "is about labels"),
        (("evaluate", teacher, "--task", own, "--as-is", "--label-smoothing", 0.3), "--label-smoothing"),
        (("generate", written, "ba", "--file", own), "not both"),
        (("generate", written, "ba"), "was not fine-tuned to generate texts"),
        (("generate", written), "give texts, or a file"),
        (("generate", written, "ba", "be", "--answer", "ba"), "--answer is given 1 time for 2 texts"),
        (("generate", written, "--file", tmp_path / "none.jsonl"), "is not a file"),
        (("generate", written, "--file", own, "--text-columns", "nosuch"), "nosuch"),
        (("generate", written, "ba", "--out", own), "exists"),
    ]
    for arguments, named in cases:
        code, _, err = command(*arguments)
        assert code in (1, 2), arguments
        last = err.strip().splitlines()[-1]
        assert last.startswith("error: "), (arguments, last)
        assert named in last, (arguments, last)
        assert "Traceback" not in err
        assert "% (" not in err, arguments  # nothing was trained before


def test_texts_that_come_out_empty_are_counted(
    teacher: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = Decoding(max_source=24, max_new_tokens=6)
    folder = shutil.copytree(teacher, tmp_path / "generator")
    (folder / GENERATION_FILE).write_text(decoding.model_dump_json())
    ended = SimpleNamespace(
        pairs=False, decoding=decoding, tokenizer=tiny_tokenizer(), generate=lambda *_, **__: ["", "be"]
    )
    monkeypatch.setattr(TextGenerator, "load", lambda *_: ended)
    code, out, err = command("generate", folder, "ba", "bi")
    assert code == 0, err
    assert out == "\nbe\n"
    assert "1 of 2 texts came out empty: the model ended at once" in err
    assert "--min-new-tokens" in err


def test_sources_are_those_that_a_model_was_tuned_on(teacher: Path, tmp_path: Path, command: Command) -> None:
    file = _write(tmp_path / "own.jsonl", _rows(24))
    trial = _trial(command, teacher, "--task", file, *SHORT, "--keep-models", "--out", tmp_path / "out")
    folder = Path(trial["folder"])
    pairs = _write(tmp_path / "pairs.jsonl", [{"src": "ba", "answer": "be", "tgt": "bo"}] * 4)
    columns = ("--text-columns", "src,answer", "--as-is", "--out", tmp_path / "4")
    command.fails("evaluate", folder / "model", "--task", pairs, *columns, code=2, says="on single texts")
    generator = TextGenerator.load(folder / "model")
    assert generator.generate(text for text in ["ba", "be"]) == generator.generate(["ba", "be"])
    of_pairs = TextGenerator(generator.model.model, generator.tokenizer, generator.decoding, pairs=True)
    with pytest.raises(InvalidConfigError, match="tuned on passages with answers: give pairs"):
        of_pairs.generate(["ba"])
    text = ("--corpus", _write(tmp_path / "text.jsonl", [{"text": "ba be bi bo bu"}] * 4), "--vocab", "texts")
    layers = ("truncate", "--teacher", folder / "model", "--layers", "0,1")
    for words in (("trim", folder / "model", *text), layers):
        assert command(*words, "--out", tmp_path / words[0])[0] == 0
        again = TextGenerator.load(tmp_path / str(words[0]))
        assert again.decoding == generator.decoding
        assert len(again.generate(["ba be"])) == 1
    for wrong in ([3], [("ba", 3)], [()], [("a", "b", "c")], "ba", 3):
        with pytest.raises(InvalidConfigError, match="give a list of texts"):
            generator.generate(wrong)  # type: ignore[arg-type]
