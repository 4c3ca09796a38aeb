"""Folders of texts: what is read of them, and what of them is said."""

import json
from pathlib import Path

import pytest

from minilm_cache.corpus.formats import corpus_files
from minilm_cache.corpus.load import load_corpus
from minilm_cache.errors import CorpusError, InvalidConfigError
from tests.fixtures import Command
from tests.support import World


def test_records_with_an_empty_text_are_left_out_aloud(world: World, command: Command) -> None:
    texts = ["", "ba be bi", " ", "be bo bu"] * 20
    file = world.root / "half.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ("dump", "--teacher", world.teacher, "--corpus", file, "--max-length", 32, "--device", "cpu")
    for _ in range(2):  # also where the text is known
        code, _, err = command(*words)
        assert code == 0, err
        assert "40 of 80 records have an empty text, and are left out" in err
    world.corpus.write_text("ba be\n\n\n\nbi bo\n")
    assert "empty text" not in command(*words[:4], world.corpus, *words[5:], "--documents", "lines")[2]


def test_linked_folders_are_skipped_aloud_and_broken_links_refused(world: World, command: Command) -> None:
    folder, other = world.root / "texts", world.root / "other"
    folder.mkdir()
    other.mkdir()
    (other / "b.txt").write_text("be bi bo\n")
    (folder / "linked").symlink_to(other)
    (folder / "README.md").write_text("what this is\n")
    with pytest.raises(CorpusError, match=r"A README\.md and linked folders are not read"):
        load_corpus(str(folder))
    (folder / "a.txt").symlink_to(world.corpus)
    dump = ("dump", "--teacher", world.teacher, "--corpus", folder, "--max-length", 32, "--k", 6)
    code, _, err = command(*dump, "--out", world.root / "linked.cache")
    assert code == 0, err
    assert "2 files of other kinds, or linked folders, skipped" in err
    (folder / "c.txt").symlink_to(world.root / "nothing")
    command.fails(*dump, "--out", world.root / "x", code=1, says=("c.txt", "does not exist"))


def test_plain_text_has_no_columns(world: World, command: Command) -> None:
    for words in (("dump", "--max-length", 32, "--out", world.root / "x"), ("tokenize",)):
        asked = ("--teacher", world.teacher, "--corpus", world.corpus, "--text-column", "body")
        command.fails(words[0], *asked, *words[1:], code=2, says="--text-column body: ")
    rows = world.root / "rows.jsonl"
    rows.write_text(json.dumps({"a": "ba"}) + "\n")
    with pytest.raises(InvalidConfigError, match="a column is named twice"):
        load_corpus(str(rows), "a,a")


def test_a_pair_in_two_files_is_one_pair(tmp_path: Path) -> None:
    row = json.dumps({"query": "ba", "docs": ["be", "bi"]}) + "\n"
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(row)
    (tmp_path / "all").mkdir()
    (tmp_path / "all/both.jsonl").write_text(row + row)
    corpora = [load_corpus(str(path), pair_columns="query,docs") for path in (tmp_path, tmp_path / "all")]
    assert [corpus.identity.num_documents for corpus in corpora] == [2, 2]


@pytest.mark.parametrize("prompt", ["ba " * 30, "ba " * 40])
def test_a_prompt_leaves_room_for_texts(world: World, command: Command, prompt: str) -> None:
    dump = ("dump", "--teacher", world.teacher, "--corpus", world.corpus, "--max-length", 32, "--k", 6)
    asked = ("--packing", "records", "--prompt", prompt, "--out", world.root / "x")
    says = (f"takes {len(prompt.split())} tokens", "--max-length leaves room for 30")
    command.fails(*dump, *asked, code=2, says=says)
    assert not (world.root / "x").exists()


def test_packed_pairs_are_refused_in_their_own_words(world: World, command: Command) -> None:
    asked = ("--teacher", world.teacher, "--corpus", world.corpus, "--packing", "packed")
    says = "--packing packed does not go with --pair-columns"
    command.fails("dump", *asked, "--pair-columns", "a,b", code=2, says=says)


@pytest.mark.parametrize("name", ["A.TXT", "b.Jsonl"])
def test_an_ending_in_capital_letters_is_not_passed_over(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text("ba be")
    (tmp_path / name).write_text("bi bo")
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(CorpusError, match="endings are in small letters"):
            corpus_files(place)
