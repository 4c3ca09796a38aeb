"""Codec `vectors`: KL as asked, read with plain zarr and torch, for every family."""

import hashlib
import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModel

from minilm_cache import open_cache
from minilm_cache.codecs.calibrate import calibrate, measured_kl, split_sample
from minilm_cache.codecs.vectors import VectorsCodec, concatenate, quantise
from minilm_cache.dump.run import dump
from minilm_cache.dump.teacher import locate_teacher
from minilm_cache.errors import CacheCorruptError, CorpusError, InterruptedRunError, InvalidConfigError
from minilm_cache.progress import Silent
from minilm_cache.relations import TeacherSignal, Vectors, key_mask, relation_probs
from minilm_cache.storage_schema.arrays import codes_path
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.manifest import CacheManifest, LayerCalibration
from minilm_cache.store.shards import encode_pcodec_shard
from minilm_cache.store.writer import creating
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.objective import choose_objective
from minilm_cache.train.run import train
from tests.conftest import Command
from tests.integration.test_dump import arrays_of, manifest_of, stop_after
from tests.integration.test_hostile import replace_in_manifest, replace_in_shard, shard_file
from tests.integration.test_train import settings as train_settings
from tests.support import World, dump_arguments, save_teacher, write_corpus, write_document

KINDS = (RelationKind.ATTENTION, RelationKind.VALUE)


def last_layer(manifest: CacheManifest) -> LayerCalibration:
    """Return how the last tapped layer was fitted."""
    assert manifest.calibration is not None
    return manifest.calibration.layers[-1]


def measured_kls(manifest: CacheManifest, at: int = -1) -> dict[RelationKind, float]:
    """Return KL(teacher || stored) of a tapped layer, as the dump measured it."""
    assert manifest.measured is not None
    found = {}
    for kind, fidelity in manifest.measured.fidelity[at].relations.items():
        assert fidelity.kl_teacher_to_stored is not None
        found[kind] = fidelity.kl_teacher_to_stored
    return found


def plain_kl(path: Path, teacher_folder: Path, at: int = -1) -> dict[str, float]:
    """Held-out KL(teacher || stored), from the arrays with plain zarr, numpy and the eager model."""
    manifest = manifest_of(path)
    assert manifest.calibration is not None
    fitted = manifest.calibration.layers[at]
    heads, size = manifest.identity.relation_heads, fitted.head_size
    group = zarr.open_group(path, mode="r", zarr_format=3)
    names = ("codes", "basis", "step", "mean")
    arrays: dict[str, Any] = {name: group[f"vectors/{fitted.layer}/{name}"] for name in names}
    basis, step, mean = (np.asarray(arrays[name][:], dtype=np.float64) for name in ("basis", "step", "mean"))
    model = AutoModel.from_pretrained(teacher_folder, attn_implementation="eager").eval()
    tables = [pq.read_table(file) for file in sorted((path / "sequences").iterdir())]
    held_out = [row for table in tables for row in table.to_pylist()][manifest.num_train :]
    sums, rows = dict.fromkeys(("attention", "value"), 0.0), 0
    cache = open_cache(path)
    for row in held_out:
        codes = np.asarray(arrays["codes"][row["offset"] : row["offset"] + row["length"]])
        flat = torch.from_numpy(mean + (codes * step) @ basis)
        query, key, value = flat.view(-1, 3, heads, size).permute(1, 2, 0, 3)
        with torch.no_grad():
            outputs = model(cache[row["sequence"]].input_ids[None], output_attentions=True)
        teacher = outputs.attentions[fitted.layer][0].double()
        stored = torch.softmax(query @ key.mT / math.sqrt(size), -1)
        if fitted.window is not None:
            seen = teacher > 0
            stored = stored * seen / (stored * seen).sum(-1, keepdim=True)
        sums["attention"] += float(torch.special.xlogy(teacher, teacher / stored).nan_to_num().sum())
        found = cache[row["sequence"]].relation("value", fitted.layer).double()
        expected = torch.softmax(value @ value.mT / math.sqrt(size), -1)
        sums["value"] += float((found - expected).abs().max())
        rows += heads * row["length"]
    return {"attention": sums["attention"] / rows, "value": sums["value"] / len(held_out)}


