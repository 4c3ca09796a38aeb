"""Tiny teachers and caches that tests share: real transformers models, built from their configurations."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from pydantic import BaseModel, ValidationError
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import DumpResult, dump_cache
from minilm_cache.errors import InterruptedRunError
from minilm_cache.models.load import HEADS
from minilm_cache.models.tap import Head
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.storage_schema.base import Problem, problems_of
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store.checked import digest_bytes
from minilm_cache.store.push import push
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.folder import RunFolder, state_name
from minilm_cache.train.run import TrainResult, train_students

WORDS = [
    f"{first}{last}" for first in "bcdfghklmnprst" for last in ("a", "e", "i", "o", "u", "an", "en", "un")
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, *WORDS]

TINY: Mapping[str, Mapping[str, Any]] = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64},
    "roberta": {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64},
    "xlm-roberta": {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    },
    "electra": {
        "hidden_size": 32,
        "embedding_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    },
    "modernbert": {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "local_attention": 8,
        "global_attn_every_n_layers": 3,
        "pad_token_id": 0,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64},
}
DECODERS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "pad_token_id": 0,
    }
}
"""Families that the attention interface serves, each with sizes that take milliseconds."""
BIASED: Mapping[str, Mapping[str, Any]] = {
    "mpnet": {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "pad_token_id": 1,
    }
}
"""Families without transformers' attention interface, whose attention has a bias."""


def tiny_model(
    family: str, *, attention: str = "eager", seed: int = 0, head: Head | None = None, **changes: Any
) -> PreTrainedModel:
    """Return a small random model of a family; weights are wide enough for attention to be far from flat."""
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": len(VOCABULARY),
            "max_position_embeddings": 66,
            **{**TINY, **DECODERS, **BIASED}[family],
            **changes,
        },
    )
    torch.manual_seed(seed)
    model = HEADS[head].from_config(config, attn_implementation=attention)
    assert isinstance(model, PreTrainedModel)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(8)
    model.eval()
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def save_teacher(folder: Path, family: str = "bert", *, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny teacher as a Hugging Face folder."""
    tiny_model(family, seed=seed, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_corpus(path: Path, num_documents: int = 60, seed: int = 0) -> Path:
    """Write a text file of paragraphs of 3 to 40 words."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    documents = [
        " ".join(WORDS[draw(0, len(WORDS))] for _ in range(draw(3, 41))) for _ in range(num_documents)
    ]
    path.write_text("\n\n".join(documents) + "\n")
    return path


def write_groups(path: Path, num_groups: int = 40, *, wrong: int = 1, seed: int = 0) -> Path:
    """Write queries of 3 words, each with a document of up to 9 words that has its words, and others."""
    drawn = random.Random(seed)
    rows = []
    for _ in range(num_groups):
        query = drawn.choices(WORDS, k=3)
        right = drawn.sample([*query, *drawn.choices(WORDS, k=drawn.randint(1, 6))], k=4)
        others = [" ".join(drawn.choices(WORDS, k=drawn.randint(2, 9))) for _ in range(wrong)]
        rows.append({"query": " ".join(query), "right": [" ".join(right)], "wrong": others})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@dataclass(frozen=True)
class World:
    """A folder with a teacher, a corpus, and room for caches."""

    root: Path
    teacher: Path
    corpus: Path

    @property
    def home(self) -> Path:
        """Home of caches and runs."""
        return self.root / "home"

    def config(self, **changes: Any) -> DumpConfig:
        """Return settings of a small dump: sequences of 32 tokens in shards of 256; resuming checks all."""
        settings: dict[str, Any] = {
            "teacher": str(self.teacher),
            "corpus": str(self.corpus),
            "max_length": 32,
            "shard_tokens": 256,
            "batch_size": 8,
            "device": "cpu",
            "check": "full",
        }
        if changes.get("codec", "topk") == "topk":
            settings["k"] = 6
        return validated(DumpConfig, {**settings, **changes})

    def dump(self, out: str = "cache", **changes: Any) -> DumpResult:
        """Make a cache."""
        return dump_cache(self.config(**changes), out=self.root / out, session=Session(self.home))

    def train(self, out: str, *, stop_at: int | None = None, **settings: Any) -> TrainResult:
        """Train a student of some steps from the cache `cache`; `stop_at` stops it after a checkpoint."""
        values: dict[str, Any] = {"arch": ("1x32",), "init": "slice", "steps": 6, "batch_size": 4, "lr": 1e-3}
        config = validated(TrainConfig, {**values, "dropout": "none", "device": "cpu", **settings})
        path, session = self.root / out, Session(self.home)
        if stop_at is not None:
            reached = RunFolder(path=path).checkpoints / state_name(stop_at)
            session = Session(self.home, should_stop=reached.exists)
        return train_students(config, self.root / "cache", out=path, session=session)

    def resumes_the_same(self, arch: str, **settings: Any) -> TrainResult:
        """Assert that a run which is stopped in between gives the student of one that is not; return it."""
        settings = {"arch": (arch,), "checkpoint_steps": 2, **settings}
        whole = self.train("whole", **settings)
        with pytest.raises(InterruptedRunError):
            self.train("parts", stop_at=2, **settings)
        parts = self.train("parts", **settings)
        first, second = (
            load_file(result.student_path(arch) / "model.safetensors") for result in (whole, parts)
        )
        assert all(torch.equal(first[name], second[name]) for name in first)
        return parts


