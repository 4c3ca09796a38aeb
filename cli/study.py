"""`minilm-cache study`: trains many students and compares them in one table and one page."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minilm_cache.cli.console import print_json, print_notes, print_pairs, print_table
from minilm_cache.cli.early import refuse_files, refuse_unfit
from minilm_cache.cli.evaluate import document_of, print_scores
from minilm_cache.cli.interrupt import quiet_session
from minilm_cache.cli.options import EngineOption, GpusOption, JsonOption, check_engine, out_option
from minilm_cache.cli.tables import print_summary
from minilm_cache.wording import counted

if TYPE_CHECKING:
    from minilm_cache.workflows.study import StudyResult
    from minilm_cache.workflows.study_pass import Pass
    from minilm_cache.workflows.study_spec import Study


def study(
    document: Annotated[
        Path, typer.Argument(metavar="STUDY.yaml", help="What to compare, as in docs/chains-and-studies.md.")
    ],
    out: Annotated[
        Path | None, out_option("Folder of the study. [default: next to the document, named after it]")
    ] = None,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the document, and show what is to be made; make nothing.")
    ] = False,
    engine: EngineOption = None,
    gpus_per_task: GpusOption = None,
    json: JsonOption = False,
) -> None:
    """Train shapes x objectives x caches x seeds; write a table and a page.

    Caches and runs are ordinary ones in the study's folder; complete ones are not made again. All shapes of
    one cache, objective and seed are trained in one pass.

    Example: minilm-cache study shapes.yaml
    """
    check_engine(engine, gpus_per_task)
    refuse_files(out=out)
    from minilm_cache.workflows.study_spec import read_study  # noqa: PLC0415 - it takes half a second

    settings = read_study(document)
    refuse_unfit(settings, here=engine is None)
    from minilm_cache.engines.ray_cluster import RayCluster  # noqa: PLC0415 - it takes seconds
    from minilm_cache.workflows.study import run_study  # noqa: PLC0415 - importing it takes seconds

    folder = out or (
        document.with_suffix("") if document.suffix else document.with_name(f"{document.name}-study")
    )
    if dry_run:
        _preview(settings, folder, here=engine is None, json=json)
        return
    with quiet_session() as session:
        result = run_study(
            settings,
            folder,
            cluster=RayCluster(gpus_per_task) if engine is not None else None,
            session=session,
        )
    _show(result, json=json)


def _show(result: "StudyResult", *, json: bool) -> None:
    if json:
        print_json(
            {
                "study": str(result.path),
                "report": str(result.report),
                "students": result.students.to_pylist(),
                "summary": result.summary.to_pylist(),
                "diverged": result.diverged,
                "cautions": result.cautions,
                **({} if result.evaluation is None else {"scores": document_of(result.evaluation)}),
            }
        )
        return
    print_pairs({"study": result.path, "report": result.report, "table": result.path / "students.parquet"})
    if result.diverged:
        print_pairs({"diverged": ", ".join(result.diverged)})
    print_summary(result.summary)
    print_notes(result.cautions)
    if result.evaluation is not None:
        print_scores(result.evaluation)


def _documents(passes: "Iterable[tuple[Pass, str]]") -> list[dict[str, Any]]:
    return [
        {"pass": planned.name, "cache": planned.cache, "students": planned.config.arch, "state": state}
        for planned, state in passes
    ]


def _preview(study: "Study", folder: Path, *, here: bool, json: bool) -> None:
    """Print which caches and passes of a study are there, and which are to be made."""
    from minilm_cache.workflows.study_preview import preview_study  # noqa: PLC0415 - it takes seconds

    with quiet_session() as session:
        preview = preview_study(study, folder, session, here=here)
    if json:
        document = {"assistants": _documents(preview.assistants), "passes": _documents(preview.passes)}
        print_json(
            {"study": folder, "caches": preview.caches, **document, "fine_tunings": preview.num_trials}
        )
        return
    print_table(f"Caches of {folder}", ["cache", "state"], list(map(list, preview.caches.items())))
    rows = [
        [planned.name, ", ".join(planned.config.arch), planned.config.objective, state]
        for planned, state in (*preview.assistants, *preview.passes)
    ]
    passes_in_words = "1 pass trains" if len(rows) == 1 else f"{len(rows)} passes train"
    trained = [counted(preview.num_students, "student")]
    if preview.assistants:
        trained.append(counted(len(preview.assistants), "assistant"))
    title = f"{passes_in_words} {' and '.join(trained)}"
    print_table(title, ["pass", "students", "objective", "state"], rows)
    if study.evaluation is not None:
        tasks = ", ".join(Path(task).name for task in study.evaluation.task)
        models = " and ".join([", ".join(["the teacher", *trained[1:]]), trained[0]])
        each = ", for each language that one trains on" if "xnli-translate-train" in tasks else ""
        then = f"{counted(preview.num_trials, 'fine-tuning')} of {models} on {tasks}{each}"
        print_pairs({"then": f"{then}; those that are finished are not done again"})
