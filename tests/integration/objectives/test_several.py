"""Students that learn the vectors of several teachers over the same texts."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer

from minilm_cache.cache import Cache, open_cache
from minilm_cache.models.pooling import SentencePooler, projection_to
from minilm_cache.objectives.several import other_teachers
from minilm_cache.report.provenance import train_command
from minilm_cache.report.runs import TrainedRun
from minilm_cache.report.tables import students_table
from minilm_cache.session import Session
from minilm_cache.storage_schema.states import POOLED
from minilm_cache.workflows.chain_plan import read_chain
from minilm_cache.workflows.study_spec import read_study
from tests.fixtures import Command
from tests.support import World, save_teacher, tiny_model, tiny_tokenizer, write_corpus

RECORDS: dict[str, Any] = {
    "codec": "none",
    "pooled": True,
    "packing": "records",
    "pooling": "mean",
    "min_cosine": 0.9999,
}


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A cache `cache` of one teacher, and a cache `other` of another one of another width and order."""
    corpus = write_corpus(tmp_path / "corpus.txt")
    world = World(tmp_path, save_teacher(tmp_path / "teacher"), corpus)
    world.dump(**RECORDS)
    wide = tiny_model("roberta", hidden_size=48, seed=3)
    wide.save_pretrained(tmp_path / "wide")
    tiny_tokenizer().save_pretrained(tmp_path / "wide")
    other = World(tmp_path, tmp_path / "wide", corpus)
    other.dump("other", seed=9, prompt="ba be", **RECORDS)
    return world


def vectors_by_text(cache: Cache) -> dict[int, torch.Tensor]:
    """Return the vector of each text, by the number of its document."""
    tables = [cache.reader.table(shard) for shard in range(len(cache.reader.ranges))]
    documents = np.concatenate([table["document"].to_numpy() for table in tables])
    return {int(text): cache[at].states()[POOLED][0] for at, text in enumerate(documents)}


def test_vectors_belong_to_the_same_texts_whatever_the_order(world: World) -> None:
    """Another seed, tokenizer and prompt: sequences come in another order, and texts are the same."""
    first, second = open_cache(world.root / "cache"), open_cache(world.root / "other")
    others = other_teachers(first, (str(world.root / "other"),))
    assert others is not None
    assert others.width == 48
    assert others.fingerprints == (second.manifest.fingerprint,)
    assert first.manifest.identity.corpus.sha256 != second.manifest.identity.corpus.sha256
    of_first, of_second = vectors_by_text(first), vectors_by_text(second)
    assert list(of_first) != list(of_second)
    found = others.of(np.arange(len(first)))
    expected = torch.stack([F.normalize(of_second[text], dim=0) for text in of_first])
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=1e-3)
    own = torch.stack(list(of_first.values()))
    joined = others.joined(own, found)
    parts = [F.normalize(own) @ F.normalize(own).T, expected @ expected.T]
    train = first.manifest.num_train
    different = ~torch.eye(train, dtype=torch.bool)
    deviations = [part[:train, :train][different].std() for part in parts]
    weighted = sum(part / deviation for part, deviation in zip(parts, deviations, strict=True))
    expected_cosines = weighted / sum(1 / deviation for deviation in deviations)
    assert (expected_cosines - (parts[0] + parts[1]) / 2).abs().max() > 5e-3  # shares are not equal
    torch.testing.assert_close(joined @ joined.T, expected_cosines, rtol=0, atol=2e-3)


