"""How folders pool: as sentence-transformers does, or one line where that cannot be computed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from torch import nn

from minilm_cache.cache import open_cache
from minilm_cache.errors import TeacherError
from minilm_cache.evaluate.embeddings import sentence_encoder
from minilm_cache.evaluate.models import Evaluated
from minilm_cache.models.complete import is_cross_encoder
from minilm_cache.models.load import read_config
from minilm_cache.models.pooling import SentenceModel, copy_pooling, leaves_prompts_out, num_map_weights
from minilm_cache.storage_schema.manifest import PROMPTS_FILE
from minilm_cache.storage_schema.states import LOGITS
from tests.encoders import save_encoder
from tests.fixtures import Command
from tests.support import VOCABULARY, WORDS, World, dump_arguments, save_teacher


def damaged(world: World, change: dict[str, object], file: str) -> None:
    """Change a JSON file of the teacher."""
    path = world.teacher / file
    content = json.loads(path.read_text())
    if isinstance(content, list):
        content[1] |= change
    else:
        content |= change
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("modules.json", {"type": "sentence_transformers.models.LSTM"}, ("modules.json names LSTM",)),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, ("pools by mean and cls",)),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, ("pools by weightedmean",)),
        ("2_Dense/config.json", {"use_residual": True}, ("2_Dense", "a residual")),
        ("2_Dense/config.json", {"activation_function": "os.system"}, ("2_Dense", "os.system")),
    ],
)
def test_what_no_pooling_here_computes_is_refused(
    world: World, command: Command, file: str, change: dict[str, object], says: tuple[str, ...]
) -> None:
    save_encoder(world.teacher, "mean", dense=nn.Tanh())
    damaged(world, change, file)
    command.fails(*dump_arguments(world, "--for", "embedding", k=None), code=1, says=says)


def test_weights_of_a_dense_layer_are_safetensors(world: World, command: Command) -> None:
    save_encoder(world.teacher, "mean", dense=nn.Tanh())
    weights = world.teacher / "2_Dense/model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    command.fails(*dump_arguments(world, "--for", "embedding", k=None), code=1, says="model.safetensors")


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_a_dense_layer_of_parts_of_weights_is_refused(
    world: World, command: Command, kind: torch.dtype
) -> None:
    """Loading would take codes for weights, as of another model."""
    save_encoder(world.teacher, "mean", dense=nn.Tanh())
    file = world.teacher / "2_Dense/model.safetensors"
    save_file({name: (100 * each).to(kind) for name, each in load_file(file).items()}, file)
    command.fails(*dump_arguments(world, "--for", "embedding", k=None), code=1, says="number format")


@pytest.mark.timeout(60)
def test_a_dense_layer_that_is_a_pipe_is_one_line(world: World, command: Command) -> None:
    save_encoder(world.teacher, "mean", dense=nn.Tanh())
    file = world.teacher / "2_Dense/model.safetensors"
    file.unlink()
    os.mkfifo(file)
    command.fails(*dump_arguments(world, "--for", "embedding", k=None), code=1, says=str(file))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"path": "../elsewhere"}, "outside the model's folder"),
        ({"path": "/etc"}, "outside the model's folder"),
        ({"path": "1_Nowhere"}, "1_Nowhere"),
    ],
)
def test_modules_lie_in_the_folder(
    world: World, command: Command, change: dict[str, object], says: str
) -> None:
    save_encoder(world.teacher, "mean")
    damaged(world, change, "modules.json")
    command.fails(*dump_arguments(world, "--for", "embedding", k=None), code=1, says=says)


def test_folders_of_modules_may_have_any_name(tmp_path: Path) -> None:
    folder = save_teacher(tmp_path / "model")
    save_encoder(folder, "mean", dense=nn.Tanh())
    before = num_map_weights(folder)
    config = json.loads((folder / "1_Pooling/config.json").read_text())
    (folder / "1_Pooling/config.json").write_text(json.dumps({**config, "include_prompt": False}))
    for name in ("1_Pooling", "2_Dense"):
        (folder / name).rename(folder / name[2:].lower())
    listed = (folder / "modules.json").read_text()
    (folder / "modules.json").write_text(listed.replace("1_Pooling", "pooling").replace("2_Dense", "dense"))
    assert num_map_weights(folder) == before > 0
    assert leaves_prompts_out(folder)


@pytest.mark.parametrize("length", [12.0, "12", 0, -1, True])
def test_a_length_that_is_none_is_refused(world: World, command: Command, length: object) -> None:
    save_encoder(world.teacher, "mean")
    (world.teacher / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
    says = ("sentence_bert_config.json", f"max_seq_length {length!r} is not a number of tokens")
    command.fails(*dump_arguments(world, "--for", "embedding", k=None), code=1, says=says)


@pytest.mark.parametrize("content", ["[", "{}", '[{"type": 1}]', "[1]", " " * (2**23 + 1)])
def test_damaged_modules_are_one_line(world: World, command: Command, content: str) -> None:
    (world.teacher / "modules.json").write_text(content)
    command.fails(*dump_arguments(world, "--for", "embedding", k=None), code=1, says="modules.json")


def test_damaged_modules_of_a_cross_encoder_are_an_error(tmp_path: Path) -> None:
    scorer = save_teacher(tmp_path / "scorer", head="sequences", num_labels=1)
    (scorer / "sentence_bert_config.json").write_text('{"transformer_task": "sequence-classification"}')
    (scorer / "modules.json").write_text('[{"idx": 0}]')
    assert is_cross_encoder(scorer)
    with pytest.raises(TeacherError, match="is not a list of modules"):
        copy_pooling(scorer, tmp_path, read_config(scorer))


@pytest.mark.parametrize(
    ("file", "change", "code", "says"),
    [
        ("sentence_bert_config.json", {}, 0, ""),
        (PROMPTS_FILE, {"prompts": {"q": "ba "}, "default_prompt_name": "q"}, 1, "puts a prompt before"),
        ("sentence_bert_config.json", {"do_lower_case": True}, 1, "sets do_lower_case"),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"text": {"truncation": "only_second"}}},
            1,
            "sets",
        ),
        ("sentence_bert_config.json", {"max_seq_length": 12}, 2, "reads 12 tokens"),
        ("tokenizer_config.json", {"model_max_length": 16}, 2, "reads 16 tokens"),
    ],
)
def test_a_cross_encoder_reads_pairs_as_its_own_predict_does_or_is_refused(
    tmp_path: Path, command: Command, file: str, change: dict[str, Any], code: int, *, says: str
) -> None:
    plain, scorer, pairs = tmp_path / "plain", tmp_path / "scorer", tmp_path / "pairs.jsonl"
    save_teacher(plain, head="sequences", num_labels=1)
    CrossEncoder(str(plain), device="cpu", max_length=32).save_pretrained(str(scorer))
    content = json.loads((scorer / file).read_text())
    (scorer / file).write_text(json.dumps(content | change))
    texts = [(f"ba {one}", f"bo {other} bi") for one, other in zip(WORDS[:40], WORDS[20:60], strict=True)]
    pairs.write_text("".join(json.dumps({"a": one, "b": other}) + "\n" for one, other in texts))
    dump = ("dump", "--teacher", scorer, "--corpus", pairs, "--pair-columns", "a,b", "--for", "score")
    words = (*dump, "--max-length", 32, "--device", "cpu", "--out", tmp_path / "cache")
    if code:
        command.fails(*words, code=code, says=says)
        if file == PROMPTS_FILE:
            export = ("export-model", scorer, "--onnx", "--corpus", pairs, "--pair-columns", "a,b")
            command.fails(*export, "--out", tmp_path / "out", code=1, says=says)
        return
    found, _, err = command(*words)
    assert found == 0, err
    stored = sorted(float(sequence.states()[LOGITS][0]) for sequence in open_cache(tmp_path / "cache"))
    scores = CrossEncoder(str(scorer), device="cpu").predict(texts, activation_fn=nn.Identity())
    assert stored == pytest.approx(sorted(scores.tolist()), abs=1e-5)


def test_a_tokenizer_without_a_json_file_makes_lower_case_too(tmp_path: Path) -> None:
    save_teacher(tmp_path)
    save_encoder(tmp_path, "mean")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY))
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 32}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    file = tmp_path / "sentence_bert_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_lower_case": True}))
    own: Any = SentenceTransformer(str(tmp_path), device="cpu").encode(["BA be"])
    assert SentenceModel(tmp_path, 32).encode(["BA be"]).numpy() == pytest.approx(own, abs=1e-5)


def test_a_text_without_tokens_is_named(tmp_path: Path) -> None:
    save_teacher(tmp_path, "llama")
    save_encoder(tmp_path, "mean")
    model = SentenceModel(tmp_path, 32)
    model._tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(TeacherError, match="makes no token of the text"):
        model.encode(["ba", ""])


@pytest.mark.parametrize(
    ("shape", "value", "says"), [((24, 31), 0.5, "width 31 to 24"), ((24, 32), float("nan"), "NaN")]
)
def test_linear_maps_of_another_size_or_without_numbers(
    world: World, command: Command, shape: tuple[int, int], value: float, says: str
) -> None:
    save_encoder(world.teacher, "mean", dense=nn.Tanh())
    weights = {"linear.weight": torch.full(shape, value), "linear.bias": torch.zeros(24)}
    save_file(weights, world.teacher / "2_Dense/model.safetensors")
    command.fails(*dump_arguments(world, "--for", "embedding", k=None), code=1, says=says)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("normalize", [True, False])
def test_queries_and_documents_are_compared_as_by_the_model_itself(
    tmp_path: Path, similarity: str, *, normalize: bool
) -> None:
    """Its own scaling, similarity and prompts hold in both of the encoders that commands use."""
    save_teacher(tmp_path)
    save_encoder(tmp_path, "mean", dense=nn.Identity(), normalize=normalize)
    said = {"prompts": {"own": "ba be ", "query": "du "}, "default_prompt_name": "own"}
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text(json.dumps(said | {"similarity_fn_name": similarity}))
    queries, documents = ["ba bo", "hi"], ["bu ban", "bo", "ba da de"]
    model = SentenceTransformer(str(tmp_path), device="cpu")
    expected = model.similarity(model.encode_query(queries), model.encode_document(documents))

    evaluated = Evaluated(name="model", folder=tmp_path)
    assert evaluated.num_bytes == sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    own = sentence_encoder(evaluated, 32, "cpu")
    torch.testing.assert_close(
        own.similarity(own.encode_query(queries), own.encode_document(documents)), expected
    )
    plain = SentenceModel(tmp_path, 32)
    found = plain.encode(queries, role="query") @ plain.encode(documents, role="document").T
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        plain.encode(queries) @ plain.encode(documents).T,
        model.similarity(model.encode(queries), model.encode(documents)),
    )
