"""Exported models: their runtimes alone run the files, and transformers says what they should answer."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, T5Config, T5EncoderModel

from minilm_cache.deploy.config import ExportModelConfig
from minilm_cache.deploy.forms import write_form
from minilm_cache.evaluate.embeddings import sentence_encoder
from minilm_cache.evaluate.models import Evaluated
from minilm_cache.models.exported import ExportedModel
from minilm_cache.models.pooling import SentenceModel
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import train_students
from minilm_cache.workflows.export_model import _texts
from tests.encoders import save_encoder
from tests.fixtures import Command
from tests.integration.evaluate.test_retrieval import questions
from tests.support import VOCABULARY, World, save_teacher, write_corpus
from tests.tasks import write_glue

FORMS = [("--onnx",), ("--onnx", "--int8"), ("--openvino",), ("--openvino", "--int8")]
FEW = ("--max-length", 32, "--texts", 16)
TEXTS = ["ba be bi", "ba bo bu da de di do", "ma"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A sentence encoder, and a text."""
    root = tmp_path_factory.mktemp("world")
    encoder = save_teacher(root / "encoder", num_hidden_layers=1, max_position_embeddings=40)
    save_encoder(encoder, "mean", max_length=32)
    return World(root, encoder, write_corpus(root / "corpus.txt", 120))


def export(command: Command, model: Path, out: Path, *words: object, corpus: Path | None = None) -> Any:
    given = () if corpus is None else ("--corpus", corpus)
    code, printed, err = command("export-model", model, "--out", out, *given, *FEW, *words, "--json")
    assert code == 0, err
    return json.loads(printed)


def run_alone(folder: Path, inputs: dict[str, torch.Tensor]) -> np.ndarray:
    """Return the output of an exported file, by its own runtime."""
    zeros = {"token_type_ids": torch.zeros_like(inputs["input_ids"])}
    arrays = {name: value.numpy() for name, value in (zeros | inputs).items()}
    if (folder / "onnx/model.onnx").exists():
        session = onnxruntime.InferenceSession(folder / "onnx/model.onnx", providers=["CPUExecutionProvider"])
        names = {each.name for each in session.get_inputs()}
        return np.asarray(session.run(None, {name: arrays[name] for name in names})[0])
    model = openvino.Core().compile_model(folder / "openvino/openvino_model.xml", "CPU")
    names = {each.get_any_name() for each in model.inputs}
    return np.asarray(model({name: arrays[name] for name in names})[0])


def cosines_by_the_page(folder: Path, model: SentenceTransformer) -> list[float]:
    """Run the lines of docs/deploy.md that need no torch; return cosines with what a model gives."""
    page = (Path(__file__).parents[3] / "docs/deploy.md").read_text()
    lines = page.partition("from pathlib")[2].partition("```")[0]
    scope: dict[str, Any] = {}
    exec(f"from pathlib{lines}".replace("shipped", str(folder)), scope)  # noqa: S102 - our own page
    expected = model.encode(["a text", "another, longer text"])
    assert scope["vectors"].shape == expected.shape
    return [float(cosine) for cosine in (scope["vectors"] * expected).sum(1)]


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_files_answer_as_the_model_does(
    world: World, tmp_path: Path, command: Command, form: tuple[str, ...]
) -> None:
    """Whole ones exactly, in 8 bit nearly, with what sentence-transformers needs beside the file."""
    is_small = "--int8" in form
    out = tmp_path / "out"
    result = export(command, world.teacher, out, *form, "--min-cosine", 0.9, corpus=world.corpus)
    assert (result["cosine"] < 1 - 1e-6) is is_small
    assert not list(out.rglob("*.safetensors"))
    record = json.loads((out / "export.json").read_text())
    assert record["cosine"] == result["cosine"]
    assert record["source_sha256"] == result["source_sha256"]
    files = list((out / form[0].strip("-")).iterdir())
    assert sum(file.stat().st_size for file in files) == result["num_bytes"]
    plain = SentenceTransformer(str(world.teacher), device="cpu")
    inputs = AutoTokenizer.from_pretrained(out)(TEXTS, padding=True, return_tensors="pt")
    states = torch.from_numpy(run_alone(out, dict(inputs)))
    mask = inputs["attention_mask"][..., None]
    vectors = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))
    expected = torch.from_numpy(plain.encode(TEXTS))
    cosines = (vectors * expected).sum(1)
    assert cosines.min() > (0.9 if is_small else 1 - 1e-4)
    if form[0] == "--onnx":
        assert min(cosines_by_the_page(out, plain)) > (0.9 if is_small else 1 - 1e-4)
    modules = json.loads((world.teacher / "modules.json").read_text())
    assert [each["path"] for each in json.loads((out / "modules.json").read_text())] == [
        each["path"] for each in modules
    ]
    command.fails("export-model", out, "--out", tmp_path / "again", *form, code=1, says="was exported")
    dump = ("dump", "--teacher", out, "--corpus", world.corpus, "--max-length", 16)
    command.fails(*dump, code=1, says="was exported")


