"""Measure text: tokenising in one and two processes, a second dump, planning at a hundred billion tokens."""

import json
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.scale.memory import peak
from benchmarks.scale.processes import run
from minilm_cache import DumpConfig, dump_cache
from minilm_cache.corpus.load import load_corpus
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.corpus.tokenise import tokenise
from minilm_cache.corpus.tokens import ENDS, TEXTS, TokenPart, TokenRecord, Tokens, address_of
from minilm_cache.errors import InterruptedRunError
from minilm_cache.models.locate import MINI, locate_teacher
from minilm_cache.models.tokenizer import load_tokenizer, tokenizer_sha256
from minilm_cache.session import Session
from minilm_cache.settings import TokenizeConfig
from minilm_cache.storage_schema.identity import CorpusIdentity, Packing
from minilm_cache.store.checked import digest_bytes, digest_file
from minilm_cache.store.index import encode_ranges
from minilm_cache.store.ranges import ShardRanges

CORPUS_BYTES = 10**9
NUM_DOCUMENTS = 200_000_000
MEAN_TOKENS = 500
"""Documents of the simulated corpus, and their mean number of tokens: 1e11 tokens."""
SHARD_TOKENS = 2**22
_PARTS = 500


def measure_text(home: Path, text: Path) -> dict[str, Any]:
    """Return seconds of tokenising a gigabyte, and of starting a dump of it twice.

    Args:
        home: folder for what is made.
        text: a text file; the corpus repeats its paragraphs, with changes.
    """
    corpus = home / "corpus.jsonl"
    if not corpus.exists():
        _write_corpus(text, corpus)
    runs = {number: _tokenised(corpus, home / f"processes{number}", number) for number in (1, 2)}
    shutil.rmtree(home / "dumps", ignore_errors=True)
    first, second = (_in_process("first", corpus, home=home / "dumps", length=length) for length in (128, 64))
    return {
        "corpus_bytes": corpus.stat().st_size,
        "num_tokens": runs[1]["num_tokens"],
        "read_s": round(runs[1]["read_s"], 1),
        "tokenised_by_1_s": round(runs[1]["tokenised_s"], 1),
        "tokenised_by_2_s": round(runs[2]["tokenised_s"], 1),
        "ratio": round(runs[1]["tokenised_s"] / runs[2]["tokenised_s"], 3),
        "first_dump": first,
        "second_dump": second,
    }


def measure_planning(home: Path) -> dict[str, Any]:
    """Return seconds and memory of planning the shards of a hundred billion tokens, in a new process."""
    return _in_process("plan", home / "planned", home=home / "planned", length=512)


def measured_child(part: str, path: Path, *, home: Path, length: int) -> dict[str, Any]:
    """Return what a process of its own measures: `first` forward pass of a dump, or `plan`."""
    return _first_pass(path, home, length) if part == "first" else _planned(home, length)


def _in_process(part: str, path: Path, *, home: Path, length: int) -> dict[str, Any]:
    words = ["--child", str(path), "--home", str(home), "--measure", part, "--length", str(length)]
    result: dict[str, Any] = json.loads(
        run([sys.executable, "-m", "benchmarks.scale", "--part", "text", *words]).splitlines()[-1]
    )
    return result


def _write_corpus(text: Path, path: Path) -> None:
    """Write the documents of a text again and again, each with a number before each of its sentences."""
    documents = text.read_text().split("\n\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        number = 0
        while file.tell() < CORPUS_BYTES:
            for document in documents:
                changed = ". ".join(f"{number} {part}" for part in document.split(". "))
                file.write(json.dumps({"text": changed}) + "\n")
                number += 1


def _tokenised(path: Path, home: Path, num_processes: int) -> dict[str, float]:
    """Return the seconds that reading and hashing a text takes, and that tokenising it takes after that."""
    shutil.rmtree(home / "tokens", ignore_errors=True)
    tokenizer = load_tokenizer(locate_teacher(MINI).folder)
    config = TokenizeConfig(teacher=MINI, corpus=str(path), processes=num_processes)
    started = time.perf_counter()
    corpus = load_corpus(config.corpus, home=home)
    read = time.perf_counter()
    tokens = tokenise(corpus, tokenizer, num_processes=config.processes, session=Session(home))
    done = time.perf_counter()
    return {"num_tokens": tokens.num_tokens, "read_s": read - started, "tokenised_s": done - read}


def _first_pass(path: Path, home: Path, length: int) -> dict[str, Any]:
    """Return the seconds from the start of this process to a dump's first forward pass, and its memory."""
    reached: list[float] = []

    def is_tokenised() -> bool:
        return any(home.glob("tokens/*/orders/*/order.json"))

    def should_stop() -> bool:
        if is_tokenised():
            reached.append(time.time())
        return bool(reached)

    config = DumpConfig(teacher=MINI, corpus=str(path), codec="topk", max_length=length)
    with peak() as memory, suppress(InterruptedRunError):
        dump_cache(config, out=home / f"cache{length}", session=Session(home, should_stop=should_stop))
    return {"seconds": round(reached[0] - psutil.Process().create_time(), 2), **memory}


def _planned(home: Path, length: int) -> dict[str, Any]:
    """Return seconds and memory of planning the shards of a simulated corpus."""
    tokenizer = load_tokenizer(locate_teacher(MINI).folder)
    identity = CorpusIdentity(sha256="0" * 64, num_documents=NUM_DOCUMENTS)
    folder = home / "tokens" / address_of(identity, tokenizer)
    if not (folder / "tokens.json").exists():
        _write_tokens(folder, identity, tokenizer_sha256(tokenizer))
    shutil.rmtree(folder / "orders", ignore_errors=True)
    packing = Packing(mode="packed", max_length=length, max_tokens=None, seed=0, split="documents")
    rows: dict[str, Any] = {}
    for name in ("first", "again"):
        started = time.perf_counter()
        with peak() as memory:
            sequences = SequenceTable(Tokens(folder, "simulated", tokenizer), packing)
            ranges = ShardRanges.split(sequences, SHARD_TOKENS)
            table = encode_ranges(ranges)
        rows[name] = {"seconds": round(time.perf_counter() - started, 1), **memory}
    return {
        "tokens": sequences.num_tokens,
        "documents": NUM_DOCUMENTS,
        "shards": len(ranges),
        "ranges_bytes": len(table),
        **rows,
    }


def _write_tokens(folder: Path, identity: CorpusIdentity, tokenizer: str) -> None:
    """Write what planning reads of the tokens of a corpus: where documents end, and the hashes of texts."""
    folder.mkdir(parents=True)
    random, before = np.random.default_rng(0), 0
    parts, num_of_part = [], NUM_DOCUMENTS // _PARTS
    with (folder / ENDS).open("wb") as ends, (folder / TEXTS).open("wb") as texts:
        for _ in range(_PARTS):
            counts = random.integers(1, 2 * MEAN_TOKENS, num_of_part)
            ends.write((before + np.cumsum(counts)).astype("<i8").tobytes())
            texts.write(random.integers(0, 2**63, num_of_part, dtype=np.uint64).tobytes())
            before += int(counts.sum())
            part = TokenPart(num_documents=num_of_part, num_tokens=int(counts.sum()), sums=digest_bytes(b""))
            parts.append(part)
    record = TokenRecord(
        corpus=identity,
        tokenizer_sha256=tokenizer,
        dtype="<u2",
        parts=tuple(parts),
        files={name: digest_file(folder / name) for name in (ENDS, TEXTS)},
    )
    (folder / "tokens.json").write_bytes(record.to_json())
