"""`minilm-cache chain`: trains students via teacher assistants, in one command."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from minilm_cache.cli.console import print_json, print_notes, print_pairs, print_table
from minilm_cache.cli.early import (
    refuse_files,
    refuse_missing,
    refuse_no_columns,
    refuse_no_layers,
    refuse_no_task_data,
    refuse_no_text,
    refuse_too_long,
    refuse_undivided,
)
from minilm_cache.cli.environment import is_first_process, note_default_corpus
from minilm_cache.cli.evaluate import print_scores
from minilm_cache.cli.interrupt import quiet_session
from minilm_cache.cli.options import (
    EngineOption,
    Given,
    GpusOption,
    JsonOption,
    PresetOption,
    StoreOption,
    check_engine,
    options,
    out_option,
)
from minilm_cache.dump.config import DumpConfig
from minilm_cache.errors import InvalidConfigError
from minilm_cache.settings import cache_home, validated
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.train.config import TrainConfig, describe_preset, refuse_no_beginning, with_preset
from minilm_cache.wording import number_text
from minilm_cache.workflows.config import (
    NOT_OF_A_CHAIN,
    RENAMED,
    ChainConfig,
    TaskStageConfig,
    check_task_stage,
    evaluation_of,
    refuse_lacking,
    refuse_other_objective,
)

if TYPE_CHECKING:
    from minilm_cache.session import Session
    from minilm_cache.workflows.chain import ChainRecord, ChainResult
    from minilm_cache.workflows.chain_plan import Stage

DocumentArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CHAIN.yaml]",
        help="Settings of the chain, as in docs/chains-and-studies.md; options replace what it says.",
    ),
]


_OTHERS: Final = ("CHAIN.yaml", "--preset", "--cache-store", "--engine", "--gpus-per-task", "--dry-run")
"""Options of a chain of assistants that a task stage does not have."""


class _Options(TaskStageConfig, ChainConfig):
    """Options of a chain of assistants, or of a task stage."""


@options(
    _Options,
    DumpConfig,
    TrainConfig,
    leave_out={
        _Options: ("dump", "train"),
        DumpConfig: NOT_OF_A_CHAIN,
        TrainConfig: ("own_labels", "label_column"),  # a chain has no labels, and a task has its own
    },
    rename={DumpConfig: RENAMED},
    may_lack=True,
    common=(
        *("teacher", "corpus", "assistants", "arch", "objective", "preset", "steps", "epochs"),
        *("task", "compare_direct", "device", "out", "dry_run", "json"),
    ),
)
def chain(
    given: Given,
    dump: Given,
    recipe: Given,
    *,
    document: DocumentArgument = None,
    preset: PresetOption = None,
    out: Annotated[Path | None, out_option("Folder of the chain. [default: in the cache home]")] = None,
    cache_store: StoreOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the stages and how far they are.")
    ] = False,
    engine: EngineOption = None,
    gpus_per_task: GpusOption = None,
    json: JsonOption = False,
) -> None:
    """Distil through assistants: dump, train, dump the assistant, train.

    Each stage is an ordinary cache or run in the chain's folder; a complete stage is not done again.

    Example: minilm-cache chain notes.yaml --dry-run

    Example: minilm-cache chain --teacher bert-base --assistant 12x384 --arch 3x384 --compare-direct

    With --task, students of a teacher that was fine-tuned on a task learn its answers to the task's texts.

    Example: minilm-cache chain --task sst2 --data glue --teacher FINE-TUNED --arch 3x384
    """
    check_engine(engine, gpus_per_task)
    if TaskStageConfig.model_fields.keys() & given.keys():
        others = (document, preset, cache_store, engine, gpus_per_task, dry_run or None)
        _task_stage(given, dump, recipe, out=out, json=json, others=dict(zip(_OTHERS, others, strict=True)))
        return
    _refuse_missing(given, dump, recipe, document=document, preset=preset, out=out)
    from minilm_cache.engines.ray_cluster import RayCluster  # noqa: PLC0415 - it takes seconds
    from minilm_cache.workflows import chain_plan as plan  # noqa: PLC0415 - it takes seconds
    from minilm_cache.workflows.chain import preview_chain, run_chain  # noqa: PLC0415 - importing it takes seconds

    config, preset = plan.read_chain(document, chain=given, dump=dump, train=recipe, preset=preset)
    _refuse_unfit(config, document)
    folder = out or plan.chain_folder(config, cache_home())
    with quiet_session() as session:
        _note_settings(config, preset, session)
        if dry_run and is_first_process():
            planned = preview_chain(config, folder, here=engine is None, session=session)
            _show_stages(folder, planned, json=json)
        if dry_run:
            return
        result = run_chain(
            config,
            folder,
            cache_store=cache_store,
            cluster=RayCluster(gpus_per_task) if engine is not None else None,
            session=session,
        )
    if result.is_first:
        _show(result, json=json)


def _refuse_missing(
    given: Given, dump: Given, recipe: Given, *, document: Path | None, preset: str | None, out: Path | None
) -> None:
    """Raise the error of the first thing that is not there, or that is a file where a folder is wanted."""
    refuse_files(out=out)
    assistants = given.get("assistants", ())
    teacher, revision, corpus = (dump.get(name) for name in ("teacher", "revision", "corpus"))
    arch = [*assistants, *recipe.get("arch", ())]
    refuse_missing(teacher=teacher, revision=revision, corpus=corpus, arch=arch, document=document)
    if document is None:
        refuse_lacking(dump=dump, train=recipe, assistants=assistants)
        refuse_other_objective(validated(TrainConfig, with_preset(preset, recipe)))
        refuse_undivided(arch, str(teacher), revision)
    if corpus is not None:
        refuse_no_text(corpus, dump.get("text_column"), dump.get("pair_columns"))
    if teacher is not None and "max_length" in dump:
        refuse_too_long(dump["max_length"], [teacher], revision, is_teacher=True)


def _refuse_unfit(config: ChainConfig, document: Path | None) -> None:
    """Raise InvalidConfigError, with the name of the document, for what the teacher does not have."""
    teacher, revision = config.dump.teacher, config.dump.revision
    try:
        refuse_undivided([*config.assistants, *config.train.arch], teacher, revision)
        refuse_no_layers(config.dump)
        refuse_too_long(config.dump.max_length, [teacher], revision, is_teacher=True)
    except InvalidConfigError as error:
        if document is None:
            raise
        raise InvalidConfigError(f"{document}: {error}") from error


def _note_settings(config: ChainConfig, preset: str | None, session: "Session") -> None:
    if not is_first_process():
        return
    given_corpus = {"corpus": "corpus" in config.dump.model_fields_set}
    note_default_corpus(given_corpus, config.dump.corpus, session)
    if preset is not None:
        session.progress.note(describe_preset(preset, config.train))


def _task_stage(
    given: Given, dump: Given, recipe: Given, *, out: Path | None, json: bool, others: Mapping[str, object]
) -> None:
    own = TaskStageConfig.model_fields
    config = validated(TaskStageConfig, {name: value for name, value in given.items() if name in own})
    check_task_stage(config, chain=given.keys() - own.keys(), dump=dump, train=recipe, others=others)
    refuse_missing(teacher=dump["teacher"], revision=dump.get("revision"))
    refuse_missing(models=[config.augment, config.mine])
    refuse_undivided(recipe["arch"], str(dump["teacher"]), dump.get("revision"))
    if "max_length" in dump:
        refuse_too_long(dump["max_length"], [dump["teacher"]], dump.get("revision"), is_teacher=True)
    refuse_no_beginning(config.student)
    refuse_files(out=out)
    evaluation = evaluation_of(config, {})
    refuse_no_task_data(evaluation.data, evaluation.task)
    refuse_no_columns(evaluation)
    from minilm_cache.workflows.task_stage import run_task_stage  # noqa: PLC0415 - importing it takes seconds

    teacher = Path(str(dump["teacher"])).resolve()
    if teacher.name == "model":  # as evaluate calls the models that it keeps, each in the folder of its trial
        teacher = teacher.parent
    folder = out or cache_home() / "chains" / f"{Path(str(config.task)).stem}-{teacher.name}"
    with quiet_session() as session:
        result = run_task_stage(config, dump=dump, train=recipe, out=folder, session=session)
    if json:
        print_json(
            {
                "chain": result.path,
                "texts": result.num_texts,
                "run": result.run.path,
                "summaries": result.evaluation.summaries,
            }
        )
        return
    print_pairs({"chain": result.path, "students": result.run.path / "students"})
    print_scores(result.evaluation)


def _show(result: "ChainResult", *, json: bool) -> None:
    from minilm_cache.workflows.chain import remarks  # noqa: PLC0415 - importing it takes seconds

    if json:
        print_json({"chain": result.path, **dict(result.record)})
        return
    print_pairs({"chain": result.path, "report": result.path / "report.html"})
    _show_students(result.record)
    for remark in remarks(result.record):
        print_pairs({"gain": remark})
    print_notes(result.record.cautions)


def _show_stages(folder: Path, planned: "Sequence[Stage]", *, json: bool) -> None:
    rows = [
        {
            "does": stage.does,
            "what": ", ".join(stage.arch) or stage.source,
            "path": str(stage.path),
            "state": stage.state(),
        }
        for stage in planned
    ]
    if json:
        print_json({"chain": folder, "stages": rows})
        return
    print_table(
        f"Stages of {folder}", ["does", "what", "folder", "state"], [list(row.values()) for row in rows]
    )


def _show_students(record: "ChainRecord") -> None:
    students = record.students
    ways = Counter((student.arch, student.way) for student in students)
    names = [
        each.arch if ways[each.arch, each.way] == 1 else f"{each.arch}:s{each.seed}" for each in students
    ]
    if any(student.held_out_loss is not None for student in students):
        print_table(
            f"Held-out loss to {record.teacher}",
            ["student", "way", "parameters", "loss"],
            [
                [name, each.way, number_text(each.num_parameters, 0), number_text(each.held_out_loss, 4)]
                for name, each in zip(names, students, strict=True)
            ],
        )
        return
    kinds = next((list(student.held_out_kl) for student in students if student.held_out_kl), [])
    print_table(
        f"KL({record.teacher}, student) on held-out sequences (nats)",
        ["student", "way", "parameters", *kinds, "sum"],
        [
            [
                name,
                student.way,
                number_text(student.num_parameters, 0),
                *_figures(student.held_out_kl, len(kinds) + 1),
            ]
            for name, student in zip(names, students, strict=True)
        ],
    )


def _figures(kls: dict[RelationKind, float] | None, width: int) -> list[str]:
    if kls is None:
        return ["-"] * width
    return [f"{value:.4f}" for value in (*kls.values(), sum(kls.values()))]