def test_a_long_text_is_cut_where_positions_end(tmp_path: Path, command: Command) -> None:
    """Families like RoBERTa keep positions back, and OpenVINO answers with what it computed before."""
    model = save_teacher(tmp_path / "model", "roberta", num_hidden_layers=1)
    save_encoder(model, "mean", max_length=66)
    corpus, texts = write_corpus(tmp_path / "corpus.txt", 40), ["ba be bi", "bo da ma " * 40]
    plain = SentenceModel(model, 128).encode(texts)
    for form in ("--onnx", "--openvino"):
        out = tmp_path / form.strip("-")
        export(command, model, out, form, corpus=corpus)
        read = json.loads((out / "sentence_bert_config.json").read_text())["max_seq_length"]
        assert read == json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] < 66
        exported = SentenceModel(out, 128)
        for text, expected in zip(texts, plain, strict=True):
            torch.testing.assert_close(exported.encode([text])[0], expected, rtol=1e-3, atol=1e-3)


def test_a_model_is_judged_on_what_encode_reads(world: World, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(world.teacher, model)
    prompts = {"prompts": {"query": "ba be "}, "default_prompt_name": "query"}
    (model / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    config = validated(ExportModelConfig, {"onnx": True, "corpus": str(world.corpus), "texts": 8})
    found = list(_texts(config, Evaluated(name="model", folder=model), Session(tmp_path)))
    assert len(found) >= 8
    assert all(text.startswith("ba be ") for (text,) in found)


def test_a_head_that_would_be_lost_is_refused(world: World, tmp_path: Path, command: Command) -> None:
    for head in ("tokens", "spans"):
        model = save_teacher(tmp_path / head, head=head, num_hidden_layers=1)
        words = ("export-model", model, "--onnx", "--corpus", world.corpus, *FEW, "--out", tmp_path / "out")
        command.fails(*words, code=2, says=f"has a head for {head}, which an export would leave out")


def test_the_tokenizer_of_an_export_is_that_of_its_model(
    world: World, tmp_path: Path, command: Command
) -> None:
    """It cuts where the model's own does, and not where texts were cut to judge the export."""
    model = tmp_path / "left"
    shutil.copytree(world.teacher, model)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "truncation_side": "left"}))
    export(command, model, tmp_path / "out", "--onnx", "--max-length", 16, corpus=world.corpus)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").truncation_side == "left"
    own, exported = (Tokenizer.from_file(str(each / "tokenizer.json")) for each in (model, tmp_path / "out"))
    assert exported.truncation == own.truncation
    assert exported.padding == own.padding


