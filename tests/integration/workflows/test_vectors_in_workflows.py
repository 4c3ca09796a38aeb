"""Relations first, then vectors: one line of train, of a chain, and of a study."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from minilm_cache.cache import open_cache
from minilm_cache.report.tables import summary_table
from minilm_cache.train.record import load_record
from tests.fixtures import Command
from tests.support import World, dump_arguments

TRAIN = ("--objective", "embedding", "--steps", 3, "--batch-size", 4, "--init", "random")
FIRST = ("--first", "minilm", "--first-steps", 2)


def dumped(world: World, command: Command) -> Path:
    """Dump relations and vectors, and return the cache."""
    arguments = dump_arguments(world, "--for", "minilm,embedding", "--pooling", "mean", k=None)
    assert command(*arguments)[0] == 0
    return world.root / "cache"


def test_train_learns_relations_first(world: World, command: Command) -> None:
    cache, out = dumped(world, command), world.root / "run"
    arguments = ("train", cache, "--arch", "1x32", *TRAIN, *FIRST, "--out", out)
    assert command(*arguments)[0] == 0
    first, second = load_record(world.root / "run-first"), load_record(out)

    assert (first.identity.objective, first.identity.steps) == ("minilm", 2)
    assert (second.identity.objective, second.identity.steps) == ("embedding", 3)
    assert second.init == str(world.root / "run-first")
    assert (first.identity.batch_size, first.identity.lr) == (4, 1e-3), "lr is that of minilm"
    code, _, err = command(*arguments)
    assert (code, err.count("already complete")) == (0, 2)


def test_only_the_second_of_two_runs_goes_on(world: World, command: Command) -> None:
    """FIRST gives the steps of the first run; without them, more --steps would be more steps of both."""
    cache, out = dumped(world, command), world.root / "run"
    arguments = ("train", cache, "--arch", "1x32", *TRAIN, "--first", "minilm", "--out", out)
    assert command(*arguments)[0] == 0
    before = load_record(world.root / "run-first")
    longer = [6 if word == 3 else word for word in arguments]
    command.fails(*longer, code=2, says="To go on with it, give --first-steps 3, too")
    says = "began after 3 steps of minilm, and 4 are asked for. Give --first-steps 3"
    command.fails(*longer, "--first-steps", 4, code=1, says=says)
    assert load_record(world.root / "run-first") == before
    code, _, err = command(*longer, "--first-steps", 3)
    assert code == 0, err
    assert load_record(world.root / "run-first") == before
    assert load_record(out).continued_at == (3,)


@pytest.mark.parametrize("first", [(), FIRST])
def test_a_chain_ends_with_vectors(world: World, command: Command, first: tuple[object, ...]) -> None:
    out = world.root / "chain"
    chain = ("chain", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32)
    code, printed, err = command(
        *(*chain, "--assistant", "2x32", "--arch", "1x16:h4", *TRAIN, *first, "--pooling", "mean"),
        *("--out", out),
    )

    assert code == 0, err
    assert "via assistants" in printed
    (student,) = (out / "runs").glob("students-*/students/*/modules.json")
    assert student.is_file()


def test_assistants_of_relations_give_no_vectors(world: World, command: Command) -> None:
    chain = ("chain", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32)
    shapes = ("--assistant", "2x32", "--arch", "1x16:h4")
    objectives = ("--objective", "minilm", "--first", "embedding")
    command.fails(*chain, *shapes, *objectives, code=2, says="Exchange --first and --objective")


def test_students_of_an_assistant_are_compared_with_the_teachers_vectors(
    world: World, command: Command
) -> None:
    """Not with those of the assistant that they learned, nor with rounded ones, as transformers says."""
    (world.root / "study.yaml").write_text(
        f"""
dump: {{teacher: {world.teacher}, corpus: {world.corpus}, max_length: 32, pooling: mean}}
caches: {{fine: {{}}, coarse: {{min_cosine: 0.8}}}}
arch: [1x16, 1x32]
objective: [embedding, minilm]
assistants: [2x32]
train: {{steps: 2, batch_size: 4, init: random}}
"""
    )
    out = world.root / "study"
    code, printed, err = command("study", world.root / "study.yaml", "--out", out, "--json")
    assert code == 0, err
    assert any("what students of embedding learn" in line for line in json.loads(printed)["cautions"])
    cache = open_cache(out / "caches" / "coarse")
    rows = [row for row in json.loads(printed)["students"] if row["objective"] == "embedding"]
    assert len(rows) == 2 * 5  # the assistants are one each
    for row in rows:
        folder = out / "runs" / row["run"] / "students" / row["arch"]
        cosines = [
            torch.cosine_similarity(
                torch.from_numpy(of_ids(folder, sequence.input_ids)),
                torch.from_numpy(of_ids(world.teacher, sequence.input_ids)),
                dim=0,
            )
            for sequence in cache[cache.manifest.num_train :]
        ]
        assert row["loss: embedding, cosine"] == pytest.approx(1 - float(np.mean(cosines)), abs=1e-5)
        assert row["held_out_loss"] == row["loss: embedding, cosine"]


def of_ids(folder: Path, ids: torch.Tensor) -> np.ndarray:
    """Return a student's vector of token ids, by transformers and the maps beside it."""
    states = AutoModel.from_pretrained(folder)(input_ids=ids[None].long()).last_hidden_state[0].mean(0)
    if (folder / "2_Dense").exists():
        weights = load_file(folder / "2_Dense" / "model.safetensors")
        states = weights["linear.weight"] @ states + weights["linear.bias"]
    return np.asarray(states.detach().numpy())


def test_a_study_compares_vectors_with_relations_first(world: World, command: Command) -> None:
    (world.root / "study.yaml").write_text(
        f"""
dump: {{teacher: {world.teacher}, corpus: {world.corpus}, max_length: 32}}
caches:
  both: {{for: [minilm, embedding], pooling: mean}}
arch: [1x32, 2x32]
objective:
  - embedding
  - {{objective: embedding, first: minilm, first_steps: 2}}
  - {{objective: embedding, loss: [similarity=2], matryoshka: [8]}}
seed: [0, 1]
train: {{steps: 3, batch_size: 4, init: random}}
"""
    )
    out = world.root / "study"
    code, _, err = command("study", world.root / "study.yaml", "--out", out)

    assert code == 0, err
    summary = summary_table(pq.read_table(out / "students.parquet"))
    assert summary["seeds"].to_pylist() == [2] * 6, "runs that began with runs of other seeds are one row"
    one, two = pq.read_table(out / "students.parquet").to_pylist()[:2]  # whole students learn vectors
    assert two["own_train_s"] / one["own_train_s"] == pytest.approx(
        two["flops_per_token"] / one["flops_per_token"]
    )
    names = [path.name for path in (out / "runs").iterdir()]
    for slug in ("embedding-s0", "embedding-after-minilm2-s0", "embedding-similarity2-m8-s0"):
        assert sum(name.startswith(f"both-{slug}-") for name in names) >= 1, names
    assert sum(name.endswith("-first") for name in names) == 2


def test_what_does_not_go_together(world: World, command: Command) -> None:
    cache = dumped(world, command)
    train = ("train", cache, "--arch", "1x32", "--objective", "embedding")
    command.fails(*train, "--first-steps", 2, code=2, says="--first-steps goes with --first")
    command.fails(*train, "--first", "embedding", code=2, says="is the objective itself")
    command.fails(*train, "--first", "tinybert", code=2, says="tinybert")
