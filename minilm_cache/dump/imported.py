"""Make a cache of what somebody else computed, vectors or scores: a teacher that only its answers tell of.

A Parquet file holds texts and their vectors, or a file of records holds pairs of texts and their scores. A
model's folder gives the tokenizer, and the family and sizes that students are built from; its weights are not
read. Everything else is an ordinary dump, whose reader looks answers up instead of running a teacher.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedConfig

from minilm_cache.corpus.load import Corpus, load_corpus
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.dump.answers import TextVectors, read_scores, read_vectors
from minilm_cache.dump.config import DumpConfig, ImportConfig
from minilm_cache.dump.reading import CPU_BATCH, SequenceReader
from minilm_cache.dump.run import DumpResult, write_cache
from minilm_cache.dump.setup import ResolvedDump, identity_and_place
from minilm_cache.errors import CorpusError
from minilm_cache.models.files import VOLATILE
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.load import read_config
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.pooling import SentencePooler
from minilm_cache.models.prompts import Prompts
from minilm_cache.models.student import check_family_positions
from minilm_cache.models.teacher import Teacher
from minilm_cache.models.tokenizer import load_tokenizer, refuse_ids_beyond
from minilm_cache.relations.scores import LayerRelations
from minilm_cache.relations.signals import Signals
from minilm_cache.session import ALONE, Session
from minilm_cache.settings import validated
from minilm_cache.storage_schema.identity import PairTemplate, TeacherIdentity, canonical_sha256
from minilm_cache.storage_schema.states import LOGITS, POOLED, PoolingMode, SignalName
from minilm_cache.store.durable import refuse_file


def import_answers(config: ImportConfig, *, out: Path | None = None, session: Session = ALONE) -> DumpResult:
    """Write a cache of texts and vectors in a Parquet file, or of pairs of texts and scores in records.

    Args:
        config: the file, and how students read its texts; with `score_columns` it holds scores.
        out: folder of the cache. None means a folder below `home`, named by content.
        session: its home is the folder of caches. Its progress shows tokens done. Its `should_stop` is called
            before each batch; True stops and keeps what is committed.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`; committed shards are kept whatever happens.
    """
    if config.score_columns is None:
        of_vectors = {"pooled": True, "pooling": config.pooling, "min_cosine": config.min_cosine}
        dump = _dump_of(config, {**of_vectors, "packing": "records"})
        known, corpus = read_vectors(config, session), load_corpus(config.vectors, config.text_column)
        corpus = corpus.with_prompt(config.prompt)
    else:
        assert config.pair_columns is not None
        dump = _dump_of(config, {"logits": True, "pair_columns": config.pair_columns})
        known, corpus = read_scores(config), load_corpus(config.vectors, pair_columns=config.pair_columns)
    return _write(config, dump, known, corpus=corpus, out=out, session=session)


def _dump_of(config: ImportConfig, more: Mapping[str, object]) -> DumpConfig:
    """Return the settings of a dump that stores what is given."""
    settings = {name: getattr(config, name) for name in _OF_A_DUMP}
    teacher = config.teacher or Path(config.vectors).stem
    named = {"teacher": teacher, "corpus": config.vectors, "codec": "none"}
    return validated(DumpConfig, {**settings, **named, **more})


def _write(
    config: ImportConfig,
    dump: DumpConfig,
    known: TextVectors,
    *,
    corpus: Corpus,
    out: Path | None,
    session: Session,
) -> DumpResult:
    """Write a cache of what is given, which belongs to the documents of a corpus in order."""
    teacher = ImportedTeacher(dump.teacher, config, known)
    if list(corpus.texts()) != list(known.texts):
        raise CorpusError(f"{config.vectors} changed while it was read. Run the same command again.")
    identity, path = identity_and_place(dump, teacher, corpus=corpus, out=out, home=session.home)
    refuse_file(path)
    resolved = ResolvedDump(
        config=dump,
        batch_size=CPU_BATCH,
        teacher=teacher,
        corpus=corpus,
        identity=identity,
        path=path,
        donor=None,
        tokens_of=None,
        imported=config,
    )
    sequences = resolved.sequences(session)
    reader = _VectorReader(
        teacher=teacher,
        states=identity.states,
        masker=None,
        vectors=known.vectors,
        signal=POOLED if dump.pooled else LOGITS,
        sequences=sequences,
    )
    return write_cache(resolved, reader, sequences=sequences, session=session)


_OF_A_DUMP: Final = ("text_column", "prompt", "max_length", "max_tokens", "shard_tokens", "seed")
"""Settings that an import shares with a dump."""


class _AsGiven(SentencePooler):
    """A pooling whose vectors are given, so their width does not follow from the model."""

    def __init__(self, mode: PoolingMode, width: int, *, normalize: bool) -> None:
        super().__init__(mode, normalize=normalize)
        self._width = width

    def width(self, hidden_size: int) -> int:
        """Return the width of the given vectors."""
        del hidden_size
        return self._width


class ImportedTeacher(Teacher):
    """A teacher that is known by its vectors alone; its tokenizer and sizes are those of another model."""

    def __init__(self, name: str, config: ImportConfig, known: TextVectors) -> None:
        """Read the tokenizer and the configuration of a model.

        Args:
            name: name of the teacher for people.
            config: settings of the import.
            known: texts and vectors.

        Raises:
            TeacherError: there is no such model, or it has no tokenizer.
            InvalidConfigError: it has fewer positions than `max_length`.
        """
        source = locate_teacher(config.tokenizer, without_weights=True)
        self.name, self.folder = name, source.folder
        self.device, self.precision, self.layers = torch.device("cpu"), "float32", ()
        self.tokenizer = load_tokenizer(source.folder)
        self.config: PreTrainedConfig = read_config(source.folder)
        self._known, self._mode = known, config.pooling
        refuse_ids_beyond(self.tokenizer, self.config.vocab_size, source.folder)
        check_family_positions(
            self.config,
            self.folder,
            name=config.tokenizer,
            token=self.tokenizer.cls_token_id,
            max_length=config.max_length,
        )

    @property
    def prompts(self) -> Prompts:
        """Nothing: the prompts in the folder are of another model than the one that made the vectors."""
        return Prompts({}, None)

    @cached_property
    def reads_padding(self) -> bool:
        """False: nothing is computed."""
        return False

    def refuse_segments(self, pair: PairTemplate | None) -> None:
        """Refuse nothing: what read the pairs is not known."""

    @property
    def num_classes(self) -> int:
        """Numbers of an answer: one score."""
        return 1

    @property
    def num_layers(self) -> int:
        """Layers of the model whose sizes students are built from."""
        return int(self.config.num_hidden_layers)

    @cached_property
    def identity(self) -> TeacherIdentity:
        """What identifies the teacher: a hash of its vectors, and the sizes of the other model."""
        return TeacherIdentity(
            model_type=self.config.model_type,
            weights_sha256=self._known.sha256,
            config_sha256=canonical_sha256(self._config()),
            num_layers=self.num_layers,
            hidden_size=self.config.hidden_size,
            num_heads=self.config.num_attention_heads,
            vocab_size=self.config.vocab_size,
        )

    def _config(self) -> dict[str, Any]:
        content: Mapping[str, Any] = json.loads(self.config.to_json_string(use_diff=False))
        return {key: value for key, value in content.items() if key not in VOLATILE}

    def refuse_left_padding(self) -> None:
        """Refuse nothing: nothing is computed."""

    def refuse_other_texts(self, max_length: int) -> None:
        """Refuse nothing: vectors are given, whatever their model read of a text."""

    def pooler(self, mode: PoolingMode | None) -> SentencePooler:
        """Return the pooling of students, to vectors of the given width."""
        normalize = self._known.is_normalized
        return _AsGiven(mode or self._mode, self._known.vectors.shape[1], normalize=normalize)


@dataclass(frozen=True, slots=True, kw_only=True)
class _VectorReader(SequenceReader):
    """Looks vectors or scores up by the document of a sequence."""

    vectors: npt.NDArray[np.float32]
    signal: SignalName
    sequences: SequenceTable

    def _unchecked(
        self,
        inputs: Inputs,
        *,
        numbers: Sequence[int],
        layers: Sequence[int],
        wanted: Sequence[SignalName],
        reading: int,
    ) -> tuple[list[LayerRelations], Signals]:
        """Return what is given of sequences; arguments as for a teacher that runs."""
        del inputs, layers, wanted
        documents = [int(self.sequences.read(number, number + 1).documents[0]) for number in numbers]
        return [], Signals(values={self.signal: torch.from_numpy(self.vectors[documents])}, reading=reading)
