"""One door for models: a folder gives the model that it describes, or one line that says why it does not."""

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from io import StringIO
from logging import NOTSET, StreamHandler, root
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, BertModel, ElectraModel, PreTrainedModel, RobertaModel
from transformers.utils import logging

from minilm_cache.errors import InvalidConfigError, MiniLMCacheError, TeacherError
from minilm_cache.models.load import load_for_task, load_model, load_weights, quietly
from minilm_cache.models.locate import MINI, locate_teacher
from minilm_cache.session import Session
from tests.fixtures import Command
from tests.support import TINY, World, save_teacher

Weights = dict[str, Tensor]


def renamed(prefix: str) -> Callable[[Weights], Weights]:
    """Return a change that gives every weight a prefix, as wrappers of models do."""
    return lambda weights: {f"{prefix}{name}": weight for name, weight in weights.items()}


def without(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: weight for name, weight in weights.items() if part not in name}


def with_more(**more: Tensor) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {name.replace("__", "."): weight for name, weight in more.items()}


def as_type(name_part: str, dtype: torch.dtype) -> Callable[[Weights], Weights]:
    return lambda weights: {
        name: weight.to(dtype) if name_part in name else weight for name, weight in weights.items()
    }


def moved(old: str, new: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name.replace(old, new): weight for name, weight in weights.items()}


SQUARE = torch.ones(4, 4)
WEIGHTS: dict[str, Callable[[Weights], Weights]] = {
    "compiled": renamed("_orig_mod."),
    "parallel": renamed("module."),
    "student": renamed("student."),
    "nested": renamed("model.bert."),
    "no last layer": without("layer.5."),
    "no middle layer": without("layer.2."),
    "no bias": without("layer.1.attention.self.query.bias"),
    "no words": without("word_embeddings"),
    "no norm": without("embeddings.LayerNorm"),
    "one tensor": lambda _: {"x": SQUARE},
    "another layer": lambda weights: (
        weights
        | {
            name.replace("layer.5", "layer.6"): weight.clone()
            for name, weight in weights.items()
            if "layer.5" in name
        }
    ),
    "lora": with_more(encoder__layer__0__attention__self__query__lora_A=SQUARE),
    "unknown": with_more(x=SQUARE),
    "twice": lambda weights: (
        weights | {f"bert.{name}": weight + 1 for name, weight in weights.items() if "layer.0" in name}
    ),
    "norms twice": with_more(embeddings__LayerNorm__gamma=torch.ones(384)),
    "relative positions": with_more(encoder__layer__0__attention__self__distance_embedding__weight=SQUARE),
    "renamed layers": moved("encoder.layer", "encoder.layers"),
    "renamed attention": moved("attention.self", "attn.self"),
    "int8": as_type("query.weight", torch.int8),
    "float8": as_type("key.weight", torch.float8_e4m3fn),
    "bool": as_type("value.weight", torch.bool),
    "NaN": lambda weights: {
        name: weight / 0 if "layer.3" in name else weight for name, weight in weights.items()
    },
    "another shape": lambda weights: {
        name: weight[:-1].clone() if name.endswith("layer.4.output.dense.bias") else weight
        for name, weight in weights.items()
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "relative_key": {"position_embedding_type": "relative_key"},
    "relative_key_query": {"position_embedding_type": "relative_key_query"},
    "alibi": {"position_embedding_type": "alibi"},
    "pre-norm": {"norm_first": True},
    "rotary": {"rotary_value": True},
    "misspelt": {"layer_norm_epsilon": 1e-3},
    "fewer layers": {"num_hidden_layers": 3},
    "more layers": {"num_hidden_layers": 8},
    "wider": {"intermediate_size": 2048},
    "quantised": {"quantization_config": {"quant_method": "torchao"}},
    "other file": {"transformers_weights": "other.safetensors"},
    "other family": {"model_type": "roberta"},
    "other architecture": {"architectures": ["MPNetModel"]},
    "factorised": {"embedding_size": 128},
}


@pytest.fixture(scope="module")
def weights() -> Weights:
    """Weights of the published model."""
    return load_file(locate_teacher(MINI).folder / "model.safetensors")


def folder_of_mini(folder: Path, weights: Weights, **settings: object) -> Path:
    """Write mini's folder with other weights and settings."""
    source = locate_teacher(MINI).folder
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (folder / name).symlink_to(source / name)
    content = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | settings))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_are_not_the_models_are_refused(tmp_path: Path, weights: Weights, name: str) -> None:
    folder = folder_of_mini(tmp_path / "model", WEIGHTS[name](weights))
    with pytest.raises(TeacherError, match=re.escape(str(folder))) as caught:
        load_model(folder)
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_are_ignored_or_do_not_fit_are_refused(
    tmp_path: Path, weights: Weights, name: str
) -> None:
    folder = folder_of_mini(tmp_path / "model", weights, **SETTINGS[name])
    with pytest.raises(TeacherError, match=re.escape(str(folder))):
        load_model(folder)