def test_a_student_and_its_export_of_one_name_are_told_apart(
    world: World, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "shipped" / world.teacher.name
    export(command, world.teacher, out, "--onnx", corpus=world.corpus)
    code, printed, err = command(
        *("speed", world.teacher, out, "--length", 16, "--batch-size", 1, "--turns", 1, "--json")
    )
    assert code == 0, err
    names = [model["model"] for model in json.loads(printed)["models"]]
    assert names == [f"{world.root.name}/encoder", "shipped/encoder"]


def test_a_cross_encoder_that_sentence_transformers_saved_is_exported_and_trimmed(
    world: World, tmp_path: Path, command: Command
) -> None:
    """Newer releases list its modules, as they do for sentence encoders; its activation stays."""
    plain = save_teacher(tmp_path / "plain", head="sequences", num_labels=1, num_hidden_layers=1)
    saved, pairs = tmp_path / "saved", [("ba be", "bi bo"), ("da", "de di do")]
    whole = CrossEncoder(str(plain), device="cpu", max_length=32, activation_fn=torch.nn.Identity())
    whole.save_pretrained(str(saved))
    assert (saved / "modules.json").exists()
    export(command, saved, tmp_path / "out", "--onnx", corpus=world.corpus)
    scores = ExportedModel(tmp_path / "out", "onnx")
    inputs = AutoTokenizer.from_pretrained(plain)(
        *map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt"
    )
    np.testing.assert_allclose(scores(**inputs).logits[:, 0], whole.predict(pairs), atol=1e-4)
    for words in (
        ("trim", saved, "--corpus", world.corpus, "--vocab", 90),
        ("truncate", "--teacher", saved, "--layers", 0),
    ):
        folder = tmp_path / words[0]
        code, _, err = command(*words, "--out", folder)
        assert code == 0, err
        again = CrossEncoder(str(folder), device="cpu", max_length=32)
        np.testing.assert_allclose(again.predict(pairs), whole.predict(pairs), atol=1e-5)


def test_measured_by_every_command_that_measures_vectors(
    world: World, tmp_path: Path, command: Command
) -> None:
    whole, small = tmp_path / "whole", tmp_path / "small"
    export(command, world.teacher, whole, "--onnx", corpus=world.corpus)
    export(command, world.teacher, small, "--openvino", "--int8", "--min-cosine", 0.9, corpus=world.corpus)
    models = (world.teacher, whole, small)
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps(row) + "\n" for row in questions()))
    data = ("--data", write_glue(tmp_path / "glue"), "--retrieval", asked, "--max-length", 32)
    code, printed, err = command("embeddings", *models, *data, "--json")
    assert code == 0, err
    scores = json.loads(printed)
    assert scores["models"][1]["teacher_cosine"] == pytest.approx(1, abs=1e-5)
    assert 0.9 < scores["models"][2]["teacher_cosine"] < 1 - 1e-6
    assert scores["retrieval"][0]["ndcg_at_10"] == scores["retrieval"][1]["ndcg_at_10"]
    sizes = ("--batch-size", 2, "--length", 16, "--turns", 1, "--device", "cpu", "--json")
    code, printed, err = command("speed", *models, *sizes)
    assert code == 0, err
    speeds = json.loads(printed)["models"]
    assert [each["passes"][0]["runtime"] for each in speeds] == ["torch", "onnx", "openvino"]
    assert speeds[2]["num_bytes"] < speeds[1]["num_bytes"]
    weights = (world.teacher / "model.safetensors").stat().st_size
    assert speeds[0]["num_bytes"] == weights
    saved = tmp_path / "saved"
    command.fails("embeddings", *models, *data, "--save", saved, code=2, says="whole is a model that was exp")
    assert not saved.exists()
    command.fails("info", whole, code=1, says="It is an exported model: `speed`, `embeddings`")
    shutil.copy(world.teacher / "model.safetensors", whole)  # as on the hub, where both lie in one folder
    command.fails("info", whole, code=1, says="It is a model: `dump --teacher`")
    (whole / "model.safetensors").unlink()
    too_long = ("embeddings", *models[1:], "--retrieval", asked, "--max-length", 64)
    command.fails(*too_long, code=2, says="--max-length 64 is more than whole")


@pytest.mark.parametrize(("family", "form"), [("bert", FORMS[1]), ("roberta", FORMS[3])])
def test_cross_encoders_keep_their_scores(
    family: str, form: tuple[str, ...], tmp_path: Path, command: Command, *, world: World, soak: int
) -> None:
    """With the sides of pairs, where the family tells them apart; as CrossEncoder scores them."""
    if soak == 1 and family == "roberta":
        pytest.skip("a model without sides is exported in other tests, too; tried with --soak")
    scorer = save_teacher(tmp_path / "scorer", family, head="sequences", num_labels=1, num_hidden_layers=1)
    if family == "bert":
        file = scorer / "tokenizer_config.json"
        inputs = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
        file.write_text(json.dumps(json.loads(file.read_text()) | inputs))
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"a": row["question"], "b": row["answer"]} for row in questions()]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    words = (*form, "--pair-columns", "a,b", "--min-cosine", 0.8)
    result = export(command, scorer, out, *words, corpus=pairs)
    assert result["least_cosine"] is None
    texts = [(row["a"], row["b"]) for row in rows[16:32]]
    assert result["judged_by"] == len(texts)
    encoded = AutoTokenizer.from_pretrained(out)(
        *map(list, zip(*texts, strict=True)), padding=True, return_tensors="pt"
    )
    assert (len(encoded["token_type_ids"].unique()) == 2) if family == "bert" else len(encoded) == 2
    mine = run_alone(out, dict(encoded))[:, 0]
    theirs = CrossEncoder(str(scorer), device="cpu", max_length=32).predict(
        texts, activation_fn=torch.nn.Identity()
    )
    assert np.corrcoef(mine, theirs)[0, 1] == pytest.approx(result["cosine"], abs=5e-3)


