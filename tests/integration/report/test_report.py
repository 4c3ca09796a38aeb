"""The page, opened in a real browser, and its figures beside transformers' own."""

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait
from transformers import AutoModel

from minilm_cache.dump.run import dump_cache
from minilm_cache.errors import CacheCorruptError
from minilm_cache.models.student import teacher_config
from minilm_cache.report.maps import Example, ModelMaps, packed
from minilm_cache.report.plots import drawing_script
from minilm_cache.report.provenance import train_command
from minilm_cache.report.runs import TrainedRun
from minilm_cache.report.tables import known_scores, results
from minilm_cache.session import Session
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import train_students
from minilm_cache.workflows.chain import run_chain
from tests.fixtures import Command
from tests.integration.workflows.test_chain import chain_config
from tests.support import VOCABULARY, World, save_teacher, write_corpus

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (BROWSER and DRIVER) and "MINILM_CACHE_TESTS_NEED_BROWSER" not in os.environ,  # CI has one
    reason="no chromium and chromedriver on this machine (apt install chromium-driver)",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a world with a run of two students and a short text."""
    root = tmp_path_factory.mktemp("report")
    world = World(root, save_teacher(root / "teacher"), write_corpus(root / "corpus.txt"))
    world.dump()
    recipe = TrainConfig(arch=("1x16", "2x32"), steps=20, batch_size=4, lr=5e-3, device="cpu")
    train_students(recipe, world.root / "cache", out=world.root / "run", session=Session(world.home))
    return world


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Return a headless browser that keeps what pages write to its console."""
    options = ChromeOptions()
    assert BROWSER is not None
    options.binary_location = BROWSER
    for argument in (
        *("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking"),
        *("disable-component-update", "disable-sync", "window-size=1300,1000"),
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=ChromeService(DRIVER))
    yield driver
    driver.quit()


def page(world: World, command: Command, *more: object) -> tuple[Path, dict[str, object]]:
    """Write a page about the run, and return it and what the command printed."""
    file = world.root / "report.html"
    code, out, err = command("report", world.root / "run", "--out", file, "--json", "--device", "cpu", *more)
    assert code == 0, err
    found: dict[str, object] = json.loads(out)
    return file, found


def pixels(browser: Chrome) -> list[str]:
    """Return what every canvas shows."""
    shown: list[str] = browser.execute_script(
        "return [...document.querySelectorAll('canvas')].map((one) => one.toDataURL())"
    )
    return shown


def shows_other_than(before: list[str], browser: Chrome) -> bool:
    """Return whether canvases have changed."""
    return pixels(browser) != before


def readout(browser: Chrome) -> str:
    """Return the text that the page shows for the chosen cell."""
    return browser.find_element(By.ID, "readout").text


def choose(browser: Chrome, box: str, option: str) -> None:
    """Choose in a list as a mouse does."""
    Select(browser.find_element(By.ID, box)).select_by_visible_text(option)


@needs_browser
def test_the_page_opens_without_complaint_and_loads_nothing(
    trained: World, command: Command, browser: Chrome
) -> None:
    file, found = page(trained, command, "--teacher", trained.teacher)
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(file.as_uri())
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]

    assert browser.get_log("browser") == []
    assert [url for url in urls if not url.startswith("data:")] == [file.as_uri()]
    assert found["num_bytes"] == file.stat().st_size < 2 * 2**20
    own = file.read_text().replace(drawing_script(), "").replace("http-equiv", "")
    assert (
        re.findall('https?://[^"]+', own) == [alt.SCHEMA_URL] * 7
    )  # the name of what each chart is written in
    for section in ("students", "curves", "tradeoff", "storage", "maps", "layers", "provenance"):
        assert browser.find_element(By.ID, section).text or section == "curves"
    assert len(browser.find_elements(By.CSS_SELECTOR, "svg")) == 3 + 2 + 2
    assert len(browser.find_elements(By.TAG_NAME, "canvas")) == 3


