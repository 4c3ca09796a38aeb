"""Further pairs of a task's texts, for a teacher to answer: each first text with second texts near it.

This is the semantic search sampling of Augmented SBERT (Thakur et al. 2021, arXiv 2010.08240, section 3.1):
near texts get answers of all kinds, where texts that are paired at random are nearly all unlike.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from minilm_cache.cache import Cache
from minilm_cache.dump.config import DumpConfig
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.classifier import refuse_answers
from minilm_cache.models.complete import pools_texts
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.pooling import SentenceModel
from minilm_cache.objectives.several import documents_of
from minilm_cache.session import Session
from minilm_cache.settings import validated
from minilm_cache.storage_schema.states import LOGITS
from minilm_cache.store.durable import new_file, storage_errors

_NEAR: Final = 30
"""Second texts nearest to a first one, of which further pairs are drawn."""
_ASKED: Final = 2000
"""Pairs of the task, and further ones, whose answers are compared."""
_OTHER_SHARE: Final = 0.2
"""Difference of the shares of a class from which on it is said."""
_PART: Final = 1024
"""Texts that are encoded between two looks at whether to stop."""
_MAX_PRODUCTS: Final = 2**26
"""Products of vectors that are in memory at once."""


def encoder_of_pairs(model: str, dump: Mapping[str, Any], *, is_pair: bool) -> SentenceModel:
    """Return the sentence encoder of `--mine`, which reads as much of a text as the dump.

    Args:
        model: its name.
        dump: settings of `DumpConfig`, by name.
        is_pair: whether the task's texts are pairs.

    Raises:
        InvalidConfigError: it is no sentence encoder, or texts are no pairs.
        TeacherError: it does not exist, or has a pooling that cannot be computed.
    """
    if not is_pair:
        raise InvalidConfigError(f"--mine {model}: the texts of this task are no pairs. Leave it out.")
    folder = locate_teacher(model).folder
    if not pools_texts(folder):
        raise InvalidConfigError(
            f"--mine {model} gives no vectors of texts. Name a sentence encoder, like mini."
        )
    refuse_answers(folder, f"--mine {model}")
    return SentenceModel(folder, validated(DumpConfig, dump).max_length)


def write_further_pairs(
    pairs: Sequence[tuple[str, str]],
    encoder: SentenceModel,
    out: Path,
    *,
    corpus: Path,
    each: int,
    has_copies: bool,
    session: Session,
) -> None:
    """Write the records of a corpus and then further pairs, as JSON lines with `first` and `second`.

    Args:
        pairs: the task's pairs.
        encoder: finds the second texts that are near a first one.
        out: file to write.
        corpus: JSON lines of the pairs.
        each: further pairs of each first text.
        has_copies: whether records say which `document` they are a copy of; a further pair is then one of the
            pair whose first text it has.
        session: its progress shows texts that are encoded. Its `should_stop` is called before each part; True
            stops, and nothing is written.

    Raises:
        InterruptedRunError: a stop was requested.
        StorageError: the file cannot be written.
    """
    known = set(pairs)
    firsts = {first: number for number, (first, _) in reversed(list(enumerate(pairs)))}
    seconds = list(dict.fromkeys(second for _, second in pairs))
    nearest = _nearest(list(firsts), seconds, encoder, session=session)
    drawn = np.random.default_rng(0)
    with storage_errors("write", out), new_file(out) as opened, corpus.open("rb") as texts:
        shutil.copyfileobj(texts, opened)
        for (first, number), places in zip(firsts.items(), nearest, strict=True):
            near = [seconds[at] for at in places if seconds[at] != first]
            near = [second for second in near if (first, second) not in known][:_NEAR]
            more = {"document": number} if has_copies else {}
            for at in drawn.permutation(len(near))[:each]:
                row = json.dumps({"first": first, "second": near[at], **more}, ensure_ascii=False)
                opened.write(f"{row}\n".encode())


def _nearest(
    firsts: Sequence[str], seconds: Sequence[str], encoder: SentenceModel, *, session: Session
) -> Iterator[list[int]]:
    """Yield the places of the second texts that are nearest to each first one, the nearest first."""
    texts = [*firsts, *seconds]
    session.progress.start("mine", len(texts), "texts")
    kept = "interrupted: what is complete is kept. Run the same command again."
    parts = [encoder.encode(part) for part in session.parts(texts, _PART, kept)]
    left, right = torch.cat(parts).tensor_split([len(firsts)])
    at_once = max(1, _MAX_PRODUCTS // len(seconds))
    for start in range(0, len(firsts), at_once):
        products = left[start : start + at_once] @ right.T
        yield from products.topk(min(2 * _NEAR, len(seconds))).indices.tolist()


def other_classes(cache: Cache, num_pairs: int, classes: Sequence[str]) -> Iterator[str]:
    """Yield a remark if the teacher answers further pairs with other classes than the task's.

    Near texts are seldom paraphrases of each other, and students learn how often a class comes.

    Args:
        cache: cache of the teacher's answers to the pairs of a task, and then to further ones.
        num_pairs: pairs of the task.
        classes: names of the teacher's classes, by number.
    """
    is_own = documents_of(cache) < num_pairs
    if is_own.all():
        return
    own, further = (_shares(cache, np.flatnonzero(of_kind), len(classes)) for of_kind in (is_own, ~is_own))
    most = int(np.abs(own - further).argmax())
    if abs(own[most] - further[most]) >= _OTHER_SHARE:
        yield (
            f"the teacher answers {classes[most]!r} to {100 * own[most]:.0f} % of the task's pairs and to "
            f"{100 * further[most]:.0f} % of the further ones, which students learn. If they end worse, give "
            "a smaller --mined, or leave out --mine"
        )


def _shares(cache: Cache, numbers: npt.NDArray[np.int64], num_classes: int) -> npt.NDArray[np.float64]:
    """Return the share of each class in the teacher's answers to some of these sequences."""
    asked = numbers[:: max(1, len(numbers) // _ASKED)]
    answers = [int(cache[int(number)].states()[LOGITS][0].argmax()) for number in asked]
    shares: npt.NDArray[np.float64] = np.bincount(answers, minlength=num_classes) / len(answers)
    return shares
