"""Objectives beyond relations, each beside the same loss written plainly on transformers' own outputs.

One cache of one teacher serves them all; the twin runs the teacher again, on whole models, one sequence at a
time.
"""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from minilm_cache.cache import Cache, open_cache
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.arch import parse_arch
from minilm_cache.objectives.batch import UNITS, StudentBatch
from minilm_cache.objectives.check import choose_objective
from minilm_cache.objectives.layers import map_layers
from minilm_cache.objectives.spec import OBJECTIVES
from minilm_cache.report.runs import TrainedRun
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.initial import initial_weights
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.run import train_students
from minilm_cache.train.sampler import plan_steps
from minilm_cache.train.setup import build_trainers
from minilm_cache.train.trainer import StudentTrainer
from tests.conftest import Command
from tests.support import World, save_teacher, write_corpus
from tests.twins import SUMMED, TOTALS, Whole, plain_sum, twin

CPU = torch.device("cpu")
OF_WORDS = ("value-mse", "hidden-mse", "tinybert", "distilbert", "mlm-kd", "bert-pkd", "mobilebert")
OF_CLASSES = ("tinybert-prediction", "bert-pkd", "tinybert")
ARCH = {"distilbert": "2x32", "bert-pkd": "2x32", "mobilebert": "3x32:b16"}
"""Shapes that an objective asks for; others learn at any width."""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a world with one cache for every objective that a pre-trained teacher serves."""
    root = tmp_path_factory.mktemp("words")
    world = World(root, save_teacher(root / "teacher", head="tokens"), write_corpus(root / "corpus.txt"))
    world.dump(**{"for": ",".join(("minilm", *OF_WORDS))}, codec="vectors", max_kl=0.003, max_error=0.02)
    return world


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a world with one cache of a teacher that classifies."""
    root = tmp_path_factory.mktemp("classes")
    teacher = save_teacher(root / "teacher", head="sequences", num_labels=3)
    world = World(root, teacher, write_corpus(root / "corpus.txt", num_documents=100))
    world.dump(
        **{"for": ",".join(OF_CLASSES)}, codec="vectors", max_kl=0.003, max_error=0.02, packing="records"
    )
    return world


def world_for(objective: str, words: World, classes: World) -> World:
    """Return the world whose cache serves an objective."""
    return classes if objective == "tinybert-prediction" else words


def settings(objective: str, **changes: object) -> TrainConfig:
    """Return settings of a short run."""
    base = {"arch": (ARCH.get(objective, "2x16"),), "steps": 60, "batch_size": 8, "lr": 5e-3, "device": "cpu"}
    return TrainConfig.model_validate({**base, "objective": objective, **changes})


def trainer_of(config: TrainConfig, cache: Cache) -> tuple[StudentTrainer, StudentBatch]:
    """Return the student at its beginning, and a batch of held-out sequences."""
    objective = choose_objective(config, cache, arch=config.arch)
    shape = parse_arch(config.arch[0], 4, compares_heads=config.spec.compares_heads)
    beginnings = None
    if config.init is not None:
        home = cache.reader.root.parent / "home"
        beginnings = initial_weights(config, cache, shapes=[shape], head=objective.head, home=home)
    (trainer,) = build_trainers(
        config,
        cache,
        shapes=[shape],
        objective=objective,
        steps=60,
        ranks=Ranks.alone(CPU),
        beginnings=beginnings,
    )
    (batch,) = islice(BatchReader(cache, objective.wanted, pad_token=0, device=CPU).held_out_batches(4, 4), 1)
    return trainer, batch


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
    whole = train_students(config, cache, out=tmp_path / "whole", home=tmp_path)
    steps = iter(range(100))
    stops = lambda: next(steps) >= 5  # noqa: E731
    with pytest.raises(Exception, match="interrupted"):
        train_students(config, cache, out=tmp_path / "cut", home=tmp_path, should_stop=stops)
    cut = train_students(config, cache, out=tmp_path / "cut", home=tmp_path)

    assert cut.record.students == whole.record.students
    for name in ("step-00000004", "step-00000008"):
        files = [one.path / "checkpoints" / name / "2x16.safetensors" for one in (whole, cut)]
        if all(file.exists() for file in files):
            assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != "minilm"])
