"""What a thinking attacker puts into model folders, and into what a cache says of a model."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from minilm_cache.errors import TeacherError
from minilm_cache.models.files import weights_sha256
from minilm_cache.models.load import load_model
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.teacher import Teacher
from minilm_cache.session import Session
from minilm_cache.store.checked import digest_bytes
from minilm_cache.store.reader import read_manifest
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import train_students
from tests.fixtures import Command
from tests.integration.store.test_hostile import replace_in_manifest
from tests.support import World, write_document


def sharded(folder: Path, scale: float) -> None:
    """Give a teacher's folder an index of two files of weights."""
    model = load_model(folder)
    state = {name: scale * value for name, value in model.state_dict().items()}
    names = sorted(state)
    half = len(names) // 2
    parts = {"model-1.safetensors": names[:half], "model-2.safetensors": names[half:]}
    for file, own in parts.items():
        save_file({name: state[name].contiguous() for name in own}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def test_3_weights_that_are_loaded_are_those_that_are_hashed(world: World) -> None:
    folder = world.teacher
    sharded(folder, 1.0)
    before = Teacher(locate_teacher(str(folder)), torch.device("cpu")).identity.weights_sha256
    assert before == weights_sha256(folder)
    (folder / "decoy.safetensors").write_bytes(b"x")
    assert weights_sha256(folder) == before
    load_model(folder)
    (folder / "decoy.safetensors").unlink()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / "model-1.safetensors").rename(folder.parent / "outside.safetensors")
    for name in (
        "../outside.safetensors",
        str(folder.parent / "outside.safetensors"),
        "other.bin",
        "gone.safetensors",
    ):
        own = {
            key: name if file == "model-1.safetensors" else file for key, file in index["weight_map"].items()
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps({**index, "weight_map": own}))
        with pytest.raises(TeacherError, match="names"):
            load_model(folder)
        with pytest.raises(TeacherError, match="names"):
            weights_sha256(folder)


def test_3_a_configuration_cannot_name_other_weights(world: World) -> None:
    """Transformers loads the file that `transformers_weights` names; it is not the one that is hashed."""
    config = json.loads((world.teacher / "config.json").read_text())
    (world.teacher / "other.safetensors").write_bytes(b"no weights")
    (world.teacher / "config.json").write_text(
        json.dumps({**config, "transformers_weights": "other.safetensors"})
    )
    with pytest.raises(TeacherError, match="transformers_weights, which chooses"):
        load_model(world.teacher)
    (world.teacher / "adapter_config.json").write_text("{}")
    with pytest.raises(TeacherError, match="holds an adapter"):
        load_model(world.teacher)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "changes",
    [
        {"num_labels": 10**9},
        {"num_labels": 10**7},
        {"id2label": {str(n): "x" for n in range(2**17)}},
        {"type_vocab_size": 2**20},
        {"intermediate_size": 2**40},
        {"vocab_size": 2**40},
        {"max_position_embeddings": 2**30},
        {"input_embedding_size": 2**30},
    ],
)
def test_6_a_teachers_configuration_in_a_cache_fills_no_memory(
    world: World, command: Command, changes: dict[str, Any]
) -> None:
    cache = world.dump().path
    content = json.loads((cache / "teacher/config.json").read_text())
    replace_in_manifest(cache, "teacher/config.json", json.dumps({**content, **changes}).encode())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    command.fails(
        *("train", cache, "--arch", "1x16", "--steps", 1, "--out", world.root / "run"),
        code=1,
        says="teacher/config.json of the cache cannot be used",
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 2**10


@pytest.mark.parametrize(
    ("family", "changes"),
    [("layoutlm", {"max_2d_position_embeddings": 2**19}), ("rembert", {"input_embedding_size": 20_000})],
)
def test_6_families_with_tables_of_their_own_fill_no_memory(
    world: World, command: Command, family: str, changes: dict[str, int]
) -> None:
    cache = world.dump().path
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["identity"]["teacher"].update(model_type=family, vocab_size=30_000)
    identity = type(read_manifest(cache).identity).model_validate_json(json.dumps(manifest["identity"]))
    manifest["fingerprint"] = identity.fingerprint()
    content = json.loads((cache / "teacher/config.json").read_text()) | {"vocab_size": 30_000} | changes
    document = json.dumps(content).encode()
    (cache / "teacher/config.json").write_bytes(document)
    manifest["files"]["teacher/config.json"] = digest_bytes(document).model_dump()
    write_document(cache / "manifest.json", manifest)
    for shard in (cache / "commits").iterdir():
        record = json.loads(shard.read_text()) | {"fingerprint": manifest["fingerprint"]}
        write_document(shard, record)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found, _, err = command("train", cache, "--arch", "1x16", "--steps", 1, "--out", world.root / "run")
    assert found == 1
    assert "Traceback" not in err
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 2**10


CONFIGS: dict[str, object] = {
    "torchao": {"quantization_config": {"quant_method": "torchao", "quant_type": "int4_weight_only"}},
    "compressed": {"quantization_config": {"quant_method": "compressed-tensors"}},
    "no heads": {"num_attention_heads": 0},
    "odd heads": {"num_attention_heads": 5},
    "pad id": {"pad_token_id": 10**6},
    "dtype": {"dtype": "float13"},
    "torch dtype": {"torch_dtype": ["x"]},
    "id2label": {"id2label": 7},
    "labels": {"num_labels": -3},
    "words": {"hidden_size": "wide"},
    "layers": {"num_hidden_layers": 10**9},
    "activation": {"hidden_act": "nothing"},
    "code": {"auto_map": {"AutoModel": "evil.Model"}},
    "family": {"model_type": "nothing"},
    "no family": {"model_type": None},
    "list": [],
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CONFIGS)
def test_8_no_model_folder_ends_in_a_traceback(world: World, command: Command, name: str) -> None:
    file = world.teacher / "config.json"
    changes = CONFIGS[name]
    content = json.loads(file.read_text()) | changes if isinstance(changes, dict) else changes
    file.write_text(json.dumps(content))
    code, _, err = command("dump", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 16)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in err
    if name in {"code", "torch dtype"}:  # what is not taken harms nothing
        assert code == 0, err
    else:
        assert (code, len(errors)) == (1, 1), err
        assert str(world.teacher) in errors[0]


def test_9_a_students_tokenizer_asks_for_no_code(world: World) -> None:
    cache = world.dump().path
    settings = json.loads((cache / "teacher/tokenizer_config.json").read_text())
    hostile = {
        **settings,
        "auto_map": {"AutoTokenizer": ["evil.T", None]},
        "chat_template": "{{ ''.__class__ }}",
        "tokenizer_class": "subprocess.Popen",
    }
    replace_in_manifest(cache, "teacher/tokenizer_config.json", json.dumps(hostile).encode())
    recipe = TrainConfig(arch=("1x16",), steps=1, batch_size=2, device="cpu")
    student = train_students(recipe, cache, out=world.root / "run", session=Session(world.home)).student_path(
        "1x16"
    )
    saved = json.loads((student / "tokenizer_config.json").read_text())
    assert saved.keys().isdisjoint({"auto_map", "chat_template", "tokenizer_class"})
    assert {name: saved[name] for name in saved} == {
        name: value for name, value in settings.items() if name in saved
    }
