"""Models made of a teacher: a head for masked tokens, and some of its layers."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    PreTrainedModel,
)

from minilm_cache.errors import DeviceError
from minilm_cache.models.arch import parse_arch
from minilm_cache.models.load import keep_layers, load_weights, read_config
from minilm_cache.models.locate import TeacherSource, locate_teacher
from minilm_cache.models.student import shape_config
from minilm_cache.models.teacher import Teacher, TeacherMemory
from minilm_cache.storage_schema.identity import Precision
from tests.encoders import save_encoder
from tests.fixtures import Command
from tests.support import VOCABULARY, World, save_teacher, tiny_tokenizer


def test_a_head_is_fitted_to_a_teacher_that_has_none(world: World, tmp_path: Path, command: Command) -> None:
    words = ("head", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32)
    out = tmp_path / "with-head"
    code, told, err = command(*words, "--batch-size", 8, "--epochs", 4, "--out", out, "--json")
    assert code == 0, err
    found = json.loads(told)
    model, encoder = AutoModelForMaskedLM.from_pretrained(out), AutoModel.from_pretrained(world.teacher)
    for name, weight in model.base_model.state_dict().items():
        assert torch.equal(weight, encoder.state_dict()[name]), "the encoder was changed"

    assert 0 <= found["accuracy"] <= 1
    assert found["cross_entropy"] < np.log(len(VOCABULARY)) + 3
    again = command(*words, "--batch-size", 8, "--epochs", 4, "--out", tmp_path / "again", "--json")[1]
    assert json.loads(again)["cross_entropy"] == found["cross_entropy"]
    assert World(tmp_path, out, world.corpus).dump(labels=True, label_k=4).manifest.complete
    command.fails(*words, "--out", out, code=2, says="exists")
    command.fails("head", "--teacher", out, *words[3:], "--out", tmp_path / "x", code=1, says="already")
    command.fails(*words, "--batch-size", 4000, "--out", tmp_path / "x", code=1, says="fewer than")
    long = (*words[:-1], 128, "--out", tmp_path / "x")
    command.fails(*long, code=2, says="--max-length 128 is more than teacher teacher has positions for")


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, None),
        ("longformer", {"attention_window": [8, 4, 8], "max_position_embeddings": 130}, None),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "depend on their places"),
        ("xlm", {}, "cannot be run with some of its layers"),
    ],
)
def test_layers_are_cut_with_what_the_configuration_says_of_them(
    tmp_path: Path, command: Command, family: str, changes: dict[str, Any], says: str | None
) -> None:
    """Layers that depend on their place by more than that are refused."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {} if family in {"gpt2", "xlm"} else {"intermediate_size": 64}
    sizes |= {"num_key_value_heads": 4} if family == "smollm3" else {}
    config = AutoConfig.for_model(family, vocab_size=len(VOCABULARY), pad_token_id=0, **sizes, **changes)
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(tmp_path / "teacher")
    tiny_tokenizer().save_pretrained(tmp_path / "teacher")
    words = ("truncate", "--teacher", tmp_path / "teacher", "--out", tmp_path / "cut", "--layers", "0,2")
    if says is not None:
        command.fails(*words, code=1, says=says)
        return
    code, _, err = command(*words)
    assert code == 0, err
    whole, cut = (AutoModel.from_pretrained(tmp_path / name).eval() for name in ("teacher", "cut"))
    kept = keep_layers(whole, (0, 2))
    ids = torch.arange(5, 21)[None]
    with torch.no_grad():
        torch.testing.assert_close(cut(input_ids=ids)[0], kept(input_ids=ids)[0])


def test_a_teacher_with_a_head_makes_the_vectors_that_it_made(
    world: World, tmp_path: Path, command: Command
) -> None:
    save_encoder(world.teacher, "mean", dense=nn.Tanh())
    prompts = {"prompts": {"own": "ba be "}, "default_prompt_name": "own", "similarity_fn_name": "dot"}
    (world.teacher / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    words = ("head", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32)
    code, _, err = command(*words, "--batch-size", 8, "--epochs", 1, "--out", tmp_path / "out")
    assert code == 0, err
    before, after = (
        SentenceTransformer(str(path), device="cpu") for path in (world.teacher, tmp_path / "out")
    )
    np.testing.assert_allclose(after.encode(["bo bu", "hi"]), before.encode(["bo bu", "hi"]), atol=1e-6)
    assert (after.prompts, after.similarity_fn_name) == (before.prompts, before.similarity_fn_name)


def test_a_teacher_is_truncated(world: World, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "cut"
    assert command("truncate", "--teacher", world.teacher, "--layers", "0,2", "--out", out)[0] == 0
    cut, whole = AutoModel.from_pretrained(out), AutoModel.from_pretrained(world.teacher)
    assert cut.config.num_hidden_layers == 2
    kept = [layer.state_dict() for layer in cut.encoder.layer]
    for own, number in zip(kept, (0, 2), strict=True):
        there = whole.encoder.layer[number].state_dict()
        assert all(torch.equal(own[name], there[name]) for name in there)
    words = ("truncate", "--teacher", world.teacher)
    command.fails(*words, "--layers", "0,3", "--out", tmp_path / "x", code=2, says="from 0 to 2")
    modern = save_teacher(tmp_path / "modern", "modernbert")
    unlike = ("truncate", "--teacher", modern, "--out", tmp_path / "x", "--layers")
    command.fails(*unlike, "1,2", code=1, says="layers 1, 2 alone are not a model of it. Keep layer 0")
    command.fails(*unlike, "1,0", code=1, says="Keep layer 0, and keep it first")
    assert command(*unlike, "0,2")[0] == 0
    command.fails(*words, "--layers", "0,0", "--out", tmp_path / "x", code=2, says="different numbers")
    command.fails(*words, "--layers", "0", "--out", out, code=2, says="exists")


def test_keys_that_say_nothing_of_a_model_stay_in_its_identity(tmp_path: Path) -> None:
    """They have been hashed since the first release: fingerprints of teachers must not change."""
    folder = save_teacher(tmp_path / "teacher")
    file = folder / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "_num_labels": 5, "auto_map": {"AutoModel": "x.Y"}}))
    config = Teacher(locate_teacher(str(folder)), torch.device("cpu")).model.config.to_dict()

    assert config["_num_labels"] == 5
    assert config["auto_map"] == {"AutoModel": "x.Y"}


