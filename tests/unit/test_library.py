"""The library as people use it in a notebook: names, reprs, slices, settings with defaults."""

import html
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import minilm_cache
from minilm_cache import DumpConfig, TrainConfig, dump_cache, open_cache, students_table, train_students
from minilm_cache.report.runs import Student, TrainedRun
from minilm_cache.session import Session
from tests.support import World


@pytest.fixture(scope="module")
def trained(shared_world: World, tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Return a run of two students, made with the public functions alone."""
    out = tmp_path_factory.mktemp("library") / "run"
    config = TrainConfig(arch=("2x16", "1x32"), steps=3, batch_size=4, device="cpu")
    result = train_students(config, shared_world.root / "cache", out=out, session=Session(out.parent))
    return TrainedRun.open(result.path)


def test_importing_the_library_imports_nothing_heavy() -> None:
    program = (
        "import sys, minilm_cache; dir(minilm_cache); print(sorted({'torch', 'zarr'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    assert dir(minilm_cache) == sorted(minilm_cache.__all__)
    for name in minilm_cache.__all__:
        assert getattr(minilm_cache, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        minilm_cache.nonsense  # noqa: B018 - the access itself is what is tested


def test_a_cache_says_what_it_is_and_can_be_cut_and_iterated(shared_world: World) -> None:
    cache = open_cache(shared_world.root / "cache")

    text = repr(cache)
    for part in (str(shared_world.root / "cache"), "topk k=6", f"tokens {cache.manifest.num_tokens:,}"):
        assert part in text
    assert html.escape("topk k=6") in cache._repr_html_()
    assert [sequence.number for sequence in cache[2:9:3]] == [2, 5, 8]
    assert [sequence.number for sequence in cache[-2:]] == [len(cache) - 2, len(cache) - 1]
    assert sum(len(sequence) for sequence in cache) == cache.manifest.num_tokens
    with pytest.raises(IndexError):
        cache[len(cache)]


def test_a_sequence_says_what_it_is(shared_world: World) -> None:
    cache = open_cache(shared_world.root / "cache")
    first, last = cache[0], cache[-1]

    assert repr(first).startswith(f"<CachedSequence 0: tokens {len(first)}, relations attention, value")
    assert "training" in repr(first)
    assert "held out" in repr(last)
    assert "<table>" in first._repr_html_()
    assert len(first) == len(first.input_ids)
    assert first.relation("value").dtype == torch.float32


def test_a_run_and_its_students_say_what_they_are(trained: TrainedRun) -> None:
    assert len(trained) == 2
    assert [student.arch for student in trained] == ["2x16", "1x32"]
    student = trained["1x32"]
    assert isinstance(student, Student)
    assert (student.path / "model.safetensors").is_file()
    assert f"{student.record.num_parameters:,}" in repr(student)
    assert "attention" in repr(student)
    assert "2x16, 1x32" in repr(trained)
    assert "<table>" in trained._repr_html_()
    assert "<table>" in student._repr_html_()
    with pytest.raises(KeyError):
        trained["9x9"]
    assert students_table([trained]).num_rows == 2


def test_names_from_a_stranger_are_escaped_in_notebooks(
    shared_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache(shared_world.root / "cache")
    labels = cache.manifest.labels.model_copy(update={"teacher": "<script>alert(1)</script>"})
    manifest = cache.manifest.model_copy(update={"labels": labels})
    monkeypatch.setattr(cache.reader, "manifest", manifest)

    assert "<script>" not in cache._repr_html_()
    assert "&lt;script&gt;" in cache._repr_html_()


def test_a_home_is_not_needed(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None means the folder that the command uses, too."""
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    dumped = dump_cache(world.config())
    trained = train_students(TrainConfig(arch=("1x32",), steps=1, device="cpu"), dumped.path)

    assert dumped.path.parent == tmp_path / "user/.cache/minilm-cache/caches"
    assert trained.path.parent == tmp_path / "user/.cache/minilm-cache/runs"


def test_settings_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="--k goes with --codec topk"):
        DumpConfig(teacher="mini", codec="dense", k=4)
    with pytest.raises(ValueError, match="--patience goes with --objective bert-pkd"):
        TrainConfig(arch=("2x16",), patience=3.0)
