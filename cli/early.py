"""Checks of what a command names, before libraries are imported that take seconds.

They raise what the libraries' callers raise later, so that a mistake shows at once.
"""

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from minilm_cache.corpus.beir import look_at_judged
from minilm_cache.corpus.formats import (
    HUB_PREFIX,
    PYTHON_DOCS,
    TEXT,
    corpus_files,
    file_of_records,
    judged_files,
    parts_of_hub_name,
    refuse_other_content,
)
from minilm_cache.deploy.config import ExportModelConfig, no_texts
from minilm_cache.dump.config import DumpConfig
from minilm_cache.errors import InvalidConfigError
from minilm_cache.evaluate.own_data import read_own_data
from minilm_cache.evaluate.settings import EvaluateConfig, RetrievalData, is_own_task, refuse_no_data
from minilm_cache.evaluate.tasks import (
    TASKS,
    GenerationTask,
    SpanTask,
    TextTask,
    file_of,
    named_file,
    task_folder,
)
from minilm_cache.models.arch import (
    layers_for,
    num_layers_of,
    parse_arch,
    read_layers,
    refuse_larger,
    refuse_no_layer,
    refuse_no_state,
)
from minilm_cache.models.decoding import is_of_pairs, read_decoding, refuse_other_sources
from minilm_cache.models.locate import ALIASES, CONFIG, MINI, locate_teacher, refuse_no_config
from minilm_cache.models.outline import Outline, no_reranker, too_long
from minilm_cache.models.prompts import chosen_prompt
from minilm_cache.objectives.config import (
    check_codec,
    check_layers,
    check_logits,
    check_scores,
    check_states,
    split_into,
)
from minilm_cache.settings import SliceConfig, TruncateConfig, asked_vocabulary, option_of
from minilm_cache.storage_schema.identity import CacheIdentity, Truncation
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store.durable import refuse_existing, refuse_file
from minilm_cache.store.layout import (
    MANIFEST,
    refuse_no_answers,
    refuse_no_cache,
    refuse_occupied,
    refuse_other_cache,
)
from minilm_cache.store.urls import is_url, parts_of_url
from minilm_cache.train.config import SLICE, TrainConfig, check_batch, check_parts, refuse_no_beginning
from minilm_cache.train.folder import RunFolder, is_run, refuse_no_models, rounds_of, runs_of
from minilm_cache.train.record import RunIdentity, has_trained_nothing, load_record, refuse_other_run
from minilm_cache.wording import differing_values
from minilm_cache.workflows.config import GenerateConfig
from minilm_cache.workflows.study_source import Source

if TYPE_CHECKING:
    from minilm_cache.workflows.study_spec import Study


_ONNX: Final = ("onnx", "onnxruntime", "onnxscript")
EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "eval": ("nltk", "pytrec_eval", "rouge_score", "sacrebleu", "sklearn", "scipy", "torchmetrics"),
    "sentence-transformers": ("sentence_transformers",),
    "onnx": _ONNX,
    "openvino": (*_ONNX, "nncf", "openvino"),
    "ray": ("ray",),
}
"""Modules of the extras whose lack would else show after torch is imported."""


def refuse_no_extra(*extras: str, for_what: str) -> None:
    """Raise InvalidConfigError if a package of an extra is not installed.

    Args:
        extras: names of extras.
        for_what: command or option that needs them.
    """
    for module in (module for extra in extras for module in EXTRAS[extra]):
        if importlib.util.find_spec(module) is None:
            raise InvalidConfigError(
                f"{for_what} needs {module}, which is not installed: pip install "
                f"'minilm-cache[{','.join(extras)}]'."
            )


def refuse_missing(
    *,
    teacher: str | None = None,
    models: Iterable[str | None] = (),
    revision: str | None = None,
    corpus: str | None = None,
    cache: str | Path | None = None,
    arch: Iterable[str] = (),
    data: Path | None = None,
    document: Path | None = None,
    out: Path | None = None,
) -> None:
    """Raise the error of the first thing that is not there, or of a shape that is none.

    Args:
        teacher: name of a model that must have a configuration. None means that there is no teacher.
        models: names of models, or folders of runs.
        revision: revision of models from the hub. None means the default revision.
        corpus: name of a text. None means that none is read.
        cache: folder of a cache, or its URL, which is not asked. None means that none is read.
        arch: shapes of students.
        data: retrieval data of the user's own. None means that there are none.
        document: document of YAML. None means that there is none.
        out: file or folder that must not exist yet. None means that nothing is asked of it.
    """
    if document is not None:
        Source(document)
    for shape in arch:
        num_layers_of(shape)
    if out is not None:
        refuse_existing(out)
    if cache is not None:
        refuse_no_place(str(cache))
    if data is not None:
        refuse_no_data(data)
    if corpus is not None:
        _refuse_no_corpus(corpus)
    for name in models:
        if name is not None:
            _refuse_no_model(name, revision)
    if teacher is not None:
        refuse_no_config(locate_teacher(teacher, revision, without_weights=True).folder)


