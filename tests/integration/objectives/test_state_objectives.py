"""Objectives beyond relations, each beside the same loss written plainly on transformers' own outputs.

One cache of one teacher serves them all; the twin runs the teacher again, on whole models, one sequence at a
time.
"""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from minilm_cache.cache import open_cache
from minilm_cache.objectives.base import map_layers
from minilm_cache.objectives.batch import UNITS
from minilm_cache.objectives.check import choose_objective
from minilm_cache.objectives.spec import OBJECTIVES
from minilm_cache.report.runs import TrainedRun
from minilm_cache.session import Session
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.run import train_students
from minilm_cache.train.sampler import plan_steps
from tests.fixtures import Command
from tests.integration.objectives.conftest import ARCH, CPU, OF_WORDS, settings, trainer_of, world_for
from tests.support import World
from tests.twins import SUMMED, TOTALS, Whole, plain_sum, twin

UNTRAINED = {
    "value-mse": "**Untrained: `encoder.layer.1.attention.output`, `encoder.layer.1.intermediate`, ",
    "hidden-mse": "**Untrained: `pooler`.**",
    "tinybert": "**Untrained: `pooler`.**",
    "bert-pkd": "**Untrained: `encoder.layer.1`, `pooler`.**",
    "mobilebert": "**Untrained: `pooler`",
}
"""What cards say of students that some weights of are not trained."""


@pytest.mark.parametrize("form", [None, "paper"])
@pytest.mark.parametrize("objective", [*OF_WORDS, "tinybert-prediction"])
def test_the_loss_is_that_of_a_plainly_written_twin(
    words: World, classes: World, objective: str, form: str | None
) -> None:
    if form is not None and not OBJECTIVES[objective].has_forms:
        with pytest.raises(ValidationError, match="--form does not go with"):
            settings(objective, form=form)
        return
    world = world_for(objective, words, classes)
    trainer, batch = trainer_of(settings(objective, form=form), open_cache(world.root / "cache"))
    kind = AutoModelForSequenceClassification if world is classes else AutoModelForMaskedLM
    with torch.no_grad():
        found = trainer.evaluate(batch)
        whole = Whole(kind.from_pretrained(world.teacher))
        expected = twin(objective, whole, trainer, batch, form or "authors")
    if objective == "tinybert":
        expected = {name: value * SUMMED.get(name, 1) for name, value in expected.items()}
    if "soft_labels" in expected:
        # Labels are a sample of the distribution: right on average, not on these few tokens.
        assert float(found.parts["soft_labels"]) == pytest.approx(float(expected["soft_labels"]), rel=0.1)
        expected["soft_labels"] = found.parts["soft_labels"]

    assert found.parts.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found.parts[name], value, atol=0.01, rtol=0.02)
    of_form = f"{objective} {form}" if form else objective
    total = TOTALS.get(of_form, TOTALS.get(objective, plain_sum))(dict(found.parts))
    torch.testing.assert_close(found.total, total)


def test_patience_goes_with_answers_where_the_teacher_has_some(classes: World) -> None:
    trainer, batch = trainer_of(settings("bert-pkd"), open_cache(classes.root / "cache"))
    whole = Whole(AutoModelForSequenceClassification.from_pretrained(classes.teacher))
    with torch.no_grad():
        found, expected = trainer.evaluate(batch), twin("bert-pkd", whole, trainer, batch)
    assert found.parts.keys() == expected.keys() == {"patient", "prediction"}
    for name, value in expected.items():
        torch.testing.assert_close(found.parts[name], value, atol=0.01, rtol=0.02)


