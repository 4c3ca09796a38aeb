"""Commands of README and docs do what the pages say, and messages that are explained exist.

Pages are run as they are printed. A small teacher takes the place of the named ones, and a server that speaks
S3 that of the team's store. A block that cannot be run here has a comment that says why.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minilm_cache.cli.main import run
from tests.encoders import save_encoder
from tests.fixtures import Command
from tests.support import save_teacher, write_corpus
from tests.tasks import write_glue, write_squad

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(
    r"(?P<why><!-- not run by tests: [^\n]+ -->\n)?```(?P<language>sh|yaml)\n(?P<text>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str = "sh") -> list[list[str]]:
    """Return the commands of each block of a page that is to be run."""
    return [
        match["text"].replace("\\\n", " ").splitlines()
        for match in BLOCK.finditer(page.read_text())
        if not match["why"] and match["language"] == language
    ]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that pages name, a cache, and a run."""
    folder = tmp_path_factory.mktemp("reader")
    shape: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 12}
    save_teacher(folder / "small", max_position_embeddings=256, **shape)
    save_encoder(folder / "small", "mean", width=96, max_length=128)
    text = write_corpus(folder / "notes.txt", num_documents=90).read_text()
    paragraphs = text.strip().split("\n\n")
    (folder / "wiki.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in paragraphs))
    pairs = zip(paragraphs[:40:2], paragraphs[1:40:2], strict=True)
    lines = (json.dumps({"question": left, "answer": right}) for left, right in pairs)
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    save_teacher(folder / "reranker", max_position_embeddings=256, head="sequences", num_labels=1, **shape)
    rated = [f"{part.replace(',', ' ')},{number % 2}" for number, part in enumerate(paragraphs)]
    (folder / "reviews.csv").write_text("\n".join(["text,stars", *rated]) + "\n")
    scored = {"query": "ba", "pos": ["be"], "neg": ["bi", "bo"], "pos_scores": [2.5], "neg_scores": [0, -1]}
    rows = [{**scored, "query": part} for part in paragraphs]
    (folder / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_glue(folder / "glue")
    write_squad(folder / "SQuAD", "1.1")
    summaries = [{"src": part, "tgt": part.split()[0]} for part in paragraphs[:12]]
    (folder / "summaries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in summaries))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("MINILM_CACHE_HOME", str(tmp_path_factory.mktemp("home")))
        assert run(shlex.split("dump --teacher small --corpus notes.txt --out notes.cache")) == 0
        assert run(shlex.split("train notes.cache --arch 2x96 --steps 2 --init random --out run")) == 0
    return folder


@pytest.fixture
def folder(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of that folder, in which commands run."""
    folder = tmp_path / "reader"
    shutil.copytree(begun, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
@pytest.mark.timeout(600)
def test_commands_do_what_the_page_says(
    page: Path, folder: Path, command: Command, store: str, soak: int
) -> None:
    if soak == 1 and page.stem == "head-start":
        pytest.skip("the commands of this page are on others, too; tried with --soak")
    words = {"mini": "small", "bert-base": "small", "RUN": "run", "CACHE": "notes.cache", "DIR": "slice"}
    words |= {"RERANKER": "reranker", "300": "4", "400": "6"}  # steps of the tutorial
    commands = [line for block in blocks(page) for line in block]
    if any("--out notes.cache" in line for line in commands):
        shutil.rmtree("notes.cache")
        shutil.rmtree("run")
    for document in blocks(page, "yaml"):
        (folder / "shapes.yaml").write_text("\n".join(document).replace("teacher: mini", "teacher: small"))
    for line in commands:
        program, *arguments = shlex.split(line, comments=True)
        if program == "python":
            subprocess.run(line.replace("python", sys.executable, 1), shell=True, check=True)  # noqa: S602 - ours
            notes = folder / "notes.txt"
            notes.write_text(notes.read_text()[:20_000])  # a twentieth of it says as much
            continue
        assert program == "minilm-cache", line
        given = [_smaller(words.get(word, word)).replace("s3://team/caches", store) for word in arguments]
        if any(word.endswith("/NAME") for word in given):
            (cache,) = json.loads(command("ls", store, "--json")[1])["caches"]
            given = [cache["url"] if word.endswith("/NAME") else word for word in given]
        given = [match for word in given for match in _matches(word)]
        code, _, err = command(*_shortened(given))
        # A teacher with random weights and a handful of texts: students may end worse than they began.
        assert code == 0 or "ended worse than with the weights that training began with" in err, (
            f"{line}\n{err}"
        )


def _shortened(given: list[str]) -> list[str]:
    """Return a command with fewer texts, seeds and steps."""
    if given[0] == "export-model":
        given += ["--texts", "16"]
    if "--seeds" in given:
        given[given.index("--seeds") + 1] = "1"
    if given[0] == "search":
        given[given.index("--steps") + 1] = "9"
    if given[0] == "train":
        given += ["--steps", "4"] * ("--steps" not in given)
        given += ["--batch-size", "4"] * ("--batch-size" not in given and "--preset" not in given)
    return given


def _smaller(word: str) -> str:
    """Return a word of a command with shapes of an eighth of the width."""
    return re.sub(r"(?<=\dx)\d+", lambda width: str(max(12, int(width[0]) // 96 * 12)), word)


def _matches(word: str) -> list[str]:
    """Return the files that a shell would put in the place of a word."""
    return sorted(map(str, Path().glob(word))) if "*" in word else [word]


def test_messages_that_are_explained_exist() -> None:
    sources = [*(ROOT / "cli").glob("*.py"), *(ROOT / "minilm_cache").rglob("*.py")]
    code = re.sub(r'"\n\s*f?"', "", "\n".join(file.read_text() for file in sources))
    rows = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    words = [word for row in rows for word in re.findall("`([^`]+)`", row)]
    assert len(words) > 10
    assert [word for word in words if word not in code] == []


def test_the_toy_objective_is_the_tested_one() -> None:
    assert (ROOT / "tests/toy_objective.py").read_text() in (ROOT / "docs/own-objective.md").read_text()