def _refuse_no_corpus(corpus: str) -> None:
    if corpus.startswith(HUB_PREFIX):
        parts_of_hub_name(corpus)
    elif corpus != PYTHON_DOCS:
        corpus_files(Path(corpus))


def refuse_files(**folders: Path | None) -> None:
    """Raise InvalidConfigError if a folder, or one of its parents, is a file.

    Args:
        folders: folders by the names of their options, or of arguments in capitals; None where one is not
            given.
    """
    for name, folder in folders.items():
        if folder is not None:
            refuse_file(folder, name if name.isupper() else f"--{name}")


def _refuse_no_model(name: str, revision: str | None) -> None:
    if name not in (MINI, *ALIASES) and Path(name).is_dir():
        refuse_no_models(Path(name))
    else:
        locate_teacher(name, revision, without_weights=True)


def refuse_no_place(cache: str) -> None:
    """Raise the error of a folder that holds no cache, or of a URL that names no store, without asking it."""
    if is_url(cache):
        parts_of_url(cache)
    else:
        refuse_no_cache(Path(cache))


def refuse_no_layers(config: DumpConfig) -> None:
    """Raise InvalidConfigError for layers or hidden states that the teacher's configuration does not have."""
    teacher = Outline.of(config.teacher, config.revision)
    known, name = teacher.num_layers, teacher.name
    if known is None:
        return
    if isinstance(config.layers, tuple):
        refuse_no_layer(config.layers, known, name)
    for option in ("hidden", "masked_hidden", "first_hidden"):
        chosen = getattr(config, option)
        if isinstance(chosen, tuple):
            refuse_no_state(chosen, known, option=option_of(option), teacher=name)


def refuse_no_prompt(config: DumpConfig) -> None:
    """Raise InvalidConfigError for a name of a prompt that the teacher does not have."""
    if config.prompt_name is not None:
        source = locate_teacher(config.teacher, config.revision, without_weights=True)
        chosen_prompt(source.folder, name=config.prompt_name, text=None, has_default=False)


def refuse_undivided(arch: Iterable[str], teacher: str, revision: str | None) -> None:
    """Raise InvalidConfigError for a shape that the heads of a teacher's configuration do not divide."""
    heads = Outline.of(teacher, revision).num_heads
    if heads is not None:
        for shape in arch:
            parse_arch(shape, heads, compares_heads=False)


def refuse_uncut(config: SliceConfig | TruncateConfig) -> None:
    """Raise InvalidConfigError for layers that a teacher does not have, or a shape that is deeper than it."""
    teacher = Outline.of(config.teacher, config.revision)
    if teacher.num_layers is None:
        return
    if isinstance(config, TruncateConfig):
        read_layers(config.layers, teacher.num_layers, "--layers", ascending=False)
    elif teacher.num_heads is not None:
        shape = parse_arch(config.arch, teacher.num_heads, compares_heads=False)
        layers_for(shape, teacher.num_layers, config.layers, option="--layers")
        if teacher.hidden_size is not None and teacher.embedding_size is not None:
            refuse_larger(shape, teacher.hidden_size, teacher.embedding_size)


def refuse_too_long(
    length: int | None,
    models: Iterable[str],
    revision: str | None = None,
    *,
    option: str = "--max-length",
    is_teacher: bool = False,
) -> None:
    """Raise InvalidConfigError if a model's configuration has fewer positions than a sequence.

    Args:
        length: tokens of the sequence. None means that they follow from something else.
        models: names of models, or their folders. Folders of runs are not asked.
        revision: revision of models from the hub. None means the default revision.
        option: option that says the length.
        is_teacher: whether the models are teachers.
    """
    for model in models:
        if length is None or (Path(model).is_dir() and not (Path(model) / CONFIG).is_file()):
            continue
        outline = Outline.of(model, revision)
        name = f"teacher {outline.name}" if is_teacher else outline.name
        if outline.positions is not None and length > outline.positions:
            raise too_long(length, outline.positions, name=name, option=option)