@pytest.mark.parametrize("objective", [*OF_WORDS, "tinybert-prediction"])
def test_every_objective_trains_from_one_cache(
    words: World, classes: World, command: Command, objective: str
) -> None:
    world = world_for(objective, words, classes)
    out = world.root / f"run-{objective}"
    arch = ARCH.get(objective, "2x16")
    code, _, err = command(
        *("train", world.root / "cache", "--arch", arch, "--objective", objective, "--steps", 60),
        *("--batch-size", 8, "--lr", 5e-3, "--device", "cpu", "--out", out),
    )
    assert code == 0, err
    run = TrainedRun.open(out)
    (student,) = run.record.students
    before, after = student.held_out_before, student.held_out_after
    assert before is not None
    assert after is not None
    # Cross-entropies end at the teacher's own entropy, not at 0; random text has nothing else to learn.
    share = 0.999 if objective in ("mlm-kd", "distilbert", "tinybert-prediction") else 0.9
    assert sum(after.values()) < share * sum(before.values())
    if objective in ("mlm-kd", "distilbert"):
        saved, told = AutoModelForMaskedLM.from_pretrained(run.folder(student), output_loading_info=True)
        assert not told["missing_keys"]
    elif objective == "tinybert-prediction":
        saved, told = AutoModelForSequenceClassification.from_pretrained(
            run.folder(student), output_loading_info=True
        )
        assert not told["missing_keys"]
        assert saved.config.num_labels == 3
    else:
        saved = AutoModel.from_pretrained(run.folder(student))
    assert saved.config.num_hidden_layers == int(arch[0])
    card = (run.folder(student) / "README.md").read_text()
    assert UNTRAINED.get(objective, "") in card
    assert ("Untrained" in card) == (objective in UNTRAINED)
    assert f"objective `{objective}`" in card


def test_a_run_stopped_and_resumed_learns_the_same_projections(words: World, tmp_path: Path) -> None:
    config = settings("tinybert", steps=8, checkpoint_steps=4, keep_checkpoints=2)
    cache = words.root / "cache"
    whole = train_students(config, cache, out=tmp_path / "whole", session=Session(tmp_path))
    steps = iter(range(100))
    stops = lambda: next(steps) >= 5  # noqa: E731
    with pytest.raises(Exception, match="interrupted"):
        train_students(config, cache, out=tmp_path / "cut", session=Session(tmp_path, should_stop=stops))
    cut = train_students(config, cache, out=tmp_path / "cut", session=Session(tmp_path))

    assert cut.record.students == whole.record.students
    for name in ("step-00000004", "step-00000008"):
        files = [one.path / "checkpoints" / name / "2x16.safetensors" for one in (whole, cut)]
        if all(file.exists() for file in files):
            assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("layer_map", "expected"), [("top", [(9, 0), (10, 1), (11, 2)]), ("bottom", [(0, 0), (1, 1), (2, 2)])]
)
def test_layer_maps_of_tinybert(layer_map: str, expected: list[tuple[int, int]]) -> None:
    assert map_layers(layer_map, 3, 12) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("objective", ["mlm-kd", "distilbert", "bert-pkd", "tinybert", "tinybert-prediction"])
def test_parts_of_a_step_are_the_step(classes: World, records: World, objective: str) -> None:
    """Each part is weighed by what its mean is over: masked tokens, sequences, pairs of tokens."""
    world = classes if objective == "tinybert-prediction" else records
    cache = open_cache(world.root / "cache")
    gradients = []
    for accumulate in (1, 4):
        config = settings(objective, accumulate=accumulate)
        trainer, _ = trainer_of(config, cache)
        for module in trainer.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        plan = plan_steps(config, cache.reader)
        reader = BatchReader(
            cache, choose_objective(config, cache, arch=config.arch).wanted, pad_token=0, device=CPU
        )
        trainer.begin(0)
        trainer.model.eval()
        for batch in reader.train_batches(plan, 0):
            shares = {unit: batch.counts[unit] / max(batch.step_counts[unit], 1) for unit in UNITS}
            trainer.learn(batch, 0, shares)
            if batch.ends_step:
                break
        gradients.append(
            torch.cat([weight.grad.flatten() for weight in trainer.trained if weight.grad is not None])
        )
    difference = (gradients[0] - gradients[1]).norm() / gradients[0].norm()

    assert float(difference) < 1e-4


def test_the_log_has_the_loss_that_is_trained(words: World, tmp_path: Path) -> None:
    config = settings("distilbert", steps=10, eval_steps=5)
    result = train_students(config, words.root / "cache", out=tmp_path / "run", session=Session(tmp_path))
    lines = [json.loads(line) for line in (result.path / "log.jsonl").read_text().splitlines()]
    told = [line["students"]["2x32"] for line in lines if "students" in line]
    for one in told:
        parts = {name: torch.tensor(value) for name, value in one.items() if name != "loss"}
        assert one["loss"] == pytest.approx(float(TOTALS["distilbert"](parts)), rel=1e-4)
    looks = {line["step"]: line["held_out"]["2x32"] for line in lines if "held_out" in line}
    totals = {
        step: float(TOTALS["distilbert"]({name: torch.tensor(value) for name, value in look.items()}))
        for step, look in looks.items()
    }
    assert result.record.students[0].best_step == min(totals, key=lambda step: totals[step])
