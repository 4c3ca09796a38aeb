"""`dump --precision`: what a teacher computes in belongs to what identifies a cache."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from minilm_cache.cache import open_cache
from minilm_cache.dump.into_store import dump_into_store
from minilm_cache.dump.run import dump_cache
from minilm_cache.errors import (
    DeviceError,
    IdentityMismatchError,
    InterruptedRunError,
    InvalidConfigError,
    TeacherError,
)
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.load import load_model
from minilm_cache.models.locate import TeacherSource, locate_teacher
from minilm_cache.models.tap import Head
from minilm_cache.models.teacher import Teacher, TeacherMemory, _BytesLinear, _round_weights
from minilm_cache.session import Session, Silent
from minilm_cache.storage_schema.manifest import CacheManifest
from tests.fixtures import Command
from tests.integration.cli.test_processes import start
from tests.integration.train.test_train import stop_after
from tests.support import World, dump_arguments, save_teacher


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_a_cache_holds_what_a_teacher_of_such_a_precision_computes(world: World, precision: str) -> None:
    """The oracle is transformers' model, in int8 with weights that are rounded row by row."""
    plain = world.dump("plain", codec="dense")
    rounded = world.dump("rounded", codec="dense", precision=precision)
    sequence, own = open_cache(rounded.path)[3], open_cache(plain.path)[3]
    model = AutoModel.from_pretrained(world.teacher, dtype=torch.bfloat16)
    for part in model.modules() if precision == "int8" else ():
        if isinstance(part, torch.nn.Linear):
            weight = part.weight.data.float()
            scale = weight.abs().amax(1, keepdim=True) / 127
            part.weight.data = ((weight / scale).round() * scale).bfloat16()
    sides: list[torch.Tensor] = []
    attention = model.encoder.layer[-1].attention.self
    for module in (attention.query, attention.key):
        module.register_forward_hook(lambda _module, _inputs, output: sides.append(output.float()))
    with torch.no_grad():
        model(sequence.input_ids[None])
    query, key = (side[0].unflatten(-1, (4, -1)).transpose(0, 1) for side in sides)
    attentions = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)

    assert rounded.manifest.identity.precision == precision
    assert plain.manifest.identity.precision is None
    assert rounded.manifest.fingerprint != plain.manifest.fingerprint
    assert torch.equal(sequence.input_ids, own.input_ids)
    # In int8 the oracle's weights are rounded to bfloat16 once more.
    rtol, atol = (2**-10, 1e-6) if precision == "bfloat16" else (0.07, 1e-3)
    torch.testing.assert_close(sequence.relation("attention"), attentions, rtol=rtol, atol=atol)
    assert not torch.allclose(own.relation("attention"), attentions, rtol=2**-8, atol=1e-6)


def test_products_of_bytes_are_those_of_the_rounded_weights(world: World) -> None:
    """In float32, where nothing else is rounded."""
    model: Any = load_model(world.teacher, None, name="teacher")
    plain = AutoModel.from_pretrained(world.teacher)
    _round_weights(model, "int8")
    model.float()
    values = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    ours, theirs = (each.encoder.layer[0].attention.self.query for each in (model, plain))
    weight = theirs.weight.detach()
    most = weight.abs().amax(1, keepdim=True)
    rounded = (weight / most * 127).round() * most / 127
    assert not torch.equal(weight, rounded)
    expected = torch.nn.functional.linear(values, rounded, theirs.bias.detach().bfloat16().float())
    torch.testing.assert_close(ours(values), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "head"),
    [
        *product(["bert", "modernbert", "distilbert"], [None, "tokens", "sequences"]),
        *product(["llama"], [None, "sequences"]),  # decoders have no head for masked tokens
    ],
)
def test_memory_in_int8_is_what_the_teacher_holds(tmp_path: Path, family: str, head: Head | None) -> None:
    """The head for masked tokens is the table of embeddings, which is not held twice."""
    folder = save_teacher(tmp_path / "teacher", family, head=head, num_labels=3)
    teacher = Teacher(
        locate_teacher(str(folder)), torch.device("cpu"), precision="int8", head=head, layers=()
    )
    weights = list(teacher.model.parameters())
    eight = [part for part in teacher.model.modules() if isinstance(part, _BytesLinear)]
    held = sum(weight.numel() * weight.element_size() for weight in weights)
    held += sum(part.weight.numel() + 4 * part.scale.numel() for part in eight)
    assert teacher.memory._replace(device=torch.device("cuda")).num_bytes == held
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    assert not any(isinstance(part, torch.nn.Linear) for part in teacher.model.base_model.modules())


