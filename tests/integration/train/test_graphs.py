"""Steps that are recorded and replayed as a graph are ordinary steps, whatever changes between them."""

import gc
import json
import weakref
from itertools import islice
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minilm_cache.cache import open_cache
from minilm_cache.errors import InterruptedRunError
from minilm_cache.models.arch import parse_arch
from minilm_cache.objectives.batch import StudentBatch
from minilm_cache.objectives.check import choose_objective
from minilm_cache.objectives.relations import RelationObjective
from minilm_cache.session import Session, Silent
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.folder import RunFolder, state_name
from minilm_cache.train.graph import Graphs, rounded_length
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.run import TrainResult, train_students
from minilm_cache.train.sampler import plan_steps
from minilm_cache.train.setup import build_trainers
from minilm_cache.train.trainer import StudentTrainer
from tests.accelerator import accelerator
from tests.integration.objectives.conftest import OF_WORDS, records, words
from tests.integration.objectives.conftest import settings as settings_of
from tests.replay import Replayer
from tests.support import World

__all__ = ["records", "words"]
ARCHS = ("2x16", "1x32")
STEPS = 20


class Notes(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, message: str) -> None:
        self.said.append(message)


def train(
    world: World, out: str, *, stop_at: int | None = None, **changes: Any
) -> tuple[TrainResult, list[str]]:
    """Train two students with a schedule and clipped gradients; return the run and what was said.

    `stop_at` stops it after a checkpoint.
    """
    values = {"arch": ARCHS, "steps": STEPS, "batch_size": 4, "lr": 5e-3, "device": "cpu", "dropout": "none"}
    config = TrainConfig.model_validate(
        {**values, "warmup": 0.2, "max_grad_norm": 0.5, "init": "random", **changes}
    )
    notes = Notes()
    reached = RunFolder(path=world.root / out).checkpoints / state_name(stop_at or 0)
    session = Session(world.home, progress=notes, should_stop=reached.exists)
    return train_students(config, world.root / "cache", out=world.root / out, session=session), notes.said


def losses(result: TrainResult) -> list[float]:
    """Return all losses of a run's log."""
    lines = map(json.loads, (result.path / "log.jsonl").read_text().splitlines())
    return [
        value
        for line in lines
        for figures in (line.get("students") or line.get("held_out") or {}).values()
        for value in figures.values()
    ]


def weights(result: TrainResult) -> dict[str, torch.Tensor]:
    return {
        f"{arch}/{name}": weight
        for arch in result.record.identity.arch
        for name, weight in load_file(result.student_path(arch) / "model.safetensors").items()
        if not name.endswith("key.bias")  # their true gradient is 0, and AdamW makes steps of its rounding
    }


def assert_alike(one: TrainResult, other: TrainResult) -> None:
    assert losses(one) == pytest.approx(losses(other), abs=1e-6)
    expected = weights(other)
    for name, weight in weights(one).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Replayer:
    """Return the recorder that CPUs have from now on."""
    made = Replayer()
    monkeypatch.setattr("minilm_cache.train.graph.recorder_for", lambda _: made)
    return made


@pytest.mark.parametrize("codec", ["topk", "dense", "vectors"])
def test_replayed_steps_are_ordinary_steps(world: World, recorder: Replayer, codec: str) -> None:
    world.dump(codec=codec, max_kl=0.01) if codec == "vectors" else world.dump(codec=codec)
    replayed, said = train(world, "replayed", eval_steps=7)
    plain, _ = train(world, "plain", eval_steps=7, graph=False)

    assert len(recorder.recordings) == 1 + len(ARCHS)  # decoding, and the step of each student
    assert recorder.replays > STEPS
    assert not any("kernel by kernel" in note for note in said)
    assert_alike(replayed, plain)


def test_a_run_that_is_resumed_records_anew(world: World, recorder: Replayer) -> None:
    world.dump()
    whole, _ = train(world, "whole", checkpoint_steps=13)
    with pytest.raises(InterruptedRunError):
        train(world, "parts", checkpoint_steps=13, stop_at=13)
    recorded = len(recorder.recordings)
    parts, _ = train(world, "parts", checkpoint_steps=13)

    assert len(recorder.recordings) > recorded
    assert_alike(parts, whole)