@needs_browser
def test_charts_say_what_a_mark_is_and_show_what_is_chosen(
    trained: World, command: Command, browser: Chrome, tmp_path: Path
) -> None:
    """A second run with another seed and objective: they are never drawn together, and a mark has a name."""
    recipe = TrainConfig(arch=("1x16",), steps=10, batch_size=4, device="cpu", seed=1, value_relation=False)
    other = train_students(
        recipe, trained.root / "cache", out=tmp_path / "other", session=Session(trained.home)
    )
    file, _ = page(trained, command, other.path)
    browser.get(file.as_uri())
    boxes = {
        box.find_element(By.XPATH, "..").text.split()[0]: Select(box)
        for box in browser.find_elements(By.CSS_SELECTOR, "#curves select")
    }
    assert boxes.keys() == {"objective", "seed"}
    assert [option.text for option in boxes["seed"].options] == ["all", "0", "1"]
    assert "all" not in [option.text for option in boxes["objective"].options]

    def crosses() -> int:
        return len(browser.find_elements(By.CSS_SELECTOR, "#curves .mark-symbol.layer_2_marks path"))

    first = crosses()
    boxes["objective"].select_by_index(1)
    WebDriverWait(browser, 20).until(lambda _: crosses() != first)
    mark = browser.find_element(By.CSS_SELECTOR, "#tradeoff .mark-symbol path")
    ActionChains(browser).move_to_element(mark).perform()
    tip = WebDriverWait(browser, 20).until(
        lambda _: browser.find_element(By.CSS_SELECTOR, "#vg-tooltip-element.visible")
    )
    assert {"shape", "objective", "cache", "seed", "parameters"} <= set(tip.text.split())
    assert browser.get_log("browser") == []


@needs_browser
def test_mouse_and_keyboard_choose_what_is_shown(trained: World, command: Command, browser: Chrome) -> None:
    file, _ = page(trained, command, "--teacher", trained.teacher, "--sequence", 0, "--text", "ba ce di fo")
    browser.get(file.as_uri())
    seen = [pixels(browser)]
    for box, option in (("head", "3"), ("kind", "value"), ("layer-2", "0"), ("example", "ba ce di fo")):
        choose(browser, box, option)
        seen.append(pixels(browser))

    assert all(before[2] != after[2] for before, after in pairwise(seen))
    assert seen[2][:2] == seen[3][:2]  # another layer of one student is nobody else's business
    choose(browser, "layer-0", "1")
    assert pixels(browser)[0] != seen[-1][0]
    choose(browser, "example", "held-out sequence 0")
    choose(browser, "example", "ba ce di fo")
    assert Select(browser.find_element(By.ID, "layer-0")).first_selected_option.text == "1"
    canvas = browser.find_elements(By.TAG_NAME, "canvas")[1]
    before = readout(browser), pixels(browser)
    canvas.send_keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert readout(browser).startswith("row 1 “ba” on column 2 “ce”")
    assert all(old != new for old, new in zip(before[1], pixels(browser), strict=True))
    ActionChains(browser).move_to_element_with_offset(canvas, 60, 60).perform()
    assert readout(browser) != before[0]
    assert "row 1 “ba” on column 2" not in readout(browser)
    head = browser.find_element(By.ID, "head")
    shown = pixels(browser)
    head.send_keys(Keys.ARROW_UP)
    assert pixels(browser) != shown
    assert browser.get_log("browser") == []


@needs_browser
def test_what_is_told_is_what_transformers_says(trained: World, command: Command, browser: Chrome) -> None:
    text = "ba ce di fo ga"
    file, _ = page(trained, command, "--teacher", trained.teacher, "--text", text)
    browser.get(file.as_uri())
    choose(browser, "head", "2")
    choose(browser, "layer-0", "1")
    canvas = browser.find_elements(By.TAG_NAME, "canvas")[0]
    canvas.send_keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    told = dict(part.rsplit(": ", 1) for part in readout(browser).partition(" - ")[2].split("; "))
    model = AutoModel.from_pretrained(trained.teacher, attn_implementation="eager").eval()
    student = AutoModel.from_pretrained(
        trained.root / "run/students/2x32", attn_implementation="eager"
    ).eval()
    ids = torch.tensor([[2, *(VOCABULARY.index(word) for word in text.split()), 3]])
    with torch.no_grad():
        teachers = model(ids, output_attentions=True).attentions[1][0, 2, 1, 3]
        students = student(ids, output_attentions=True).attentions[1][0, 2, 1, 3]

    assert float(told[f"teacher {trained.teacher.name}"]) == pytest.approx(float(teachers), abs=5e-3)
    assert float(told["2x32"]) == pytest.approx(float(students), abs=5e-3)