def refuse_too_long_of(config: EvaluateConfig, models: Sequence[str], revision: str | None) -> None:
    """Raise InvalidConfigError if a model has fewer positions than the examples of a task.

    These are as long as `--max-length` says, or else as the task does. Models that learn to generate are
    given further positions.

    Args:
        config: the tasks.
        models: names of models, or their folders.
        revision: revision of models from the hub. None means the default revision.
    """
    from minilm_cache.evaluate.files import task_like  # noqa: PLC0415 - datasets take a second

    tasks = [task_like(name, config) for name in config.task]
    lengths = [config.max_length or task.max_length for task in tasks if not isinstance(task, GenerationTask)]
    refuse_too_long(max(lengths, default=None), models, revision)


def refuse_no_rerankers(models: Iterable[str], revision: str | None) -> None:
    """Raise InvalidConfigError for a model that is no cross-encoder of one score, by its configuration."""
    for model in models:
        if not Path(model).is_dir() or (Path(model) / CONFIG).is_file():
            outline = Outline.of(model, revision)
            if outline.answers != 1:
                raise no_reranker(outline.name, outline.answers)


def refuse_several(name: str) -> None:
    """Raise InvalidConfigError for a run that has trained several students, where one model is wanted."""
    folder = Path(name)
    if not is_run(folder):
        return
    trained = [student.arch for student in load_record(folder).trained]
    if len(trained) > 1:
        raise InvalidConfigError(
            f"{name} is a run of {len(trained)} students. Name the folder of one: "
            f"{RunFolder(path=folder).student(trained[0])}."
        )


def refuse_cache_of_others(config: DumpConfig, out: Path | None) -> None:
    """Raise IdentityMismatchError if a folder has a cache that was dumped with other settings, or no cache.

    What the teacher and the text add to the settings is compared later.
    """
    if out is None or not out.is_dir():
        return
    if not (out / MANIFEST).is_file():
        refuse_occupied(out)
        return
    from minilm_cache.store.reader import read_manifest  # noqa: PLC0415 - pyarrow takes a while

    identity = read_manifest(out).identity
    packing = {name: getattr(config, name) for name in ("max_length", "max_tokens", "seed")}
    there = {name: getattr(identity.packing, name) for name in packing}
    asked = {"codec": {"name": config.codec}, "packing": {"mode": config.packing, **packing}}
    known = {"codec": {"name": identity.codec.name}, "packing": {"mode": identity.packing.mode, **there}}
    refuse_other_cache(out, differing_values(known, asked))


def refuse_no_text(
    corpus: str,
    text_column: str | None,
    pair_columns: str | None = None,
    *,
    truncation: Truncation | None = None,
) -> None:
    """Raise CorpusError if the first file of a corpus lacks a column that is to be read, or is damaged.

    What would cut the queries of its groups differently raises InvalidConfigError.
    """
    if corpus == PYTHON_DOCS or corpus.startswith(HUB_PREFIX):
        return
    files = corpus_files(Path(corpus), pairs=pair_columns is not None)
    if len(files) == 1:
        refuse_other_content(files[0])
    files = [file for file in files if file.suffix not in TEXT and file.stat().st_size]
    if not files:
        return
    from minilm_cache.corpus.records import read_records  # noqa: PLC0415 - pyarrow takes a while

    if pair_columns is None:
        next(read_records(files[0], text_column, "paragraphs"), None)
        return
    from minilm_cache.corpus import pairs  # noqa: PLC0415 - takes a second

    columns = pairs.PairColumns.of(pair_columns).seen_in(*files)
    if columns.are_groups:
        pairs.refuse_uneven_cut(truncation)
    if judged_files(files[0]):
        look_at_judged(files[0])
    else:
        next(pairs.read_pairs(files[0], columns), None)


def refuse_no_columns(config: EvaluateConfig) -> None:
    """Raise CorpusError if a file of a task of the user's own does not exist, is damaged, or lacks a column.

    Options that contradict each other raise InvalidConfigError.
    """
    own = [name for name in config.task if is_own_task(name)]
    if own:
        from minilm_cache.evaluate.files import check_own_columns  # noqa: PLC0415 - datasets take a second

        for name in own:
            check_own_columns(Path(name), config)
            if config.dev is not None:
                check_own_columns(config.dev, config, like=Path(name))