def test_an_exported_cross_encoder_reranks_as_before(tmp_path: Path, command: Command, world: World) -> None:
    scorer = save_teacher(tmp_path / "scorer", head="sequences", num_labels=1, num_hidden_layers=1)
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps(row) + "\n" for row in questions()[:-1]))
    first = ("--first-stage", world.teacher, "--candidates", 4, "--max-length", 32, "--device", "cpu")
    exact, single = tmp_path / "exact", ("--text-column", "question", "--min-cosine", 0)
    code, _, err = command("export-model", scorer, "--out", exact, "--onnx", *FEW, "--corpus", asked, *single)
    assert code == 0, err
    assert "judged by single texts" in err
    code, printed, err = command("rerank", scorer, exact, "--retrieval", asked, *first, "--json")
    assert code == 0, err
    _, before, after = json.loads(printed)["models"]
    assert before["ndcg_at_10"] == after["ndcg_at_10"]
    command.fails(
        *("export-model", scorer, "--onnx", "--out", tmp_path / "no", "--retrieval", asked),
        code=2,
        says="--retrieval and --data are about vectors",
    )


def test_classifiers_answer_tasks_as_before(tmp_path: Path, command: Command, world: World) -> None:
    """`evaluate --as-is` of the model and of its export, with classes in another order than the task's."""
    names: dict[str, Any] = {"id2label": {0: "1", 1: "0"}, "label2id": {"1": 0, "0": 1}}
    model = save_teacher(tmp_path / "model", head="sequences", num_labels=2, num_hidden_layers=1, **names)
    export(command, model, tmp_path / "out", "--onnx", corpus=world.corpus)
    task = ("--task", "sst2", "--data", write_glue(tmp_path / "glue"), "--max-length", 32, "--device", "cpu")
    code, printed, err = command("evaluate", model, tmp_path / "out", *task, "--as-is", "--json")
    assert code == 0, err
    before, after = json.loads(printed)["summaries"]
    assert before["scores"] == after["scores"]
    plain = AutoModelForSequenceClassification.from_pretrained(model).eval()
    inputs = AutoTokenizer.from_pretrained(model)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = plain(**inputs).logits.numpy()
    assert np.abs(run_alone(tmp_path / "out", dict(inputs)) - expected).max() < 1e-4
    tune = ("evaluate", model, tmp_path / "out", *task, "--out", tmp_path / "tuned")
    command.fails(*tune, code=1, says="was exported")
    assert not list((tmp_path / "tuned").rglob("trial.json"))  # refused before the other one is fine-tuned