def plain_value_kl(path: Path) -> float:
    """Held-out KL of the value relation of `mini`, with plain zarr, torch and a hook."""
    manifest = manifest_of(path)
    group = zarr.open_group(path, mode="r", zarr_format=3)
    arrays: dict[str, Any] = {name: group[f"vectors/5/{name}"] for name in ("codes", "basis", "step", "mean")}
    basis, step, mean = (np.asarray(arrays[name][:], dtype=np.float64) for name in ("basis", "step", "mean"))
    model = AutoModel.from_pretrained(locate_teacher("mini").folder).eval()
    seen: list[Tensor] = []
    layer = model.get_submodule("encoder.layer.5.attention.self.value")
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    tables = [pq.read_table(file) for file in sorted((path / "sequences").iterdir())]
    held_out = [row for table in tables for row in table.to_pylist()][manifest.num_train :]
    total, rows = 0.0, 0
    tokens: Any = group["tokens"]
    for row in held_out:
        span = slice(row["offset"], row["offset"] + row["length"])
        flat = torch.from_numpy(mean + (np.asarray(arrays["codes"][span]) * step) @ basis)
        with torch.no_grad():
            model(torch.from_numpy(np.asarray(tokens[span]).astype(np.int64))[None])
        found = []
        for value in (seen.pop().double(), flat[:, 768:]):
            heads = value.view(-1, 12, 32).transpose(0, 1)
            found.append(torch.log_softmax(heads @ heads.mT / math.sqrt(32), -1))
        total += float((found[0].exp() * (found[0] - found[1])).sum())
        rows += 12 * row["length"]
    return total / rows


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "electra", "modernbert", "distilbert"])
def test_relations_keep_to_the_kl_asked_for(tmp_path: Path, family: str) -> None:
    """Rotary positions (ModernBERT) included; few held-out tokens, so half as much again is allowed."""
    teacher = save_teacher(tmp_path / "teacher", family)
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt", 600))
    path = world.dump(codec="vectors", max_kl=0.02, shard_tokens=4096).path
    manifest = manifest_of(path)
    fitted, kls = last_layer(manifest), measured_kls(manifest)
    found = plain_kl(path, teacher)

    assert max(fitted.kl.values()) <= 0.02
    assert all(0.002 < kls[kind] <= 0.03 for kind in KINDS)
    assert found["attention"] == pytest.approx(kls[RelationKind.ATTENTION], rel=0.02)
    assert found["value"] < 1e-5
    # width of the layer's input, and twice as much again where positions turn queries and keys
    assert fitted.components <= (96 if family == "modernbert" else 32)


def test_attention_that_sees_a_window_is_kept_as_such(tmp_path: Path) -> None:
    """A ModernBERT whose last layer sees 4 positions to each side."""
    teacher = save_teacher(tmp_path / "teacher", "modernbert", num_hidden_layers=3)
    world = World(tmp_path, teacher, write_corpus(tmp_path / "corpus.txt", 200))
    result = world.dump(codec="vectors", shard_tokens=4096)
    attention = open_cache(result.path)[0].relation("attention")
    position = torch.arange(attention.shape[-1])
    near = (position[:, None] - position).abs() <= 4

    assert last_layer(result.manifest).window == 4
    assert bool((attention[:, ~near] == 0).all())
    assert measured_kls(result.manifest)[RelationKind.ATTENTION] <= 0.03


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
    with pytest.raises(ValueError, match="no layer 1, but 0, 2"):
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
        (("--layers", "0,1"), 2, "several --layers go with --codec vectors, not with topk"),
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
    poison = np.full((manifest.shards[1].num_tokens, components), spec.fill_value, dtype=np.int16)
    content = encode_pcodec_shard(poison, spec, manifest.shard_tokens)
    replace_in_shard(path, f"{codes_path(0)}/c/1/0", _always(content))
    command.fails("verify", "--full", path, code=3, says="a stored token has no codes")


def test_only_the_layer_asked_for_is_read(world: World) -> None:
    """What is damaged elsewhere does not matter then."""
    path = world.dump(codec="vectors", layers=(0, 2)).path
    damaged = path / codes_path(0) / "c/0/0"
    damaged.write_bytes(b"")
    reader = open_cache(path).reader

    assert set(reader.shard(0, [codes_path(2)]).rows) == {"tokens", codes_path(2)}
    with pytest.raises(CacheCorruptError, match="vectors/0/codes/c/0/0 is damaged"):
        reader.shard(0)
    result = train(train_settings(steps=2), path, world.root / "run", world.home)
    assert result.record.complete


