"""What chains, studies, searches and stages of a task share: states of caches and runs, and early checks."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from transformers import PreTrainedConfig

from minilm_cache.cache import Cache
from minilm_cache.dump.config import DumpConfig, StateSettings
from minilm_cache.errors import CacheCorruptError, IdentityMismatchError, InvalidConfigError
from minilm_cache.models.arch import parse_arch
from minilm_cache.models.device import choose_device
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.student import shape_config
from minilm_cache.objectives.base import StudentFacts, check_shape
from minilm_cache.objectives.check import choose_objective
from minilm_cache.objectives.config import split_into
from minilm_cache.settings import asked_vocabulary
from minilm_cache.slicing.source import source_config
from minilm_cache.store.index import committed_shards, read_ranges
from minilm_cache.store.layout import MANIFEST
from minilm_cache.store.reader import read_manifest
from minilm_cache.train.config import RANDOM, TrainConfig, check_batch, refuse_no_tracker, with_first
from minilm_cache.train.folder import is_run
from minilm_cache.train.initial import check_beginning, initial_weights
from minilm_cache.train.record import load_record
from minilm_cache.train.sampler import plan_steps
from minilm_cache.train.setup import refuse_other_texts, student_shapes
from minilm_cache.workflows.config import NOT_OF_A_CHAIN

COMPLETE: Final = "complete"
TO_DO: Final = "to do"


def cache_state(path: Path) -> str:
    """Return `to do`, `unfinished` with the number of shards written, or `complete`.

    Raises:
        MiniLMCacheError: the cache is damaged.
    """
    if not (path / MANIFEST).is_file():
        return TO_DO
    manifest = read_manifest(path)
    if manifest.complete:
        return COMPLETE
    try:
        num_shards = len(read_ranges(path, manifest))
    except CacheCorruptError:  # the dump was killed before it wrote them, and writes them when it resumes
        return "unfinished"
    return f"unfinished: {len(committed_shards(path, num_shards))} of {num_shards} shards"


def run_state(path: Path) -> str:
    """Return `to do`, `unfinished` or `complete`.

    Raises:
        MiniLMCacheError: the run is damaged.
    """
    if not is_run(path):
        return TO_DO
    return COMPLETE if load_record(path).complete else "unfinished"


def refuse_foreign(folder: Path, what: str, *, own: Collection[str] = ()) -> None:
    """Refuse a folder that is not empty and holds nothing of what is to be written into it.

    Args:
        folder: the folder, which need not be there. Names that begin with a dot do not count.
        what: what is to be written, as a noun for the message.
        own: names of files and folders, one of which it has once it was begun.

    Raises:
        IdentityMismatchError: it holds something else.
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    others = sorted(name for name in names if not name.startswith("."))
    if others and names.isdisjoint(own):
        raise IdentityMismatchError(
            f"{folder} is not empty, and holds no {what} ({others[0]}). Choose another --out."
        )


def check_student(
    config: TrainConfig,
    arch: str,
    teacher: PreTrainedConfig,
    *,
    heads: int,
    is_assistant: bool = False,
    here: bool = True,
) -> PreTrainedConfig:
    """Return the configuration of a student, before anything is dumped.

    Args:
        config: settings of its training.
        arch: its shape.
        teacher: configuration of its teacher.
        heads: heads of the teacher's relations.
        is_assistant: whether it is a teacher, too.
        here: whether this machine trains it, so that it must have the model that it is cut from.

    Raises:
        InvalidConfigError: the shape does not fit the teacher's family, cannot begin as it should, or is that
            of an assistant with other heads than its teacher, or cannot learn the objective.
        TeacherError: the model that it is cut from does not exist.
    """
    split = split_into(config.objective, config.relation_heads, heads)
    compares_heads = is_assistant or config.spec.compares_heads
    source = source_config(config.init_teacher if here else None, teacher)
    has_donors_heads = source is not teacher and not compares_heads
    own_heads = source.num_attention_heads if has_donors_heads else heads
    shape = parse_arch(arch, own_heads, split_into=split, compares_heads=compares_heads)
    if shape.num_heads != heads and is_assistant:
        raise InvalidConfigError(
            f"assistant {arch}: an assistant must have its teacher's {heads} heads, so that the same "
            f"students can be trained with and without it. Leave out :h{shape.num_heads}."
        )
    student = shape_config(shape, source.to_dict(), source.model_type)
    if here or config.init_teacher is None:
        check_beginning(config, shape, teacher=teacher, source=source)
    sizes = [StudentFacts.of(each, each.num_hidden_layers) for each in (student, teacher)]
    for each in with_first(config):
        check_shape(each, *sizes)
    return student


