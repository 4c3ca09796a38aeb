"""Codec `vectors` over several layers of a teacher: chosen, fitted, read and trained from one by one."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from minilm_cache import open_cache
from minilm_cache.errors import CacheCorruptError, InvalidConfigError
from minilm_cache.session import Session
from minilm_cache.storage_schema.arrays import codes_path
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.store.reader import CacheReader
from minilm_cache.train.run import train_students
from tests.fixtures import Command
from tests.integration.codecs.test_vectors import KINDS, always, measured_kls, plain_kl
from tests.integration.dump.test_dump import manifest_of
from tests.integration.store.test_hostile import replace_in_shard
from tests.integration.train.test_train import settings as train_settings
from tests.support import World, dump_arguments, save_teacher, write_corpus, write_document
from tests.unit.store.support import encoded


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_every_tapped_layer_keeps_to_the_kl(tmp_path: Path, family: str) -> None:
    """ModernBERT's first layer sees everything, its others a window: each has a mask of its own."""
    teacher = save_teacher(tmp_path / "teacher", family, num_hidden_layers=3)
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt", 600))
    path = world.dump(codec="vectors", shard_tokens=4096, layers="all").path
    manifest = manifest_of(path)

    assert manifest.identity.layers == (0, 1, 2)
    for at in range(3):
        kls, found = measured_kls(manifest, at), plain_kl(path, teacher, at)
        assert all(kls[kind] <= 0.03 for kind in KINDS)
        assert found["attention"] == pytest.approx(kls[RelationKind.ATTENTION], rel=0.02)
        assert found["value"] < 1e-5


def test_layers_are_chosen_by_number_and_trained_from(world: World, command: Command) -> None:
    cache = world.root / "cache"
    code, out, err = command(*dump_arguments(world, k=None), "--codec", "vectors", "--layers", "2,0")
    assert code == 0, err
    assert open_cache(cache).layers == (0, 2)
    assert {folder.name for folder in (cache / "vectors").iterdir() if folder.is_dir()} == {"0", "2"}
    assert "components of layer 0" in command("info", cache)[1]
    found = {}
    for layer in (0, 2):
        arguments = ("train", cache, "--arch", "2x32", "--steps", 3, "--teacher-layer", layer, "--json")
        code, out, err = command(*arguments)
        assert code == 0, err
        assert f"layer {layer} of the teacher" in err
        found[layer] = out
    assert found[0] != found[2]
    command.fails(
        *("train", cache, "--arch", "2x32", "--teacher-layer", 1),
        code=2,
        says=("--teacher-layer 1: the cache holds layer 0, 2", "--layers"),
    )
    with pytest.raises(InvalidConfigError, match="no layer 1, but 0, 2"):
        open_cache(cache)[0].relation("value", 1)


def test_relations_of_any_one_layer_can_be_stored(world: World) -> None:
    path = world.dump(codec="dense", layers=(0,)).path
    sequence = open_cache(path)[0]
    eager = AutoModel.from_pretrained(world.teacher, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = eager(sequence.input_ids[None], output_attentions=True).attentions[0][0]

    assert manifest_of(path).identity.layers == (0,)
    torch.testing.assert_close(sequence.relation("attention"), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--layers", "9"), 2, "--layers 9: teacher teacher has layers 0 to 2. Choose among them."),
        (("--layers", "1,1", "--codec", "vectors"), 2, "--layers 1,1: give last, all, or different numbers"),
        (("--layers", "2000"), 2, "--layers 2000: give last, all, or different numbers from 0 to 127"),
        (("--layers", ","), 2, "--layers ,: give last, all, or different numbers"),
        (("--layers", "first"), 2, "--layers first: give last, all, or different numbers"),
        (
            ("--layers", "0,1", "--codec", "topk"),
            2,
            "several --layers go with --codec vectors, not with topk",
        ),
        (
            ("--layers", "all", "--codec", "dense"),
            2,
            "several --layers go with --codec vectors, not with dense",
        ),
    ],
    ids=str,
)
def test_layers_that_make_no_sense(
    world: World, command: Command, options: tuple[str, ...], code: int, says: str
) -> None:
    command.fails(*dump_arguments(world, k=None), *options, code=code, says=says)