def test_models_loaded_by_two_threads_have_their_tied_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers ties no weights while it makes a model, and the second thread would keep it so."""
    teacher = save_teacher(tmp_path / "teacher", head="tokens")
    monkeypatch.setattr(PreTrainedModel, "tie_weights", PreTrainedModel.tie_weights)  # restored if this fails
    first, second = Event(), Event()
    real = BertForMaskedLM.__init__

    def overlapping(model: BertForMaskedLM, config: BertConfig) -> None:
        real(model, config)
        begun, ended = (second, first) if first.is_set() else (first, second)
        begun.set()
        ended.wait(0.5)

    monkeypatch.setattr(BertForMaskedLM, "__init__", overlapping)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: load_weights(teacher, "tokens"), range(2)))
    model, lacking = load_weights(teacher, "tokens")

    assert not lacking
    assert not any(weight.is_meta for weight in model.parameters())


def test_a_teacher_that_cannot_fit_is_refused_before_it_is_loaded(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU holds two bytes of a weight in bfloat16; a machine loads four, whatever computes later."""
    num_weights = sum(weight.numel() for weight in load_file(world.teacher / "model.safetensors").values())
    words = ("dump", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32)
    monkeypatch.setattr("minilm_cache.models.teacher.load_model", None)
    monkeypatch.setattr("minilm_cache.models.teacher.free_bytes", lambda device: 4 * num_weights - 1)
    for precision in ("float32", "bfloat16"):
        named = ("teacher teacher does not fit", f"{num_weights:,} weights", "a smaller teacher")
        command.fails(*words, "--precision", precision, "--out", world.root / "x", code=1, says=named)
    gpu, source = torch.device("cuda"), TeacherSource(name="wide", folder=world.teacher)
    cases: list[tuple[Precision, int, str | None]] = [
        ("float32", 3, "`dump --precision bfloat16`, which takes"),
        ("bfloat16", 1, "a smaller teacher, or a device"),
        ("bfloat16", 3, None),
    ]
    for of_gpu, share, says in cases:
        free = {"cuda": share * num_weights, "cpu": 10**12}
        monkeypatch.setattr("minilm_cache.models.teacher.free_bytes", lambda device, f=free: f[device.type])
        with nullcontext() if says is None else pytest.raises(DeviceError, match=says):
            TeacherMemory.of(source, gpu, of_gpu, head=None)
    monkeypatch.setattr("minilm_cache.models.teacher.free_bytes", lambda device: 3 * num_weights)
    with pytest.raises(DeviceError, match="loading its weights in float32 takes"):
        TeacherMemory.of(source, gpu, "bfloat16", head=None)
    assert not (world.root / "x").exists()


def test_a_truncated_encoder_pools_as_its_whole_does(world: World, tmp_path: Path, command: Command) -> None:
    save_encoder(world.teacher, "cls", normalize=False)
    out = tmp_path / "cut"
    assert command("truncate", "--teacher", world.teacher, "--layers", "0,1,2", "--out", out)[0] == 0
    texts = ["ba be bi", "da"]
    whole, cut = (SentenceTransformer(str(folder)).encode(texts) for folder in (world.teacher, out))

    np.testing.assert_allclose(cut, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "content", "sizes"),
    [
        ("deberta-v2", {"pooler_hidden_size": 32}, {"pooler_hidden_size": 16}),
        ("nomic_bert", {"head_dim": 8}, {"head_dim": 4}),
        ("qwen3", {"head_dim": 8, "num_key_value_heads": 2}, {"head_dim": 4, "num_key_value_heads": 4}),
    ],
)
def test_a_narrower_student_has_narrower_heads(
    family: str, content: dict[str, int], sizes: dict[str, int]
) -> None:
    teacher = AutoConfig.for_model(family, hidden_size=32, num_attention_heads=4, **content)
    config = shape_config(parse_arch("2x16", 4), teacher.to_dict(), family)

    assert {name: getattr(config, name) for name in sizes} == sizes


FILES = {"config.json", "vocab.txt", "merges.txt", "spiece.model", "tokenizer.json", "model.safetensors"}


def test_without_weights_the_hub_gives_configuration_and_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older models have their tokenizer in other files than tokenizer.json."""
    asked: list[list[str]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for without_weights in (True, False):
        locate_teacher("someone/model", without_weights=without_weights)
    without, whole = (
        {name for name in FILES if any(fnmatch(name, pattern) for pattern in patterns)} for patterns in asked
    )
    assert without == FILES - {"model.safetensors"}
    assert whole == FILES


def test_a_long_wavelength_may_be_a_whole_number(tmp_path: Path) -> None:
    """Positions of long texts turn slowly: `rope_theta` is no size."""
    save_teacher(tmp_path, "llama")
    content = json.loads((tmp_path / "config.json").read_text())
    content.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(content | {"rope_theta": 50_000_000}))
    assert read_config(tmp_path).rope_parameters["rope_theta"] == 50_000_000