def test_a_kl_that_cannot_be_reached_is_refused(world: World) -> None:
    with pytest.raises(InvalidConfigError, match=r"--max-kl 1e-08 cannot be reached"):
        world.dump(codec="vectors", max_kl=1e-8)
    assert not (world.root / "cache").exists()


def test_a_missing_record_is_repaired_with_the_same_codec(world: World) -> None:
    path = world.dump(codec="vectors").path
    expected = arrays_of(path)
    (path / "commits/00002.json").unlink()
    world.dump(codec="vectors", batch_size=3)
    basis = "vectors/2/basis/c/0/0"

    assert arrays_of(path)[basis] == expected[basis]


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
def test_the_pretrained_encoder_keeps_to_the_kl_and_to_62_bytes(tmp_path: Path) -> None:
    """On a tenth of python-docs; what is the same for all tokens is left out of the count."""
    world = World(tmp_path, Path("mini"), Path("python-docs"))
    result = world.dump(codec="vectors", max_kl=0.02, max_length=128, max_tokens=2**16, shard_tokens=2**16)
    measured = result.manifest.measured
    assert measured is not None
    folder = locate_teacher("mini").folder
    recomputed = {
        "attention": plain_kl(result.path, folder)["attention"],
        "value": plain_value_kl(result.path),
    }

    for kind, kl in measured_kls(result.manifest).items():
        assert kl <= 0.02
        assert recomputed[kind] == pytest.approx(kl, rel=0.02)
    assert measured.bytes_per_token <= 50


def test_calibration_sequences_are_recorded_and_are_not_those_of_the_fidelity(world: World) -> None:
    manifest = world.dump(codec="vectors").manifest
    assert manifest.calibration is not None

    assert manifest.calibration.num_fitted + manifest.calibration.num_checked <= manifest.num_train


@pytest.mark.parametrize("reached", ["manifest.json", "commits/00000.json"])
def test_a_resumed_dump_is_byte_for_byte_an_uninterrupted_one(world: World, reached: str) -> None:
    expected = arrays_of(world.dump("whole", codec="vectors").path)
    config = world.config(codec="vectors")
    parts = world.root / "parts"
    with pytest.raises(InterruptedRunError, match=r"of 6 shards of .* are committed"):
        dump(config, parts, world.home, should_stop=(parts / reached).exists)
    dump(config, parts, world.home)

    assert arrays_of(world.root / "parts") == expected


def test_a_kill_before_the_codec_was_written_is_not_in_the_way(world: World) -> None:
    expected = arrays_of(world.dump("whole", codec="vectors").path)
    config = world.config(codec="vectors")
    with pytest.raises(InterruptedRunError):
        dump(
            config, world.root / "parts", world.home, should_stop=(world.root / "parts/manifest.json").exists
        )
    (world.root / "parts/vectors/2/basis/c/0/0").unlink()
    dump(config, world.root / "parts", world.home)

    assert arrays_of(world.root / "parts") == expected


@pytest.mark.parametrize("calls", [0, 5])
def test_fitting_the_codec_can_be_interrupted(world: World, calls: int) -> None:
    """While the teacher runs over the sample, and while steps are tried."""
    with pytest.raises(InterruptedRunError, match="while fitting the codec: nothing was written"):
        dump(world.config(codec="vectors"), world.root / "cache", world.home, should_stop=stop_after(calls))
    assert not (world.root / "cache").exists()


def test_a_rank_waits_for_the_one_that_fits_the_codec(world: World) -> None:
    """In batches of another size it would fit another codec, and be refused."""
    path = world.root / "cache"
    stop = threading.Event()
    with ThreadPoolExecutor() as threads:
        with creating(path, Silent(), stop.is_set):
            assert not (path / "manifest.json").exists()
            later = world.config(codec="vectors", rank=1, world_size=2, batch_size=3)
            waiting = threads.submit(dump, later, path, world.home)
            given_up = threads.submit(dump, later, path, world.home, should_stop=lambda: True)
            with pytest.raises(InterruptedRunError, match="this one wrote nothing"):
                given_up.result()
            assert not waiting.done()
        assert waiting.result().shards_written == 3
    first = world.dump(codec="vectors", rank=0, world_size=2)
    assert first.manifest.complete
    assert not list(first.path.glob("locks/0*"))


def test_info_says_what_vectors_hold(world: World, command: Command) -> None:
    result = world.dump(codec="vectors")
    components = last_layer(result.manifest).components
    code, out, _ = command("info", result.path)
    assert code == 0
    assert f"all, from queries, keys and values in {components} components of layer 2" in out
    assert "vectors max_kl=0.015" in out
    assert command("verify", "--full", result.path)[0] == 0