def test_a_teacher_that_does_not_fit_is_told_what_would(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, gpu = locate_teacher(str(world.teacher)), torch.device("cuda")
    monkeypatch.setattr("minilm_cache.models.teacher.free_bytes", lambda _device: None)
    of = partial(TeacherMemory.of, source, gpu, head=None)
    whole, half, eight = (of(precision=each).num_bytes for each in ("float32", "bfloat16", "int8"))
    assert whole == 2 * half > 2 * eight
    for free, remedy in ((half, "bfloat16"), (half - 1, "int8"), (eight - 1, "a smaller")):
        monkeypatch.setattr("minilm_cache.models.teacher.free_bytes", lambda _device, free=free: free)
        with pytest.raises(DeviceError, match=f"Take (`dump --precision )?{remedy}"):
            of(precision="float32")


def test_8_bits_need_linear_layers(world: World) -> None:
    """A table of words and hardly anything else."""
    save_teacher(
        world.teacher, hidden_size=4, num_attention_heads=1, intermediate_size=4, num_hidden_layers=1
    )
    with pytest.raises(TeacherError, match="no linear layers"):
        world.dump(precision="int8", codec="dense")


@pytest.mark.parametrize("states", ["minilm,tinybert", "minilm,bert-pkd"])
def test_states_in_bfloat16_are_stored_too(world: World, states: str) -> None:
    dumped = world.dump(**{"for": states}, codec="vectors", max_kl=0.01, precision="bfloat16")

    assert dumped.manifest.complete
    measured = dumped.manifest.measured
    assert measured is not None
    assert all((state.relative_error or 0) < 0.11 for state in measured.states)


def test_a_dump_goes_on_in_the_precision_that_it_began_in(world: World) -> None:
    first = world.dump(precision="bfloat16", world_size=2)
    rest = world.dump(rank=1, world_size=2)  # names no precision, and a CPU's own is float32

    assert not first.manifest.complete
    assert rest.manifest.complete
    with pytest.raises(IdentityMismatchError, match="precision"):
        world.dump(precision="float32")


def test_weights_are_kept_as_they_are_in_the_teacher(world: World) -> None:
    dumped = world.dump(precision="bfloat16", keep_weights=True)
    kept = load_file(dumped.path / "teacher/model.safetensors")
    plain = load_file(world.teacher / "model.safetensors")

    assert all(torch.equal(values, plain[name].half()) for name, values in kept.items())


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_verify_runs_the_teacher_in_the_precision_of_the_cache(
    world: World, command: Command, precision: str
) -> None:
    path = world.dump(codec="dense", precision=precision).path
    code, _, err = command("verify", path, "--teacher", world.teacher, "--corpus", world.corpus)

    assert code == 0, err


def test_tf32_needs_a_gpu_that_has_it(world: World, command: Command) -> None:
    code, _, err = command(*dump_arguments(world, "--precision", "tf32"))

    assert code == 2
    assert err.splitlines()[-1] == (
        "error: --precision tf32: only NVIDIA GPUs compute in TF32, and device cpu is none. "
        "Choose float32 or bfloat16."
    )
    with pytest.raises(InvalidConfigError, match="precision"):
        world.config(precision="float16")


def test_a_compiled_teacher_computes_the_same(world: World) -> None:
    """In a process of its own: the compiler cannot look through the tests' type checks."""
    save_teacher(world.teacher, num_hidden_layers=1)  # compiling takes seconds for each layer
    plain = open_cache(world.dump("plain", codec="dense").path)
    arguments = dump_arguments(world, "--codec", "dense", "--device", "cpu", "--compile", k=None)
    code, _, err = start(world, *arguments).end()
    assert code == 0, err
    assert err.index("compile the teacher") < err.index("dump"), "not in the time of the dump"
    compiled = open_cache(world.root / "cache")

    assert plain.manifest.fingerprint == compiled.manifest.fingerprint
    for number in (0, len(plain) - 1):
        torch.testing.assert_close(
            plain[number].relation("value"), compiled[number].relation("value"), rtol=0, atol=1e-3
        )


def test_a_teacher_is_compiled_for_both_ends_of_a_segment_before_a_dump_counts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: dict[str, list[torch.Size]] = {}
    read = Teacher.read

    class Tasks(Silent):
        def start(self, task: str, total: int, unit: str) -> None:
            tasks[task] = []

    def recorded(teacher: Teacher, inputs: Inputs, *rest: Any) -> object:
        list(tasks.values())[-1].append(inputs.ids.shape)
        return read(teacher, inputs, *rest)

    monkeypatch.setattr(Teacher, "compile_forward", lambda _: None)
    monkeypatch.setattr(Teacher, "read", recorded)
    dump_cache(
        world.config(compiled=True, shard_tokens=None, packing="records"),
        session=Session(world.home, progress=Tasks()),
    )
    compiled, dumped = tasks["compile the teacher"], tasks["dump"]

    assert list(tasks).index("compile the teacher") < list(tasks).index("dump")
    assert compiled == [dumped[0], dumped[-1]]
    assert compiled[0][1] < compiled[1][1], "both lengths, so that no length between them is new"


def test_a_rank_has_announced_itself_when_it_compiles_and_stops_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[str] = []

    class Tasks(Silent):
        def start(self, task: str, total: int, unit: str) -> None:
            tasks.append(task)

    monkeypatch.setattr(Teacher, "compile_forward", lambda _: None)
    with pytest.raises(InterruptedRunError, match="are committed"):
        dump_cache(
            world.config(compiled=True, rank=1, world_size=2),
            session=Session(world.home, progress=Tasks(), should_stop=lambda: "compile the teacher" in tasks),
        )

    assert tasks[-1] == "compile the teacher"
    assert [file.name for file in world.home.rglob("rank-*")] == ["rank-00001"]


def test_a_cache_says_its_precision(world: World, command: Command, tmp_path: Path) -> None:
    del tmp_path
    code, out, err = command("info", world.dump(precision="bfloat16").path)

    assert code == 0, err
    assert "bfloat16" in out


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let dumps choose as they do on a GPU, and compute on the CPU."""

    def teacher(source: TeacherSource, _device: object, **named: Any) -> Teacher:
        return Teacher(source, torch.device("cpu"), **named)

    monkeypatch.setattr("minilm_cache.dump.setup.choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("minilm_cache.dump.setup.Teacher", teacher)


def test_a_gpu_computes_in_bfloat16_but_goes_on_with_what_was_begun(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = world.config(world_size=2)
    begun = dump_cache(config, session=Session(world.home))
    on_a_gpu(monkeypatch)
    rest = dump_cache(world.config(world_size=2, rank=1), session=Session(world.home))
    other = dump_cache(world.config(seed=1), session=Session(world.home))

    assert rest.path == begun.path
    assert rest.manifest.complete
    assert rest.manifest.identity.precision is None
    assert other.manifest.identity.precision == "bfloat16"


def test_a_dump_into_a_store_goes_on_in_its_precision(
    world: World, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, url = world.config(check="sizes"), f"{store}/begun"
    with pytest.raises(InterruptedRunError):
        dump_into_store(config, url, session=Session(world.home / "one", should_stop=stop_after(2)))
    on_a_gpu(monkeypatch)
    rest = dump_into_store(config, url, session=Session(world.home / "two"))

    assert rest.manifest.complete
    assert rest.manifest.identity.precision is None


def test_frequencies_of_rotary_positions_stay_in_float32(tmp_path: Path) -> None:
    folder = save_teacher(tmp_path / "teacher", "modernbert")
    teacher = Teacher(locate_teacher(str(folder)), torch.device("cpu"), precision="bfloat16")

    assert {weight.dtype for weight in teacher.model.parameters()} == {torch.bfloat16}
    floats = {name: part.dtype for name, part in teacher.model.named_buffers() if part.is_floating_point()}
    assert floats
    assert set(floats.values()) == {torch.float32}


def test_a_cache_in_tf32_is_verified_without_a_gpu(world: World, command: Command) -> None:
    path = world.dump(codec="dense").path
    file = path / "manifest.json"
    manifest = CacheManifest.model_validate_json(file.read_bytes())
    identity = manifest.identity.model_copy(update={"precision": "tf32"})
    changes = {"identity": identity, "fingerprint": identity.fingerprint()}
    file.write_bytes(manifest.model_copy(update=changes).to_json())
    code, out, err = command("verify", path, "--teacher", world.teacher)

    assert "tf32" not in err
    assert "run again on a sample" in out, (code, err)