def test_a_class_whose_answers_are_shifted_is_seen(
    tmp_path: Path, command: Command, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a bias of 8 bit is: what all texts have in common decides which class is the likeliest."""
    model = save_teacher(tmp_path / "model", head="sequences", num_labels=3, num_hidden_layers=1)

    def shifted(*arguments: Any, **settings: Any) -> Any:
        run, names = write_form(*arguments, **settings)
        return (lambda inputs: run(inputs) + torch.tensor([3.0, 0.0, 0.0])), names

    monkeypatch.setattr("minilm_cache.workflows.export_model.write_form", shifted)
    words = ("export-model", model, "--onnx", *FEW, "--corpus", world.corpus, "--out", tmp_path / "out")
    command.fails(*words, code=1, says="--min-cosine")


def test_a_student_is_fitted_to_its_own_cache(world: World, tmp_path: Path, command: Command) -> None:
    """Its texts are those of the cache, held-out ones to judge by, also with a vocabulary of its own."""
    cache = world.dump(str(tmp_path / "cache"), **{"for": "embedding"})
    settings = {"arch": ("1x32",), "objective": "embedding", "steps": 2, "vocab": "60", "device": "cpu"}
    run = train_students(
        validated(TrainConfig, settings), cache.path, out=tmp_path / "run", session=Session(world.home)
    )
    student = run.student_path("1x32")
    result = export(command, student, tmp_path / "out", "--openvino", "--int8", "--min-cosine", 0.8)
    assert (result["fitted_to"], result["judged_by"]) == (16, 16)
    unused = ("--onnx", "--corpus", cache.path, "--documents", "lines", "--out", tmp_path / "unused", *FEW)
    command.fails("export-model", student, *unused, code=2, says="--documents: ")
    narrow = validated(TrainConfig, {**settings, "arch": ("1x16",), "vocab": None})
    train_students(narrow, cache.path, out=tmp_path / "narrow", session=Session(world.home))
    code, printed, _ = command(
        "export-model", tmp_path / "narrow", "--onnx", "--out", tmp_path / "mapped", *FEW
    )
    assert code == 0
    assert "minilm-cache speed" in printed
    plain = SentenceTransformer(str(tmp_path / "narrow/students/1x16"), device="cpu")
    assert (
        min(cosines_by_the_page(tmp_path / "mapped", plain)) > 1 - 1e-4
    )  # with the map to the teacher's width
    shutil.rmtree(cache.path)
    again = ("export-model", student, "--onnx", "--out", tmp_path / "no", *FEW)
    command.fails(*again, code=1, says="cache")
    world.dump(str(tmp_path / "cache"), **{"for": "embedding", "max_tokens": 600})
    command.fails(*again, code=1, says="is not the cache that")
    record = tmp_path / "run/run.json"
    record.write_text(record.read_text().replace(str(tmp_path / "cache"), "s3://bucket/cache"))
    command.fails(*again, code=2, says=("a URL from a run is not opened by itself", "--corpus"))


def test_what_has_lost_too_much_is_not_written(world: World, tmp_path: Path, command: Command) -> None:
    """The figure is said, and nothing is left."""
    model, out = world.teacher, tmp_path / "made/out"
    small = ("export-model", model, "--onnx", "--int8", "--out", out, "--corpus", world.corpus, *FEW)
    line = command.fails(*small, "--min-cosine", 0.999999, code=1, says="--min-cosine is 0.999999")
    assert "--openvino" in line
    rows = [
        {"question": f"{first} {second}", "answer": f"{first} {second} ba"}
        for first, second in zip("bcdfgh", "ghklmn", strict=True)
    ]
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured = (*small, "--min-cosine", 0.5, "--retrieval", asked)
    command.fails(*measured, "--max-drop", -1, code=2, says="--max-drop")
    code, printed, err = command(*measured, "--data", write_glue(tmp_path / "glue"), "--max-drop", 100)
    assert code == 0, err
    assert "nDCG@10" in printed
    assert "STS-B, Spearman" in printed
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_model_that_overflows_is_refused(world: World, tmp_path: Path, command: Command) -> None:
    """What is not a number agrees with nothing."""
    broken = shutil.copytree(world.teacher, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["encoder.layer.0.output.dense.weight"][:] = 3e38
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    given = ("export-model", broken, "--onnx", "--out", tmp_path / "out", "--corpus", world.corpus, *FEW)
    command.fails(*given, code=1, says="broken")
    assert not (tmp_path / "out").exists()


def test_prompts_that_pooling_leaves_out_stay_out(world: World, tmp_path: Path, command: Command) -> None:
    """An exported encoder gives the vectors of sentence-transformers, with a prompt before every text."""
    folder = shutil.copytree(world.teacher, tmp_path / "prompted")
    pooling = folder / "1_Pooling/config.json"
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"include_prompt": False}))
    prompts = {"prompts": {"query": "da de di do du "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    export(command, folder, tmp_path / "out", "--onnx", corpus=world.corpus)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    model = Evaluated(name="out", folder=tmp_path / "out")
    found = sentence_encoder(model, 32, "cpu").encode(TEXTS)
    assert np.abs(found - expected).max() < 1e-5


def test_no_file_reads_beyond_its_positions(world: World, tmp_path: Path, command: Command) -> None:
    """RoBERTa reserves two positions of its table, which OpenVINO would read beyond without a word."""
    model = save_teacher(tmp_path / "model", "roberta", num_hidden_layers=1, max_position_embeddings=34)
    export(command, model, tmp_path / "out", "--openvino", corpus=world.corpus)
    sizes = ("--batch-size", 1, "--turns", 1, "--device", "cpu", "--length")
    command.fails("speed", tmp_path / "out", *sizes, 33, code=2, says="--length 33 is more than out reads")
    assert command("speed", tmp_path / "out", *sizes, 32)[0] == 0


def test_a_file_that_cannot_be_run_is_one_line(world: World, tmp_path: Path, command: Command) -> None:
    """A file of fixed sizes, one of another model, and one that is damaged."""
    export(command, world.teacher, tmp_path / "out", "--onnx", corpus=world.corpus)
    file, config = tmp_path / "out/onnx/model.onnx", tmp_path / "out/config.json"
    own, other = config.read_text(), {"hidden_size": 64, "architectures": ["BertModel"]}
    for changes, says in (
        (other, "gives 64 for each token"),
        ({**other, "architectures": ["BertForSequenceClassification"]}, "gives 2 for each text"),
    ):
        config.write_text(json.dumps(json.loads(own) | changes))
        words = ("speed", tmp_path / "out", "--batch-size", 2, "--length", 8, "--turns", 1, "--device", "cpu")
        command.fails(*words, code=1, says=(says, "Export it again"))
    config.write_text(own)
    model = onnx.load(file)
    for each in model.graph.input:
        for size in each.type.tensor_type.shape.dim:
            size.dim_value = 8
    onnx.save(model, file)
    sizes = ("--batch-size", 2, "--length", 8, "--turns", 1, "--device", "cpu")
    command.fails("speed", tmp_path / "out", *sizes, code=1, says="Export the model again")
    file.write_bytes(file.read_bytes()[:1000])
    command.fails("speed", tmp_path / "out", *sizes, code=1, says="onnxruntime cannot read")


def test_misuse_is_one_line(world: World, tmp_path: Path, command: Command) -> None:
    begin, out = ("export-model", world.teacher, "--max-length", 32), ("--out", tmp_path / "out")
    command.fails(*begin, *out, code=2, says="give either --onnx")
    command.fails(*begin, *out, "--onnx", "--openvino", code=2, says="give either --onnx")
    command.fails(*begin, *out, "--onnx", code=2, says="Give --corpus")
    command.fails(*begin, *out, "--onnx", "--max-drop", 2, code=2, says="--max-drop needs")
    text = ("--corpus", world.corpus)
    few = tmp_path / "few.txt"
    few.write_text("ba be\n\nbi bo\n")
    command.fails(*begin, *out, "--corpus", few, "--onnx", code=2, says="has 2 texts, and at least 16")
    few.write_text("ba be\n\n" * 40)
    same = (*begin, *out, "--corpus", few, "--openvino", "--int8")
    command.fails(*same, code=2, says="only 0 of its texts differ")
    command.fails(*begin, *out, *text, "--onnx", "--max-length", 64, code=2, says="--max-length 64")
    command.fails(*begin, "--out", world.corpus, *text, "--onnx", code=2, says="exists")
    command.fails("export-model", tmp_path, *out, *text, "--onnx", code=1, says="neither a model nor a run")
    assert not (tmp_path / "out").exists()


def test_what_torch_cannot_export_says_why(world: World, tmp_path: Path, command: Command) -> None:
    """T5's encoder is a family whose export torch ends with several lines of its own, in colours."""
    AutoTokenizer.from_pretrained(world.teacher).save_pretrained(tmp_path / "t5")
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 1, "d_ff": 64}
    T5EncoderModel(T5Config(vocab_size=len(VOCABULARY), **sizes)).save_pretrained(tmp_path / "t5")
    save_encoder(tmp_path / "t5", "mean")
    given = (
        "export-model",
        tmp_path / "t5",
        "--onnx",
        "--corpus",
        world.corpus,
        "--out",
        tmp_path / "out",
        *FEW,
    )
    line = command.fails(*given, code=1, says="cannot export this model to ONNX: Cannot view a tensor")

    assert line.endswith("this one runs in PyTorch.")
    assert not (tmp_path / "out").exists()
