"""A cache of everything that a teacher can state, and transformers' own outputs to compare it with."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from minilm_cache.cache import CachedSequence, open_cache
from tests.support import VOCABULARY, World, save_teacher, write_corpus

EVERYTHING = "minilm,tinybert,distilbert,mlm-kd,bert-pkd"
MASK = VOCABULARY.index("[MASK]")


def world_of(root: Path, head: str | None, family: str = "bert") -> World:
    """Return a teacher with a head, and a corpus."""
    teacher = save_teacher(root / "teacher", family, head=head)
    return World(root, teacher, write_corpus(root / "corpus.txt", num_documents=80))


@pytest.fixture(scope="package")
def stored(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a world with a cache of everything, which no test may change."""
    world = world_of(tmp_path_factory.mktemp("states"), "tokens")
    world.dump(**{"for": EVERYTHING}, codec="vectors", max_error=0.05, label_k=12)
    return world


def outputs(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return hidden states, stacked, and logits of one sequence."""
    with torch.no_grad():
        found = model.eval()(input_ids=ids[None], output_hidden_states=True)
    return {"hidden": torch.stack([one[0] for one in found.hidden_states]), "logits": found.logits[0]}


def held_out(world: World, name: str = "cache") -> list[CachedSequence]:
    """Return sequences that no code was fitted to."""
    cache = open_cache(world.root / name)
    return [cache[number] for number in range(cache.manifest.num_train, len(cache))]


def relative(said: torch.Tensor, stored: torch.Tensor) -> float:
    """Return the root of squared error over variance."""
    return float(((stored - said).square().sum() / (said - said.mean(0)).square().sum()).sqrt())