def refuse_no_task_data(data: str | None, names: Iterable[str], *, reads_training: bool = True) -> None:
    """Raise CorpusError if a folder of published files is not there, or lacks a set; the hub is not asked.

    Args:
        data: value of `--data`. None means that there is none.
        names: names of the tasks whose files it has; tasks of one's own are not asked.
        reads_training: whether training sets are read, too.
    """
    if data is None or f"{data}:".startswith(HUB_PREFIX):
        return
    for task in (TASKS[name] for name in names if name in TASKS):
        folder = task_folder(Path(data), task.title)
        if isinstance(task, SpanTask):
            named_file(folder, task.train, task)
        if isinstance(task, TextTask) and task.languages == "one":
            for set_file in task.dev:
                file_of(Path(data), task, set_file, kind="dev")
            if reads_training:
                file_of(Path(data), task, task.train, kind="training")


def refuse_no_sources(config: GenerateConfig, model: str, texts: Sequence[str]) -> None:
    """Raise the error of sources that are not there, or that a model does not generate from.

    Args:
        config: settings of what is generated.
        model: name of the model, or its folder.
        texts: texts that are given beside the settings.
    """
    config.refuse_texts(texts)
    if config.file is not None:
        from minilm_cache.evaluate.files import own_rows  # noqa: PLC0415 - datasets take a second

        next(own_rows(config.file, config.columns, "--text-columns", named="--file "), None)
    folder = locate_teacher(model, config.revision, without_weights=True).folder
    refuse_no_config(folder)
    read_decoding(folder).changed(config, config.max_length)
    is_pair = bool(config.answer) if config.file is None else len(config.columns) > 1
    refuse_other_sources(model, num_texts=2 if is_pair else 1, pairs=is_of_pairs(folder))


def refuse_no_own_data(named: RetrievalData) -> None:
    """Raise CorpusError if retrieval data, or the texts beside them, are damaged or lack something."""
    read_own_data(named)
    if named.beside is not None:
        refuse_no_text(named.beside, named.text_column)


def refuse_no_labels(config: TrainConfig) -> None:
    """Raise CorpusError if the file of labels does not exist, is damaged, or lacks the column."""
    if config.own_labels is None:
        return
    file = file_of_records(config.own_labels, "--own-labels")
    from minilm_cache.corpus.records import read_rows  # noqa: PLC0415 - pyarrow takes a while

    next(read_rows(file, (config.label_column,), "--label-column"), None)


def refuse_run_of_others(config: TrainConfig, out: Path | None) -> None:
    """Raise IdentityMismatchError if a folder has a run that was trained with other settings.

    What the cache and this machine add to the settings is compared later.
    """
    if out is None or not is_run(out):
        return
    record = load_record(out)
    if not has_trained_nothing(out, record):
        refuse_other_run(out, record, RunIdentity.settings_of(config))


def refuse_unserved(config: TrainConfig, cache: str | Path, *, has_shapes: bool = True) -> None:
    """Raise InvalidConfigError for what the manifest of a cache says that it cannot serve.

    Args:
        config: settings of the training.
        cache: folder or URL of the cache.
        has_shapes: whether the shapes are those that will be trained.
    """
    refuse_no_beginning(config.init)
    check_parts(config)
    if config.vocab is not None:
        asked_vocabulary(config.vocab)
    if config.init_teacher is not None:
        Outline.of(config.init_teacher)
    manifest = _manifest_of(str(cache))
    identity = manifest.identity
    check_batch(config, manifest)
    _refuse_lacking_of(config, identity)
    if config.teacher_layer is not None and (config.spec.is_relational or config.spec.needs.vectors):
        wanted, codec = (config.teacher_layer,), identity.codec.name
        check_layers(config, wanted, held=identity.layers, codec=codec, place=str(cache))
    if has_shapes and config.init_teacher is None:  # shapes of a donor have its heads
        split = split_into(config.objective, config.relation_heads, identity.relation_heads)
        for arch in config.arch:
            compares = config.spec.compares_heads
            shape = parse_arch(arch, identity.relation_heads, split_into=split, compares_heads=compares)
            if config.init == SLICE or config.init_layers is not None:
                layers_for(shape, identity.teacher.num_layers, config.init_layers)
            if config.init == SLICE and shape.embedding_size == shape.hidden_size:
                refuse_larger(shape, identity.teacher.hidden_size, identity.teacher.hidden_size)