@needs_browser
def test_dark_and_light(trained: World, command: Command, browser: Chrome) -> None:
    file, _ = page(trained, command)
    browser.get(file.as_uri())
    seen = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        before = pixels(browser)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        if scheme == "dark":  # the page hears of it a moment later
            WebDriverWait(browser, 20).until(partial(shows_other_than, before))
        colours = browser.execute_script(
            "const style = getComputedStyle(document.body); return [style.color, style.backgroundColor]"
        )
        curve = browser.execute_script("return getComputedStyle(document.querySelector('svg text')).fill")
        seen.append((colours, curve, pixels(browser)))

    light, dark = seen
    assert light[0] != dark[0]
    assert light[1] == light[0][0]  # ink of pictures is ink of text
    assert dark[1] == dark[0][0]
    assert all(one != other for one, other in zip(light[2], dark[2], strict=True))


@needs_browser
def test_names_from_strangers_are_text(tmp_path: Path, command: Command, browser: Chrome) -> None:
    """A teacher, a corpus and a text whose names are markup; the tests' words stand for the rest."""
    teacher = save_teacher(tmp_path / HOSTILE.replace("/", "_"))
    corpus = write_corpus(tmp_path / "<b>corpus.txt")
    world = World(tmp_path, teacher, corpus)
    world.dump()
    recipe = TrainConfig(arch=("1x16",), steps=10, batch_size=4, device="cpu")
    train_students(recipe, world.root / "cache", out=world.root / "run", session=Session(world.home))
    file, _ = page(world, command, "--teacher", teacher, "--text", HOSTILE, "--title", HOSTILE)
    browser.get(file.as_uri())

    assert browser.title == f"{HOSTILE} - minilm-cache"
    assert browser.find_elements(By.TAG_NAME, "img") == []
    assert "<b>corpus.txt" in browser.find_element(By.ID, "provenance").text
    assert browser.get_log("browser") == []


def test_without_a_teacher_the_page_shows_what_the_cache_holds(trained: World, command: Command) -> None:
    file, found = page(trained, command)

    assert found["similarity"] == []
    assert "as the cache holds it (topk)" in file.read_text()
    assert {row["kl_to"] for row in found["students"]} == {"teacher"}  # type: ignore[attr-defined]


def test_similarity_of_layers_is_told_in_json(trained: World, command: Command) -> None:
    _, found = page(trained, command, "--teacher", trained.teacher)
    similarity = {one["student"]: one for one in found["similarity"]}  # type: ignore[attr-defined]

    assert similarity.keys() == {"1x16", "2x32"}
    for name, num_layers in (("1x16", 1), ("2x32", 2)):
        for kind in ("cka", "svcca"):
            values = np.asarray(similarity[name][kind])
            assert values.shape == (4, num_layers + 1)
            assert (values >= 0).all()
            assert (values <= 1 + 1e-9).all()


def test_a_chain_is_one_page_whose_students_are_all_compared_with_its_first_teacher(
    world: World, command: Command
) -> None:
    folder = world.root / "chain"
    record = run_chain(chain_config(world), folder, session=Session(world.home)).record
    code, out, _ = command(
        *("report", folder, "--teacher", world.teacher, "--out", world.root / "page.html", "--json")
    )
    rows = json.loads(out)["students"]

    assert code == 0
    assert (folder / "report.html").stat().st_size > 10_000
    found = {(row["run"], row["arch"]): row["kl_sum"] for row in rows}
    runs = {"assistant": "1-2x32", "via assistants": "students-1x16_1x32", "direct": "direct-1x16_1x32"}
    for student in record.students:
        assert student.held_out_kl is not None
        expected = sum(student.held_out_kl.values())
        assert found[runs[student.way], student.arch] == pytest.approx(expected)