def test_a_cache_that_lacks_something_names_the_flags_that_add_it(
    shared_world: World, command: Command, objective: str
) -> None:
    arch = "3x32:b16" if objective == "mobilebert" else "2x32"
    line = command.fails(
        *("train", shared_world.root / "cache", "--arch", arch, "--objective", objective, "--steps", 1),
        code=2,
        says=f"--objective {objective} needs",
    )
    needs = OBJECTIVES[objective].needs
    if needs.vectors:
        assert "--codec vectors" in line
    for option, is_needed in (
        ("--hidden", needs.hidden),
        ("--masked-hidden 3", needs.masked_hidden),
        ("--first-hidden", needs.first),
        ("--labels", needs.labels),
        ("--logits", needs.logits),
    ):
        if is_needed and not needs.vectors:
            assert option in line
            assert "--add" in line


def test_students_that_cannot_learn_something_are_told_why(words: World, command: Command) -> None:
    say = ("train", words.root / "cache", "--steps", 1, "--arch")
    for objective in ("distilbert", "bert-pkd", "mobilebert"):
        command.fails(*say, "3x16", "--objective", objective, code=2, says="the teacher's 32")
    command.fails(*say, "2x32", "--objective", "mobilebert", code=2, says=("3x32:b8", "layer with layer"))
    command.fails(*say, "1x32", "--objective", "bert-pkd", code=2, says="students of 2 layers or more")
    command.fails(*say, "2x32:b12:h8", "--objective", "mlm-kd", code=2, says="divide by 8 heads")
    command.fails(
        *say, "2x32", "--objective", "mlm-kd", "--layer-map", "all", code=2, says="does not go with"
    )
    command.fails(
        *say, "2x32", "--objective", "distilbert", "--teacher-layer", 1, code=2, says="does not go with"
    )
    command.fails(*say, "2x32", "--objective", "nothing", code=2, says="--objective nothing")
    command.fails(*say, "foo", "--objective", "tinybert", code=2, says="--arch foo: write LAYERSxHIDDEN")


def test_heads_are_free_where_no_heads_are_compared(words: World) -> None:
    for objective in ("mlm-kd", "distilbert", "bert-pkd"):
        trainer, _ = trainer_of(settings(objective, arch=("2x32:h8",)), open_cache(words.root / "cache"))
        assert trainer.model.model.config.num_attention_heads == 8
    with pytest.raises(InvalidConfigError, match="compares head with head"):
        trainer_of(settings("tinybert", arch=("2x32:h8",)), open_cache(words.root / "cache"))


def test_students_begin_with_the_teachers_layers(words: World, command: Command, tmp_path: Path) -> None:
    teacher: Any = AutoModel.from_pretrained(words.teacher)
    cache = open_cache(words.root / "cache")
    config = settings(
        "distilbert", arch=("2x32:ff64",), init="teacher-layers", init_teacher=str(words.teacher)
    )
    trainer, batch = trainer_of(config, cache)
    own: Any = trainer.model.model.base_model
    for number, there in ((0, 0), (1, 2)):  # evenly spaced, the last included
        expected = teacher.encoder.layer[there].state_dict()
        found = own.encoder.layer[number].state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(own.embeddings.word_embeddings.weight, teacher.embeddings.word_embeddings.weight)
    drawn, _ = trainer_of(settings("distilbert", arch=("2x32:ff64",)), cache)
    with torch.no_grad():
        begun, random = trainer.evaluate(batch).parts, drawn.evaluate(batch).parts
    assert float(begun["cosine"]) < float(random["cosine"])
    say = ("train", words.root / "cache", "--objective", "distilbert", "--steps", 1, "--arch")
    teacher_of = ("--init", "teacher-layers", "--init-teacher")
    other = save_teacher(tmp_path / "other", head="tokens", seed=3)
    command.fails(*say, "2x32", *teacher_of, other, code=1, says="is not the teacher of this cache")
    command.fails(
        *say, "4x32:ff64", *teacher_of, words.teacher, code=2, says="more layers than the teacher's 3"
    )
    command.fails(*say, "2x32", "--init", tmp_path / "nowhere", code=2, says="no such folder")


