"""Pooled vectors and objective `embedding`, judged by sentence-transformers and plain torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import AutoModel

from minilm_cache.cache import open_cache
from minilm_cache.dump.run import dump_cache
from minilm_cache.errors import InterruptedRunError
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.tap import Reading
from minilm_cache.objectives.base import StudentFacts
from minilm_cache.objectives.batch import StudentBatch
from minilm_cache.objectives.check import choose_objective
from minilm_cache.objectives.embedding import Embedding, EmbeddingObjective, similarity_difference
from minilm_cache.relations.signals import Signals
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.storage_schema.states import POOLED
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import TrainResult, train_students
from tests.encoders import save_encoder
from tests.fixtures import Command
from tests.support import World, dump_arguments, write_corpus

WORDS_OF_EMBEDDING: dict[str, Any] = {"codec": "none", "pooled": True, "packing": "records"}


def texts_of(world: World, numbers: Sequence[int], cache: str = "cache") -> list[str]:
    """Return the texts of sequences, from the corpus."""
    documents = world.corpus.read_text().strip().split("\n\n")
    opened = open_cache(world.root / cache)
    table = opened.reader.table(0)
    assert table.num_rows > max(numbers)
    return [documents[table["document"][number].as_py()] for number in numbers]


def vectors_of(world: World, numbers: Sequence[int]) -> torch.Tensor:
    """Return the stored vectors of sequences."""
    cache = open_cache(world.root / "cache")
    return torch.cat([cache[number].states()[POOLED] for number in numbers])


@pytest.mark.parametrize(
    ("mode", "dense", "normalize"),
    [
        ("mean", None, True),
        ("mean", nn.Tanh(), True),
        ("cls", None, True),
        ("max", nn.Identity(), False),
        ("lasttoken", None, False),
    ],
)
def test_stored_vectors_are_those_of_sentence_transformers(
    world: World, mode: str, dense: nn.Module | None, normalize: bool
) -> None:
    save_encoder(world.teacher, mode, dense=dense, normalize=normalize)
    manifest = world.dump(**WORDS_OF_EMBEDDING).manifest
    numbers = range(4)
    encoder: Any = SentenceTransformer(str(world.teacher), device="cpu")
    expected = torch.from_numpy(encoder.encode(texts_of(world, numbers)))
    stored = vectors_of(world, numbers)

    assert stored.shape == expected.shape
    assert torch.cosine_similarity(stored, expected).mean() > 0.999
    assert manifest.measured is not None
    (pooled,) = manifest.measured.states
    assert pooled.cosine is not None
    assert pooled.cosine > 0.999
    assert (manifest.identity.layers, manifest.measured.fidelity) == ((), ())
    assert not (world.root / "cache" / "vectors").exists()


@pytest.mark.filterwarnings("ignore:Numcodecs codecs")
def test_plain_zarr_reads_the_vectors(world: World) -> None:
    save_encoder(world.teacher, "mean")
    world.dump(**WORDS_OF_EMBEDDING)
    group = zarr.open_group(str(world.root / "cache"), mode="r")
    parts = {name: np.asarray(group[f"states/pooled/{name}"]) for name in ("basis", "mean", "step")}
    codes = np.asarray(group["states/pooled/codes"])
    cache = open_cache(world.root / "cache")
    size = cache.manifest.shard_tokens
    number = cache.reader.ranges[1].first_sequence + 2
    plain = parts["mean"] + (codes[size + 2] * parts["step"]) @ parts["basis"].astype(np.float32)

    np.testing.assert_allclose(vectors_of(world, [number])[0], plain, atol=1e-5)


def test_one_held_out_text_has_no_similarity(world: World, command: Command) -> None:
    save_encoder(world.teacher, "mean")
    write_corpus(world.corpus, 20)
    assert world.dump(**WORDS_OF_EMBEDDING).manifest.num_held_out == 1
    words = ("train", world.root / "cache", "--objective", "embedding", "--arch", "1x32", "--steps", 4)
    command.fails(*words, "--loss", "similarity", "--eval-steps", 2, code=2, says="one text is held out")
    code, out, err = command(*words, "--loss", "similarity", "--out", world.root / "run", "--json")
    assert code == 0, err
    (student,) = json.loads(out)["students"]
    assert (student["held_out_before"], student["held_out_after"]) == (None, None)
    code, out, err = command(*words, "--loss", "cosine", "--out", world.root / "other", "--json")
    assert code == 0, err
    assert json.loads(out)["students"][0]["held_out_after"]["cosine"] > 0


def test_held_out_similarities_do_not_depend_on_the_size_of_batches(world: World) -> None:
    save_encoder(world.teacher, "mean")
    write_corpus(world.corpus, 300)
    assert world.dump(**WORDS_OF_EMBEDDING).manifest.num_held_out >= 6
    settings: dict[str, Any] = {"objective": "embedding", "loss": ("similarity",), "matryoshka": (8,)}
    runs = [world.train(f"of-{size}", batch_size=size, steps=1, **settings) for size in (2, 16)]
    small, large = (run.record.students[0].held_out_before for run in runs)
    assert small is not None
    assert small.keys() == {"similarity", "similarity of 8"}
    assert small == pytest.approx(large)


def test_relations_and_vectors_share_a_cache(world: World) -> None:
    save_encoder(world.teacher, "mean")
    world.dump("both", codec="vectors", pooled=True, packing="records")
    cache = open_cache(world.root / "both")

    assert cache[0].relation("attention").shape[0] == 4
    assert cache[0].states()[POOLED].shape == (1, 32)
    for objective in ("minilm", "embedding"):
        config = validated(TrainConfig, {"arch": ("1x32",), "objective": objective, "steps": 2})
        train_students(config, cache.reader.root, out=world.root / objective, session=Session(world.home))


def trained(world: World, arch: str = "2x32", out: str = "run", **changes: object) -> TrainResult:
    """Return a short training from vectors."""
    settings = {"arch": (arch,), "objective": "embedding", "steps": 6, "init": "random", **changes}
    config = validated(TrainConfig, {"batch_size": 8, "checkpoint_steps": 3, **settings})
    return train_students(config, world.root / "cache", out=world.root / out, session=Session(world.home))


@pytest.mark.parametrize(("arch", "mode"), [("2x32", "mean"), ("1x16:h2", "cls"), ("1x16:h2", "lasttoken")])
def test_a_student_opens_in_sentence_transformers_and_transformers(
    world: World, arch: str, mode: str
) -> None:
    save_encoder(world.teacher, mode)
    world.dump(**WORDS_OF_EMBEDDING)
    result = trained(world, arch, lr=1e-3, steps=30)
    folder = result.student_path(arch)
    (record,) = result.record.students
    assert record.held_out_before is not None
    assert record.held_out_after is not None
    texts = texts_of(world, range(6))
    encoder: Any = SentenceTransformer(str(folder), device="cpu")
    vectors = torch.from_numpy(encoder.encode(texts))

    assert record.num_parameters == sum(weight.numel() for weight in encoder.parameters())
    assert record.held_out_after["cosine"] < record.held_out_before["cosine"]
    assert vectors.shape == (6, 32), "the learned map leads to the teacher's width"
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(6))
    hidden_size = AutoModel.from_pretrained(folder).config.hidden_size
    assert hidden_size == int(arch.partition(":")[0].partition("x")[2])
    cosines = torch.cosine_similarity(vectors, vectors_of(world, range(6)))
    assert 1 - cosines.mean() < 1.5 * record.held_out_before["cosine"]
    assert "sentence-similarity" in (folder / "README.md").read_text()


def batch_of(student: torch.Tensor, teacher: torch.Tensor) -> StudentBatch:
    """Return a batch with these targets."""
    return StudentBatch(
        inputs=Inputs.full(torch.zeros(student.shape[:2], dtype=torch.int64)),
        counts={"tokens": 1, "chosen": 0, "sequences": len(student), "pairs": 1},
        part=0,
        step_counts={"tokens": 1, "chosen": 0, "sequences": len(student), "pairs": 1},
        ends_step=True,
        targets=(),
        signals=Signals(values={POOLED: teacher}),
    )


def test_parts_of_the_loss_are_what_they_say(world: World) -> None:
    save_encoder(world.teacher, "mean")
    world.dump(**WORDS_OF_EMBEDDING)
    settings = {"arch": ("2x32",), "objective": "embedding", "loss": ("cosine", "mse=3", "similarity=0.5")}
    config = validated(TrainConfig, {**settings, "matryoshka": (8,)})
    cache = open_cache(world.root / "cache")
    states = cache.manifest.identity.states
    assert states is not None
    assert states.pooled is not None
    assert choose_objective(config, cache, arch=config.arch).wanted.signals == (POOLED,)
    objective = EmbeddingObjective(
        states.pooled, 32, 2, losses={"cosine": 1.0, "mse": 3.0, "similarity": 0.5}, widths=(8,)
    )
    hidden, teacher = torch.randn(5, 7, 32), torch.nn.functional.normalize(torch.randn(5, 32))
    reading = Reading(vectors=[], hidden={2: hidden}, logits=None)
    parts = objective(reading, batch_of(hidden, teacher))
    student = torch.nn.functional.normalize(hidden.mean(1))
    pairs = [(i, j) for i in range(5) for j in range(5) if i != j]

    def similarity(width: int) -> torch.Tensor:
        return torch.stack(
            [
                torch.cosine_similarity(student[i, :width], student[j, :width], 0) - teacher[i] @ teacher[j]
                for i, j in pairs
            ]
        )

    torch.testing.assert_close(parts["cosine"], (1 - (student * teacher).sum(-1)).mean())
    torch.testing.assert_close(parts["mse"], torch.nn.functional.mse_loss(student, teacher))
    torch.testing.assert_close(parts["similarity"], similarity(32).square().mean())
    torch.testing.assert_close(parts["similarity of 8"], similarity(8).square().mean())
    total = parts["cosine"] + 3 * parts["mse"] + 0.5 * (parts["similarity"] + parts["similarity of 8"])
    torch.testing.assert_close(objective.losses(parts).total, total)
    assert similarity_difference(student[:1], teacher[:1]) == 0


@pytest.mark.parametrize("temperature", [None, 0.2])
def test_vectors_that_crowd_together_are_compared_without_their_mean(
    world: World, temperature: float | None
) -> None:
    save_encoder(world.teacher, "mean")
    world.dump(**WORDS_OF_EMBEDDING)
    values = {
        "arch": ("2x32",),
        "objective": "embedding",
        "loss": ("centred", "neighbours=2"),
        "device": "cpu",
    }
    config = validated(TrainConfig, {**values, "temperature": temperature})
    cache = open_cache(world.root / "cache")
    chosen = choose_objective(config, cache, arch=config.arch)
    facts = StudentFacts(num_layers=2, hidden_size=32, vector_width=32)
    objective = Embedding().build(chosen.request, chosen.wanted, facts)
    hidden, teacher = torch.randn(5, 7, 32), torch.nn.functional.normalize(torch.randn(5, 32))
    parts = objective(Reading(vectors=[], hidden={2: hidden}, logits=None), batch_of(hidden, teacher))
    student = torch.nn.functional.normalize(hidden.mean(1))
    cached = torch.cat([cache[n].states()[POOLED] for n in range(cache.manifest.num_train)])
    assert len(cached) < 2048

    mean = cached.mean(0)
    cosines = torch.stack(
        [
            torch.dot(s - mean, t - mean) / ((s - mean).norm() * (t - mean).norm())
            for s, t in zip(student, teacher, strict=True)
        ]
    )
    torch.testing.assert_close(parts["centred"], 1 - cosines.mean())
    unit = cached / cached.norm(dim=-1, keepdim=True)
    pairs = torch.stack([unit[i] @ unit[j] for i in range(len(unit)) for j in range(len(unit)) if i != j])
    divided_by = temperature or float(pairs.std()) / 3
    theirs, mine = (torch.softmax(vectors @ unit.T / divided_by, -1) for vectors in (teacher, student))
    expected = (theirs * (theirs / mine).log()).sum(-1).mean()
    torch.testing.assert_close(parts["neighbours"], expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(objective.losses(parts).total, parts["centred"] + 2 * parts["neighbours"])
    assert float(
        objective.losses(
            objective(
                Reading(vectors=[], hidden={2: teacher[:, None].expand(5, 7, 32)}, logits=None),
                batch_of(hidden, teacher),
            )
        ).total
    ) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("stop_after", [2, 4])
def test_an_interrupted_training_ends_as_an_uninterrupted_one(world: World, stop_after: int) -> None:
    save_encoder(world.teacher, "mean")
    world.dump(**WORDS_OF_EMBEDDING)
    whole = trained(world, out="whole")
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > stop_after

    config = validated(
        TrainConfig,
        {
            "arch": ("2x32",),
            "objective": "embedding",
            "steps": 6,
            "init": "random",
            "batch_size": 8,
            "checkpoint_steps": 3,
        },
    )
    out = world.root / "cut"
    with pytest.raises(InterruptedRunError):
        train_students(config, world.root / "cache", session=Session(world.home, should_stop=stop), out=out)
    resumed = train_students(config, world.root / "cache", session=Session(world.home), out=out)
    weights = [
        (result.student_path("2x32") / "model.safetensors").read_bytes() for result in (whole, resumed)
    ]

    assert weights[0] == weights[1]


def test_relations_first_then_vectors(world: World) -> None:
    """A second training begins with the students of a first one, whatever its objective."""
    save_encoder(world.teacher, "mean")
    world.dump(codec="vectors", pooled=True, packing="records")
    first = trained(world, out="relations", objective="minilm")
    second = trained(world, out="vectors", init=str(first.path))

    assert second.record.students[0].init == "another model"


def test_a_teacher_that_does_not_say_how_it_pools(world: World, command: Command) -> None:
    arguments = dump_arguments(world, "--for", "embedding", k=None)
    command.fails(*arguments, code=2, says=("no modules.json", "--pooling"))
    assert command(*arguments, "--pooling", "cls")[0] == 0
    save_encoder(world.teacher, "mean")
    command.fails(*arguments, "--pooling", "cls", code=2, says=("--pooling cls", "pools by mean"))


def test_an_objective_that_the_cache_does_not_serve(world: World, command: Command) -> None:
    save_encoder(world.teacher, "mean")
    world.dump(**WORDS_OF_EMBEDDING)
    world.dump("relations", codec="topk")
    cache, relations = world.root / "cache", world.root / "relations"
    command.fails("train", cache, "--arch", "2x32", code=2, says=("attention", "codec none"))
    train = ("--arch", "2x32", "--objective", "embedding")
    command.fails("train", relations, *train, code=2, says=("pooled vectors", "--for embedding"))
    command.fails("train", cache, *train, "--matryoshka", 32, code=2, says="--matryoshka 32")
    command.fails("train", cache, *train, *["--matryoshka", 8] * 2, code=2, says="is given twice with one")
    command.fails("train", cache, *train, "--loss", "cosin", code=2, says=("--loss cosin", "similarity"))
    command.fails("train", cache, *train, "--loss", "mse=0", code=2, says="--loss mse=0")
    command.fails("train", relations, "--arch", "2x32", "--loss", "mse", code=2, says="--loss goes with")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--codec", "none"), "nothing else is asked for"),
        (("--codec", "none", "--pooled", "--pooling", "mean", "--layers", "all"), "--layers"),
        (("--pooling", "mean"), "--pooling needs --pooled"),
        (("--pooled", "--pooling", "sum"), "--pooling sum"),
        (("--pooled", "--min-cosine", "1"), "--min-cosine 1"),
    ],
)
def test_options_that_contradict_each_other(
    world: World, command: Command, options: tuple[str, ...], says: str
) -> None:
    command.fails(*dump_arguments(world, *options, k=None), code=2, says=says)


def test_commands_show_a_cache_without_relations(world: World, command: Command, tmp_path: Path) -> None:
    save_encoder(world.teacher, "mean")
    arguments = dump_arguments(world, "--for", "embedding", k=None)
    assert command(*arguments)[0] == 0
    cache = world.root / "cache"
    code, out, _ = command("info", cache)
    assert (code, "relations" in out, "cosine" in out) == (0, True, True)
    assert command("verify", cache, "--full")[0] == 0
    assert command("verify", cache, "--teacher", world.teacher, "--corpus", world.corpus)[0] == 0
    code, out, _ = command(
        *("plan", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32),
        *("--for", "embedding", "--json"),
    )
    (setting,) = json.loads(out)["settings"]
    assert (code, setting["codec"]["name"], len(setting["states"])) == (0, "none", 1)
    run = tmp_path / "run"
    train = ("train", cache, "--arch", "2x32", "--objective", "embedding", "--steps", 2, "--lr", "1e-6")
    assert command(*train, "--out", run)[0] == 0
    assert command("report", run, "--out", tmp_path / "page.html", "--teacher", world.teacher)[0] == 0
    assert command("report", run, "--out", tmp_path / "plain.html")[0] == 0


def test_the_learned_map_begins_where_plain_least_squares_ends(world: World) -> None:
    save_encoder(world.teacher, "mean", normalize=False)
    world.dump(**WORDS_OF_EMBEDDING)
    result = trained(world, "1x16:h2", steps=1, lr=1e-12)
    encoder: Any = SentenceTransformer(str(result.student_path("1x16:h2")), device="cpu")
    cache = open_cache(world.root / "cache")
    numbers = range(cache.manifest.num_train)
    documents = world.corpus.read_text().strip().split("\n\n")
    tables = [cache.reader.table(shard)["document"].to_pylist() for shard in range(len(cache.reader.ranges))]
    texts = [documents[document] for table in tables for document in table][: len(numbers)]
    pooled = encoder[1](encoder[0](encoder.preprocess(texts)))["sentence_embedding"].detach()
    inputs = torch.cat([pooled, torch.ones(len(pooled), 1)], 1).double()
    targets = vectors_of(world, numbers).double()
    plain = inputs @ torch.linalg.lstsq(inputs, targets).solution
    ours = torch.from_numpy(encoder.encode(texts)).double()
    errors = [(found - targets).square().sum() for found in (plain, ours)]

    assert errors[0] <= errors[1] < 1.1 * errors[0]


def test_a_teacher_that_pools_otherwise_is_another_teacher(world: World, command: Command) -> None:
    save_encoder(world.teacher, "mean")
    world.dump(**WORDS_OF_EMBEDDING)
    save_encoder(world.teacher, "max")
    command.fails(
        *("verify", world.root / "cache", "--teacher", world.teacher),
        code=3,
        says="the way the teacher pools",
    )


def test_vectors_are_of_whole_texts(world: World, command: Command) -> None:
    arguments = dump_arguments(world, "--for", "embedding", "--pooling", "mean", k=None)
    command.fails(*arguments, "--packing", "packed", code=2, says="--pooled goes with --packing records")
    both = dump_arguments(world, "--for", "minilm,embedding", "--pooling", "mean", "--codec", "none", k=None)
    command.fails(*both, code=2, says="--for asks for relations")


def test_vectors_are_added_to_relations_and_relations_stay(world: World) -> None:
    save_encoder(world.teacher, "mean")
    world.dump(codec="vectors", packing="records")
    plain = open_cache(world.root / "cache")
    config = world.config(codec="vectors", packing="records", pooled=True)
    dump_cache(config, out=world.root / "both", add=world.root / "cache", session=Session(world.home))
    both = open_cache(world.root / "both")

    assert torch.equal(both[3].relation("value"), plain[3].relation("value"))
    assert both[3].states()[POOLED].shape == (1, 32)


def test_ranks_write_vectors_together(world: World) -> None:
    save_encoder(world.teacher, "mean")
    world.dump(**WORDS_OF_EMBEDDING)
    for rank in (1, 0):
        world.dump("ranks", **WORDS_OF_EMBEDDING, rank=rank, world_size=2)
    alone, together = open_cache(world.root / "cache"), open_cache(world.root / "ranks")

    for number in range(len(alone)):
        vectors = [cache[number].states()[POOLED] for cache in (alone, together)]
        assert torch.equal(*vectors)


def test_checkpointed_layers_train_as_others_do(world: World) -> None:
    """Layers are computed again although nothing is in training mode: there is no dropout."""
    save_encoder(world.teacher, "mean")
    world.dump(**WORDS_OF_EMBEDDING)
    plain = trained(world, out="plain")
    saving = trained(world, out="saving", gradient_checkpointing=True)
    weights = [load_file(run.student_path("2x32") / "model.safetensors") for run in (plain, saving)]

    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-4, atol=1e-6)
