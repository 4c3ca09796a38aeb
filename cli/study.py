"""`minilm-cache study`: trains many students and compares them in one table and one page."""

from pathlib import Path
from typing import Annotated

import typer

from minilm_cache.cli.console import TerminalProgress, print_json, print_pairs
from minilm_cache.cli.environment import home, quiet_libraries
from minilm_cache.cli.interrupt import stop_on_signal
from minilm_cache.cli.options import JsonOption
from minilm_cache.cli.tables import print_summary


def study(
    document: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="What to compare; see the README.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the study [default: next to the document, named after it]")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Train shapes x objectives x caches x seeds, and write one table and one page.

    Caches and runs are ordinary ones in the study's folder; complete ones are not made again. All shapes of
    one cache, objective and seed are trained in one pass.

    Example: minilm-cache study shapes.yaml
    """
    from minilm_cache.workflows.study import run_study  # noqa: PLC0415 - importing it takes seconds
    from minilm_cache.workflows.study_spec import read_study  # noqa: PLC0415 - importing it takes seconds

    quiet_libraries()
    settings = read_study(document)
    folder = out or (
        document.with_suffix("") if document.suffix else document.with_name(f"{document.name}-study")
    )
    with TerminalProgress().shown() as progress, stop_on_signal() as should_stop:
        result = run_study(settings, folder, home=home(), progress=progress, should_stop=should_stop)
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