def find_problems(model: type[BaseModel], document: bytes) -> Sequence[Problem]:
    """Return every problem that keeps `document` (JSON) from being a `model`; empty if it is valid."""
    try:
        model.model_validate_json(document)
    except ValidationError as error:
        return problems_of(error)
    return []


def write_document(file: Path, document: Mapping[str, Any]) -> None:
    """Write a manifest or a commit record as someone would who leaves its checksum out."""
    file.write_text(json.dumps({name: value for name, value in document.items() if name != "checksum"}))


def change_record(cache: Path, shard: int, **changes: Any) -> None:
    """Change what a complete cache says of a shard: in its record, in the index, and in the manifest with it.

    `changes` are fields of the commit record; `files` are only the ones that change.
    """
    file = cache / f"commits/{shard:05d}.json"
    record = json.loads(file.read_text())
    files = changes.pop("files", {})
    write_document(file, {**record, **changes, "files": {**record["files"], **files}})
    index = cache / "index/shards.parquet"
    table = pq.read_table(index)
    rows = table.to_pylist()
    if "tokens_xxh3" in changes:
        rows[shard]["tokens_xxh3"] = bytes.fromhex(changes["tokens_xxh3"])
    for path, digest in files.items():
        name = path.split("/c/")[0] if "/c/" in path else "sequences"
        for part in ("sha256", "xxh3_128"):
            rows[shard][f"{name}/{part}"] = bytes.fromhex(digest[part])
        rows[shard][f"{name}/size"] = digest["size"]
    pq.write_table(pa.Table.from_pylist(rows, table.schema), index)
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["files"]["index/shards.parquet"] = digest_bytes(index.read_bytes()).model_dump()
    named = CacheManifest.model_validate_json(json.dumps(manifest | {"checksum": None}))
    (cache / "manifest.json").write_bytes(named.to_json())


def dump_arguments(world: World, *more: object, k: int | None = 6) -> list[object]:
    """Return a small dump as words of the command line."""
    settings: dict[str, object] = {
        "--teacher": world.teacher,
        "--corpus": world.corpus,
        "--max-length": 32,
        "--shard-tokens": 256,
        "--out": world.root / "cache",
    }
    entries = [] if k is None else ["--k", k]
    return ["dump", *(part for pair in settings.items() for part in pair), *entries, *more]


def pushed(world: World, store: str) -> str:
    """Push the world's cache, and return its URL."""
    return push(world.root / "cache", store, session=Session()).place


def write_revisions(root: Path, **teacher: Any) -> Path:
    """Write a folder of downloads in which org/teacher has two revisions, main and v1, of seeds 0 and 1.

    Returns:
        Folder of the revisions: seed 0 is in the folder of 40 zeros, seed 1 in that of 40 ones.
    """
    hub = root / "models--org--teacher"
    (hub / "refs").mkdir(parents=True)
    for seed, name in enumerate(("main", "v1")):
        sha = str(seed) * 40
        (hub / "refs" / name).write_text(sha)
        save_teacher(hub / "snapshots" / sha, seed=seed, **teacher)
    return hub / "snapshots"


def write_hub(root: Path, configurations: dict[str, dict[str, Dataset]]) -> Path:
    """Write a folder that `datasets` reads as it does a repository of the hub."""
    described = []
    for name, splits in configurations.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        files = []
        for split, rows in splits.items():
            rows.to_parquet(root / name / f"{split}.parquet")
            files.append(f"  - split: {split}\n    path: {name}/{split}.parquet")
        described.append(f"- config_name: {name}\n  data_files:\n" + "\n".join(files))
    (root / "README.md").write_text("---\nconfigs:\n" + "\n".join(described) + "\n---\n")
    return root