def test_padded_batches_have_few_forms(records: World, recorder: Replayer) -> None:
    """Rounded lengths change nothing that is learned."""
    replayed, _ = train(records, "replayed", steps=80)
    plain, _ = train(records, "plain", steps=80, graph=False)

    places = len(recorder.recordings) / (1 + len(ARCHS))
    assert 1 < places <= 8
    assert recorder.replays > 80
    assert_alike(replayed, plain)


@pytest.mark.parametrize("loss", ["cosine", "similarity"])
def test_vectors_of_texts_are_learned_by_graphs(world: World, recorder: Replayer, loss: str) -> None:
    world.dump(**{"for": "embedding"}, packing="records", pooling="mean")
    changes: dict[str, Any] = {"objective": "embedding", "loss": loss, "arch": ("2x32",), "steps": 60}
    replayed, said = train(world, "replayed", **changes)
    plain, _ = train(world, "plain", **changes, graph=False)

    assert not any("kernel by kernel" in note for note in said)
    assert recorder.replays > 30
    assert_alike(replayed, plain)


def test_lengths_are_rounded_to_quarters_of_powers_of_two() -> None:
    lengths = {rounded_length(longest, 512) for longest in range(1, 513)}

    assert sorted(lengths)[:9] == [16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert len(lengths) == 21
    assert all(rounded_length(length, 512) == length for length in lengths)
    assert all(
        longest <= rounded_length(longest, 512) <= max(16, 1.25 * longest) for longest in range(1, 513)
    )
    assert [rounded_length(longest, 100) for longest in (1, 90, 97, 100)] == [16, 96, 100, 100]
    assert [rounded_length(longest, 4) for longest in (1, 3, 4)] == [4, 4, 4]


def test_where_nothing_can_be_recorded_steps_are_ordinary(world: World, recorder: Replayer) -> None:
    world.dump()
    recorder.refuses = True
    refused, said = train(world, "refused")
    plain, _ = train(world, "plain", graph=False)

    (line,) = (note for note in said if "kernel by kernel" in note)
    assert line.endswith("(--no-graph): operation not permitted when stream is capturing")
    assert_alike(refused, plain)


def test_what_was_recorded_as_a_constant_is_noticed(world: World, recorder: Replayer) -> None:
    """Dropout on a CPU is drawn by numpy, which no recording sees: each replay would drop the same."""
    world.dump()
    noticed, said = train(world, "noticed", dropout="teacher")
    plain, _ = train(world, "plain", dropout="teacher", graph=False)

    assert recorder.recordings
    (line,) = (note for note in said if "kernel by kernel" in note)
    assert "computed something else" in line
    assert_alike(noticed, plain)


def test_a_number_of_the_batch_that_was_recorded_is_noticed(
    records: World, recorder: Replayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An objective of one's own may count tokens in Python; a recording has the count of its batch."""
    real = RelationObjective.forward

    def counting(self: RelationObjective, reading: Any, batch: StudentBatch, *rest: Any) -> Any:
        return {name: part * batch.num_tokens for name, part in real(self, reading, batch, *rest).items()}

    monkeypatch.setattr(RelationObjective, "forward", counting)
    noticed, said = train(records, "counted", steps=80)
    plain, _ = train(records, "counted-plainly", steps=80, graph=False)

    assert any("computed something else" in note for note in said)
    assert losses(noticed) == pytest.approx(losses(plain), rel=1e-5)


@pytest.mark.parametrize("recordings", [1, 2, 3])
def test_where_memory_is_short_graphs_are_given_up(
    world: World, recorder: Replayer, monkeypatch: pytest.MonkeyPatch, recordings: int
) -> None:
    """After decoding is recorded, or the step of a student, or those of all."""
    world.dump()
    real, calls = StudentTrainer._add_gradient, iter(range(1000))

    def short(self: StudentTrainer, *arguments: Any) -> None:
        real(self, *arguments)
        if len(recorder.recordings) == recordings and next(calls) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(StudentTrainer, "_add_gradient", short)
    given_up, said = train(world, "given-up")
    monkeypatch.undo()
    plain, _ = train(world, "plain", graph=False)

    assert any("out of memory" in note for note in said)
    assert recorder.num_freed == 1
    assert_alike(given_up, plain)


def test_where_memory_is_short_for_an_evaluation_graphs_are_given_up(
    world: World, recorder: Replayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.dump()
    real, was_short = StudentTrainer.evaluate, list[bool]()

    def short(self: StudentTrainer, *arguments: Any) -> Any:
        if recorder.replays and not was_short:
            was_short.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(StudentTrainer, "evaluate", short)
        given_up, said = train(world, "given-up", eval_steps=8)
    plain, _ = train(world, "plain", graph=False, eval_steps=8)
    assert was_short
    assert any("out of memory" in note for note in said)
    assert_alike(given_up, plain)


def test_students_of_a_run_that_is_over_are_freed(
    world: World, recorder: Replayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study trains one run after the other, and a GPU has no room for the graphs of all."""
    world.dump()
    trainers: list[weakref.ref[StudentTrainer]] = []
    real = StudentTrainer.__init__

    def noting(self: StudentTrainer, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **named)
        trainers.append(weakref.ref(self))

    monkeypatch.setattr(StudentTrainer, "__init__", noting)
    gc.collect()
    gc.disable()
    try:
        train(world, "run")
        assert recorder.replays
        recorder.recordings.clear()
        assert [trainer() for trainer in trainers] == [None] * len(ARCHS)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"accumulate": 2}, "--accumulate"),
        ({"gradient_checkpointing": True}, "--gradient-checkpointing"),
        ({"objective": "mlm-kd"}, "masked tokens"),
        ({"graph": False}, None),
    ],
)
def test_runs_without_graphs_say_why(
    records: World, recorder: Replayer, changes: dict[str, Any], reason: str | None
) -> None:
    _, said = train(records, f"without-{'-'.join(changes)}", steps=2, **changes)

    assert not recorder.recordings
    lines = [note for note in said if "kernel by kernel" in note]
    assert len(lines) == (reason is not None)
    assert reason is None or reason in lines[0]


def of_steps(config: TrainConfig, world: World, recorder: Replayer | None) -> tuple[list[float], list[int]]:
    """Return the losses and launches of steps on the pretend accelerator, with dropout."""
    cache = open_cache(world.root / "cache")
    with accelerator() as (device, counts):
        objective = choose_objective(config, cache, arch=config.arch)
        graphs = None
        if recorder is not None:
            recorder.counts = counts
            graphs = Graphs(recorder=recorder, say=pytest.fail)
        shapes = [parse_arch(config.arch[0], 4, compares_heads=config.spec.compares_heads)]
        ranks = Ranks.alone(device)
        (trainer,) = build_trainers(
            config, cache, shapes=shapes, objective=objective, steps=STEPS, ranks=ranks, graphs=graphs
        )
        reader = BatchReader(cache, objective.wanted, pad_token=0, device=device, graphs=graphs)
        batches = reader.train_batches(plan_steps(config, cache.reader), 0)
        taken, launches = [], []
        for step, batch in enumerate(islice(batches, STEPS)):
            taken.append(trainer.step(batch, step).total)
            assert step < 10 or not counts.waits, counts
            launches.append(counts.kernels.total())
            counts.clear()
        batches.close()
        return [float(loss) for loss in taken], launches


@pytest.mark.parametrize("objective", ["minilm", "minilmv2", *(set(OF_WORDS) - {"mlm-kd", "distilbert"})])
def test_a_device_launches_a_step_once(objective: str, words: World) -> None:
    config = settings_of(objective, precision="float32", max_grad_norm=1.0, dropout="teacher", steps=STEPS)
    replayed, launches = of_steps(config, words, Replayer())
    plain, kernel_by_kernel = of_steps(config, words, None)

    assert replayed == pytest.approx(plain, rel=1e-6, abs=1e-6)
    assert kernel_by_kernel[-1] > 150
    assert sorted(launches)[STEPS // 4] == 4  # decoding, the learning rate, the step, a copy of its losses
