"""A teacher and a text of any size, made of nothing that has to be downloaded."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, BertConfig, PreTrainedTokenizerFast

from minilm_cache.cache import Cache, open_cache
from minilm_cache.corpus.formats import PYTHON_DOCS
from minilm_cache.corpus.load import load_corpus
from minilm_cache.dump.config import DumpConfig
from minilm_cache.dump.run import dump_cache
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.storage_schema.identity import Precision

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS_PER_DOCUMENT = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured."""

    teacher: dict[str, int]
    """Sizes of the teacher, a BERT model of random weights."""
    tokens: int
    """Tokens of the caches that students are trained from."""
    dump_tokens: int
    """Tokens of each dump that is timed."""
    arch: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    seconds: float
    """Seconds for which a way of training is timed in each turn."""


BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
LARGE = Sizes(
    teacher=BASE,
    tokens=2**20,
    dump_tokens=2**20,
    arch=("3x384", "6x384", "12x384"),
    batch_sizes=(32, 256, 1024),
    lengths=(128, 512),
    seconds=0.5,
)
SMALL = Sizes(
    teacher={"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 96},
    tokens=2**13,
    dump_tokens=2**13,
    arch=("1x24",),
    batch_sizes=(8,),
    lengths=(32,),
    seconds=0.05,
)
"""Sizes that take a CPU seconds, to see that everything runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A folder with a teacher, a text and caches, and the device that is measured."""

    folder: Path
    device: torch.device
    sizes: Sizes

    @property
    def teacher(self) -> Path:
        """Folder of the teacher."""
        return self.folder / "teacher"

    def config(
        self,
        codec: str,
        length: int,
        *,
        tokens: int,
        device: torch.device | None = None,
        precision: Precision | None = None,
    ) -> DumpConfig:
        """Return settings of a dump. None means this bench's device, and the device's own precision."""
        settings = {
            "teacher": str(self.teacher),
            "corpus": str(self.folder / "text.txt"),
            "codec": codec,
            "max_length": length,
            "max_tokens": tokens,
            "device": str(device or self.device),
            "precision": precision,
        }
        return validated(DumpConfig, settings)

    def cache(self, codec: str, length: int) -> Cache:
        """Return a cache to train from; a second call returns the same one."""
        path = self.folder / f"{codec}-{length}"
        config = self.config(codec, length, tokens=self.sizes.tokens)
        dump_cache(config, out=path, session=Session(self.folder))
        return open_cache(path)


def prepare(folder: Path, device: torch.device, sizes: Sizes) -> Bench:
    """Write a teacher of random weights, its tokenizer, and a text of random words."""
    words = Counter(word for text in load_corpus(PYTHON_DOCS).texts() for word in text.split())
    known = [word for word, _ in words.most_common(30_000)]
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *known])}
    _save_tokenizer(folder / "teacher", vocabulary)
    torch.manual_seed(0)
    _save_teacher(folder / "teacher", sizes)
    generator = np.random.default_rng(0)
    count = sizes.tokens + sizes.tokens // 8
    drawn = np.asarray(known)[np.minimum(generator.zipf(1.2, count), len(known)) - 1]
    documents = [drawn[at : at + WORDS_PER_DOCUMENT] for at in range(0, count, WORDS_PER_DOCUMENT)]
    (folder / "text.txt").write_text("\n\n".join(" ".join(document) for document in documents))
    return Bench(folder=folder, device=device, sizes=sizes)


def _save_teacher(folder: Path, sizes: Sizes) -> None:
    """Write a teacher whose relations are not flat, as those of a trained one are not."""
    # The usual vocabulary, whose embeddings a step pays for.
    config = BertConfig(vocab_size=30_522, initializer_range=0.05, **sizes.teacher)  # type: ignore[arg-type]
    model = AutoModel.from_config(config)
    for name, weight in model.named_parameters():
        if name.endswith("output.dense.weight"):
            weight.data.mul_(0.1)  # else the layers make all tokens of a sequence alike, one after the other
    model.save_pretrained(folder)


def _save_tokenizer(folder: Path, vocabulary: dict[str, int]) -> None:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL, strict=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": token for name, token in names}
    )
    fast.save_pretrained(folder)