def test_students_train_from_vectors(world: World) -> None:
    cache = world.dump(codec="vectors").path
    result = train(train_settings(steps=60), cache, world.root / "run", world.home)
    for student in result.record.students:
        assert student.held_out_before is not None
        assert student.held_out_after is not None
        assert sum(student.held_out_after.values()) < 0.9 * sum(student.held_out_before.values())


def test_every_relation_comes_from_vectors(world: World) -> None:
    sequence = open_cache(world.dump(codec="vectors").path)[0]
    for kind in RelationKind:
        rows = sequence.relation(kind)
        torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]))


def test_a_corpus_too_small_to_hold_anything_out_is_told_so(world: World) -> None:
    world.corpus.write_text("ba be bi bo bu ban " * 12)
    with pytest.raises(CorpusError, match=r"training sequences are too few: it needs 4\. Give more text"):
        world.dump(codec="vectors")


def test_damage_to_basis_and_codes_is_an_error(world: World) -> None:
    cache = world.dump(codec="vectors").path
    codes = f"{codes_path(2)}/c/1/0"
    for content in (shard_file(None), shard_file(b"nonsense"), b""):
        replace_in_shard(cache, codes, _always(content))
        with pytest.raises(CacheCorruptError, match="codes/c/1/0 is damaged"):
            open_cache(cache).reader.shard(1)
    basis = (cache / "vectors/2/basis/c/0/0").read_bytes()
    replace_in_manifest(cache, "vectors/2/basis/c/0/0", basis[:-2] + b"\xff\x7f")
    with pytest.raises(CacheCorruptError, match="is not the array it should be"):
        open_cache(cache)


def _always(content: bytes) -> Callable[[bytes], bytes]:
    return lambda _: content


@st.composite
def signals(draw: st.DrawFn) -> list[TeacherSignal]:
    """Vectors of any rank, with constant components and outliers, in sequences of any length."""
    heads, size = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    width = heads * size
    rank = draw(st.integers(0, 3 * width))
    basis = torch.randn(rank, 3 * width, generator=generator)
    offset = torch.randn(3 * width, generator=generator) * draw(st.sampled_from([0.0, 1.0, 30.0]))
    found = []
    for _ in range(3):
        length = draw(st.integers(1, 13))
        lengths = torch.tensor([draw(st.integers(1, length)), length])
        flat = torch.randn(2, length, rank, generator=generator) @ basis + offset
        if draw(st.booleans()):
            flat[0, 0] *= draw(st.sampled_from([10.0, 1e4]))
        query, key, value = flat.view(2, length, 3, heads, size).permute(2, 0, 3, 1, 4)
        vectors = Vectors(query, key, value, key_mask(lengths, length)[:, None, None, :], size**-0.5)
        found.append(TeacherSignal(vectors, lengths))
    return found


@settings(max_examples=40, deadline=None)
@given(signals())
def test_any_vectors_can_be_coded(batches: list[TeacherSignal]) -> None:
    try:
        fitted = calibrate(batches[:2], batches[2:], 0.02, layer=0)
    except InvalidConfigError:  # outliers beyond what the codes reach: refused, not stored badly
        return
    assert max(fitted.kl.values()) <= 0.02
    codec = fitted.codec
    (codes,) = codec.encode(batches[2], ()).values()
    again = codec.encode(batches[2], ())[codec.codes_path]
    stored = codec.vectors(torch.from_numpy(codes))

    assert np.array_equal(codes, again)
    assert all(bool(torch.isfinite(part).all()) for part in (stored.query, stored.key, stored.value))
    assert measured_kl(codec, batches[2:]) == fitted.kl
    for kind in RelationKind:
        rows = relation_probs(stored, kind, batches[2].lengths)
        torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]))


@given(st.floats(-40000, 40000, width=32))
def test_rounding_is_towards_zero_more_than_to_the_nearest(value: float) -> None:
    code = float(quantise(torch.tensor([value]))[0])

    assert abs(code) <= 2**15 - 1
    assert code == 0 or math.copysign(1, code) == math.copysign(1, value)
    if abs(value) < 2**15 - 2:
        assert -0.33 - 1e-2 <= abs(value) - abs(code) <= 0.67 + 1e-2


