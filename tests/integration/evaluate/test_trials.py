"""What makes a trial what it is: seeds, weights, tokenizers, label words, and what is kept of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from minilm_cache.evaluate.card import Score, Summary
from minilm_cache.evaluate.examples import SpanExample
from minilm_cache.evaluate.finetune import _arguments
from minilm_cache.evaluate.kind import kind_of
from minilm_cache.evaluate.run import _may_be_chance
from minilm_cache.evaluate.settings import TrialIdentity
from minilm_cache.evaluate.spans import SpanAnswer
from minilm_cache.evaluate.tasks import TASKS
from tests.fixtures import Command
from tests.support import World, dump_arguments, save_teacher, tiny_model, tiny_tokenizer
from tests.tasks import SHORT, evaluated, write_glue, write_squad, write_sst2

ONE = ("--epochs", 1, "--lr", "1e-3")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teacher(tmp_path_factory.mktemp("models") / "teacher")


def _weights(trial: dict[str, Any]) -> dict[str, torch.Tensor]:
    return load_file(Path(trial["folder"]) / "model" / "model.safetensors")


def test_seeds_and_untrained_shapes_are_what_they_say(
    teacher: Path, tmp_path: Path, command: Command
) -> None:
    """Seeds draw other heads and orders; an untrained shape has nothing of the folder's weights."""
    data = write_sst2(tmp_path / "SST-2")
    asked = ("--data", data, "--lr", "1e-9", "--epochs", 1, "--seeds", 2, "--untrained", "--keep-models")
    found = evaluated(command, teacher, "--task", "sst2", *asked, "--out", tmp_path / "out")
    trials = [_weights(trial) for trial in found["trials"]]
    own = load_file(teacher / "model.safetensors")
    table = "embeddings.word_embeddings.weight"
    first, second, drawn, redrawn = (one[f"bert.{table}"] for one in trials)
    assert torch.allclose(first, own[table], atol=1e-5)
    assert torch.allclose(second, own[table], atol=1e-5)
    assert not torch.allclose(trials[0]["classifier.weight"], trials[1]["classifier.weight"], atol=1e-3)
    assert not torch.allclose(drawn, own[table], atol=1e-3)
    assert not torch.allclose(drawn, redrawn, atol=1e-3)


def test_scores_by_chance_are_said(teacher: Path, tmp_path: Path, command: Command) -> None:
    """A model that was taught next to nothing may be as good as the commonest class, and hears so."""
    data = write_sst2(tmp_path / "SST-2")
    words = ("evaluate", teacher, "--task", "sst2", "--data", data, "--epochs", 1, "--max-length", 16)
    code, _, err = command(*words, "--lr", "1e-9", "--out", tmp_path / "out")
    assert code == 0, err
    assert "may be no better than chance" in err
    assert "answered for every text, has an accuracy of 50.0 in dev" in err
    scores = {"dev": {"accuracy": Score(mean=88.0, stddev=None)}}
    summary = Summary(
        model="m",
        task="sst2",
        track="",
        lr=1.0,
        epochs=1,
        seeds=1,
        settings=1,
        diverged=0,
        num_train=1,
        num_scored={"dev": 16},
        scores=scores,
    )
    assert not _may_be_chance(summary, {"dev": 0.625})  # two standard errors are 24.2 points
    assert _may_be_chance(summary, {"dev": 0.7})


def test_each_set_of_mnli_has_its_own_answers_in_words(
    teacher: Path, tmp_path: Path, command: Command
) -> None:
    """MNLI-m.tsv, MNLI-mm.tsv and AX.tsv are what plain transformers says of their rows."""
    data = write_glue(tmp_path)
    asked = ("--data", data, "--task", "mnli", *ONE, "--predict", "--keep-models", "--out", tmp_path / "out")
    (trial,) = evaluated(command, teacher, *asked)["trials"]
    folder = Path(trial["folder"])
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    assert model.config.id2label == {0: "entailment", 1: "neutral", 2: "contradiction"}
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    sources = {
        "MNLI-m": "MNLI/test_matched",
        "MNLI-mm": "MNLI/test_mismatched",
        "AX": "diagnostic/diagnostic",
    }
    for name, file in sources.items():
        rows = [line.split("\t") for line in (data / f"{file}.tsv").read_text().splitlines()[1:]]
        with torch.no_grad():
            told = [int(model(**tokenizer(*row[-2:], return_tensors="pt")).logits.argmax()) for row in rows]
        written = (folder / "predictions" / f"{name}.tsv").read_text().splitlines()[1:]
        assert [line.split("\t")[1] for line in written] == [model.config.id2label[one] for one in told]


