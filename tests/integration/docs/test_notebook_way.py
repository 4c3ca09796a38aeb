"""What people write in Python: texts for numbers and paths, bars, and what results print."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from minilm_cache import (
    DumpConfig,
    Session,
    TrainConfig,
    TrainedRun,
    attention_figure,
    dump_cache,
    evaluate_models,
    open_cache,
    results,
    search_texts,
    slice_teacher,
    train_students,
)
from minilm_cache.errors import IdentityMismatchError, InvalidConfigError, StorageError
from minilm_cache.settings import whole_number
from tests.support import World, save_teacher


def test_settings_are_written_as_on_the_command_line() -> None:
    config = DumpConfig.model_validate({"teacher": "mini", "max_tokens": "20k", "for": "minilm,tinybert"})
    assert config.max_tokens == 20_000
    assert config.serve == ("minilm", "tinybert")
    assert TrainConfig(arch="3x384", steps="1.5k", objective="embedding", matryoshka=64).steps == 1500
    assert TrainConfig(arch="3x384").with_changes(arch=["2x96", "3x96"]).arch == ("2x96", "3x96")
    for wrong in ("20K", "many", ""):
        with pytest.raises(ValueError, match="valid integer"):
            DumpConfig(teacher="mini", max_tokens=wrong)
        with pytest.raises(ValueError, match="not a whole number"):
            whole_number(wrong)


def test_a_notebook_is_pleasant(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world.root)
    session = Session(str(world.home), progress=True)
    config = DumpConfig(teacher=str(world.teacher), corpus=str(world.corpus), max_length=32, device="cpu")
    dumped = dump_cache(config, out="notes.cache", session=session)
    trained = train_students(
        TrainConfig(arch="1x32", steps="4", batch_size="4", device="cpu"),
        "notes.cache",
        out="run",
        session=session,
    )
    shown = capsys.readouterr().err
    assert "dump: 100%" in shown
    assert "train: 100%" in shown
    assert "Loading weights" not in shown
    assert repr(dumped).startswith("<DumpResult notes.cache: teacher teacher, tokens")
    assert "held-out loss of 1x32" in repr(trained)
    assert "<table>" in trained._repr_html_()

    with pytest.raises(IdentityMismatchError, match="is not the one of"):
        results("run", teacher=str(save_teacher(world.root / "other", seed=1)))
    assert open_cache(dumped).manifest.fingerprint == dumped.manifest.fingerprint
    (row,) = results(trained).to_dict("records")
    assert row["arch"] == "1x32"
    assert "masked_agreement" not in row  # nothing measured it
    run = TrainedRun.open("run")
    figure = attention_figure(run, "ba be bi", teacher=str(world.teacher))
    figure.save("maps.PNG")
    assert Path("maps.PNG").read_bytes() == figure._repr_png_()
    assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(InvalidConfigError, match=r"maps\.svg: a picture is written as a PNG"):
        figure.save("maps.svg")
    with pytest.raises(StorageError, match="cannot write"):
        figure.save("maps.PNG/maps.png")
    with pytest.raises(ValidationError, match="--arch three: write LAYERSxHIDDEN"):
        TrainConfig(arch="three")
    maps = figure.spec["hconcat"]
    assert [one["title"] for one in maps] == ["teacher teacher", "1x32"]
    tokens = [token.rpartition(" ")[0].strip() for token in maps[0]["encoding"]["y"]["sort"]]
    assert tokens == ["[CLS]", "ba", "be", "bi", "[SEP]"]
    with pytest.raises(InvalidConfigError, match="head 4: give a number from 0 to 3"):
        attention_figure(run, "ba", teacher=str(world.teacher), head=4)
    with pytest.raises(
        InvalidConfigError, match="no relation 'atention'; the relations are attention, value"
    ):
        open_cache(Path("notes.cache"))[0].relation("atention")


def test_maps_of_students_with_fewer_pieces_are_refused(world: World) -> None:
    """They would read other words in the teacher's token ids."""
    world.dump()
    fewer = world.train("fewer", vocab="20", arch=("1x16",), init="random", steps=1)
    with pytest.raises(InvalidConfigError, match="do not have all pieces of the teacher's vocabulary"):
        attention_figure(fewer.path, "ba", teacher=str(world.teacher))


def test_settings_are_objects_of_their_class(tmp_path: Path) -> None:
    given: Any = {"teacher": "mini"}
    for call, name in (
        (lambda: dump_cache(given), "DumpConfig"),
        (lambda: train_students(given, tmp_path), "TrainConfig"),
        (lambda: evaluate_models(given, "mini", out=tmp_path), "EvaluateConfig"),
        (lambda: slice_teacher(given, tmp_path / "out"), "SliceConfig"),
        (lambda: search_texts(given, "mini", "a text"), "SearchTextConfig"),
    ):
        with pytest.raises(
            InvalidConfigError, match=rf"settings are a dict, and a {name} is needed: {name}\("
        ):
            call()
