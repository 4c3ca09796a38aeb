"""`minilm-cache chain`: trains students via teacher assistants, in one command."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minilm_cache.cli.console import print_json, print_pairs, print_table
from minilm_cache.cli.environment import is_first_process, note_default_corpus, quiet_libraries
from minilm_cache.cli.interrupt import stoppable_session
from minilm_cache.cli.options import (
    EngineOption,
    Given,
    GpusOption,
    JsonOption,
    PresetOption,
    StoreOption,
    check_engine,
    options,
)
from minilm_cache.dump.config import DumpConfig
from minilm_cache.settings import cache_home
from minilm_cache.storage_schema.identity import RelationKind
from minilm_cache.train.config import TrainConfig, describe_preset
from minilm_cache.wording import number_text
from minilm_cache.workflows.config import NOT_OF_A_CHAIN, ChainConfig

if TYPE_CHECKING:
    from minilm_cache.workflows.chain import ChainRecord, ChainResult
    from minilm_cache.workflows.chain_plan import Stage

DocumentArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CHAIN.yaml]",
        help="Settings of the chain, as in docs/chains-and-studies.md; options replace what it says.",
    ),
]


@options(
    ChainConfig,
    DumpConfig,
    TrainConfig,
    leave_out={ChainConfig: ("dump", "train"), DumpConfig: NOT_OF_A_CHAIN},
    rename={DumpConfig: {"batch_size": "dump_batch_size", "precision": "dump_precision"}},
    may_lack=True,
    common=(
        *("teacher", "corpus", "max_tokens", "assistants", "arch", "objective", "preset", "steps", "epochs"),
        *("compare_direct", "device", "out", "dry_run", "json"),
    ),
)
def chain(
    given: Given,
    dump: Given,
    recipe: Given,
    *,
    document: DocumentArgument = None,
    preset: PresetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the chain. [default: in the cache home]")
    ] = None,
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
    """
    from minilm_cache.engines.ray_cluster import RayCluster  # noqa: PLC0415 - it takes seconds
    from minilm_cache.workflows import chain_plan as plan  # noqa: PLC0415 - it takes seconds
    from minilm_cache.workflows.chain import run_chain  # noqa: PLC0415 - importing it takes seconds

    config, preset = plan.read_chain(document, chain=given, dump=dump, train=recipe, preset=preset)
    check_engine(engine, gpus_per_task)
    quiet_libraries()
    folder = out or plan.chain_folder(config, cache_home())
    with stoppable_session() as session:
        if is_first_process():
            given_corpus = {"corpus": "corpus" in config.dump.model_fields_set}
            note_default_corpus(given_corpus, config.dump.corpus, session)
            if preset is not None:
                session.progress.note(describe_preset(preset, config.train))
        if dry_run and not is_first_process():
            return
        if dry_run:
            config = plan.check_chain(config, folder, here=engine is None)
            _show_stages(folder, plan.stages(config, folder), json=json)
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


def _show(result: "ChainResult", *, json: bool) -> None:
    from minilm_cache.workflows.chain import remarks  # noqa: PLC0415 - importing it takes seconds

    if json:
        print_json({"chain": str(result.path), **result.record.model_dump(mode="json")})
        return
    print_pairs({"chain": result.path, "report": result.path / "report.html"})
    _show_students(result.record)
    for remark in remarks(result.record.gains):
        print_pairs({"gain": remark})


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
        print_json({"chain": str(folder), "stages": rows})
        return
    print_table(
        f"Stages of {folder}", ["does", "what", "folder", "state"], [list(row.values()) for row in rows]
    )


def _show_students(record: "ChainRecord") -> None:
    students = record.students
    kinds = next((list(student.held_out_kl) for student in students if student.held_out_kl), [])
    print_table(
        f"KL({record.teacher}, student) on held-out sequences (nats)",
        ["student", "way", "parameters", *kinds, "sum"],
        [
            [
                student.arch,
                student.way,
                number_text(student.num_parameters, 0),
                *_figures(student.held_out_kl, len(kinds) + 1),
            ]
            for student in students
        ],
    )


def _figures(kls: dict[RelationKind, float] | None, width: int) -> list[str]:
    if kls is None:
        return ["-"] * width
    return [f"{value:.4f}" for value in (*kls.values(), sum(kls.values()))]