def test_decoding_is_one_matrix_product() -> None:
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(5, 24, generator=generator).half()
    mean = torch.randn(24, generator=generator)
    codec = VectorsCodec(
        layer=0,
        num_heads=2,
        head_size=4,
        scaling=0.5,
        window=None,
        mean=mean,
        basis=basis,
        step=torch.full((5,), 0.5),
        analysis=basis,
        gain=torch.ones(5),
    )
    codes = torch.randint(-9, 9, (1, 7, 5), generator=generator, dtype=torch.int16)
    expected: Tensor = mean + (codes.float() * 0.5) @ basis.float()

    torch.testing.assert_close(concatenate(codec.vectors(codes)), expected)


@pytest.mark.parametrize("num_sequences", [4, 5, 9, 100, 1000])
def test_the_sample_is_split_without_overlap(num_sequences: int) -> None:
    fit, check = split_sample(num_sequences, 256)

    assert fit.start == 0
    assert len(fit) >= 1
    assert len(check) >= 1
    assert fit.stop == check.start
    assert check.stop <= num_sequences


@pytest.mark.parametrize("relation_heads", [None, 2, 8])
def test_minilmv2_is_plain_torch_on_heads_split_anew(world: World, relation_heads: int | None) -> None:
    """Q-Q, K-K and V-V of a teacher of width 32 and a student of width 16, any number of relation heads."""
    cache = open_cache(world.dump(codec="vectors").path)
    config = train_settings(objective="minilmv2", relation_heads=relation_heads)
    objective = choose_objective(config, cache)
    heads = relation_heads or 4
    reader = BatchReader(cache, objective.wanted, 0, torch.device("cpu"))
    batch = next(iter(reader.held_out_batches(1, 1)))
    query, key, value = torch.randn(3, len(batch.ids), 4, batch.ids.shape[1], 4)
    found = objective(Vectors(query, key, value, None, 0.5), batch)
    assert isinstance(cache.codec, VectorsCodec)
    sequence = cache[cache.manifest.num_train]
    codes = torch.from_numpy(sequence._rows[cache.codec.codes_path][None])
    teacher = cache.codec.vectors(codes)
    length = len(sequence.input_ids)
    parts = {"query": (teacher.query, query), "key": (teacher.key, key), "value": (teacher.value, value)}
    for kind, (theirs, ours) in parts.items():
        wide = theirs[0].transpose(0, 1).reshape(length, heads, -1).transpose(0, 1).double()
        narrow = ours[0].transpose(0, 1).reshape(length, heads, -1).transpose(0, 1).double()
        target = (wide @ wide.mT / wide.shape[-1] ** 0.5).softmax(-1)
        log_student = (narrow @ narrow.mT / narrow.shape[-1] ** 0.5).log_softmax(-1)
        expected = torch.nn.functional.kl_div(log_student, target, reduction="sum") / (heads * length)

        torch.testing.assert_close(found.parts[RelationKind(kind)].double(), expected, atol=1e-4, rtol=1e-4)


def test_minilmv2_trains_students_with_heads_of_their_own(world: World) -> None:
    cache = world.dump(codec="vectors").path
    config = train_settings(arch=("2x16:h2", "1x32"), steps=40, objective="minilmv2", relation_heads=8)
    result = train(config, cache, world.root / "run", world.home)

    for student in result.record.students:
        assert student.held_out_before is not None
        assert student.held_out_after is not None
        assert set(student.held_out_after) == {"query", "key", "value"}
        assert sum(student.held_out_after.values()) < sum(student.held_out_before.values())
    assert AutoModel.from_pretrained(result.student_path("2x16:h2")).config.num_attention_heads == 2


@pytest.mark.parametrize(
    ("changes", "codec", "message"),
    [
        ({}, {}, "needs the query and key relation, which a cache of codec topk does not hold"),
        ({"relation_heads": 3}, {"codec": "vectors"}, "--relation-heads 3: the teacher's width 32"),
        (
            {"arch": ("1x20",), "relation_heads": 8},
            {"codec": "vectors"},
            "does not divide by 8 relation heads",
        ),
    ],
    ids=["topk", "teacher", "student"],
)
def test_minilmv2_says_what_does_not_fit(
    world: World, changes: dict[str, Any], codec: dict[str, Any], message: str
) -> None:
    cache = world.dump(**codec).path
    config = train_settings(objective="minilmv2", **changes)
    with pytest.raises(InvalidConfigError) as caught:
        train(config, cache, world.root / "run", world.home)

    assert message in str(caught.value)
