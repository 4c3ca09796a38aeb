"""Training from a cache: without the teacher, reproducible, resumable, and what comes out of it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

from minilm_cache.cache import open_cache
from minilm_cache.errors import (
    CacheIncompleteError,
    DivergedError,
    IdentityMismatchError,
    InterruptedRunError,
    InvalidConfigError,
)
from minilm_cache.models.locate import TeacherSource
from minilm_cache.models.tap import ATTENTION, Tap, TappedModel
from minilm_cache.models.teacher import Teacher
from minilm_cache.objectives.base import LayerPair
from minilm_cache.objectives.batch import WantedTargets
from minilm_cache.objectives.relations import RelationObjective
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.config import LEAST_STEPS, TrainConfig
from minilm_cache.train.heldout import with_live_targets
from minilm_cache.train.run import TrainResult, train_students
from minilm_cache.train.sampler import plan_steps
from minilm_cache.train.setup import num_steps
from tests.support import TINY, World, save_teacher, tiny_model
from tests.unit.models.test_tap import with_attention
from tests.unit.store.support import Recorder

KINDS = (RelationKind.ATTENTION, RelationKind.VALUE)


def settings(**changes: Any) -> TrainConfig:
    values = {"arch": ("2x16", "1x32"), "steps": 12, "batch_size": 4, "device": "cpu", "lr": 5e-3}
    return validated(TrainConfig, {**values, **changes})


def weights(result: TrainResult) -> dict[str, dict[str, torch.Tensor]]:
    archs = [student.arch for student in result.record.students]
    return {arch: load_file(result.student_path(arch) / "model.safetensors") for arch in archs}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, weight in left.items():
        assert torch.equal(weight, right[name]), name


def stop_after(calls: int) -> Callable[[], bool]:
    left = iter([False] * calls)
    return lambda: next(left, True)


def test_training_needs_no_teacher(world: World) -> None:
    cache = world.dump().path
    shutil.rmtree(world.teacher)
    result = train_students(settings(steps=60), cache, out=world.root / "run", session=Session(world.home))

    for student in result.record.students:
        assert student.held_out_before is not None
        assert student.held_out_after is not None
        assert sum(student.held_out_after.values()) < 0.9 * sum(student.held_out_before.values())


@pytest.mark.parametrize("family", TINY)
def test_students_of_every_family_are_huggingface_folders(tmp_path: Path, family: str) -> None:
    world = World(tmp_path, save_teacher(tmp_path / "teacher", family), tmp_path / "corpus.txt")
    world.corpus.write_text("ba be bi bo\n\nfa fe fi fo fun fan\n\n" * 20)
    cache = world.dump().path
    result = train_students(
        settings(arch=("2x16:ff24",), steps=2), cache, out=world.root / "run", session=Session(world.home)
    )
    folder = result.student_path("2x16:ff24")
    model, loading = AutoModel.from_pretrained(folder, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer("ba be", return_tensors="pt")

    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert (
        encoded["input_ids"].tolist()
        == AutoTokenizer.from_pretrained(world.teacher)("ba be", return_tensors="pt")["input_ids"].tolist()
    )
    hidden = model(input_ids=encoded["input_ids"]).last_hidden_state
    assert hidden.shape == (1, encoded["input_ids"].shape[1], 16)
    assert model.config.model_type == family
    assert model.config.num_hidden_layers == 2


def test_a_factorised_student_of_bert_is_an_electra(world: World) -> None:
    result = train_students(
        settings(arch=("2x16:e8",), steps=2),
        world.dump().path,
        out=world.root / "run",
        session=Session(world.home),
    )
    model = AutoModel.from_pretrained(result.student_path("2x16:e8"))

    assert model.config.model_type == "electra"
    assert model.embeddings.word_embeddings.weight.shape[1] == 8


def test_the_card_says_what_was_distilled_and_what_is_untrained(world: World) -> None:
    result = train_students(
        settings(), world.dump().path, out=world.root / "run", session=Session(world.home)
    )
    card = (result.student_path("2x16") / "README.md").read_text()

    assert result.record.identity.fingerprint in card
    named = ("attention.output", "intermediate", "output")
    assert f"**Untrained: {', '.join(f'`encoder.layer.1.{one}`' for one in named)}, `pooler`.**" in card
    after = result.record.students[0].held_out_after
    assert after is not None
    assert f"{after[RelationKind.ATTENTION]:.4f}" in card


def test_what_is_untrained_keeps_its_initial_values(world: World) -> None:
    cache = world.dump().path
    short = weights(
        train_students(settings(steps=1), cache, out=world.root / "a", session=Session(world.home))
    )["2x16"]
    long = weights(
        train_students(settings(steps=9), cache, out=world.root / "b", session=Session(world.home))
    )["2x16"]
    changed = {name for name in short if not torch.equal(short[name], long[name])}

    assert "encoder.layer.1.attention.self.value.weight" in changed
    assert "encoder.layer.1.attention.output.dense.weight" not in changed
    assert not any(name.startswith(("encoder.layer.1.output", "pooler")) for name in changed)


def test_training_is_reproducible_and_students_do_not_mind_company(world: World) -> None:
    cache = world.dump().path
    both = weights(train_students(settings(), cache, out=world.root / "both", session=Session(world.home)))
    again = weights(train_students(settings(), cache, out=world.root / "again", session=Session(world.home)))
    alone = weights(
        train_students(settings(arch=("1x32",)), cache, out=world.root / "alone", session=Session(world.home))
    )

    assert_same(both["2x16"], again["2x16"])
    assert_same(both["1x32"], alone["1x32"])


@pytest.mark.parametrize("calls", [1, 5, 9])
def test_a_resumed_run_equals_an_uninterrupted_one(world: World, calls: int) -> None:
    cache = world.dump().path
    config = settings(checkpoint_steps=4)
    whole = weights(train_students(config, cache, out=world.root / "whole", session=Session(world.home)))
    with pytest.raises(InterruptedRunError, match=f"the state after step {calls} of 12 is kept"):
        train_students(
            config,
            cache,
            out=world.root / "parts",
            session=Session(world.home, should_stop=stop_after(calls)),
        )
    resumed = train_students(config, cache, out=world.root / "parts", session=Session(world.home))

    for arch, found in weights(resumed).items():
        assert_same(found, whole[arch])
    log = [json.loads(line) for line in (world.root / "parts/log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in log]
    assert steps == sorted(set(steps))
    assert steps[-1] == 12


def test_a_finished_run_has_nothing_left_to_do(world: World) -> None:
    cache = world.dump().path
    first = train_students(settings(), cache, out=None, session=Session(world.home))
    second = train_students(settings(), cache, out=None, session=Session(world.home))

    assert second.tokens_per_s is None
    assert second.record == first.record
    assert second.path == first.path
    assert second.path.parent == world.home / "runs"


def test_another_runs_folder_is_refused(world: World) -> None:
    cache = world.dump().path
    train_students(settings(), cache, out=world.root / "run", session=Session(world.home))
    with pytest.raises(IdentityMismatchError, match=r"differs in lr \(0\.005 there, 0\.001 asked\)"):
        train_students(settings(lr=1e-3), cache, out=world.root / "run", session=Session(world.home))
    with pytest.raises(IdentityMismatchError, match="exists"):
        train_students(settings(), cache, out=world.root / "run", resume=False, session=Session(world.home))
    with pytest.raises(IdentityMismatchError, match="holds no run"):
        train_students(settings(), cache, out=world.teacher, session=Session(world.home))


def test_a_student_that_diverges_is_an_error_that_names_it(world: World) -> None:
    with pytest.raises(DivergedError, match=r"student 2x16 diverged: .* lower --lr than 1e\+30"):
        train_students(
            settings(lr=1e30, arch=("2x16",)),
            world.dump().path,
            out=world.root / "run",
            session=Session(world.home),
        )


def test_an_unfinished_cache_is_refused(world: World) -> None:
    world.dump(world_size=2)
    with pytest.raises(CacheIncompleteError, match=r"shards are committed\. Finish it"):
        train_students(settings(), world.root / "cache", out=world.root / "run", session=Session(world.home))


def test_a_damaged_checkpoint_is_an_error_that_names_it(world: World) -> None:
    cache = world.dump().path
    with pytest.raises(InterruptedRunError):
        train_students(
            settings(), cache, out=world.root / "run", session=Session(world.home, should_stop=stop_after(3))
        )
    (checkpoint,) = (world.root / "run/checkpoints").iterdir()
    (checkpoint / "2x16.safetensors").write_bytes(b"nonsense")
    with pytest.raises(IdentityMismatchError, match=r"2x16\.safetensors cannot be used"):
        train_students(settings(), cache, out=world.root / "run", session=Session(world.home))


def test_epochs_are_passes_over_the_training_sequences(world: World) -> None:
    cache = world.dump()
    result = train_students(
        settings(steps=None, epochs=2, arch=("1x32",)), cache.path, out=None, session=Session(world.home)
    )

    assert result.record.identity.steps == -(-2 * cache.manifest.num_train // 4)
    assert num_steps(settings(steps=None), cache.manifest) == LEAST_STEPS


def test_a_cache_of_one_sequence_has_nothing_held_out_and_says_so(world: World) -> None:
    world.corpus.write_text("ba be bi bo bu ban\n")
    result = train_students(
        settings(arch=("1x32",)), world.dump().path, out=world.root / "run", session=Session(world.home)
    )

    assert result.record.students[0].held_out_after is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": ("3x34",)}, "hidden size 34 is not divisible by 4 heads. Take 3x32 or 3x36."),
        ({"arch": ("3x32:h8",)}, "8 heads, but the cache holds relations of 4 heads"),
        ({"arch": ("3by32",)}, "write LAYERSxHIDDEN"),
        ({"arch": ("0x32",)}, "every size must be at least 1"),
        ({"arch": ("01x32",)}, "write LAYERSxHIDDEN"),
        ({"arch": ("1x32:ff064",)}, "write LAYERSxHIDDEN"),
        ({"arch": ("3x32:e64",)}, "embedding size 64 is above hidden size 32"),
        ({"arch": ("3x32:e8:e9",)}, "gives one of ff, h, e, b and s twice"),
        ({"arch": ("300x32",)}, "more than 256 layers"),
    ],
    ids=str,
)
def test_shapes_that_cannot_be_are_refused(
    shared_world: World, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        train_students(
            settings(**changes),
            shared_world.root / "cache",
            out=shared_world.root / "no",
            session=Session(shared_world.home),
        )

    assert message in str(caught.value)
    assert not (shared_world.root / "no").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps 0"),
        ({"steps": 3, "epochs": 1}, "exclude each other"),
        ({"arch": ("1x32", "1x32")}, "--arch 1x32 is given twice"),
        ({"arch": ("1x32", "1x32:ff128")}, "--arch 1x32:ff128 is the same student as 1x32"),
        ({"arch": ("1x32:s0", "1x32")}, "--arch 1x32 is the same student as 1x32:s0"),
        ({"steps": 2**53}, "--steps 9007199254740992"),
        ({"lr": float("inf")}, "--lr inf"),
        ({"warmup": 1.5}, "--warmup 1.5"),
        ({"epochs": float("inf"), "steps": None}, "--epochs inf"),
        ({"objective": "tiny"}, "--objective tiny"),
        ({"seed": 2**32}, "--seed 4294967296"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        settings(**changes)

    assert message in str(caught.value)


def test_targets_from_the_cache_are_those_of_the_live_teacher(world: World) -> None:
    """Parity: decoded dense cache + objective = live teacher + objective, within float16 rounding."""
    cache = open_cache(world.dump(codec="dense", packing="records").path)
    assert os.fspath(cache) == str(world.root / "cache")
    device = torch.device("cpu")
    teacher = Teacher(TeacherSource(name="t", folder=world.teacher), device)
    plan = plan_steps(settings(batch_size=6), cache.reader)
    stored = BatchReader(cache, WantedTargets(kinds=KINDS), pad_token=0, device=device).train_batches(plan, 0)
    tokens = BatchReader(cache, WantedTargets(kinds=()), pad_token=0, device=device).train_batches(plan, 0)
    live = with_live_targets(tokens, teacher, WantedTargets(kinds=KINDS))
    own = RelationObjective(WantedTargets(kinds=KINDS, layers=(2,)), [LayerPair(2, 2)])
    student = TappedModel(with_attention(tiny_model("bert", seed=9), ATTENTION))
    for _ in range(6):
        left, right = next(stored), next(live)
        assert torch.equal(left.inputs.ids, right.inputs.ids)
        reading = student(left.inputs, Tap((2,)))
        found, expected = own(reading, left), own(reading, right)
        for kind in KINDS:
            torch.testing.assert_close(found[kind], expected[kind], atol=2e-3, rtol=2e-3)


def test_a_student_larger_than_its_teacher_is_named(world: World) -> None:
    world.dump()
    progress = Recorder()
    config = settings(arch=("4x64:ff256", "1x32"), steps=1)
    train_students(config, world.root / "cache", session=Session(world.home, progress=progress))
    (note,) = [note for note in progress.notes if "times the weights of its teacher" in note]
    assert note.startswith("4x64:ff256 has ")