def test_students_begin_with_students(words: World, command: Command, tmp_path: Path) -> None:
    base = ("train", words.root / "cache", "--steps", 2, "--batch-size", 4, "--device", "cpu")
    first = tmp_path / "first"
    assert command(*base, "--objective", "minilm", "--arch", "2x16", "--arch", "1x32", "--out", first)[0] == 0
    say = (*base, "--objective", "mlm-kd", "--init", first)
    assert command(*say, "--arch", "2x16", "--arch", "1x32", "--out", tmp_path / "second")[0] == 0
    config = settings("mlm-kd", init=str(first), arch=("2x16",))
    trainer, _ = trainer_of(config, open_cache(words.root / "cache"))
    begun, saved = trainer.model.model.base_model, AutoModel.from_pretrained(first / "students/2x16")
    there = saved.state_dict()
    assert all(torch.equal(value, there[name]) for name, value in begun.state_dict().items())
    record = TrainedRun.open(tmp_path / "second").record
    assert len(record.identity.init) == 64
    command.fails(*say, "--arch", "3x16", "--out", tmp_path / "x", code=2, says="has no student 3x16")
    single = (*base, "--objective", "mlm-kd", "--init", first / "students/2x16", "--out", tmp_path / "x")
    command.fails(*single, "--arch", "1x32", code=2, says="not of the same shape")


def test_bottlenecks_are_mobileberts(words: World) -> None:
    trainer, _ = trainer_of(settings("mobilebert"), open_cache(words.root / "cache"))
    config = trainer.model.model.config
    assert (config.model_type, config.hidden_size, config.true_hidden_size) == ("mobilebert", 32, 16)
    assert (config.num_hidden_layers, config.num_attention_heads, config.embedding_size) == (3, 4, 16)


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


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a world whose sequences have many lengths, some of them without a token to mask."""
    root = tmp_path_factory.mktemp("records")
    corpus = write_corpus(root / "corpus.txt")
    corpus.write_text(corpus.read_text() + "\n\n".join(["zz"] * 20) + "\n")
    world = World(root, save_teacher(root / "teacher", head="tokens"), corpus)
    world.dump(**{"for": ",".join(OF_WORDS)}, codec="vectors", max_kl=0.05, packing="records")
    return world


def test_sequences_without_a_token_to_mask_do_no_harm(records: World, command: Command) -> None:
    out = records.root / "run"
    words = ("train", records.root / "cache", "--arch", "2x16", "--objective", "mlm-kd", "--steps", 30)
    code, _, err = command(*words, "--batch-size", 4, "--accumulate", 4, "--device", "cpu", "--out", out)
    assert code == 0, err


def test_the_log_has_the_loss_that_is_trained(words: World, tmp_path: Path) -> None:
    config = settings("distilbert", steps=10, eval_steps=5)
    result = train_students(config, words.root / "cache", out=tmp_path / "run", home=tmp_path)
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


def test_an_encoder_without_a_head_begins_a_student_with_one(
    classes: World, words: World, tmp_path: Path
) -> None:
    config = settings("tinybert-prediction", arch=("3x32:ff64",), init=str(tmp_path / "encoder"))
    save_teacher(tmp_path / "encoder", seed=7)
    trainer, _ = trainer_of(config, open_cache(classes.root / "cache"))
    there = AutoModel.from_pretrained(tmp_path / "encoder").state_dict()
    begun = trainer.model.model.base_model.state_dict()
    assert all(torch.equal(value, there[name]) for name, value in begun.items())
    assert trainer.model.model.config.num_labels == 3
    with pytest.raises(InvalidConfigError, match="the number of heads"):
        trainer_of(
            settings("mlm-kd", arch=("3x32:ff64:h8",), init=str(tmp_path / "encoder")),
            open_cache(words.root / "cache"),
        )


def test_seeds_of_students_are_those_of_their_projections_too(words: World) -> None:
    cache = open_cache(words.root / "cache")
    drawn = [
        trainer_of(settings("hidden-mse", arch=(arch,)), cache)[0].learner.objective.state_dict()
        for arch in ("2x16:s1", "2x16:s2", "2x16:s1")
    ]
    (name,) = drawn[0]
    assert torch.equal(drawn[0][name], drawn[2][name])
    assert not torch.equal(drawn[0][name], drawn[1][name])


def test_bottlenecks_have_vectors_of_their_own_width(words: World, command: Command) -> None:
    say = ("train", words.root / "cache", "--objective", "minilmv2", "--steps", 1, "--arch", "3x32:b12")
    command.fails(*say, "--relation-heads", 8, code=2, says="width 12 does not divide by 8 relation heads")