def test_layers_are_put_in_order_however_they_are_given(world: World) -> None:
    assert world.config(codec="vectors", layers=(2, 0)).layers == (0, 2)
    assert world.config(codec="vectors", layers="2, 0").layers == (0, 2)
    for nonsense in ((), (1, 1), (-1,), (1.5,), 3):
        with pytest.raises(InvalidConfigError, match="give last, all, or different numbers"):
            world.config(codec="vectors", layers=nonsense)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"identity": {"layers": [2, 0]}}, "layers do not ascend"),
        ({"identity": {"layers": [0, 9]}}, "the teacher has no layer 9"),
        ({"identity": {"codec": {"name": "dense"}, "relations": ["value"]}}, "stores several layers"),
        ({"calibration": None}, "is no file of the format"),
        ({"calibration": {"num_fitted": 2**40}}, "held out"),
        ({"calibration": {"layers": {"reverse": 1}}}, "calibration.layers names other layers"),
        ({"measured": {"fidelity": {"reverse": 1}}}, "measured.fidelity names other layers"),
        ({"calibration": {"layers": {"kl": {"attention": 0.01}}}}, "not of attention and value relation"),
        ({"calibration": {"layers": {"kl": {"attention": 0.01, "value": float("nan")}}}}, "manifest.json"),
        (
            {"calibration": {"layers": {"kl": {"attention": 0.01, "value": -1.0}}}},
            "greater than or equal to 0",
        ),
        ({"calibration": {"layers": {"scaling": 1e300}}}, "less than or equal to"),
        ({"files": {"vectors/0099/basis/c/0/0": None}}, "vectors/0099/basis/c/0/0 is no file of the format"),
        ({"files": {"vectors/1/basis/c/0/0": None}}, "vectors/1/basis/c/0/0 is no file of the format"),
    ],
    ids=str,
)
def test_manifests_whose_layers_disagree_are_refused(
    world: World, command: Command, change: dict[str, Any], says: str
) -> None:
    path = world.dump(codec="vectors", layers=(0, 2)).path
    manifest = json.loads((path / "manifest.json").read_text())
    _alter(manifest, change, next(iter(manifest["files"].values())))
    identity = json.dumps(manifest["identity"], sort_keys=True, separators=(",", ":"))
    manifest["fingerprint"] = hashlib.sha256(identity.encode()).hexdigest()
    write_document(path / "manifest.json", manifest)
    command.fails("info", path, code=1, says=says)


def _alter(document: dict[str, Any], change: dict[str, Any], digest: dict[str, Any]) -> None:
    """Change fields of a document; of a list its first entry, or its order."""
    for name, value in change.items():
        there: Any = document.get(name)
        if isinstance(value, dict) and value == {"reverse": 1}:
            document[name] = there[::-1]
        elif isinstance(there, list) and isinstance(value, dict):
            there[0].update(value)
        elif isinstance(there, dict) and isinstance(value, dict) and "name" not in value:
            _alter(there, value, digest)
        else:
            document[name] = digest if name.startswith("vectors/") else value


def test_codes_that_are_none_are_found_in_every_layer(world: World, command: Command) -> None:
    path = world.dump(codec="vectors", layers=(0, 2), shard_tokens=256).path
    manifest = manifest_of(path)
    assert manifest.calibration is not None
    components = manifest.calibration.layers[0].components
    spec = next(one for one in open_cache(path).reader.specs if one.path == codes_path(0))
    poison = np.full((CacheReader(path).ranges[1].num_tokens, components), spec.fill_value, dtype=np.int16)
    content = encoded(poison, spec, manifest.shard_tokens)
    replace_in_shard(path, f"{codes_path(0)}/c/1/0", always(content))
    command.fails("verify", "--full", path, code=3, says="a stored token has no codes")


def test_only_the_layer_asked_for_is_read(world: World) -> None:
    """What is damaged elsewhere does not matter then."""
    path = world.dump(codec="vectors", layers=(0, 2)).path
    damaged = path / codes_path(0) / "c/0/0"
    damaged.write_bytes(b"")
    reader = open_cache(path).reader

    assert set(reader.segment(0, [codes_path(2)]).rows) == {"tokens", codes_path(2)}
    with pytest.raises(CacheCorruptError, match="vectors/0/codes/c/0/0 is damaged"):
        reader.segment(0)
    result = train_students(
        train_settings(steps=2), path, out=world.root / "run", session=Session(world.home)
    )
    assert result.record.complete
