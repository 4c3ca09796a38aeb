"""Caches that serve every objective beyond relations, and students at their beginning."""

from itertools import islice

import pytest
import torch

from minilm_cache.cache import Cache
from minilm_cache.models.arch import parse_arch
from minilm_cache.objectives.batch import StudentBatch
from minilm_cache.objectives.check import choose_objective
from minilm_cache.train.batches import BatchReader
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.initial import initial_weights
from minilm_cache.train.ranks import Ranks
from minilm_cache.train.setup import build_trainers
from minilm_cache.train.trainer import StudentTrainer
from tests.support import World, save_teacher, write_corpus

CPU = torch.device("cpu")
OF_WORDS = ("value-mse", "hidden-mse", "tinybert", "distilbert", "mlm-kd", "bert-pkd", "mobilebert")
OF_CLASSES = ("tinybert-prediction", "bert-pkd", "tinybert")
ARCH = {"distilbert": "2x32", "bert-pkd": "2x32", "mobilebert": "3x32:b16"}
"""Shapes that an objective asks for; others learn at any width."""


@pytest.fixture(scope="package")
def words(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a world with one cache for every objective that a pre-trained teacher serves."""
    root = tmp_path_factory.mktemp("words")
    world = World(root, save_teacher(root / "teacher", head="tokens"), write_corpus(root / "corpus.txt"))
    world.dump(**{"for": ",".join(("minilm", *OF_WORDS))}, codec="vectors", max_kl=0.003, max_error=0.02)
    return world


@pytest.fixture(scope="package")
def classes(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a world with one cache of a teacher that classifies."""
    root = tmp_path_factory.mktemp("classes")
    teacher = save_teacher(root / "teacher", head="sequences", num_labels=3)
    world = World(root, teacher, write_corpus(root / "corpus.txt", num_documents=100))
    world.dump(
        **{"for": ",".join(OF_CLASSES)}, codec="vectors", max_kl=0.003, max_error=0.02, packing="records"
    )
    return world


@pytest.fixture(scope="package")
def records(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a world whose sequences have many lengths, some of them without a token to mask."""
    root = tmp_path_factory.mktemp("records")
    corpus = write_corpus(root / "corpus.txt")
    corpus.write_text(corpus.read_text() + "\n\n".join(["zz"] * 20) + "\n")
    world = World(root, save_teacher(root / "teacher", head="tokens"), corpus)
    world.dump(**{"for": ",".join(OF_WORDS)}, codec="vectors", max_kl=0.05, packing="records")
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
