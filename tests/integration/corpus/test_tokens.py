"""A text is tokenised once; what is kept is noticed to be damaged, interrupted, or of another text."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minilm_cache.corpus import load, tokenise
from minilm_cache.corpus.load import Corpus, load_corpus
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.corpus.tokens import Tokens, part_name
from minilm_cache.errors import CacheCorruptError, CorpusError, InterruptedRunError, RankLostError
from minilm_cache.session import Session, ShouldStop, never_stop
from minilm_cache.storage_schema.identity import Packing
from tests.encoders import save_encoder
from tests.fixtures import Command
from tests.processes import CONTEXT
from tests.support import World, tiny_tokenizer, write_corpus

PACKING = Packing(mode="packed", max_length=16, seed=1, split="documents")


def tokens_of(
    corpus: Corpus, home: Path, *, should_stop: ShouldStop = never_stop, num_processes: int | None = None
) -> Tokens:
    session = Session(home, should_stop=should_stop)
    return tokenise.tokenise(corpus, tiny_tokenizer(), session=session, num_processes=num_processes)


def ids_of(tokens: Tokens) -> list[list[int]]:
    """Return the token ids of every document, read in another order than they were written."""
    numbers = np.random.default_rng(0).permutation(len(tokens.ends))
    read = dict(zip(numbers.tolist(), tokens.read(numbers), strict=True))
    return [read[number].tolist() for number in range(len(numbers))]


def expected_ids(corpus: Corpus) -> list[list[int]]:
    """Return what the tokenizer gives for each text alone."""
    tokenizer = tiny_tokenizer()
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in corpus.texts()]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return load_corpus(str(write_corpus(tmp_path / "text.txt")))


@pytest.fixture(autouse=True)
def _start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes be forked by a server that has imported everything; one test runs a whole script."""
    monkeypatch.setattr(tokenise, "get_context", lambda _: CONTEXT)


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch, corpus: Corpus) -> int:
    """Make texts of tests be tokenised in several parts, and return how many."""
    monkeypatch.setattr(tokenise, "_PART_BYTES", corpus.documents.data.nbytes // 4)
    return 4


def fail(*_: object, **__: object) -> None:
    raise AssertionError("the text is read or tokenised again")


def test_documents_have_the_ids_that_the_tokenizer_gives(corpus: Corpus, tmp_path: Path) -> None:
    tokens = tokens_of(corpus, tmp_path)

    assert ids_of(tokens) == expected_ids(corpus)
    assert tokens.num_tokens == sum(map(len, expected_ids(corpus)))


def test_parts_of_several_processes_are_as_one(corpus: Corpus, tmp_path: Path, in_parts: int) -> None:
    tokens = tokens_of(corpus, tmp_path, num_processes=2)

    assert len(tokens.record.parts) == in_parts
    assert ids_of(tokens) == expected_ids(corpus)


def kill_itself(job: object) -> None:
    del job
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_missed(
    corpus: Corpus, tmp_path: Path, in_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(tokenise, "_write_part", kill_itself)
        with pytest.raises(RankLostError, match="a process that tokenises has ended"):
            tokens_of(corpus, tmp_path, num_processes=2)
    assert ids_of(tokens_of(corpus, tmp_path)) == expected_ids(corpus)


@pytest.mark.parametrize("guard", ["True", '__name__ == "__main__"'])
def test_a_script_that_processes_import(corpus: Corpus, tmp_path: Path, guard: str, soak: int) -> None:
    if soak == 1 and guard != "True":
        pytest.skip("processes of a whole script are at work in other tests, too; tried with --soak")
    (tmp_path / "script.py").write_text(
        "from pathlib import Path\n"
        "from minilm_cache.corpus import tokenise\n"
        "from minilm_cache.corpus.load import load_corpus\n"
        "from minilm_cache.session import Session\n"
        "from minilm_cache.models.tokenizer import load_tokenizer\n"
        f"tokenise._PART_BYTES = {corpus.documents.data.nbytes // 4}\n"
        f"if {guard}:\n"
        f"    corpus = load_corpus({str(tmp_path / 'text.txt')!r})\n"
        f"    home = Path({str(tmp_path)!r})\n"
        "    tokenizer = load_tokenizer(home / 'tokenizer')\n"
        "    tokenise.tokenise(corpus, tokenizer, session=Session(home), num_processes=2)\n"
    )
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    if guard == "True":
        assert done.returncode == 1
        assert "RankLostError: a process that tokenises has ended" in done.stderr
        assert 'Put the call below `if __name__ == "__main__":`' in done.stderr
    else:
        assert done.returncode == 0, done.stderr


def test_a_text_that_was_tokenised_is_neither_read_nor_tokenised_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.dump().manifest
    with monkeypatch.context() as patched:
        patched.setattr(load, "_read", fail)
        patched.setattr(tokenise, "_write", fail)
        again = world.dump("again", codec="dense").manifest

    assert again.identity.corpus == first.identity.corpus
    assert (world.root / "again/sequences").is_dir()


def test_a_text_that_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("ba be")
    first = load_corpus(str(file), home=tmp_path)
    state = file.stat()
    file.write_text("be ba")  # of the same size
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    second = load_corpus(str(file), home=tmp_path)

    assert first.identity != second.identity
    assert ids_of(tokens_of(second, tmp_path)) == expected_ids(second)


def test_a_text_that_changes_after_its_note_was_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("ba be")
    load_corpus(str(file), home=tmp_path)
    known = load_corpus(str(file), home=tmp_path)
    file.write_text("other words")

    with pytest.raises(CorpusError, match="changed while it was read"):
        tokens_of(known, tmp_path)


def test_other_columns_and_documents_have_notes_of_their_own(tmp_path: Path) -> None:
    records = tmp_path / "c.jsonl"
    records.write_text(json.dumps({"a": "ba be", "b": "bi"}) + "\n")
    lines = tmp_path / "d.txt"
    lines.write_text("ba\nbe\n")
    for _ in range(2):
        texts = [[*load_corpus(str(records), column, home=tmp_path).texts()] for column in ("a", "b", "a,b")]
        assert texts == [["ba be"], ["bi"], ["ba be", "bi"]]
        assert load_corpus(str(lines), documents="lines", home=tmp_path).identity.num_documents == 2
        assert load_corpus(str(lines), home=tmp_path).identity.num_documents == 1


def test_the_same_text_elsewhere_is_not_tokenised_again(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(corpus, tmp_path)
    copy = load_corpus(str(shutil.copy(tmp_path / "text.txt", tmp_path / "copy.txt")), home=tmp_path)
    monkeypatch.setattr(tokenise, "_write", fail)

    assert tokens_of(copy, tmp_path).folder == tokens.folder


def stop_after(calls: int) -> Callable[[], bool]:
    left = iter(range(calls))
    return lambda: next(left, None) is None


@pytest.mark.usefixtures("in_parts")
def test_an_interrupted_run_keeps_the_parts_that_are_done(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_then_stop(jobs: list[Any], *_: object) -> Iterator[int]:
        yield from map(tokenise._write_part, jobs[:2])
        raise InterruptedRunError

    with monkeypatch.context() as patched:
        patched.setattr(tokenise, "_in_processes", two_then_stop)
        with pytest.raises(InterruptedRunError):
            tokens_of(corpus, tmp_path)
    written = []

    def note(job: Any, *_: object) -> int:
        written.append(job.number)
        return write_part(job)

    write_part = tokenise._write_part
    with monkeypatch.context() as patched:
        patched.setattr(tokenise, "_in_processes", lambda jobs, *_: map(note, jobs))
        tokens = tokens_of(corpus, tmp_path)

    assert written == [2, 3]
    assert ids_of(tokens) == expected_ids(corpus)
    assert {path.name for path in tokens.folder.iterdir()} == {
        *("tokens.json", ".lock", "ends", "texts"),
        *(f"{part_name(number)}.{ending}" for number in range(4) for ending in ("ids", "sums")),
    }


def take_long(job: object) -> None:
    del job
    time.sleep(600)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("in_parts")
def test_a_stop_while_processes_are_at_work(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(tokenise, "_write_part", take_long)
        with pytest.raises(InterruptedRunError, match="finished parts are kept"):
            tokens_of(corpus, tmp_path, num_processes=1, should_stop=stop_after(1))
    assert ids_of(tokens_of(corpus, tmp_path)) == expected_ids(corpus)


def test_a_stop_within_a_single_part(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError, match="finished parts are kept"):
        tokens_of(corpus, tmp_path, should_stop=lambda: True)
    assert ids_of(tokens_of(corpus, tmp_path)) == expected_ids(corpus)


def damage(path: Path, how: str) -> None:
    if how == "gone":
        path.unlink()
    elif how == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["gone", "short", "other"])
@pytest.mark.parametrize(
    "name", ["tokens.json", "ends", "texts", "part-00000.ids", "part-00000.sums", "order", "ends of order"]
)
def test_damage_is_repaired_or_refused(corpus: Corpus, tmp_path: Path, name: str, how: str) -> None:
    whole = SequenceTable(tokens_of(corpus, tmp_path), PACKING).read(0, 20)
    folder = next(path.parent for path in tmp_path.rglob("tokens.json"))
    order = next(folder.glob("orders/*"))
    places = {"order": order / "part-0.order", "ends of order": order / "part-0.ends"}
    damage(places.get(name, folder / name), how)
    try:
        table = SequenceTable(tokens_of(corpus, tmp_path), PACKING)
        read = table.read(0, 20)
    except CacheCorruptError as error:
        assert name.startswith("part-")
        assert f"{folder}" in str(error)  # noqa: PT017 - either outcome is right
        shutil.rmtree(folder)
        read = SequenceTable(tokens_of(corpus, tmp_path), PACKING).read(0, 20)
    assert [ids.tolist() for ids in read.ids] == [ids.tolist() for ids in whole.ids]
    assert read.documents.tolist() == whole.documents.tolist()


def test_the_command_says_what_it_made_and_how_to_go_on(world: World, command: Command) -> None:
    text = ("--corpus", world.corpus, "--documents", "lines")
    code, out, err = command("tokenize", "--teacher", world.teacher, *text, "--json")
    made = json.loads(out)

    assert code == 0, err
    assert made["num_documents"] == 60
    assert made["num_tokens"] == sum(len(line.split()) for line in world.corpus.read_text().split("\n\n"))
    assert made["bytes"] == sum(file.stat().st_size for file in Path(made["folder"]).iterdir())
    _, out, _ = command("tokenize", "--teacher", world.teacher, *text)
    assert f"minilm-cache dump --teacher {world.teacher} --corpus {world.corpus} --documents lines" in out
    command.fails("tokenize", "--teacher", world.teacher, "--corpus", "none.txt", code=1, says="none.txt")


@pytest.mark.parametrize("form", ["prompt", "role", "pair"])
def test_texts_with_prompts_and_pairs_are_those_of_dumps(world: World, command: Command, form: str) -> None:
    save_encoder(world.teacher, "mean", max_length=32)
    prompts = {"prompts": {"q": "ba be ", "d": "bi "}, "default_prompt_name": "q"}
    (world.teacher / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    records = world.root / "records.jsonl"
    rows = [{"text": f"bo ba {n}", "other": "bu", "role": "qd"[n % 2]} for n in range(40)]
    records.write_text("\n".join(map(json.dumps, rows)))
    texts = ("--teacher", world.teacher, "--corpus", records)
    asked, packing = {
        "prompt": (("--prompt-name", "q"), ("--packing", "records")),
        "role": (("--role-column", "role"), ("--packing", "records")),
        "pair": (("--pair-columns", "text,other"), ()),
    }[form]
    code, out, err = command("tokenize", *texts, *asked)
    assert code == 0, err
    assert " ".join((*asked, *packing)) in out
    assert "own prompt" not in err
    pooled = ("--codec", "none", "--pooled", "--max-length", 32, "--out", world.root / "cache")
    code, _, err = command("dump", *texts, *asked, *packing, *pooled)
    assert code == 0, err
    assert "tokenise" not in err, "it was done before"
    assert "own prompt q stands before each text" in command("tokenize", *texts)[2]
    command.fails("tokenize", *texts, "--prompt-name", "x", code=2, says="no such prompt")
    both = ("--pair-columns", "text,other", "--prompt", "x ")
    command.fails("tokenize", *texts, *both, code=2, says="not with --pair-columns")
