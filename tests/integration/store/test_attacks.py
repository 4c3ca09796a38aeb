"""What a thinking attacker does: each attack that was once found, and what comes of it now."""

import io
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minilm_cache.cache import open_cache
from minilm_cache.errors import CacheCorruptError, InvalidConfigError, MiniLMCacheError
from minilm_cache.report.provenance import provenance
from minilm_cache.report.runs import TrainedRun
from minilm_cache.session import Session
from minilm_cache.storage_schema.documents import CommitRecord
from minilm_cache.store.card import cache_card
from minilm_cache.store.pull import Fetcher, pull
from minilm_cache.store.push import push
from minilm_cache.store.reader import read_manifest
from minilm_cache.store.remote import open_store
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.run import train_students
from tests.fixtures import Command
from tests.support import World, pushed, write_document


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    """Return the URL of a server and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET  # noqa: N815 - likewise

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def changed_run(trained: World, out: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Copy a run, its record changed."""
    shutil.copytree(trained.root / "run/students", out / "students")
    document = json.loads((trained.root / "run/run.json").read_text())
    change(document)
    (out / "run.json").write_text(json.dumps(document))
    (out / "log.jsonl").write_bytes((trained.root / "run/log.jsonl").read_bytes())
    return out


@pytest.mark.parametrize("chained", ["", "reference::", "simplecache::"])
def test_1_a_run_chooses_no_url(
    trained: World, command: Command, tmp_path: Path, listener: tuple[str, list[str]], chained: str
) -> None:
    url, asked = listener
    run = changed_run(trained, tmp_path / "run", lambda one: one.update(cache=f"{chained}{url}/x.json"))
    line = command.fails("report", run, "--out", tmp_path / "page.html", code=2, says="opened by itself")
    assert "--cache" in line
    command.fails(
        *("report", run, "--out", tmp_path / "page.html", "--cache", f"{chained}{url}/x.json"),
        code=2,
        says="no store of this kind is known",
    )
    assert asked == []


@pytest.mark.parametrize(
    "url",
    ["http://x/y", "ftp://x/y", "github://a:b@c/d", "memory://x", "reference::s3://x/y", "zip://a::file://b"],
)
def test_1_and_15_only_known_kinds_of_stores_are_opened(command: Command, url: str) -> None:
    shown = url.rsplit("@", maxsplit=1)[-1]
    command.fails("ls", url, code=2, says=("cannot open", shown.rsplit("/", 1)[-1], "s3://"))
    with pytest.raises(InvalidConfigError, match="no store of this kind"):
        open_store(url)


