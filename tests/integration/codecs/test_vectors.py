"""Codec `vectors`: KL as asked, read with plain zarr and torch, for every family."""

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
from minilm_cache.codecs.transform import TransformCode, quantise
from minilm_cache.codecs.vectors import VectorsCodec, calibrate, concatenate, measured_kl, split_sample
from minilm_cache.dump.run import dump_cache
from minilm_cache.errors import CacheCorruptError, CorpusError, InterruptedRunError, InvalidConfigError
from minilm_cache.models.locate import locate_teacher
from minilm_cache.relations.scores import LayerRelations, Vectors, key_mask, relation_probs
from minilm_cache.session import Session
from minilm_cache.storage_schema.arrays import codes_path
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.storage_schema.manifest import CacheManifest, LayerCalibration
from minilm_cache.store.creation import creating
from minilm_cache.train.run import train_students
from tests.fixtures import Command
from tests.integration.dump.test_dump import arrays_of, manifest_of, stop_after
from tests.integration.store.test_hostile import replace_in_manifest, replace_in_shard, shard_file
from tests.integration.train.test_train import settings as train_settings
from tests.support import World, save_teacher, write_corpus
from tests.unit.store.support import keep_shards

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


def test_a_kl_that_cannot_be_reached_is_refused(world: World) -> None:
    with pytest.raises(InvalidConfigError, match=r"--max-kl 1e-08 cannot be reached"):
        world.dump(codec="vectors", max_kl=1e-8)
    assert not (world.root / "cache").exists()


def test_a_missing_record_is_repaired_with_the_same_codec(world: World) -> None:
    path = world.dump(codec="vectors").path
    expected = arrays_of(path)
    keep_shards(path, {0, 1, 3, 4, 5})
    world.dump(codec="vectors", batch_size=3)
    basis = "vectors/2/basis/c/0/0"

    assert arrays_of(path)[basis] == expected[basis]


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
def test_the_pretrained_encoder_keeps_to_the_kl_and_to_50_bytes(tmp_path: Path) -> None:
    """On the decisions, which change seldom: two sequences are held out, and other ones have another KL.

    What is the same for all tokens is left out of the count.
    """
    world = World(tmp_path, Path("mini"), Path(__file__).parents[3] / "docs" / "adr")
    result = world.dump(codec="vectors", max_kl=0.02, max_length=128, max_tokens=2**13, shard_tokens=2**13)
    measured = result.manifest.measured
    assert measured is not None
    folder = locate_teacher("mini").folder
    recomputed = {
        "attention": plain_kl(result.path, folder)["attention"],
        "value": plain_value_kl(result.path),
    }

    for kind, kl in measured_kls(result.manifest).items():
        assert kl <= 1.1 * 0.02  # few sequences; the bound is that of the check
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
        dump_cache(config, out=parts, session=Session(world.home, should_stop=(parts / reached).exists))
    dump_cache(config, out=parts, session=Session(world.home))

    assert arrays_of(world.root / "parts") == expected


def test_a_kill_before_the_codec_was_written_is_not_in_the_way(world: World) -> None:
    expected = arrays_of(world.dump("whole", codec="vectors").path)
    config = world.config(codec="vectors")
    with pytest.raises(InterruptedRunError):
        dump_cache(
            config,
            out=world.root / "parts",
            session=Session(world.home, should_stop=(world.root / "parts/manifest.json").exists),
        )
    (world.root / "parts/vectors/2/basis/c/0/0").unlink()
    dump_cache(config, out=world.root / "parts", session=Session(world.home))

    assert arrays_of(world.root / "parts") == expected


@pytest.mark.parametrize("calls", [1, 5])  # the first call is for the text's tokens
def test_fitting_the_codec_can_be_interrupted(world: World, calls: int) -> None:
    """While the teacher runs over the sample, and while steps are tried."""
    with pytest.raises(InterruptedRunError, match="while fitting the codec: nothing was written"):
        dump_cache(
            world.config(codec="vectors"),
            out=world.root / "cache",
            session=Session(world.home, should_stop=stop_after(calls)),
        )
    assert not (world.root / "cache").exists()


def test_a_rank_waits_for_the_one_that_fits_the_codec(world: World) -> None:
    """In batches of another size it would fit another codec, and be refused."""
    world.dump("other")  # so that the text is tokenised
    path = world.root / "cache"
    stop = threading.Event()
    with ThreadPoolExecutor() as threads:
        with creating(path, Session(should_stop=stop.is_set)):
            assert not (path / "manifest.json").exists()
            later = world.config(codec="vectors", rank=1, world_size=2, batch_size=3)
            waiting = threads.submit(dump_cache, later, out=path, session=Session(world.home))
            given_up = threads.submit(
                dump_cache, later, out=path, session=Session(world.home, should_stop=lambda: True)
            )
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
    assert "vectors max_kl=0.005" in out
    assert command("verify", "--full", result.path)[0] == 0


def test_students_train_from_vectors(world: World) -> None:
    cache = world.dump(codec="vectors").path
    result = train_students(
        train_settings(steps=60), cache, out=world.root / "run", session=Session(world.home)
    )
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
    few = r"training sequences are too few: it needs 4\. Give more text"
    with pytest.raises(CorpusError, match=f"{few}, or take --codec topk or dense"):
        world.dump(codec="vectors")
    with pytest.raises(CorpusError, match=rf"{few}\.$"):
        world.dump(codec="none", hidden="last")


def test_damage_to_basis_and_codes_is_an_error(world: World) -> None:
    cache = world.dump(codec="vectors").path
    codes = f"{codes_path(2)}/c/1/0"
    for content in (shard_file(None), shard_file(b"nonsense"), b""):
        replace_in_shard(cache, codes, always(content))
        with pytest.raises(CacheCorruptError, match="codes/c/1/0 is damaged"):
            open_cache(cache).reader.segment(1)
    basis = (cache / "vectors/2/basis/c/0/0").read_bytes()
    replace_in_manifest(cache, "vectors/2/basis/c/0/0", basis[:-2] + b"\xff\x7f")
    with pytest.raises(CacheCorruptError, match="is not the array it should be"):
        open_cache(cache)[0].relation("attention")


def always(content: bytes) -> Callable[[bytes], bytes]:
    return lambda _: content


@st.composite
def signals(draw: st.DrawFn) -> list[LayerRelations]:
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
        found.append(LayerRelations(vectors, lengths))
    return found


@settings(max_examples=40, deadline=None)
@given(signals())
def test_any_vectors_can_be_coded(batches: list[LayerRelations]) -> None:
    try:
        fitted = calibrate(batches[:2], batches[2:], 0.02, layer=0)
    except InvalidConfigError:  # outliers beyond what the codes reach: refused, not stored badly
        return
    assert max(fitted.kl.values()) <= 0.02
    codec = fitted.codec
    (codes,) = codec.encode(batches[2], (), lengths=batches[2].lengths).values()
    again = codec.encode(batches[2], (), lengths=batches[2].lengths)[codec.codes_path]
    stored = codec.vectors(codes)

    assert torch.equal(codes, again)
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
        code=TransformCode(
            mean=mean, basis=basis, step=torch.full((5,), 0.5), analysis=basis, gain=torch.ones(5)
        ),
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