def test_what_changes_nothing_is_accepted(tmp_path: Path, weights: Weights) -> None:
    """Heads, poolers, other number formats, older names, and settings of trainings."""
    changed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): weight
        for name, weight in without("pooler")(weights).items()
    }
    changed |= {"cls.seq_relationship.weight": SQUARE, "cls.predictions.bias": torch.ones(3)}
    settings = {"gradient_checkpointing": True, "pooler_type": "first", "use_bias": False, "language": "en"}
    settings |= {"mask_token": "[MASK]", "hidden_dropout": 0.0}
    folder = folder_of_mini(tmp_path / "model", changed, **settings)
    expected = load_model(locate_teacher(MINI).folder).state_dict()
    for name, weight in load_model(folder).state_dict().items():
        assert "pooler" in name or torch.equal(weight, expected[name])


@pytest.mark.parametrize("family", TINY)
def test_every_family_is_whole_with_and_without_its_heads(tmp_path: Path, family: str) -> None:
    folder = save_teacher(tmp_path / "teacher", family, head="tokens")
    assert all("pooler" in name for name in load_weights(folder)[1])
    assert all("pooler" in name for name in load_weights(folder, "tokens")[1])
    oracle = AutoModel.from_pretrained(folder).state_dict()
    loaded = load_model(folder).state_dict()
    assert all("pooler" in name or torch.equal(loaded[name], oracle[name]) for name in oracle)
    weights = load_file(folder / "model.safetensors")
    head = sorted(name for name in weights if not name.startswith(load_model(folder).base_model_prefix + "."))
    save_file(
        {name: weight for name, weight in weights.items() if name != head[0]},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    load_model(folder)  # the encoder is whole
    with pytest.raises(TeacherError, match=r"lacks the rest|has no head"):
        load_model(folder, "tokens")


def test_another_shape_in_the_encoder_is_refused_where_heads_may_have_one(tmp_path: Path) -> None:
    """`ignore_mismatched_sizes` is for the head of another task; it must not draw an encoder's weights."""
    folder = save_teacher(tmp_path / "teacher")
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.1.output.dense.bias"] = torch.ones(31)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TeacherError, match=r"layer\.1\.output\.dense\.bias"):
        load_for_task(folder, "sequences", ["a", "b", "c"])


@pytest.mark.parametrize("command_line", ["dump", "slice", "speed", "truncate", "train", "evaluate", "head"])
def test_every_command_comes_through_the_door(
    world: World, command: Command, tmp_path: Path, command_line: str
) -> None:
    broken = save_teacher(tmp_path / "broken", num_hidden_layers=2)
    weights = load_file(broken / "model.safetensors")
    save_file(without("layer.1.")(weights), broken / "model.safetensors", metadata={"format": "pt"})
    out = ("--out", tmp_path / "out")
    if command_line == "train":
        world.dump()
    words: dict[str, tuple[object, ...]] = {
        "dump": ("--teacher", broken, "--corpus", world.corpus, "--max-length", 32, *out),
        "slice": ("--teacher", broken, "--corpus", world.corpus, "--arch", "1x16", *out),
        "speed": (broken, "--length", 32),
        "truncate": ("--teacher", broken, "--layers", "0", *out),
        "train": (world.root / "cache", "--arch", "2x32", "--init", broken, *out),
        "evaluate": (broken, "--task", "sst2", "--data", tmp_path / "sst2"),
        "head": ("--teacher", broken, "--corpus", world.corpus, "--max-length", 32, *out),
    }
    if command_line == "evaluate":
        (tmp_path / "sst2").mkdir()
        for name in ("train", "dev"):
            (tmp_path / f"sst2/{name}.tsv").write_text("sentence\tlabel\nba be\t1\nbo bu\t0\n")
    code, _, err = command(command_line, *words[command_line])
    assert code in (1, 2)
    assert "such as" in err
    assert not (tmp_path / "out").exists() or command_line == "train"
    assert not list(tmp_path.glob("out/students/*"))


def test_a_teacher_that_changes_while_it_is_read_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minilm_cache.models import teacher as module  # noqa: PLC0415

    def load_and_replace(folder: Path, *arguments: Any, **more: Any) -> object:
        model = load_model(folder, *arguments, **more)
        save_teacher(folder, seed=7)
        return model

    monkeypatch.setattr(module, "load_model", load_and_replace)
    with pytest.raises(TeacherError, match="changed while it was read"):
        world.dump()


def test_init_takes_models_that_compute_as_the_student_does(world: World, tmp_path: Path) -> None:
    """An activation or a tokenizer of its own is another model, whatever the shapes."""
    from minilm_cache.train.config import TrainConfig  # noqa: PLC0415
    from minilm_cache.train.run import train_students  # noqa: PLC0415

    cache = world.dump().path

    def train(folder: Path) -> None:
        recipe = TrainConfig(arch=("3x32:ff64",), init=str(folder), steps=1, batch_size=2, device="cpu")
        train_students(recipe, cache, out=tmp_path / f"run of {folder.name}", session=Session(world.home))

    train(save_teacher(tmp_path / "same", seed=3))
    with pytest.raises(InvalidConfigError, match="hidden_act is 'relu'"):
        train(save_teacher(tmp_path / "relu", seed=3, hidden_act="relu"))
    other = save_teacher(tmp_path / "other", seed=3)
    file = other / "tokenizer.json"
    file.write_text(
        file.read_text().replace('"ba"', '"ba2"').replace('"be"', '"ba"').replace('"ba2"', '"be"')
    )
    with pytest.raises(InvalidConfigError, match="tokenizer"):
        train(other)


def test_a_teacher_whose_configuration_changed_is_not_the_one_of_the_cache(
    world: World, tmp_path: Path
) -> None:
    from minilm_cache.cache import open_cache  # noqa: PLC0415
    from minilm_cache.slicing.source import teacher_weights  # noqa: PLC0415

    cache = open_cache(world.dump().path)
    found = teacher_weights(cache, world.home, None)
    assert found is not None
    file = world.teacher / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "relu"}))
    assert teacher_weights(cache, world.home, None) is None
    with pytest.raises(MiniLMCacheError, match="hidden_act"):
        teacher_weights(cache, world.home, str(world.teacher))


