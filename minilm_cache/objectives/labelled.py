"""Labels of a task of one's own: records of a cache's text with their classes, learned with the answers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from minilm_cache.cache import Cache
from minilm_cache.corpus.formats import file_of_records, joined_columns, plain_number
from minilm_cache.corpus.pairs import PairColumns
from minilm_cache.corpus.records import columns_of, read_rows
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.student import class_names
from minilm_cache.objectives.config import ObjectiveConfig
from minilm_cache.objectives.several import documents_of
from minilm_cache.storage_schema.identity import canonical_sha256
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG
from minilm_cache.storage_schema.states import LOGITS, SignalName

LABEL_COLUMN: Final = "--label-column"
_SHOWN: Final = 8
_MOST_SCORE: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLabels:
    """The labels of the texts of a cache, which are mixed into the teacher's answers.

    The cross-entropy of a student's answer under a mixture of distributions is the same mixture of
    cross-entropies, so students learn (1 - weight) x the teacher's answer + weight x the label (Hinton et al.
    2015, arXiv 1503.02531, section 2, with temperature 1). Where a teacher gives one number, the target of
    the squared error is mixed.
    """

    signal: ClassVar[SignalName] = LOGITS
    """What is mixed with."""
    values: npt.NDArray[np.float32]
    """Number of the class of each sequence, or its value where the teacher gives one number; NaN where it has
    no label. `(sequences,)`."""
    weight: float
    """Weight of a label, above 0 and at most 1."""

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of the labels."""
        return canonical_sha256([None if np.isnan(value) else float(value) for value in self.values])

    def of(self, sequences: npt.NDArray[np.int64]) -> Float[Tensor, " batch"]:
        """Return the labels of some sequences, NaN where they have none."""
        return torch.from_numpy(self.values[sequences])

    def joined(
        self, own: Float[Tensor, "batch classes"], labels: Float[Tensor, " batch"]
    ) -> Float[Tensor, "batch classes"]:
        """Return answers whose distributions are the mixtures, or the mixed values of a single number.

        Args:
            own: the teacher's answers.
            labels: labels as `of` returns them.
        """
        has_label = ~labels.isnan()
        known = labels.where(has_label, 0.0)
        if own.shape[1] == 1:
            mixed = torch.lerp(own, known[:, None].to(own), self.weight)
        else:
            one_hot = F.one_hot(known.long(), own.shape[1]).to(own)
            mixed = torch.lerp(own.softmax(-1), one_hot, self.weight).clamp(min=torch.finfo(own.dtype).tiny)
            mixed = mixed.log()
        return torch.where(has_label[:, None], mixed, own)


def own_labels(cache: Cache, config: ObjectiveConfig, *, home: Path | None = None) -> OwnLabels | None:
    """Read the labels that settings name. None means that they name none.

    Args:
        cache: cache of the teacher's answers to the same texts.
        config: the file, its column of labels, and their weight.
        home: folder of what is kept of texts. None means that nothing is kept.

    Raises:
        InvalidConfigError: the file has other texts than the cache, or a label is none of the teacher's
            classes.
        CorpusError: the file does not exist, cannot be read, or lacks a column.
    """
    if config.own_labels is None:
        return None
    file = file_of_records(config.own_labels, "--own-labels")
    manifest = cache.manifest
    _refuse_other_texts(file, cache, home)
    classes = _numbers_of_classes(cache)
    rows = read_rows(file, (*_text_columns(cache, file), config.label_column), LABEL_COLUMN)
    labels = [_number(row[config.label_column], classes, f"{file}, {where}") for where, row in rows]
    num_texts = manifest.identity.corpus.num_documents
    if len(labels) != num_texts:
        raise InvalidConfigError(
            f"--own-labels {file} has {len(labels):,} records, and {manifest.labels.corpus} has "
            f"{num_texts:,} texts: some records have no text. Give each text a record."
        )
    if np.isnan(labels).all():
        raise InvalidConfigError(
            f"--own-labels {file}: no record has a label in column {config.label_column!r}. Name another "
            f"({LABEL_COLUMN}), or leave it out."
        )
    weight = 0.5 if config.label_weight is None else config.label_weight
    return OwnLabels(values=np.array(labels, np.float32)[documents_of(cache)], weight=weight)


def _text_columns(cache: Cache, file: Path) -> Sequence[str]:
    """Return the columns of a cache's texts in a file; all that are read tell whether it has a header."""
    labels = cache.manifest.labels
    if labels.pair_columns is not None:
        return PairColumns.of(labels.pair_columns).every
    if labels.text_column is None:
        return ()
    return joined_columns(labels.text_column, columns_of(file)) or (labels.text_column,)


def _refuse_other_texts(file: Path, cache: Cache, home: Path | None) -> None:
    manifest, labels = cache.manifest, cache.manifest.labels
    several = {
        "each query has several documents": manifest.identity.corpus.groups,
        "each record has several texts": "," in (labels.text_column or ""),
        "texts have prompts by their role": labels.role_column is not None,
    }
    for what, is_so in several.items():
        if is_so:
            raise InvalidConfigError(
                f"--own-labels: in this cache {what}, and labels cannot be read then. Leave it out."
            )
    from minilm_cache.corpus.load import load_corpus  # noqa: PLC0415 - it takes a while

    corpus = load_corpus(str(file), labels.text_column, pair_columns=labels.pair_columns, home=home)
    if corpus.identity.sha256 != manifest.texts_sha256:
        raise InvalidConfigError(
            f"--own-labels {file} has other texts (sha256 {corpus.identity.sha256[:12]}) than the cache, "
            f"which was dumped from {labels.corpus} (sha256 {manifest.texts_sha256[:12]}). Give the same "
            "records, in the same order, with their labels."
        )


def _numbers_of_classes(cache: Cache) -> Mapping[str, int]:
    """Return the teacher's classes by name and by number; empty where it gives one number."""
    count = cache.manifest.identity.num_classes or 1
    if count == 1:
        return {}
    named = class_names(cache.reader.attachment(TEACHER_CONFIG), cache.manifest)
    # Where a class is called by a number, like +1, labels mean names alone.
    is_named = all(math.isnan(plain_number(name)) for name in named.values())
    numbers = {str(each): each for each in range(count)} if is_named else {}
    return {name.strip(): number for number, name in named.items()} | numbers


def _number(label: Any, classes: Mapping[str, int], where: str) -> float:  # noqa: ANN401 - any value of a file
    """Return the class or the value of a label, NaN where there is none."""
    word = "" if label is None else str(label).strip()
    if word in classes:
        return classes[word]
    if word in ("", "nan"):
        return float("nan")
    value = float(label) if isinstance(label, bool) else plain_number(label)
    if not classes and abs(value) < _MOST_SCORE and not isinstance(label, bool):
        return value
    if not classes:
        raise InvalidConfigError(
            f"{where}: label {word[:40]!r} is not a number, and this teacher answers with a number. Correct "
            f"it, leave it empty, or name another column ({LABEL_COLUMN})."
        )
    number = str(int(value)) if value.is_integer() else word  # 1.0 and True are class 1
    if number not in classes:
        raise InvalidConfigError(
            f"{where}: label {word[:40]!r} is none of the teacher's classes: {_listed(list(classes))}. "
            f"Correct it, leave it empty, or name another column ({LABEL_COLUMN})."
        )
    return classes[number]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