def test_without_a_teacher_a_chain_shows_what_its_runs_recorded(world: World, command: Command) -> None:
    folder = world.root / "chain"
    run_chain(chain_config(world), folder, session=Session(world.home))
    code, out, err = command("report", folder, "--out", world.root / "page.html", "--json")
    found = {row["run"]: row["kl_sum"] for row in json.loads(out)["students"]}

    assert code == 0, err
    assert found["1-2x32"] is not None
    assert found["direct-1x16_1x32"] is not None
    assert found["students-1x16_1x32"] is None  # what it recorded is to the assistant


def test_names_that_look_like_formulas(trained: World, command: Command, tmp_path: Path) -> None:
    for name in ("a", r"r$\x$"):
        shutil.copytree(trained.root / "run", tmp_path / name)
    runs = (tmp_path / "a", tmp_path / r"r$\x$")
    assert command("report", *runs, "--out", tmp_path / "page.html")[0] == 0


def test_damaged_runs_end_in_one_line(trained: World, command: Command, tmp_path: Path) -> None:
    def damaged(name: str) -> Path:
        shutil.copytree(trained.root / "run", tmp_path / name)
        return tmp_path / name

    with (damaged("log") / "log.jsonl").open("a") as file:
        file.write('{"step": 30, "stu')
    shutil.rmtree(damaged("student") / "students/2x32")
    record = damaged("record") / "run.json"
    record.write_text(record.read_text().replace('"steps": 20', f'"steps": {2**70}'))
    out = ("--out", tmp_path / "page.html")
    command.fails("report", tmp_path / "log", *out, code=1, says="log.jsonl is damaged")
    command.fails("report", tmp_path / "student", *out, code=1, says="students/2x32")
    command.fails("report", tmp_path / "record", *out, code=1, says="run.json is damaged")


def test_a_cache_that_was_moved_is_asked_for(trained: World, command: Command) -> None:
    words = ("report", trained.root / "run", "--out", trained.root / "page.html")
    (trained.root / "cache").rename(trained.root / "moved")
    command.fails(*words, code=1, says=("is not there", "Give its place by --cache"))
    assert command(*words, "--cache", trained.root / "moved")[0] == 0
    (trained.root / "moved").rename(trained.root / "cache")  # other tests share it


def test_the_teachers_configuration_in_a_cache_is_not_trusted(trained: World) -> None:
    cache = TrainedRun.open(trained.root / "run").cache
    content = json.loads(cache.reader.attachment("teacher/config.json"))
    for changes in ({"intermediate_size": 2**45}, {"hidden_size": 2**20}, {"num_hidden_layers": 2**20}):
        with pytest.raises(CacheCorruptError, match="cannot be used"):
            teacher_config(json.dumps(content | changes).encode(), cache.manifest)