@pytest.mark.parametrize("family", [BertModel, RobertaModel, ElectraModel])
def test_a_new_head_for_masked_tokens_scores_hidden_states_themselves(
    tmp_path: Path, family: type[PreTrainedModel]
) -> None:
    """The oracle is plain torch: normed GELU of the hidden states, times the table of words."""
    shape = {**TINY["bert"], "vocab_size": 40, "max_position_embeddings": 40}
    if family is ElectraModel:
        shape["embedding_size"] = 32  # with words of another size the map is not square, and is drawn
    assert family.config_class is not None
    torch.manual_seed(0)
    family(family.config_class(**shape)).eval().save_pretrained(tmp_path)
    ids = torch.arange(5, 13)[None]

    model = load_for_task(tmp_path, "tokens", None)
    with torch.no_grad():
        logits = model(ids).logits
        hidden = family.from_pretrained(tmp_path)(ids).last_hidden_state
        normed = F.layer_norm(F.gelu(hidden), hidden.shape[-1:], eps=model.config.layer_norm_eps)
        words = load_file(tmp_path / "model.safetensors")["embeddings.word_embeddings.weight"]

    torch.testing.assert_close(logits, normed @ words.T, rtol=1e-5, atol=1e-5)


def test_loading_says_nothing_of_a_head_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_teacher(tmp_path / "teacher")
    monkeypatch.setattr(root.manager, "disable", NOTSET)  # which libraries set for all loggers
    said = StringIO()
    handler, verbosity = StreamHandler(said), logging.get_verbosity()
    logging.set_verbosity_warning()  # which an earlier command may have lowered
    logging.add_handler(handler)
    try:
        load_for_task(folder, "tokens", None)
        with ExitStack() as first, quietly():  # two threads may overlap so
            first.enter_context(quietly())
            first.close()
            assert logging.get_verbosity() > 30
        assert not said.getvalue()
        AutoModel.from_pretrained(folder, num_hidden_layers=1)  # the caller's own loading reports as before
        assert "UNEXPECTED" in said.getvalue()
    finally:
        logging.remove_handler(handler)
        logging.set_verbosity(verbosity)
