"""Mistakes in what a command names are said before libraries are imported that take seconds."""

import json
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from minilm_cache.cli.early import EXTRAS, refuse_no_text
from tests.fixtures import Command
from tests.support import World, save_teacher, write_corpus

SLOW = ("torch", "transformers", "datasets", "pyarrow")
MISTAKES = {
    "dump --teacher nosuch --corpus notes.txt": "nosuch",
    "dump --teacher mini --corpus nosuch.txt": "corpus nosuch.txt does not exist",
    "dump --teacher mini --corpus notes.txt --codec nosuch": "--codec nosuch",
    "dump --teacher mini --corpus notes.txt --out notes.txt": "notes.txt is a file",
    "dump --teacher mini --corpus notes.txt --out run": "run is not empty and is not a cache",
    "dump --teacher empty --corpus notes.txt": "config.json is not there",
    "dump --teacher mini --corpus notes.txt --max-length 2": "--max-length 2",
    "train nosuch.cache --arch 3x384": "no cache at nosuch.cache",
    "train empty --arch 3x384": "manifest.json is not there",
    "train s3:/bucket/x --arch 3x384": "one slash",
    "train cache --arch 3x38q": "--arch 3x38q",
    "train cache --arch 3x384 --objective nosuch": "there is no objective nosuch",
    "train cache --arch 3x384 --objective hiden-mse": "hiden-mse (did you mean hidden-mse?); there",
    "train cache --arch 3x384 --steps 1 --epochs 2": "exclude each other",
    "search nosuch --speedup 2 --out o": "no cache at nosuch",
    "search cache --out o": "give a budget",
    "study bad.yaml": "this is not YAML",
    "study nosuch.yaml": "cannot read nosuch.yaml",
    "chain --teacher mini --assistant 3x38q --arch 2x96 --corpus notes.txt": "--arch 3x38q",
    "evaluate mini --task nosuch --data .": "there is no task nosuch",
    "evaluate mini --task sst --data .": "there is no task sst (did you mean sst2?)",
    "evaluate nosuch --task sst2 --data .": "nosuch",
    "evaluate mini --task sst2 --data nosuch": "--data nosuch",
    "embeddings mini --retrieval nosuch.jsonl": "--retrieval nosuch.jsonl does not exist",
    "embeddings mini --retrieval groups.jsonl": "line 1 lacks question and answer; it has query",
    "embeddings mini --retrieval questions.jsonl --corpus nosuch.txt": "corpus nosuch.txt does not exist",
    "embeddings mini --retrieval questions.jsonl --documents lines": "go with --corpus",
    "mine mini --retrieval groups.jsonl --out o.jsonl": "groups.jsonl, line 1 lacks question and answer",
    "rerank nosuch --retrieval empty --first-stage mini": "nosuch",
    "speed mini nosuch": "nosuch",
    "verify nosuch": "no cache at nosuch",
    "verify run": "manifest.json is not there. It is a run",
    "export nosuch out.parquet": "no cache at nosuch",
    "trim nosuch --out o": "nosuch",
    "slice --teacher mini --arch 3x38q --out o": "--arch 3x38q",
    "mine mini --retrieval nosuch --out o.jsonl": "--retrieval nosuch does not exist",
    "export-model nosuch --onnx --out o": "nosuch",
    "dump --teacher teacher --corpus notes.txt --layers 9": "--layers 9: teacher teacher has layers 0 to 2",
    "dump --teacher teacher --corpus notes.txt --hidden 9": "--hidden 9: teacher teacher has hidden states 0",
    "dump --teacher teacher --corpus notes.txt --add nosuch --for embedding": "no cache at nosuch",
    "embeddings mini --data nosuch": "--data nosuch: no such folder",
    "export-model mini --onnx --out o --data nosuch": "--data nosuch: no such folder",
    "export-model mini --onnx --out o --retrieval groups.jsonl": "line 1 lacks question and answer",
    "generate teacher": "give texts, or a file that has them",
    "generate teacher a --answer b --answer c": "--answer is given 2 times for 1 text.",
    "generate teacher a --file groups.jsonl": "give texts or --file groups.jsonl, not both",
    "generate teacher a": "was not fine-tuned to generate texts",
    "generate generator a": "was tuned on passages with answers",
    "generate generator a --answer b --min-new-tokens 8": "8 is not below --max-new-tokens 6",
    "export-model mini --onnx --openvino --out o": "give either --onnx",
    "export-model mini --onnx --out o": "mini is no student of a run, so its texts are not known",
    "dump --teacher mini --corpus notes.txt --max-length 513": "513 is more than teacher mini has positions",
    "evaluate mini --task sst2 --data .": ". has no dev set of SST-2: neither",
    "embeddings mini --data .": ". has no dev set of STS-B: neither dev.tsv nor dev.jsonl is there",
    "embeddings mini --retrieval questions.jsonl --max-length 600": "--max-length 600 is more than mini has",
    "speed mini --length 600": "--length 600 is more than mini has positions for",
    "evaluate empty --task sst2 --data .": "empty is neither a model nor a run",
    "rerank mini --retrieval questions.jsonl --first-stage mini": "mini scores no pairs; rerank takes cross-",
    "slice --teacher mini --arch 3x384 --layers 1,2 --out o": "--layers 1,2 names 2 layers, and --arch 3x384",
    "slice --teacher mini --arch 7x384 --out o": "--arch 7x384: more layers than the teacher's 6",
    "slice --teacher mini --arch 3x384 --layers 1,2,9 --out o": "different numbers from 0 to 5, ascending",
    "truncate --teacher mini --layers 9 --out o": "--layers 9: give different numbers from 0 to 5, with",
    "truncate --teacher mini --layers 1 --out empty": "empty exists",
    "trim mini --vocab nosuch --out o": "--vocab nosuch: there is no such file",
    "dump --teacher mini --corpus notes.txt --out s3://": "cannot open s3://: it names no bucket",
    "dump --teacher mini --corpus notes.txt --out ftp://x": "no store of this kind is known",
    "train s3:// --arch 3x384": "cannot open s3://: it names no bucket",
    "dump --teacher mini --corpus nothing.txt": "corpus nothing.txt is empty: the file has no bytes",
    "tokenize --teacher mini --corpus nothing.txt": "corpus nothing.txt is empty: the file has no bytes",
    "chain --teacher mini --corpus notes.txt --arch 3x384": "--assistant is missing. Give it, or a CHAIN",
    "chain --teacher mini --corpus notes.txt --assistant 3x384": "--arch is missing",
    "chain --task sst2 --arch 3x384": "--teacher is missing: a model that was fine-tuned on the task",
    "chain --task sst2 --teacher nosuch --arch 3x384": "nosuch",
    "train cache --arch 3x384 --out notes.txt": "--out notes.txt: notes.txt is a file",
    "evaluate mini --task sst2 --data . --out notes.txt": "--out notes.txt: notes.txt is a file",
    "evaluate cache --task sst2 --data .": "cache is neither a model nor a run: it has no config.json and no",
    "chain --teacher mini --assistant 3x384 --arch 2x96 --out notes.txt/x": "notes.txt is a file",
    "speed mini --onnx notes.txt": "--onnx notes.txt: notes.txt is a file",
    "dump --teacher mini --corpus hf:": "corpus hf:: write hf:ID, hf:ID:CONFIG or hf:ID:CONFIG:SPLIT",
    "dump --teacher mini --corpus notes.txt --packing records --prompt-name nosuch": "has no such prompt",
    "chain --teacher mini --assistant 3x384 --arch 2x99": "hidden size 99 is not divisible by 12 heads",
    "chain --teacher mini --assistant 3x384 --arch 2x96 --objective tinybert": "a chain's students learn",
    "chain --task nosuch --teacher mini --arch 3x384": "there is no task nosuch",
    "chain --task sst2 --teacher mini --arch 3x384": "--data is missing",
    "chain --task sst2 --teacher mini --arch 3x384 --data nosuch": "--data nosuch: no such folder",
    "evaluate mini --task squad --data empty": "empty has no train-v1.1.json",
    "slice --teacher mini --arch 3x768 --out o": "hidden size 768 is above the teacher's 384",
    "trim mini --vocab cache --out o": "--vocab cache goes with train",
    "search cache --speedup 2 --widths a --out o": "--widths a: give whole numbers with commas",
}
READ = {
    "report trained --out notes.txt": "--out notes.txt: a report is a page. Give a name that ends in .html",
    "report trained --text ba": "--text needs --teacher",
    "report trained --teacher nosuch": "there is no folder nosuch",
    "export cache out.csv": "out.csv: vectors are written as Parquet",
    "generate generator --file groups.jsonl --text-columns src,query": "has no column 'src'",
    "generate generator --file nosuch.jsonl --text-columns src,query": "--file nosuch.jsonl is not a file",
    "dump --teacher teacher --corpus table.csv --text-column nosuch": "no column 'nosuch'",
    "dump --teacher teacher --corpus table.csv --pair-columns text,nosuch": "no column 'nosuch'",
    "train cache --arch 3x33": "3x33",
    "train cache --arch 2x32 --vocab nosuch": "--vocab nosuch: there is no such file",
    "train cache --arch 2x32 --batch-size 6 --accumulate 4": "does not divide into 4 parts",
    "train cache --arch 2x32 --init-layers 0,9": "--init-layers 0,9: give different numbers from 0 to 2",
    "train cache --arch 2x32 --init slice --init-layers 0": "--init-layers 0 names 1 layer, and",
    "train cache --arch 9x32 --init slice": "--arch 9x32: more layers than the teacher's 3",
    "train vectors --arch 2x32 --objective embedding --matryoshka 64": "the vectors of this cache have 32",
    "search cache --speedup 2 --widths 33 --out o": "hidden size 33 is not divisible by 4 heads",
    "dump --teacher teacher --corpus notes.txt --out cache --max-length 8": "max_length (32 there, 8 asked)",
    "export cache vectors.parquet": "cache holds no pooled vectors",
    "export cache scores --scores": "cache holds no scores",
    "import notes.txt --tokenizer teacher": "cannot read notes.txt: it has no footer",
    "import table.parquet --tokenizer teacher": "table.parquet has no column 'embedding', or two; it has",
    "import table.csv --tokenizer teacher --pair-columns text,b --score-columns label": "no column 'b'",
    "export-model several --onnx --out o": "several is a run of 2 students. Name the folder of one: several/",
    "export-model teacher --onnx --out o --corpus table.csv --text-column b": "no column 'b'",
    "tokenize --teacher teacher --corpus table.csv --text-column b": "no column 'b'",
    "trim teacher --out o --corpus table.csv --text-column b": "no column 'b'",
    "train cache --arch 2x32 --objective embedding": "needs pooled vectors",
    "train cache --arch 2x32 --objective minilmv2": "--objective minilmv2 needs",
    "train cache --arch 2x32 --objective hidden-mse": "does not hold: hidden states (--hidden). Add them",
    "train cache --arch 2x32 --objective mlm-kd": "does not hold: soft labels (--labels). Add them",
    "train cache --arch 2x32 --teacher-layer 0": "--teacher-layer 0: the cache holds layer 2",
    "train cache --arch 2x32 --init cache": "--init cache: it holds neither a model nor a run. Give random",
    "train cache --arch 2x64 --init slice": "hidden size 64 is above the teacher's 32",
    "train cache --arch 2x32 --init slice --init-teacher empty": "config.json is not there",
    "train cache --arch 2x32 --objective score": "this cache does not hold: logits (--logits)",
    "train cache --arch 2x32 --objective margin-mse": "needs scores of pairs of texts",
    "train file:///nosuch --arch 2x32": "no cache at file:///nosuch: manifest.json is not there",
    "evaluate teacher --task table.csv --dev nosuch.csv": "nosuch.csv is not a file",
    "embeddings trained --retrieval questions.jsonl": "trained is a run of students. Name its teacher first",
    "report trained --cache nosuch": "no cache at nosuch",
    "search cache --speedup 2 --widths 16 --layers 9 --init slice --out o": "more layers than the",
    "train cache --arch 2x32 --init nosuch": "--init nosuch: there is no such folder",
    "train cache --arch 2x16 --seed 3 --out trained": "holds another run, which differs in arch (1x32 there",
    "dump --teacher teacher --corpus semicolons.csv": "Its columns stand apart by ';': write it with commas",
    "evaluate teacher --task semicolons.csv": "Its columns stand apart by ';': write it with commas",
    "dump --teacher teacher --corpus semicolons.csv --pair-columns text,label": "stand apart by ';'",
    "train cache --arch 2x32 --objective score --own-labels nosuch.csv": "nosuch.csv does not exist",
    "train cache --arch 2x32 --objective score --own-labels table.csv --label-column b": "no column 'b'",
    "study key.yaml": "key.yaml, line 3, train.stepps: there is no such setting",
    "study shape.yaml": "shape.yaml, line 2, arch.0: --arch 3x3z",
    "study text.yaml --dry-run": "text.yaml, line 1, dump.corpus: corpus nosuch.txt does not exist",
    "study own.yaml": "own.yaml, line 3, caches.two.corpus: corpus nosuch.txt does not exist",
    "study scores.yaml": "scores.yaml, line 3, evaluate: empty has no dev set of SST-2",
    "study cache.yaml": "this cache does not hold: logits (--logits)",
    "train cache --arch 2x32 --batch-size 100k": "Take at most",
    "ls file:///nosuch": "file:///nosuch does not exist",
    "study heads.yaml": "heads.yaml, line 2, arch.1: --arch 3x33",
    "evaluate teacher --task table.csv --label-column nosuch": "no column 'nosuch'",
    "evaluate teacher --task nosuch.csv": "nosuch.csv is not a file",
    "evaluate teacher --task table.csv --max-length 128": "--max-length 128 is more than teacher has",
    "report nosuch": "there is no folder ",
    "import nosuch --tokenizer teacher": "nosuch is not a file",
    "info nosuch": "no cache at nosuch",
    "rm nosuch --yes": "there is no cache or run nosuch",
}
"""Mistakes that a look into a file or a manifest shows, which takes pyarrow or datasets, and never torch."""
CODE = """
import contextlib, io, json, sys
from minilm_cache.cli.main import run
found = []
for mistake in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = run(mistake.split())
    lines = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
    found.append([code, lines, [name for name in json.loads(sys.argv[2]) if name in sys.modules]])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the mistakes are made beside."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "notes.txt").write_text("ba be\n\nbi bo\n")
    (folder / "bad.yaml").write_text("x: [1\n")
    (folder / "empty").mkdir()
    (folder / "run").mkdir()
    (folder / "run" / "run.json").touch()
    (folder / "groups.jsonl").write_text('{"query": "ba", "documents": ["be"]}\n')
    (folder / "questions.jsonl").write_text('{"question": "ba", "answer": "be"}\n')
    (folder / "table.csv").write_text("text,label\nba,1\n")
    (folder / "nothing.txt").touch()
    pq.write_table(pa.table({"text": ["ba"]}), folder / "table.parquet")
    (folder / "semicolons.csv").write_text("text;label\nba;1\n")
    study = "dump: {teacher: teacher, max_length: 32, corpus: notes.txt}\n"
    (folder / "key.yaml").write_text(f"{study}arch: [2x32]\ntrain: {{stepps: 3}}\n")
    (folder / "text.yaml").write_text(
        "dump: {teacher: teacher, max_length: 32, corpus: nosuch.txt}\narch: [2x32]\n"
    )
    two = "caches:\n  two: {corpus: nosuch.txt}\n"
    (folder / "own.yaml").write_text(f"dump: {{teacher: teacher, max_length: 32}}\n{two}arch: [2x32]\n")
    (folder / "heads.yaml").write_text(f"{study}arch: [2x32, 3x33]\n")
    scores = "evaluate: {task: sst2, data: empty}\n"
    (folder / "scores.yaml").write_text(f"{study}arch: [2x32]\n{scores}")
    given = "caches: {one: {cache: cache}}\n"
    (folder / "cache.yaml").write_text(f"{given}arch: [2x32]\nobjective: [score]\n")
    (folder / "shape.yaml").write_text(f"{study}arch: [3x3z]\n")
    world = World(folder, save_teacher(folder / "teacher"), write_corpus(folder / "corpus.txt"))
    world.dump("cache")
    world.train("trained", steps=2)
    world.train("several", steps=2, arch=("1x32", "2x32"))
    world.dump("vectors", codec="none", pooled=True, pooling="mean", packing="records", k=None)
    save_teacher(folder / "generator")
    decoding = {"max_source": 24, "max_new_tokens": 6, "pairs": True}
    (folder / "generator" / "generation_config.json").write_text(json.dumps(decoding))
    return folder


def test_a_mistake_shows_before_torch_is_there(folder: Path) -> None:
    """In one process, since none of them imports anything slow."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps([*MISTAKES, *READ]), json.dumps(SLOW)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "HF_HUB_OFFLINE": "1"},
    )
    every = MISTAKES | READ
    wrong = [
        (mistake, code, lines, imported)
        for (mistake, says), (code, lines, imported) in zip(
            every.items(), json.loads(done.stdout.splitlines()[-1]), strict=True
        )
        if len(lines) != 1
        or says not in lines[0]
        or code not in (1, 2)
        or not {*imported} <= ({"datasets", "pyarrow"} if mistake in READ else set())
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_what_can_be_read_is_not_refused(tmp_path: Path) -> None:
    groups = tmp_path / "groups.jsonl"
    groups.write_text('{"query": "ba", "documents": ["be", "bi"]}\n{"query": "bo", "documents": ["bu"]}\n')
    refuse_no_text(str(groups), None, "query,documents")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "later.jsonl").write_text('{"title": "ba"}\n{"body": "be", "title": null}\n')
    refuse_no_text(str(tmp_path / "later.jsonl"), "title+body")
    refuse_no_text(str(tmp_path), "query")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "one.tsv").write_text("text\tlabel\nba\t1\n")
    refuse_no_text(str(tmp_path / "tables"), None)