def test_the_command_of_a_run_in_parts_makes_the_same_again(
    trained: World, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINILM_CACHE_HOME", str(trained.home))  # where the teacher is known
    recipe = TrainConfig(
        arch=("1x16",), steps=6, batch_size=8, accumulate=4, streams=2, max_grad_norm=0.5, device="cpu"
    )
    train_students(recipe, trained.root / "cache", out=tmp_path / "run", session=Session(trained.home))
    words = shlex.split(train_command(TrainedRun.open(tmp_path / "run")))
    assert command(*words[1:], "--device", "cpu", "--out", tmp_path / "again")[0] == 0
    weights = "students/1x16/model.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (tmp_path / "run" / weights).read_bytes()


def test_commands_of_the_page_make_the_same_again(
    trained: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINILM_CACHE_HOME", str(trained.home))  # where the teacher is known
    run = TrainedRun.open(trained.root / "run")
    file, _ = page(trained, command, "--paths")
    text = file.read_text()

    assert run.cache.manifest.fingerprint in text
    dumped = "minilm-cache dump --teacher teacher --corpus corpus.txt --codec topk --k 6 --select pps"
    dumped += " --layers last --precision float32 --packing packed"
    dumped += " --max-length 32 --shard-tokens 256 --seed 0"
    assert dumped in text
    (trained_by,) = re.findall("minilm-cache train [^<]*", text)
    again = trained.root / "again"
    assert command(*shlex.split(trained_by)[1:], "--device", "cpu", "--out", again)[0] == 0
    weights = "students/2x32/model.safetensors"
    assert (again / weights).read_bytes() == (run.path / weights).read_bytes()


def test_maps_of_large_models_are_cut_to_fit(trained: World) -> None:
    """Five students of six layers and a teacher of 24, 16 heads each, 512 positions."""

    def model(layers: int) -> ModelMaps:
        maps = np.broadcast_to(np.float32(1 / 512), (layers, 16, 512, 512))
        relations = {RelationKind.ATTENTION: maps, RelationKind.VALUE: maps}
        return ModelMaps(name="model", note="", layers=tuple(range(layers)), relations=relations)

    models = (model(24), *(model(6) for _ in range(5)))
    found = packed([Example(label="text", tokens=("a",) * 512, models=models)])
    assert 1_000_000 < len(json.dumps(found)) < 1_300_000
    assert len(found["examples"][0]["tokens"]) > 16


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--sequence", 99), "--sequence 99: the cache has 2 held-out sequences"),
        (("--text", "ba"), "--text needs --teacher"),
        (("--teacher", "nowhere"), "there is no folder nowhere, and the hub cannot be asked"),
        (("--cache", "nowhere"), "no cache at nowhere"),
    ],
)
def test_what_cannot_be_shown_is_said(
    trained: World, command: Command, arguments: tuple[object, ...], says: str
) -> None:
    code = 1 if arguments[0] in ("--teacher", "--cache") else 2
    command.fails(
        "report", trained.root / "run", "--out", trained.root / "no.html", *arguments, code=code, says=says
    )
    assert not (trained.root / "no.html").exists()


