"""Measure how long mistakes take to show, from the start of a command to the line that names the mistake.

    python -m benchmarks.mistakes [--home HOME]

Each command has one mistake, in a process of its own, after a first process that nobody counts. `imported`
lists the slow libraries that it had imported by then.
"""

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.report import cpu, write_result
from minilm_cache import DumpConfig, dump_cache
from minilm_cache.session import Session
from minilm_cache.settings import validated

_SLOW: Final = ("torch", "transformers", "datasets", "pyarrow")
_MISTAKES: Final = """
dump --teacher nosuch --corpus notes.txt
dump --teacher mini --corpus nosuch.txt
dump --teacher mini --corpus notes.txt --codec nosuch
dump --teacher mini --corpus table.csv --text-column nosuch
dump --teacher mini --corpus notes.txt --out notes.txt
dump --teacher folder --corpus notes.txt
dump --teacher mini --corpus notes.txt --max-length 2
dump --teacher mini --corpus notes.txt --pair-columns a
dump --teacher mini --corpus notes.txt --for embeding
train nosuch.cache --arch 3x384
train folder --arch 3x384
train s3:/bucket/x --arch 3x384
train notes.cache --arch 3x38q
train notes.cache --arch 3x200 --objective embedding
train notes.cache --arch 3x384 --objective embeding
train notes.cache --arch 3x384 --steps 1 --epochs 2
train notes.cache --arch 3x384 --objective minilm
train notes.cache --arch 3x384 --objective hidden-mse
train relations.cache --arch 3x384 --teacher-layer 2
train notes.cache --arch 3x384 --objective embedding --init nosuch
train notes.cache --arch 3x384 --objective score --own-labels nosuch.csv
dump --teacher mini --corpus semicolons.csv
evaluate mini --task semicolons.csv
study wrong_key.yaml
study wrong_shape.yaml
study wrong_heads.yaml
study nosuch.yaml
chain --teacher nosuch --assistant 3x384 --arch 2x96 --corpus notes.txt
chain --teacher mini --assistant 3x38q --arch 2x96 --corpus notes.txt
evaluate mini --task nosuch --data .
evaluate nosuch --task sst2 --data .
evaluate mini --task sst2 --data nosuch
evaluate mini --task table.csv --label-column nosuch
embeddings mini --retrieval nosuch.jsonl
embeddings mini --retrieval notes.jsonl
embeddings mini --retrieval questions.jsonl --corpus nosuch.txt
embeddings mini nosuch --data .
rerank nosuch --retrieval notes.txt --first-stage mini
speed mini nosuch
report nosuch
info nosuch
verify nosuch
verify run
push nosuch s3://b/c
push notes.cache ftp://b/c
pull s3:/b/c
rm nosuch
export nosuch out.parquet
import nosuch --tokenizer mini
trim nosuch --out trimmed
mine mini --retrieval nosuch --out mined.jsonl
merge merged nosuch
export-model nosuch --onnx --out exported
search nosuch --speedup 2 --out found
search notes.cache --speedup 2 --out notes.txt
generate nosuch "a text"
generate mini "a text"
dump --teacher mini --corpus notes.txt --max-length 513
dump --teacher mini --corpus notes.txt --layers 9
dump --teacher mini --corpus notes.txt --out notes.cache --max-length 64
dump --teacher mini --corpus notes.txt --out s3://
train notes.cache --arch 3x384 --init slice --init-layers 7,8,9
train notes.cache --arch 3x384 --vocab nosuch --objective embedding
train notes.cache --arch 3x384 --objective embedding --matryoshka 999
train notes.cache --arch 3x384 --objective embedding --batch-size 6 --accumulate 4
slice --teacher mini --arch 3x384 --layers 1,2 --out cut
truncate --teacher mini --layers 9 --out cut
chain --teacher mini --corpus notes.txt --arch 3x384
chain --task sst2 --arch 3x384
speed mini --length 600
embeddings mini --data .
rerank mini --retrieval questions.jsonl --first-stage mini
export relations.cache vectors.parquet
export-model mini --onnx --out exported
import notes.txt --tokenizer mini
search notes.cache --speedup 2 --out found --widths 100 --objective embedding
-h
ls
info notes.cache
"""
_CHILD: Final = """
import json, sys
from minilm_cache.cli.main import run
code = run(sys.argv[2:])
imported = [name for name in sys.argv[1].split(",") if name in sys.modules]
json.dump([code, imported], open("imported.json", "w"))
"""


def main() -> None:
    """Make a small cache and wrong documents, and time every command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=Path("mistakes"))
    given = parser.parse_args()
    _prepare(given.home)
    lines = _MISTAKES.strip().splitlines()
    _timed(lines[0], given.home)
    rows = [_timed(line, given.home) for line in lines]
    longest = max(row["seconds"] for row in rows if row["exit"])
    write_result("mistakes", {"commands": rows, "longest_s": longest, "cpu": cpu()})


def _prepare(home: Path) -> None:
    (home / "folder").mkdir(parents=True, exist_ok=True)
    notes = home / "notes.txt"
    notes.write_text("\n\n".join(f"The {number}th note is about the sea." for number in range(200)))
    (home / "notes.jsonl").write_text('{"text": "The sea."}\n')
    (home / "questions.jsonl").write_text('{"question": "What?", "answer": "The sea."}\n')
    (home / "run").mkdir(exist_ok=True)
    (home / "run" / "run.json").touch()
    (home / "table.csv").write_text("text,label\none,1\ntwo,0\n")
    (home / "semicolons.csv").write_text("text;label\none;1\n")
    study = "dump: {teacher: mini, corpus: notes.txt}\n"
    (home / "wrong_key.yaml").write_text(f"{study}arch: [3x192]\ntrain: {{stepps: 3}}\n")
    (home / "wrong_heads.yaml").write_text(f"{study}arch: [3x200]\n")
    (home / "wrong_shape.yaml").write_text(f"{study}arch: [3x19z]\n")
    for name, objective in (("relations", "minilm"), ("notes", "embedding")):
        if not (home / f"{name}.cache").exists():
            config = validated(DumpConfig, {"teacher": "mini", "corpus": str(notes), "for": objective})
            dump_cache(config, out=home / f"{name}.cache", session=Session(home / "home"))


def _timed(line: str, home: Path) -> dict[str, Any]:
    """Return the seconds of a command, its exit code, its last line and the slow libraries it imported."""
    command = [sys.executable, "-c", _CHILD, ",".join(_SLOW), *shlex.split(line)]
    before, began = _processor_seconds(), time.perf_counter()
    surroundings = {**os.environ, "MINILM_CACHE_HOME": "home"}
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False, env=surroundings)
    seconds, busy = time.perf_counter() - began, _processor_seconds() - before
    code, imported = json.loads((home / "imported.json").read_text())
    last = (done.stderr.strip().splitlines() or [""])[-1] if code else ""
    spent = {"seconds": round(seconds, 2), "processor_s": round(busy, 2)}
    return {"command": line, **spent, "exit": code, "imported": imported, "line": last}


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