def test_mlqas_sets_are_scored_by_their_languages() -> None:
    example = SpanExample(identifier="q", question="?", context="der Hund", answers=((4, "Hund"),))
    predicted = {"q": SpanAnswer("der Hund", 0.0)}
    assert kind_of(TASKS["mlqa"]).scores("dev-de", [example], predicted)["exact match"] == 100
    assert kind_of(TASKS["mlqa"]).scores("dev-en", [example], predicted)["exact match"] == 0


def test_the_trainer_gets_the_papers_settings(tmp_path: Path) -> None:
    identity = TrialIdentity(
        task="sst2",
        track="",
        data_sha256="",
        model_sha256="",
        tokenizer_sha256="",
        untrained=False,
        lr=2e-5,
        epochs=4,
        batch_size=16,
        seed=7,
        max_length=32,
        precision="bfloat16",
    )
    found = _arguments(identity, str(tmp_path), torch.device("cpu"))
    assert (found.learning_rate, found.num_train_epochs, found.per_device_train_batch_size) == (2e-5, 4, 16)
    assert (found.get_warmup_steps(100), found.weight_decay, found.seed, found.bf16) == (10, 0.01, 7, True)
    assert str(found.lr_scheduler_type).endswith(("linear", "LINEAR"))


def test_what_was_kept_of_a_trial_stays(teacher: Path, tmp_path: Path, command: Command) -> None:
    """A trial that is done again for its predictions keeps its model, and the reverse."""
    data = write_sst2(tmp_path / "SST-2")
    asked = (teacher, "--task", "sst2", "--data", data, *ONE, "--out", tmp_path / "out")
    for more in (["--keep-models"], ["--predict"], ["--keep-models"], ["--keep-models", "--predict"]):
        (trial,) = evaluated(command, *asked, *more)["trials"]
    folder = Path(trial["folder"])
    assert (folder / "model" / "model.safetensors").is_file()
    assert (folder / "predictions" / "SST-2.tsv").is_file()
    at = (folder / "trial.json").stat().st_mtime_ns
    evaluated(command, *asked, "--keep-models", "--predict")
    assert (folder / "trial.json").stat().st_mtime_ns == at
    rows = (data / "test.tsv").read_text().splitlines()
    (data / "test.tsv").write_text("\n".join(rows[:3]) + "\n")  # predictions of other texts are no use
    evaluated(command, *asked, "--predict")
    assert len((folder / "predictions" / "SST-2.tsv").read_text().splitlines()) == 3
    at = (folder / "trial.json").stat().st_mtime_ns
    (data / "test.tsv").unlink()
    assert evaluated(command, *asked)["trials"][0]["folder"] == str(folder)
    assert (folder / "trial.json").stat().st_mtime_ns == at


def test_another_tokenizer_is_another_trial(tmp_path: Path, command: Command) -> None:
    own = save_teacher(tmp_path / "own")
    data = write_glue(tmp_path / "glue")
    asked = (own, "--task", "rte", "--data", data, *ONE, "--out", tmp_path / "out")
    (first,) = evaluated(command, *asked)["trials"]
    file = own / "tokenizer_config.json"
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    file.write_text(json.dumps({**json.loads(file.read_text()), **names}))
    (second,) = evaluated(command, *asked)["trials"]
    assert first["folder"] != second["folder"]


def test_padding_is_on_the_right_whatever_a_tokenizer_says(tmp_path: Path, command: Command) -> None:
    scores = []
    for side in ("right", "left"):
        own = save_teacher(tmp_path / side)
        tokenizer = tiny_tokenizer()
        tokenizer.padding_side = side
        tokenizer.save_pretrained(own)
        data = write_squad(tmp_path / "squad", "2.0")
        asked = ("--data", data, *ONE, "--batch-size", 4, "--out", tmp_path / side / "out")
        scores.append(evaluated(command, own, "--task", "squad2", *asked)["trials"][0]["scores"])
    assert scores[0] == scores[1]


