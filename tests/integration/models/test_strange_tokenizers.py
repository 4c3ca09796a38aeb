"""Tokenizers of strangers: what makes far more of a text than it was, or gives up on it, is one line."""

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from minilm_cache.errors import TeacherError
from minilm_cache.models.locate import MINI, locate_teacher
from minilm_cache.models.tokenizer import load_tokenizer
from tests.fixtures import Command
from tests.processes import CommandProcess
from tests.support import World, dump_arguments, save_teacher

TEN = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}
EMPTY = {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "yyyyyyyyyy" * 10}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def changed(folder: Path, **changes: object) -> Path:
    """Change parts of a teacher's tokenizer.json."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


BOMBS: dict[str, dict[str, Any]] = {
    "ten times ten": {"normalizer": {"type": "Sequence", "normalizers": [TEN] * 10}},
    "nested": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [TEN, TEN]}]}
    },
    "between characters": {"normalizer": EMPTY},
    "bytes of bytes": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 14}},
    "decoder": {"decoder": {"type": "Sequence", "decoders": [TEN] * 10}},
    "decoder by pattern": {"decoder": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}},
    "prefix": {"normalizer": {"type": "Prepend", "prepend": "a" * 1000}},
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BOMBS)
def test_rules_that_lengthen_texts_are_refused(world: World, command: Command, name: str) -> None:
    changed(world.teacher, **BOMBS[name])
    with pytest.raises(TeacherError, match="tokenizer") as caught:
        load_tokenizer(world.teacher)
    assert "\n" not in str(caught.value)
    code, _, err = command(*dump_arguments(world))
    assert (code, "Traceback" in err) == (1, False)


def test_long_words_of_a_vocabulary_are_refused(world: World) -> None:
    model = json.loads((world.teacher / "tokenizer.json").read_text())["model"]
    model["vocab"]["x" * 10**6] = len(model["vocab"])
    with pytest.raises(TeacherError, match="1,000,000 characters"):
        load_tokenizer(changed(world.teacher, model=model))


def test_ids_beyond_the_table_are_refused(world: World, command: Command) -> None:
    """As many words as rows, with a gap among their ids."""
    file = world.teacher / "tokenizer.json"
    content = json.loads(file.read_text())
    word = max(content["model"]["vocab"], key=content["model"]["vocab"].get)
    content["model"]["vocab"][word] = 500
    file.write_text(json.dumps(content))
    world.corpus.write_text(f"{word} {word}\n\n" * 40)
    headed = save_teacher(world.root / "headed", head="tokens")
    shutil.copy(file, headed)
    others = ("--corpus", world.corpus, "--out", world.root / "new", "--max-length", 32)
    for words in (
        tuple(dump_arguments(world)),
        ("head", "--teacher", world.teacher, *others),
        ("augment", "--teacher", headed, *others),
    ):
        command.fails(*words, code=1, says=("has ids up to 500", "trained with there"))


def test_known_tokenizers_are_accepted() -> None:
    assert len(load_tokenizer(locate_teacher(MINI).folder)) == 30_522


@pytest.mark.timeout(60)
@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(.*a){12}$"])
def test_a_pattern_that_gives_up_is_one_line(world: World, command: Command, pattern: str) -> None:
    splitting = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    changed(world.teacher, pre_tokenizer=splitting)
    world.corpus.write_text("a" * 40 + "b\n\n" + "ba be bi " * 20)
    code, _, err = command(*dump_arguments(world))
    assert "Traceback" not in err
    if code:
        assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1


@pytest.mark.timeout(90)
def test_one_signal_ends_a_pattern_that_takes_for_ever(world: World) -> None:
    slow = {"Regex": "(?:a*a*a*)[bc]+[cd]"}
    splitting = {"type": "Split", "pattern": slow, "behavior": "Isolated", "invert": False}
    changed(world.teacher, pre_tokenizer=splitting)
    world.corpus.write_text(("a" * 240 + "bb") * 400)
    process = CommandProcess(*dump_arguments(world), environment={"MINILM_CACHE_HOME": world.home})
    time.sleep(8)
    process.send(signal.SIGTERM)
    began = time.monotonic()
    code, _, err = process.end()
    assert (code, "Traceback" in err) == (130, False), err
    assert time.monotonic() - began < 15