@pytest.mark.parametrize("width", [12, 40])
def test_a_turned_map_keeps_products(width: int) -> None:
    torch.manual_seed(0)
    pooler = SentencePooler("mean", projection_to(width, 24, bias=False), normalize=True)
    hidden, lengths = torch.randn(6, 5, 24), torch.tensor([5, 4, 3, 2, 1, 5])
    before, after = pooler(hidden, lengths), pooler.turned()(hidden, lengths)
    assert after.shape[1] == min(width, 24)
    torch.testing.assert_close(after @ after.T, before @ before.T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("loss", [("cosine",), ("similarity",), ("centred", "neighbours")])
def test_a_student_of_two_teachers_learns_and_opens(
    world: World, loss: tuple[str, ...], command: Command
) -> None:
    settings: dict[str, Any] = {
        "objective": "embedding",
        "loss": loss,
        "steps": 60,
        "batch_size": 16,
        "lr": 3e-3,
    }
    also = (str(world.root / "other"),)
    run = world.train("run", arch=("2x16",), also=also, **settings)
    lines = [json.loads(line) for line in (run.path / "log.jsonl").read_text().splitlines()]
    losses = [sum(line["students"]["2x16"].values()) for line in lines if "students" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert run.record.identity.also == (open_cache(also[0]).manifest.fingerprint,)
    folder = run.student_path("2x16")
    encoded = SentenceTransformer(str(folder), device="cpu").encode(["ba be bi", "da de di do"])
    assert encoded.shape == (2, 16)  # the student's own width, and not that of all teachers
    np.testing.assert_allclose(np.linalg.norm(encoded, axis=1), 1, atol=1e-5)
    assert "of another teacher over the same texts" in (folder / "README.md").read_text()
    shown = command("info", run.path)[1]
    assert also[0] in shown
    assert "and of 1 other" in shown
    assert f"--also {also[0]}" in train_command(TrainedRun.open(run.path))
    assert students_table([TrainedRun.open(run.path)])["needed_bytes_per_token"][0].as_py() > 0


def test_such_a_run_resumes_and_differs_from_one_without(world: World) -> None:
    also = (str(world.root / "other"),)
    run = world.resumes_the_same("1x32", objective="embedding", also=also)
    alone = world.train("alone", arch=("1x32",), objective="embedding")
    assert run.record.identity.name() != alone.record.identity.name()
    assert "also" not in json.loads((alone.path / "run.json").read_text())["identity"]


def test_a_study_compares_one_teacher_with_two(world: World, command: Command) -> None:
    document = world.root / "study.yaml"
    document.write_text(
        "caches: {one: {cache: cache}}\narch: [1x32]\n"
        "objective: [embedding, {objective: embedding, also: [other]}]\n"
        "train: {steps: 4, batch_size: 4, init: random}\n"
    )
    code, out, err = command("study", document, "--out", world.root / "study", "--json")
    assert code == 0, err
    names = sorted(path.name for path in (world.root / "study" / "runs").iterdir())
    assert len(names) == 2
    assert any("-also-other-" in name for name in names)
    assert out


def test_passes_of_a_study_have_one_name_wherever_it_is_read_from(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = world.root / "study.yaml"
    document.write_text(
        "caches: {one: {cache: cache}}\narch: [1x32]\n"
        "objective: [{objective: embedding, also: [other]}]\ntrain: {steps: 4}\n"
    )
    names, places = set(), set()
    for folder in (world.root, world.root / "cache", Path("/")):
        monkeypatch.chdir(folder)
        path = document.relative_to(world.root) if folder == world.root else document
        (planned,) = read_study(path).passes
        names.add(planned.name)
        places.add(planned.config.also)
    assert len(names) == 1
    assert places == {(str(world.root / "other"),)}
    chain = world.root / "chain.yaml"
    chain.write_text(
        "dump: {teacher: teacher, corpus: corpus.txt}\nassistants: [2x32]\n"
        "train: {arch: [1x32], objective: embedding, also: [other]}\n"
    )
    settings, _ = read_chain(chain, chain={}, dump={}, train={}, preset=None)
    assert settings.train.also == (str(world.root / "other"),)


def test_what_such_a_run_needs_is_kept_and_its_secrets_are_not(
    world: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Mapping[str, Any]] = []

    @contextmanager
    def tracked(*_names: object, settings: Mapping[str, Any], session: Session) -> Iterator[SimpleNamespace]:
        del session
        seen.append(settings)
        yield SimpleNamespace(log=lambda *_values, **_named: None)

    monkeypatch.setattr("minilm_cache.train.run.tracking", tracked)
    monkeypatch.setattr("minilm_cache.train.run.without_secrets", lambda place: f"safe {Path(place).name}")
    other = world.root / "other"
    world.train("run", arch=("1x32",), objective="embedding", also=(str(other),))
    assert seen[0]["also"] == ("safe other",)
    command.fails("rm", other, "--yes", code=2, says=("is needed by", "run"))
    assert other.is_dir()


def test_caches_that_do_not_go_together_are_one_line(world: World, command: Command) -> None:
    world.dump("relations", packing="records")
    world.dump("few", **RECORDS, max_tokens=200)
    longer = write_corpus(world.root / "longer.txt")
    longer.write_text(longer.read_text() + "\n\nba be bi bo bu\n")
    World(world.root, world.teacher, longer).dump("longer", **RECORDS)
    World(world.root, world.teacher, world.corpus).dump("lines", **RECORDS, documents="lines")
    words = ("train", world.root / "cache", "--objective", "embedding", "--arch", "1x32", "--steps", 1)
    for also, says in (
        ("longer", ("is over other texts", "Dump it with --corpus corpus.txt")),
        ("lines", ("is over other texts", "with the same --documents")),
        ("few", ("lacks", "larger --max-tokens")),
        ("relations", ("needs caches with a vector of each single text", "--for embedding")),
        ("cache", ("given twice",)),
        ("nothing", ("nothing",)),
    ):
        code = 1 if also == "nothing" else 2
        command.fails(*words, "--also", world.root / also, code=code, says=says)
    both = (*words, "--also", world.root / "other", "--matryoshka", 8)
    command.fails(*both, code=2, says=("--matryoshka goes with the vectors of one teacher",))
    relational = ("train", world.root / "relations", "--arch", "1x32", "--also", world.root / "other")
    command.fails(*relational, code=2, says=("--also goes with --objective embedding",))