@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_classifier_learns_another_task(tmp_path: Path, command: Command, num_labels: int) -> None:
    """Heads of another task are drawn anew: for spans, and for classes of another number."""
    own = tmp_path / "classifier"
    tiny_model("bert", head="sequences", num_labels=num_labels).save_pretrained(own)
    tiny_tokenizer().save_pretrained(own)
    data = write_squad(tmp_path / "squad", "2.0")
    evaluated(command, own, "--task", "squad2", "--data", data, *ONE, "--out", tmp_path / "out")
    data = write_sst2(tmp_path / "SST-2")
    evaluated(command, own, "--task", "sst2", "--data", data, *ONE, "--out", tmp_path / "out")


def test_scores_of_other_versions_are_told(teacher: Path, tmp_path: Path, command: Command) -> None:
    data = write_sst2(tmp_path / "SST-2")
    asked = ("evaluate", teacher, "--task", "sst2", "--data", data, *ONE, "--out", tmp_path / "out", *SHORT)
    command(*asked)
    file = next((tmp_path / "out").rglob("trial.json"))
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "versions": {**record["versions"], "torch": "1.0"}}))
    code, _, err = command(*asked)
    assert code == 0
    assert "1 of 1 trials were run with other versions of libraries" in err


def test_cards_keep_what_is_not_replaced(tmp_path: Path, command: Command) -> None:
    own = save_teacher(tmp_path / "own")
    theirs = EvalResult("text-classification", "mine/rte", "RTE", "accuracy", 99.0)
    data = ModelCardData(model_name="x", eval_results=[theirs])
    (own / "README.md").write_text(f"---\n{data.to_yaml()}\n---\n\n# Mine\n")
    glue = write_glue(tmp_path / "glue")
    asked = ("--data", glue, "--epochs", 1, "--card", "--max-train", 6, "--out", tmp_path / "out")
    evaluated(command, own, "--task", "rte", *asked, "--lr", "1e-3", "--lr", "1e-5", "--seeds", 2)
    evaluated(command, own, "--task", "sst2", *asked)
    card = ModelCard.load(own / "README.md")
    results = {(one.dataset_type, one.dataset_config, one.dataset_split) for one in card.data.eval_results}
    assert results == {
        ("mine/rte", None, None),
        ("nyu-mll/glue", "rte", "validation"),
        ("nyu-mll/glue", "sst2", "validation"),
    }
    assert "The best on dev of 2 settings" in card.text
    assert "Fine-tuned on 6 examples" in card.text
    assert "dev (12 examples)" in card.text
    assert "±" in card.text


def test_misuse_of_models_and_options(world: World, command: Command) -> None:
    data = write_sst2(world.root / "SST-2")
    asked = ("--task", "sst2", "--data", data, *SHORT)
    command.fails(
        "evaluate", world.teacher, *asked, "--task", "ssst", code=2, says="sst2, ssst: there is no task ssst"
    )
    command.fails("evaluate", world.teacher, *asked, "--out", world.corpus, code=2, says="is a file")
    command.fails(
        "evaluate",
        data,
        *asked,
        code=1,
        says=("is neither a model nor a run", "no config.json", "no run.json"),
    )
    command.fails(
        "evaluate",
        world.teacher,
        *asked,
        "--device",
        "meta",
        code=2,
        says="--device meta: torch computes nothing",
    )
    squad = write_squad(world.root / "squad", "1.1")
    says = "SQuAD has no test set to predict"
    command.fails(
        *("evaluate", world.teacher, "--task", "squad", "--data", squad, "--predict"), code=1, says=says
    )
    command(*dump_arguments(world))
    run = world.root / "run"
    command("train", world.root / "cache", "--arch", "1x16", "--steps", 2, "--out", run)
    command.fails(
        "evaluate", run, *asked, "--revision", "main", code=2, says="goes with a model from the hub"
    )
    decoder = world.root / "decoder"
    config = AutoConfig.for_model("gpt2", n_embd=16, n_layer=1, n_head=2, vocab_size=200, n_positions=64)
    AutoModel.from_config(config).save_pretrained(decoder)
    tiny_tokenizer().save_pretrained(decoder)
    command.fails("evaluate", decoder, *asked, code=1, says="names no pad_token_id")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["more", "words"])
    tokenizer.save_pretrained(world.teacher)
    command.fails("evaluate", world.teacher, *asked, code=1, says="tokens, and the model")