PACKAGES = {
    "export-model mini --onnx --out o": "onnxscript",
    "export-model mini --openvino --out o": "nncf",
    "evaluate mini --task table.csv": "sacrebleu",
    "embeddings mini --retrieval questions.jsonl": "sentence_transformers",
    "mine mini --retrieval questions.jsonl --out o": "pytrec_eval",
    "rerank teacher --retrieval questions.jsonl --first-stage mini": "sentence_transformers",
    "speed mini --onnx o": "onnxruntime",
    "search cache --speedup 2 --runtime openvino-int8 --out o": "openvino",
    "study study.yaml --engine ray": "ray",
    "chain --teacher mini --assistant 3x384 --arch 2x96 --engine ray": "ray",
    "dump --teacher mini --corpus notes.txt --engine ray": "ray",
    "train cache --arch 2x32 --tracker wandb": "wandb",
}
"""Commands that need a package, and the package."""


@pytest.mark.parametrize(("line", "lacking"), PACKAGES.items())
def test_a_package_that_is_not_installed_shows_first(
    folder: Path, line: str, lacking: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)

    def too_late() -> None:
        pytest.fail("what takes seconds is imported by now")

    for name, module in list(sys.modules.items()):
        if name.startswith("minilm_cache.cli.") and hasattr(module, "quiet_libraries"):
            monkeypatch.setattr(module, "quiet_libraries", too_late)
    monkeypatch.setitem(sys.modules, lacking, None)
    command.fails(*line.split(), code=2, says=(lacking, "not installed", "pip install"))


def test_extras_have_the_packages_of_the_project() -> None:
    wanted: dict[str, set[str]] = {}
    for requirement in map(Requirement, requires("minilm-cache") or ()):
        for extra in EXTRAS:
            if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
                inner = requirement.extras or {canonicalize_name(requirement.name)}
                wanted.setdefault(extra, set()).update(inner)
    distributions = packages_distributions()
    for extra, modules in EXTRAS.items():
        names = {canonicalize_name(name) for module in modules for name in distributions[module]}
        asked = {name for each in wanted[extra] for name in wanted.get(each, {each})}
        assert names >= asked
        assert len(modules) == len(asked)
