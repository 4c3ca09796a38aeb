"""Estimate from a sample what a dump costs and is worth: bytes, fidelity, time, and when it pays.

Each setting is really dumped, over the first tokens of the corpus, and read back. Only the step from the
sample to the whole corpus is modelled.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from minilm_cache.codecs.vectors import split_sample
from minilm_cache.corpus.formats import lines_hint
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.corpus.tokenise import tokenise
from minilm_cache.dump.audit import MAX_SEQUENCES
from minilm_cache.dump.config import MIN_SHARD_TOKENS, DumpConfig
from minilm_cache.dump.fit import MIN_SEQUENCES
from minilm_cache.dump.identity import (
    CALIBRATION_TOKENS,
    STATE_CALIBRATION_TOKENS,
    codec_parameters,
    packing_for,
    text_of,
)
from minilm_cache.dump.reading import batch_size_for
from minilm_cache.dump.run import dump_cache
from minilm_cache.dump.setup import load_teacher
from minilm_cache.dump.shards import COMPILE
from minilm_cache.errors import CorpusError, InterruptedRunError
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.teacher import Teacher, TeacherMemory
from minilm_cache.session import Progress, Session, Silent
from minilm_cache.storage_schema.identity import CodecParameters, codec_words
from minilm_cache.storage_schema.manifest import (
    TEACHER_WEIGHTS,
    CacheManifest,
    CutText,
    LayerFidelity,
    StateFidelity,
)

LEAST_SEQUENCES = 16
"""Fewest sequences of full length in a sample: enough to fit codec `vectors`, check it and hold some out."""
TIMED_BATCHES = 5
"""Forward passes that are timed for the break-even, after a first pass that is not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSetting:
    """Estimated cost and fidelity of one setting."""

    config: DumpConfig
    """The settings that were planned."""
    codec: CodecParameters
    bytes_per_token: float
    """Bytes of shard files per token."""
    total_bytes: int
    """Bytes of all files of a cache of the whole corpus, kept weights included."""
    weights_bytes: int | None
    """Bytes of the teacher's weights that the cache keeps. None means that it keeps none."""
    fidelity: tuple[LayerFidelity, ...]
    states: tuple[StateFidelity, ...]
    """Fidelity of states. Their bytes per token are included in `bytes_per_token`."""
    tokens_per_s: float
    """Tokens of the corpus that are written per second."""
    dump_s: float
    """Seconds that the whole corpus takes, fitting the codec and measuring fidelity included."""
    break_even_epochs: int
    """Student epochs from which on the cache is cheaper than running the teacher during training."""

    @property
    def words(self) -> str:
        """The codec and its settings, in words."""
        return codec_words(self.codec)

    @property
    def worst_kl(self) -> float:
        """Largest KL(teacher || stored) of any relation, nats; infinite where rows are sampled, 0 without."""
        kls = [
            fidelity.kl_teacher_to_stored for layer in self.fidelity for fidelity in layer.relations.values()
        ]
        return max((math.inf if kl is None else kl for kl in kls), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every requested setting, and the choice among them."""

    num_tokens: int
    """Tokens of the whole corpus."""
    num_sequences: int
    """Sequences of the whole corpus."""
    cut: CutText | None
    """What would be missing of texts that are longer than a sequence. None means nothing."""
    sample_tokens: int
    """Tokens of the sample."""
    teacher_tokens_per_s: float
    """Tokens per second of the teacher's forward pass as online training needs it: it stops at the vectors of
    the last layer."""
    memory: TeacherMemory
    """What the teacher takes of the device's memory."""
    settings: tuple[PlannedSetting, ...]

    def best_within(self, max_bytes: int) -> PlannedSetting | None:
        """Return the most faithful setting of at most `max_bytes` bytes. None means that all are larger.

        The smallest KL decides. Among settings whose KL is infinite, because they are sampled or leave
        something out, it is the setting that keeps most bytes. Settings with fewer layers than others are
        left out.
        """
        most = max(len(setting.fidelity) for setting in self.settings)
        whole = [setting for setting in self.settings if len(setting.fidelity) == most]
        fitting = [setting for setting in whole if setting.total_bytes <= max_bytes]
        return min(fitting, key=lambda setting: (setting.worst_kl, -setting.total_bytes), default=None)


def plan(configs: Sequence[DumpConfig], sample_tokens: int, *, session: Session) -> Plan:
    """Dump a sample with each setting, and estimate what the whole corpus would cost.

    Args:
        configs: settings that differ only in their codec.
        sample_tokens: approximate number of tokens of the sample.
        session: its progress shows tokens done. Its `should_stop` is called before each batch; True stops,
            and nothing is kept.

    Raises:
        MiniLMCacheError: see `minilm_cache.errors`.
    """
    first = configs[0]
    teacher = load_teacher(next((config for config in configs if config.layers != "last"), first))
    sequences = _load_sequences(first, teacher, session=session)
    num_tokens = sequences.num_tokens
    batch_size = first.batch_size or batch_size_for(teacher.identity, first.max_length, teacher.device)
    rate = _teacher_rate(teacher, sequences, batch_size)
    sample = min(max(sample_tokens, LEAST_SEQUENCES * first.max_length), num_tokens)
    sample = max(sample, first.max_length)
    settings = []
    num_train = sequences.num_train
    for config in configs:
        if config.codec == "vectors" and num_train < MIN_SEQUENCES:
            session.progress.note(
                f"left out: {codec_words(codec_parameters(config))} is fitted to {MIN_SEQUENCES} training "
                f"sequences at least, and there are {num_train}"
            )
            continue
        if config.codec == "vectors" and (why := teacher.why_no_vectors) is not None:
            session.progress.note(f"left out: {codec_words(codec_parameters(config))}: {why}")
            continue
        session.progress.note(f"sampling {codec_words(codec_parameters(config))}")
        settings.append(_measure(config, sample, sequences=sequences, teacher_rate=rate, session=session))
    if not settings:
        raise CorpusError(
            f"corpus {first.corpus} has {num_train} training sequences, too few for codec vectors, which is "
            f"fitted to {MIN_SEQUENCES} at least. Give more text.{lines_hint(first.corpus, first.documents)}"
        )
    return Plan(
        num_tokens=num_tokens,
        num_sequences=sequences.num_sequences,
        cut=sequences.cut,
        sample_tokens=sample,
        teacher_tokens_per_s=rate,
        memory=teacher.memory,
        settings=tuple(settings),
    )


def _load_sequences(config: DumpConfig, teacher: Teacher, *, session: Session) -> SequenceTable:
    """Return the whole corpus as the sequences of a dump."""
    corpus = text_of(config, teacher, session.home)
    tokens = tokenise(corpus, teacher.tokenizer, session=session)
    return SequenceTable(tokens, packing_for(config, teacher, corpus))


def _measure(
    config: DumpConfig, sample: int, *, sequences: SequenceTable, teacher_rate: float, session: Session
) -> PlannedSetting:
    """Dump a sample of `sample` tokens with one setting, and scale what is measured to the whole corpus."""
    clock = TaskClock(session.progress)
    sampled = config
    if sample < sequences.num_tokens:
        # Several shards, so that writing one while the teacher runs on the next is timed, too.
        shard_tokens = 2 ** max(math.ceil(math.log2(config.max_length)), math.floor(math.log2(sample)) - 3)
        shard_tokens = max(shard_tokens, MIN_SHARD_TOKENS)
        sampled = config.with_changes(max_tokens=sample, shard_tokens=shard_tokens)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cache"
        try:
            manifest = dump_cache(sampled, out=path, session=session.with_progress(clock)).manifest
        except InterruptedRunError:
            raise InterruptedRunError(
                "interrupted: a plan keeps nothing. Run the same command again."
            ) from None
        clock.stop()
        whole = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    measured = manifest.measured
    assert measured is not None
    other_bytes = whole - measured.total_bytes
    num_tokens = sequences.num_tokens
    rate = manifest.num_tokens / clock.seconds["dump"]
    dump_s = num_tokens / rate + _fixed_s(manifest, clock, sequences)
    return PlannedSetting(
        config=config,
        codec=manifest.identity.codec,
        bytes_per_token=measured.bytes_per_token,
        weights_bytes=manifest.files[TEACHER_WEIGHTS].size if config.keep_weights else None,
        total_bytes=round(measured.bytes_per_token * num_tokens) + other_bytes,
        fidelity=measured.fidelity,
        states=measured.states,
        tokens_per_s=rate,
        dump_s=dump_s,
        # n epochs online run the teacher n times; offline they cost one dump. One epoch never pays.
        break_even_epochs=max(2, math.floor(dump_s * teacher_rate / num_tokens) + 1),
    )


def _fixed_s(manifest: CacheManifest, clock: "TaskClock", sequences: SequenceTable) -> float:
    """Return the seconds that compiling, measuring fidelity and fitting take for the whole corpus."""
    assert manifest.measured is not None
    audited = min(max(sequences.num_held_out, 1), MAX_SEQUENCES)
    seconds = clock.seconds["measure fidelity"] * audited / manifest.measured.fidelity_sequences
    seconds += clock.seconds.get(COMPILE, 0)
    if manifest.calibration is None:
        return seconds
    num_train = sequences.num_train
    is_vectors, pooled = bool(manifest.calibration.layers), manifest.identity.pooled
    tokens = CALIBRATION_TOKENS if is_vectors else STATE_CALIBRATION_TOKENS
    num_fitted = math.ceil(tokens * sequences.num_sequences / sequences.num_tokens)
    if pooled is not None:
        num_fitted = max(num_fitted, pooled.calibration_sequences)
    fit, check = split_sample(num_train, num_fitted)
    used = manifest.calibration.num_fitted + manifest.calibration.num_checked
    spent = sum(taken for task, taken in clock.seconds.items() if task.startswith("calibrate"))
    return seconds + spent * (len(fit) + len(check)) / used


class TaskClock(Silent):
    """Times the tasks of a dump."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: str | None = None
        self._started = 0.0
        self.seconds: dict[str, float] = {}
        """Seconds of each task up to the beginning of the next one, its last shard and the fit included."""

    def start(self, task: str, total: int, unit: str) -> None:
        """Begin a task."""
        self.stop()
        self._task = task
        self._started = time.perf_counter()
        self._progress.start(task, total, unit)

    def stop(self) -> None:
        """End the task that began last."""
        if self._task is not None:
            self.seconds[self._task] = time.perf_counter() - self._started

    def advance(self, amount: int, detail: str = "") -> None:
        """Report that units are done."""
        self._progress.advance(amount, detail)


def _teacher_rate(teacher: Teacher, sequences: SequenceTable, batch_size: int) -> float:
    """Return the median tokens per second of the teacher's forward pass up to its last tapped vectors."""
    size = min(batch_size, sequences.num_sequences)
    rows = [torch.from_numpy(row) for row in sequences.read(0, size).ids]
    inputs = Inputs.of(rows, teacher.tokenizer.pad_token_id).paired(sequences.packing.pair)
    times = []
    for _ in range(TIMED_BATCHES + 1):
        started = time.perf_counter()
        teacher.relations(inputs)
        if teacher.device.type == "cuda":
            torch.cuda.synchronize(teacher.device)
        times.append(time.perf_counter() - started)
    return int(inputs.lengths.sum()) / sorted(times[1:])[TIMED_BATCHES // 2]
