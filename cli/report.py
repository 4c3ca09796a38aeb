"""`minilm-cache report` and `minilm-cache study`: tables for terminals, a page for people."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minilm_cache.cli.console import TerminalProgress, print_json, print_pairs, print_table
from minilm_cache.cli.interrupt import stop_on_signal
from minilm_cache.cli.options import DeviceOption, JsonOption, home, quiet_libraries
from minilm_cache.wording import number_text

if TYPE_CHECKING:
    import pyarrow as pa

    from minilm_cache.report.similarity import LayerSimilarity


def study(
    document: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="What to compare; see the README")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the study [default: beside the document, named after it]")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Train shapes x objectives x caches x seeds, and write one table and one page.

    Caches and runs are ordinary ones in the study's folder; complete ones are not done again. Shapes of one
    cache, objective and seed train in one pass.

    Example: minilm-cache study shapes.yaml
    """
    from minilm_cache.study.run import run_study  # noqa: PLC0415 - importing it takes seconds
    from minilm_cache.study.spec import read_study  # noqa: PLC0415 - likewise

    quiet_libraries()
    wanted = read_study(document)
    folder = out or (
        document.with_suffix("") if document.suffix else document.with_name(f"{document.name}-study")
    )
    with TerminalProgress().shown() as progress, stop_on_signal() as should_stop:
        result = run_study(wanted, folder, home(), progress=progress, should_stop=should_stop)
    if json:
        print_json(
            {
                "study": str(result.path),
                "report": str(result.report),
                "students": result.students.to_pylist(),
                "summary": result.summary.to_pylist(),
            }
        )
        return
    print_pairs({"study": result.path, "report": result.report, "table": result.path / "students.parquet"})
    print_summary(result.summary)


def report(  # noqa: PLR0913 - one parameter for each option
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, chains or studies")],
    out: Annotated[Path, typer.Option(help="File of the page")] = Path("report.html"),
    teacher: Annotated[
        str | None,
        typer.Option(
            help="Run the teacher, too: exact KLs, maps of every layer, similarity of layers "
            "[default: what the caches hold]"
        ),
    ] = None,
    sequence: Annotated[
        list[int] | None,
        typer.Option(help="Held-out sequence whose attention maps are shown; may be repeated [default: 0]"),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="Text of your own, with --teacher; may be repeated")
    ] = None,
    cache: Annotated[
        str | None, typer.Option(help="Folder or URL of the runs' cache [default: where it was]")
    ] = None,
    title: Annotated[str, typer.Option(help="Of the page")] = "Distilled students",
    paths: Annotated[
        bool, typer.Option("--paths", help="Show whole paths of folders, not their names alone")
    ] = False,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Write one self-contained page about runs: curves, trade-offs, attention maps, similarity of layers.

    Example: minilm-cache report RUN --teacher mini --text "The cat sat on the mat."
    """
    from minilm_cache.device import choose_device  # noqa: PLC0415 - importing it takes seconds
    from minilm_cache.dump.teacher import Teacher  # noqa: PLC0415 - likewise
    from minilm_cache.pretrained import locate_teacher  # noqa: PLC0415 - likewise
    from minilm_cache.report.maps import Wanted  # noqa: PLC0415 - likewise
    from minilm_cache.report.page import check_page, write_report  # noqa: PLC0415 - likewise
    from minilm_cache.results import students_table, summary_table  # noqa: PLC0415 - likewise
    from minilm_cache.runs import open_runs  # noqa: PLC0415 - likewise

    quiet_libraries()
    chosen = Wanted(sequences=tuple(sequence or ()), texts=tuple(text or ()))
    wanted = chosen if sequence or text else None
    check_page(out, wanted, has_teacher=teacher is not None)
    with TerminalProgress().shown() as progress:
        folders = dict.fromkeys(path.resolve() for path in runs)
        opened = [one for folder in folders for one in open_runs(folder, cache, home())]
        live = None if teacher is None else Teacher(locate_teacher(teacher), choose_device(device))
        progress.note(f"measuring {sum(len(one.students) for one in opened)} students")
        students = students_table(opened, live, device=device)
        made = write_report(out, opened, students, teacher=live, wanted=wanted, title=title, paths=paths)
    if json:
        print_json(
            {
                "report": str(made.path),
                "num_bytes": made.num_bytes,
                "students": students.to_pylist(),
                "similarity": [_as_json(one) for one in made.similarity],
                "agreement": [asdict(one) for one in made.agreement],
            }
        )
        return
    print_pairs({"report": made.path, "bytes": f"{made.num_bytes:,}"})
    print_summary(summary_table(students))


def _as_json(found: "LayerSimilarity") -> dict[str, Any]:
    return {
        "student": found.student,
        "num_tokens": found.num_tokens,
        "cka": found.cka.tolist(),
        "svcca": found.svcca.tolist(),
    }


def print_summary(summary: "pa.Table") -> None:
    """Print means over seeds, as `results.summary_table` gives them."""
    measured = [
        name.removesuffix("_stddev")
        for name in summary.column_names
        if name.endswith("_stddev") and summary[name.removesuffix("_stddev")].null_count < len(summary)
    ]
    print_table(
        "KL on held-out sequences, nats, mean over seeds +- standard deviation; "
        "seconds are a student's share of its pass",
        [
            *("cache", "objective", "student", "parameters", "layers'", "MFLOPs/token", "speed"),
            *("KL to", *map(_heading, measured)),
            *("seeds", "bytes of pass", "seconds", "cost"),
        ],
        [_cells(row, measured) for row in summary.to_pylist()],
    )


def _heading(column: str) -> str:
    return "masked tokens as the teacher" if column == "masked_agreement" else f"KL, {column[3:]}"


def _cells(row: dict[str, Any], measured: list[str]) -> list[str]:
    flops = row["flops_per_token"]
    kls = []
    for column in measured:
        spread = row[f"{column}_stddev"]
        kls.append(number_text(row[column]) + ("" if spread is None else f" +- {spread:.4f}"))
    return [
        *(row["cache"], row["objective"], row["arch"]),
        *(number_text(row[name], 0) for name in ("num_parameters", "transformer_parameters")),
        number_text(None if flops is None else flops / 1e6, 1),
        *(number_text(row["speedup"], 1), row["kl_to"]),
        *kls,
        str(row["seeds"]),
        number_text(row["bytes_read"], 0),
        number_text(row["own_train_s"], 1),
        number_text(row["cost"]),
    ]