def test_what_cannot_be_shown_or_written_is_said_before_anything_is_measured(
    trained: World, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minilm_cache.report.page.students_table", None)
    run = trained.root / "run"
    command.fails("report", run, "--sequence", 99, code=2, says="has 2 held-out sequences")
    command.fails("report", run, "--out", "/proc/page.html", code=1, says="/proc")


def test_other_teachers_and_folders_are_refused(trained: World, command: Command, tmp_path: Path) -> None:
    run = trained.root / "run"
    other = save_teacher(tmp_path / "other", seed=3)
    command.fails("report", run, "--teacher", other, code=1, says=("is not the one of", "Give the teacher"))
    command.fails("report", tmp_path, code=2, says="is not a run: run.json is missing")
    command.fails("report", run, "--out", tmp_path, code=2, says=f"--out {tmp_path} is a folder")
    in_file = run / "run.json" / "page.html"
    command.fails("report", run, "--out", in_file, code=2, says="run.json is a file")
    record = json.loads((run / "run.json").read_text())
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/run.json").write_text(json.dumps({**record, "complete": False}))
    command.fails("report", tmp_path / "run", code=1, says="is not complete. Finish it")


def test_students_of_another_teacher_are_in_no_map_and_each_cache_has_its_cautions(
    world: World, command: Command
) -> None:
    deeper = save_teacher(world.root / "deeper", seed=4, num_hidden_layers=5)
    for folder, teacher, more in (("x", world.teacher, {"max_tokens": 200}), ("y", deeper, {})):
        dump_cache(world.config(teacher=str(teacher), **more), out=world.root / folder / "cache")
        words = ("--arch", "1x32", "--steps", 3, "--out", world.root / folder / "run")
        assert command("train", world.root / folder / "cache", *words)[0] == 0
    page, runs = world.root / "page.html", [world.root / "x/run", world.root / "y/run"]
    code, out, err = command("report", *runs, "--teacher", world.teacher, "--out", page, "--json")
    assert code == 0, err
    compared = json.dumps({name: json.loads(out)[name] for name in ("similarity", "agreement")})
    assert "1x32, x/run" in compared
    assert "1x32, y/run" not in compared
    assert "y/run: these students learned from another teacher than" in page.read_text()
    assert "too few to tell students apart" in page.read_text()


def test_scores_of_several_studies_are_said_to_be(world: World, command: Command) -> None:
    world.dump()
    folders = [world.root / name for name in ("one", "two")]
    for seed, folder in enumerate(folders):
        words = ("--arch", "1x16", "--steps", 2, "--seed", seed, "--out", folder / "runs/r")
        assert command("train", world.root / "cache", *words)[0] == 0
        scored = {"run": ["r"], "arch": ["1x16"], "steps": [2], "score: SST-2 accuracy": [90.0 - seed]}
        pq.write_table(pa.table(scored), folder / "students.parquet")
    page = world.root / "page.html"
    code, out, err = command("report", *folders, "--out", page)
    assert code == 0, err
    for said in (out, page.read_text()):
        assert "those of several studies" in " ".join(said.split())
    _, out, _ = command("report", folders[0], "--out", page)
    assert "several studies" not in out + page.read_text()


def test_what_a_study_has_not_finished_or_has_trained_further_is_said(world: World, command: Command) -> None:
    """Scores of students that went on are not shown beside their new losses."""
    cache, study, page = world.dump().path, world.root / "study", world.root / "page.html"
    for name in ("a", "b", "c"):
        words = ("--arch", "1x16", "--steps", 2, "--out", study / "runs" / name)
        assert command("train", cache, *words)[0] == 0
    record = study / "runs/c/run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "complete": False}))
    scored = {"run": ["a", "b"], "arch": 2 * ["1x16"], "steps": [2, 1], "score: x": [1.0, 2.0]}
    pq.write_table(pa.table(scored), study / "students.parquet")
    known, left_out = known_scores(study)
    assert {Path(name).parent.name for name in known} == {"a"}
    assert left_out == [
        "study: c is not complete, and is left out",
        "study: scores from before further training are left out, of b/1x16",
    ]
    code, out, err = command("report", study, "--out", page, "--json")
    assert code == 0, err
    assert set(json.loads(out)["cautions"]) >= {f"{line}." for line in left_out}
    assert all(line in page.read_text() for line in left_out)
    assert str(world.root) not in page.read_text()  # which names folders alone
    said = (pytest.warns(UserWarning, match=what) for what in ("not complete", "before further training"))
    with next(said), next(said):
        results(study)
    code, _, err = command("speed", world.teacher, study, "--turns", 1, "--batch-size", 1, "--length", 8)
    assert (code, left_out[0] in err) == (0, True), err


@pytest.mark.parametrize(
    "table",
    [
        {"arch": ["1x16"], "steps": [1], "score: x": [1.0]},
        {"run": ["r"], "arch": ["1x16"], "score: x": [1.0]},
        {"run": [None], "arch": ["1x16"], "steps": [1], "score: x": [1.0]},
        {"run": [3], "arch": [["1x16"]], "steps": [1], "score: x": [1.0]},
        {"run": ["r"], "arch": ["1x16"], "steps": [1], "score: x": ["good"]},
    ],
)
def test_a_table_of_scores_that_no_study_wrote_is_one_line(tmp_path: Path, table: dict[str, Any]) -> None:
    pq.write_table(pa.table(table), tmp_path / "students.parquet")
    with pytest.raises(CacheCorruptError, match="Run the study again"):
        known_scores(tmp_path)


def test_runs_of_one_name_are_told_apart(world: World, command: Command) -> None:
    world.dump()
    for number, folder in enumerate(("x", "y")):
        words = ("--arch", "1x16", "--steps", 3 + number, "--out", world.root / folder / "run")
        assert command("train", world.root / "cache", *words)[0] == 0
    page = world.root / "page.html"
    code, out, err = command("report", world.root / "x/run", world.root / "y/run", "--out", page, "--json")
    assert code == 0, err
    assert [row["run"] for row in json.loads(out)["students"]] == ["x/run", "y/run"]
    assert "1x16, x/run" in page.read_text()