def check_training(
    config: TrainConfig, dump: DumpConfig | None = None, *, depth: int = 0, here: bool = True
) -> None:
    """Check what the settings of a training say without its cache, before anything is dumped.

    Args:
        config: settings of the training.
        dump: settings of the dump of its cache. None means that the cache is there, and is asked itself.
        depth: layers of the teacher that is dumped.
        here: whether this machine trains, so that it must have device, tracker and donor.

    Raises:
        InvalidConfigError: settings contradict each other, or need what the cache will not hold, or a device
            that is not there.
        TeacherError: the donor does not exist.
    """
    if here:
        choose_device(config.device)
        refuse_no_tracker(config.tracker)
    elif config.device is not None and ":" in config.device and not config.device.endswith(":0"):
        raise InvalidConfigError(
            f"--device {config.device}: on a cluster each task sees its own GPUs alone. Give cuda, or leave "
            "it out."
        )
    if config.init == RANDOM and config.frozen == "embeddings":
        raise InvalidConfigError(
            "--frozen embeddings goes with weights of the teacher, not with --init random. Leave one out."
        )
    if here and config.init_teacher is not None:
        locate_teacher(config.init_teacher, without_weights=True)
    if here and config.vocab is not None:
        asked_vocabulary(config.vocab)
    if dump is None:
        return
    if config.batches == "by-query" and dump.pair_columns is None:
        raise InvalidConfigError(
            "--batches by-query is for pairs of texts, and single ones are dumped. Leave it out."
        )
    stored = range(depth) if dump.layers == "all" else (depth - 1,) if dump.layers == "last" else dump.layers
    if config.teacher_layer is not None and config.teacher_layer not in stored:
        raise InvalidConfigError(
            f"--teacher-layer {config.teacher_layer}: the dump stores layer {', '.join(map(str, stored))}. "
            "Give one of these, or dump others with --layers."
        )


def check_with_cache(
    trainings: Iterable[TrainConfig], cache: Cache, *, home: Path, num_ranks: int = 1
) -> None:
    """Check trainings against a complete cache, before the first of them trains for hours.

    Args:
        trainings: their settings.
        cache: the cache.
        home: folder of caches, runs and slices.
        num_ranks: processes that train together.

    Raises:
        InvalidConfigError: the cache does not serve one of them, has too few sequences for its batches, or
            students cannot begin or read as they should.
        IdentityMismatchError: the model that they begin with is not the cache's teacher.
        TeacherError: it does not exist.
    """
    for config in trainings:
        check_batch(config, cache.manifest)
        for each in with_first(config):
            objective = choose_objective(each, cache, arch=each.arch, home=home)
        plan_steps(config, cache.reader, num_ranks=num_ranks)
        shapes = student_shapes(config, objective)
        begun = initial_weights(config, cache, shapes=shapes, head=objective.head, home=home)
        refuse_other_texts(cache, objective, begun.tokens)


def assistants_dump(of_teacher: DumpConfig, assistant: Path, *, first: Path, out: Path) -> DumpConfig:
    """Return the settings of an assistant's dump: its teacher's sequences, in the same shards.

    Args:
        of_teacher: settings of the teacher's dump.
        assistant: folder of the assistant.
        first: folder of the teacher's cache.
        out: folder of the cache; one that is complete, and may have been pulled, keeps its shards.
    """
    fields = StateSettings.model_fields
    none = {name: fields[name].default for name in NOT_OF_A_CHAIN & fields.keys() if name != "pooled"}
    shard_tokens = None if cache_state(out) == COMPLETE else read_manifest(first).shard_tokens
    changes = {"teacher": str(assistant), "revision": None, "layers": "last", "shard_tokens": shard_tokens}
    return of_teacher.with_changes(**none, **changes)