PADDED, NAMED = b'{"' + b"0" * 42 + b'":1},', b'{"first_sequence":"' + b"0" * 40 + b'"},'
"""Objects as long as a shard's range, and some that say that they are one."""
BOMBS = {
    "objects": b'{"x":[' + b"{}," * (2 * 2**20) + b"{}]}",
    "lists": b'{"x":[' + b"[]," * (2 * 2**20) + b"[]]}",
    "numbers": b'{"x":[' + b"1," * (3 * 2**20) + b"1]}",
    "deep": b"[" * 2**20,
    "padded": b'{"format_version":1,"shards":[' + PADDED * 2**17 + b"{}]}",
    "shards": b'{"format_version":1,"shards":[' + NAMED * 2**17 + b"{}]}",
}
MEASURE = """
import resource, sys
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.storage_schema.base import parse
document = open(sys.argv[1], "rb").read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    parse(CacheManifest, document, "manifest.json")
except Exception as error:
    print(type(error).__name__, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("name", BOMBS)
def test_2_a_small_manifest_takes_little_memory(command: Command, tmp_path: Path, name: str) -> None:
    (tmp_path / "cache").mkdir()
    file = tmp_path / "cache/manifest.json"
    file.write_bytes(BOMBS[name])
    found = subprocess.run(
        [sys.executable, "-c", MEASURE, str(file)], capture_output=True, text=True, check=True
    )
    kind, kibibytes = found.stdout.split()
    assert kind == "CacheCorruptError"
    assert int(kibibytes) < 512 * 2**10
    command.fails("info", tmp_path / "cache", code=1, says="is damaged")
    code, out, _ = command("ls", tmp_path)
    assert code == 1 or "damaged" in out


@pytest.mark.parametrize("page", ["README.md", "preview/sequences.parquet"])
def test_4_links_in_a_store_are_not_followed(world: World, page: str) -> None:
    world.dump()
    url = Path(pushed(world, str(world.root / "store")))
    secret = world.root / "secret"
    secret.write_text("do not copy me")
    (url / page).unlink()
    (url / page).symlink_to(secret)
    out = world.root / "pulled"
    if page == "README.md":
        pull(str(url), out, session=Session())
        assert (out / page).read_text() == cache_card(read_manifest(out))
        again = Path(push(out, str(world.root / "other"), session=Session()).place)
        assert (again / page).read_text() == cache_card(read_manifest(out))
    else:
        with pytest.raises(CacheCorruptError, match=r"symbolic link.*Ask its publisher"):
            pull(str(url), out, session=Session())
        assert not out.exists()
    assert not [
        file
        for file in world.root.rglob("*")
        if file.is_file()
        and not file.is_symlink()
        and file != secret
        and file.read_bytes() == secret.read_bytes()
    ]


def test_4_a_preview_is_what_was_committed(world: World, command: Command) -> None:
    """A changed one is named, neither pushed nor pulled, and written again by the same dump."""
    cache = world.dump().path
    file = cache / "preview/sequences.parquet"
    good = file.read_bytes()
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": ["planted"]}), buffer)
    file.write_bytes(buffer.getvalue())
    command.fails("verify", "--full", cache, code=3, says="preview/sequences.parquet")
    with pytest.raises(CacheCorruptError, match="preview"):
        push(cache, str(world.root / "store"), session=Session())
    world.dump()
    assert file.read_bytes() == good
    assert command("verify", "--full", cache)[0] == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("path", ["README.md", "manifest.json", "tokens/c/0", "index/shards.parquet"])
def test_5_pipes_do_not_hang(world: World, command: Command, path: str) -> None:
    world.dump()
    url = Path(pushed(world, str(world.root / "store")))
    (url / path).unlink()
    os.mkfifo(url / path)
    if path == "README.md":
        pull(str(url), world.root / "out", session=Session())
        return
    with pytest.raises(MiniLMCacheError, match=r"regular|missing|is not there|no cache"):
        pull(str(url), world.root / "out", session=Session())
    command("ls", world.root / "store")
    command.fails(
        "info" if path != "tokens/c/0" else "verify", url, code=1 if path != "tokens/c/0" else 3, says=""
    )


@pytest.mark.timeout(60)
def test_5_pipes_in_a_runs_folder_do_not_hang(trained: World, command: Command, tmp_path: Path) -> None:
    run = changed_run(trained, tmp_path / "run", lambda _: None)
    (run / "log.jsonl").unlink()
    os.mkfifo(run / "log.jsonl")
    command.fails("report", run, "--out", tmp_path / "page.html", code=1, says="log.jsonl")
    (run / "run.json").unlink()
    os.mkfifo(run / "run.json")
    command.fails("report", run, "--out", tmp_path / "page.html", code=1, says="run.json")


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "text",
    [
        "arch: &a [*a]\ncaches: {x: {}}\n",
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)),
    ],
    ids=["recursive", "billion laughs"],
)
def test_7_a_study_has_no_aliases(command: Command, tmp_path: Path, text: str) -> None:
    (tmp_path / "study.yaml").write_text(text)
    command.fails("study", tmp_path / "study.yaml", code=2, says=("study.yaml, line", "cannot have aliases"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "damage", ["config.json", "model.safetensors", "tokenizer.json", "no weights", "empty"]
)
def test_8_damaged_students_are_one_line_under_report(
    trained: World, command: Command, tmp_path: Path, damage: str
) -> None:
    run = changed_run(trained, tmp_path / "run", lambda _: None)
    student = run / "students/1x16"
    if damage == "empty":
        for file in student.iterdir():
            file.unlink()
    elif damage == "no weights":
        (student / "model.safetensors").unlink()
    else:
        (student / damage).write_text('{"x": 1}')
    code, _, err = command(
        "report", run, "--out", tmp_path / "page.html", "--teacher", trained.teacher, "--device", "cpu"
    )
    assert "Traceback" not in err
    if damage != "tokenizer.json":  # the cache's is read
        assert code == 1
        assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run["students"][0].update(held_out_after={"nonsense": 0.1}),
        lambda run: run.update(students=[]),
        lambda run: run["identity"].update(relation_heads=0),
        lambda run: run["identity"].update(teacher_layer=-99),
        lambda run: run["students"][0].update(held_out_after={"attention": float("nan"), "value": 0.1}),
        lambda run: run["students"][0].update(arch="2x32"),
        lambda run: run["students"][0].update(num_parameters=-1),
    ],
    ids=["relation", "no students", "heads", "layer", "NaN", "another student", "parameters"],
)
def test_10_a_record_that_no_run_writes_is_one_line(
    trained: World, command: Command, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    run = changed_run(trained, tmp_path / "run", change)
    command.fails("report", run, "--out", tmp_path / "page.html", code=1, says="run.json is damaged")


def test_10_a_record_of_many_empty_students_takes_little_memory(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b'{"students":[' + b"{}," * 200_000 + b"{}]}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    command.fails("report", tmp_path, "--out", tmp_path / "page.html", code=1, says="run.json is damaged")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 2**10


def test_10_a_huge_sparse_record_is_not_read(trained: World, command: Command, tmp_path: Path) -> None:
    run = changed_run(trained, tmp_path / "run", lambda _: None)
    with (run / "run.json").open("r+b") as file:
        file.truncate(3 * 2**30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    command.fails("report", run, "--out", tmp_path / "page.html", code=1, says="run.json is damaged")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 2**10


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:hunter2@bucket/x",
        "s3://bucket/x?X-Amz-Signature=hunter2",
        "az://user:hunter2@place/x",
        "my_store://KEY:hunter2@place/x",
        "s3://[hunter2@x",
    ],
)
def test_11_no_secret_of_a_url_is_echoed(command: Command, url: str) -> None:
    line = command.fails("ls", url, code=2, says="cannot open")
    assert "hunter2" not in line


def test_12_cards_show_names_as_they_are(world: World) -> None:
    cache = world.dump().path
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["labels"]["teacher"] = "<img src=x onerror=alert(1)> [click](javascript:alert(1)) \u009b31m"
    write_document(cache / "manifest.json", manifest)
    recipe = TrainConfig(arch=("1x16",), steps=1, batch_size=2, device="cpu")
    student = train_students(recipe, cache, out=world.root / "run", session=Session(world.home)).student_path(
        "1x16"
    )
    for card in ((student / "README.md").read_text(), cache_card(open_cache(cache).manifest)):
        body = card.split("---\n", 2)[2]
        assert "<img" not in body
        assert "](javascript" not in body
        assert "\u009b" not in card
        assert "&lt;img" in body


def test_13_a_page_shows_no_paths_unless_asked(trained: World, command: Command, tmp_path: Path) -> None:
    command("report", trained.root / "run", "--out", tmp_path / "page.html", "--device", "cpu")
    text = (tmp_path / "page.html").read_text()
    assert str(trained.root) not in text
    command("report", trained.root / "run", "--out", tmp_path / "page.html", "--device", "cpu", "--paths")
    assert str(trained.root) in (tmp_path / "page.html").read_text()
    assert str(trained.root) not in str(provenance(TrainedRun.open(trained.root / "run")))


def test_14_a_file_is_bounded_by_what_its_array_can_need(world: World) -> None:
    """256 rows of 4 heads and 6 entries take about 1.05 MB with headers, less than the whole shard."""
    cache = world.dump().path
    manifest = read_manifest(cache)
    record = CommitRecord.model_validate_json((cache / "commits/00000.json").read_bytes())
    fetcher = Fetcher(open_store(str(cache)), world.root / "arriving", manifest)
    for path, digest in record.files.items():
        too_long = digest.model_copy(update={"size": fetcher._most_bytes(path) + 1})
        assert too_long.size < 2**21
        with pytest.raises(CacheCorruptError, match="more than it can need"):
            fetcher.fetch(path, too_long)
        assert fetcher.fetch(path, digest)
