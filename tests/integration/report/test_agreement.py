"""Agreement of relations, beside attention weights as transformers hands them out."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from minilm_cache.cache import open_cache
from minilm_cache.models.locate import TeacherSource
from minilm_cache.models.teacher import Teacher
from minilm_cache.report.page import _compared_students
from minilm_cache.report.runs import TrainedRun
from minilm_cache.report.similarity import ComparedStudent, relation_agreement
from minilm_cache.session import Session
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import train_students
from tests.fixtures import Command
from tests.support import WORDS, World, save_teacher, write_corpus


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("agreement")
    world = World(root, save_teacher(root / "teacher"), write_corpus(root / "corpus.txt", 600))
    world.dump()
    recipe = TrainConfig(
        arch=("1x16", "2x16:h2"), steps=10, batch_size=4, device="cpu", relation_heads=4, objective="minilmv2"
    )
    dump = world.dump("vectors", codec="vectors")
    train_students(recipe, dump.path, out=root / "split", session=Session(world.home))
    own = TrainConfig(arch=("1x16",), steps=10, batch_size=4, device="cpu")
    train_students(own, root / "cache", out=root / "run", session=Session(world.home))
    return world


def _teacher(world: World) -> Teacher:
    return Teacher(TeacherSource(name="teacher", folder=world.teacher), torch.device("cpu"))


def _attentions(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids[None], output_attentions=True).attentions[-1][0]
    return found


def test_attention_agrees_as_transformers_weights_do(trained: World) -> None:
    """KL and the likeliest column of each head, position and length, from `output_attentions`."""
    cache = open_cache(trained.root / "cache")
    student = trained.root / "run" / "students" / "1x16"
    compared = [ComparedStudent(name="s", folder=student, relation_heads=None, layer=None)]
    attention, value = relation_agreement(cache, _teacher(trained), compared)
    assert (attention.kind, value.kind) == (RelationKind.ATTENTION, RelationKind.VALUE)
    held_out = range(cache.manifest.num_train, cache.manifest.num_sequences)
    ids = [cache[number].input_ids for number in held_out]
    kls, sames, places = [], [], []
    for one in ids:
        true, own = _attentions(trained.teacher, one), _attentions(student, one)
        kls.append((true * (true.log() - own.log())).sum(-1).T)
        sames.append((true.argmax(-1) == own.argmax(-1)).float().T)
        places.append(torch.arange(len(one)) / len(one))
    kl, same, place = torch.cat(kls), torch.cat(sames), torch.cat(places)
    assert [one.kl for one in attention.heads] == pytest.approx(kl.mean(0).tolist(), rel=1e-4)
    assert [one.same for one in attention.heads] == pytest.approx(same.mean(0).tolist())
    for number, probe in enumerate(attention.positions):
        inside = (place >= number / 8) & (place < (number + 1) / 8)
        assert probe is not None
        assert probe.kl == pytest.approx(float(kl[inside].mean()), rel=1e-4)
    assert list(attention.lengths) == [8, 16, 32]
    assert attention.lengths[32].kl == pytest.approx(float(kl.mean()), rel=1e-4)
    cut = [torch.cat([one[:7], one[-1:]]) if len(one) > 8 else one for one in ids]
    short = torch.cat(
        [
            (true * (true.log() - _attentions(student, one).log())).sum(-1).T
            for one in cut
            for true in [_attentions(trained.teacher, one)]
        ]
    )
    assert attention.lengths[8].kl == pytest.approx(float(short.mean()), rel=1e-4)


def test_a_teacher_agrees_with_itself(trained: World) -> None:
    cache = open_cache(trained.root / "cache")
    itself = ComparedStudent(name="itself", folder=trained.teacher, relation_heads=None, layer=None)
    for one in relation_agreement(cache, _teacher(trained), [itself]):
        assert all(probe.same == 1 and abs(probe.kl) < 1e-6 for probe in one.heads)
        assert len(one.heads) == 4


def test_the_report_shows_students_with_comparable_heads(trained: World, command: Command) -> None:
    """Relations of MiniLMv2's students are split as they were learned; others need the teacher's heads."""
    page = trained.root / "report.html"
    asked = ("report", trained.root / "split", "--teacher", trained.teacher, "--device", "cpu", "--out", page)
    code, out, err = command(*asked, "--json")
    assert code == 0, err
    found = json.loads(out)["agreement"]
    assert {(one["student"], one["kind"]) for one in found} == {
        (arch, kind) for arch in ("1x16", "2x16:h2") for kind in ("query", "key", "value")
    }
    assert all(len(one["heads"]) == 4 for one in found)
    text = page.read_text()
    assert "Agreement of relations" in text
    assert f"<td>{found[0]['heads'][0]['kl']:.3f}</td>" in text
    cache = open_cache(trained.root / "cache")
    other = ComparedStudent(
        name="x", folder=trained.root / "split" / "students" / "2x16-h2", relation_heads=None, layer=None
    )
    assert other.folder.is_dir()
    assert relation_agreement(cache, _teacher(trained), [other]) == []


def test_short_texts_leave_some_eighths_out(tmp_path: Path, command: Command) -> None:
    corpus = tmp_path / "records.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{a} {b}"}) + "\n" for a in WORDS for b in WORDS[:3]))
    world = World(tmp_path, save_teacher(tmp_path / "teacher"), corpus)
    world.dump(packing="records", shard_tokens=1024)
    run = world.train("run").path
    page = tmp_path / "page.html"
    asked = ("report", run, "--teacher", world.teacher, "--out", page, "--device", "cpu", "--json")
    code, out, err = command(*asked)
    assert code == 0, err
    assert "NaN" not in out
    found = json.loads(out)["agreement"]
    assert all(None in one["positions"] and any(one["positions"]) for one in found)
    specs = re.findall(r'class="spec">(.*?)</script>', page.read_text())
    assert specs
    assert not any("NaN" in spec for spec in specs)


def test_without_a_teacher_the_page_says_what_it_lacks(trained: World, command: Command) -> None:
    page = trained.root / "plain.html"
    code, out, _ = command("report", trained.root / "run", "--out", page, "--device", "cpu", "--json")
    assert (code, json.loads(out)["agreement"]) == (0, [])
    assert "position and length needs the teacher" in page.read_text()


def test_students_of_several_runs_are_compared_each_with_its_layer(tmp_path: Path, command: Command) -> None:
    world = World(tmp_path, save_teacher(tmp_path / "teacher"), write_corpus(tmp_path / "corpus.txt", 600))
    world.dump(codec="vectors", layers="all")
    for layer in (2, 0):
        config = TrainConfig(arch=("1x16",), steps=2, batch_size=4, device="cpu", teacher_layer=layer)
        train_students(config, tmp_path / "cache", out=tmp_path / f"run{layer}", session=Session(world.home))
    runs = [TrainedRun.open(tmp_path / f"run{layer}") for layer in (2, 0)]
    shown = [(run.path.name, run.folder(run.students[0])) for run in runs]
    both = relation_agreement(runs[0].reference, _teacher(world), _compared_students(runs, shown))
    alone = relation_agreement(runs[1].reference, _teacher(world), _compared_students(runs[1:], shown[1:]))
    assert [one.heads for one in both if one.student == "run0"] == [one.heads for one in alone]
    assert [one.heads for one in both if one.student == "run2"] != [one.heads for one in alone]


def test_what_readers_must_know_is_on_the_page_and_in_the_terminal(world: World, command: Command) -> None:
    write_corpus(world.corpus, 20)
    world.dump()
    run = world.train("run").path
    page = world.root / "page.html"
    asked = ("report", run, "--out", page, "--device", "cpu")
    cautions = json.loads(command(*asked, "--json")[1])["cautions"]

    assert "too few to tell students apart" in cautions[0]
    assert all(line in page.read_text() for line in cautions)
    assert "too few to tell students" in command(*asked)[1]