def _refuse_lacking_of(config: TrainConfig, identity: CacheIdentity) -> None:
    """Raise InvalidConfigError for an objective that needs what a cache does not hold."""
    for each in config.each:
        check_codec(each, identity.codec.name)
        check_states(each, identity.states)
        check_scores(each, identity)
        check_logits(each, identity.states)


def refuse_no_export(cache: str, *, scores: bool) -> None:
    """Raise InvalidConfigError if a cache has no vectors, or no scores, to export."""
    refuse_no_answers(cache, _manifest_of(cache).identity, scores=scores)


def _manifest_of(cache: str) -> CacheManifest:
    """Return the manifest of a cache, read from its folder or its store."""
    if is_url(cache):
        from minilm_cache.store.catalogue import named_manifest  # noqa: PLC0415 - libraries of stores
        from minilm_cache.store.remote import open_store  # noqa: PLC0415 - take half a second

        return named_manifest(open_store(cache))
    from minilm_cache.store.reader import read_manifest  # noqa: PLC0415 - pyarrow takes a while

    return read_manifest(Path(cache))


def refuse_no_texts(config: ExportModelConfig, model: str) -> None:
    """Raise the error of texts that an export needs and lacks: of the run, a corpus or a cache."""
    if config.corpus is None:
        if not Path(model).is_dir():  # folders may be students, or what was exported before
            raise no_texts(model)
    elif is_url(config.corpus) or (Path(config.corpus) / MANIFEST).is_file():
        refuse_missing(cache=config.corpus)
    else:
        refuse_no_text(config.corpus, config.text_column, config.pair_columns)


def refuse_unfit(study: "Study", *, here: bool) -> None:
    """Raise InvalidConfigError, at its line, for what a study names and lacks, or a shape that does not fit.

    Looked at are texts, the data of tasks, labels, and what the caches hold that it takes as they are.

    Args:
        study: the study.
        here: whether this machine dumps, so that it must have the text.
    """
    if study.evaluation is not None:
        with study.located(("evaluate",)):
            refuse_no_task_data(study.evaluation.data, study.evaluation.task)
            refuse_no_columns(study.evaluation)
            if study.teacher is not None:
                name, revision = study.teacher
                refuse_too_long_of(study.evaluation, [name], revision)
    for name, cache in study.caches.items():
        configs = [planned.config for planned in study.passes if planned.cache == name]
        identity = None if isinstance(cache, DumpConfig) else _manifest_of(cache).identity
        with study.located(("objective",)):
            for config in configs:
                refuse_no_labels(config)
                if identity is not None:
                    _refuse_lacking_of(config, identity)
        heads = None if identity is None else identity.relation_heads
        if isinstance(cache, DumpConfig):
            with study.located(_of_cache(study, name, "teacher")):
                heads = Outline.of(cache.teacher, cache.revision).num_heads
            with study.located(_of_cache(study, name, "layers")):
                refuse_no_layers(cache)
            with study.located(_of_cache(study, name, "max_length")):
                refuse_too_long(cache.max_length, [cache.teacher], cache.revision, is_teacher=True)
            with study.located(_of_cache(study, name, "prompt_name")):
                refuse_no_prompt(cache)
            if here:
                _refuse_no_text_of(study, name, cache)
        if heads is not None:
            _refuse_undivided_of(study, configs, heads)


def _of_cache(study: "Study", name: str, key: str) -> tuple[str, ...]:
    """Return where the document has a setting of a cache: its own, or the one that all caches share."""
    own = ("caches", name, key)
    return own if study.source.holds(own) else ("dump", key)


def _refuse_no_text_of(study: "Study", name: str, cache: DumpConfig) -> None:
    with study.located(_of_cache(study, name, "corpus")):
        refuse_missing(corpus=cache.corpus)
        refuse_no_text(cache.corpus, cache.text_column, cache.pair_columns)


def _refuse_undivided_of(study: "Study", configs: Iterable[TrainConfig], heads: int) -> None:
    for config in configs:
        if config.init_teacher is not None:  # shapes of a donor have its heads
            continue
        split = split_into(config.objective, config.relation_heads, heads)
        for arch in config.arch:
            try:
                parse_arch(arch, heads, split_into=split, compares_heads=config.spec.compares_heads)
            except InvalidConfigError as error:
                study.refuse_arch(arch, str(error))


def refuse_no_runs(folders: Iterable[Path]) -> None:
    """Raise the error of the first folder that holds neither a run nor a chain, a study or a search."""
    for folder in folders:
        if not is_run(folder) and not runs_of(folder) and not rounds_of(folder):
            load_record(folder.resolve())
