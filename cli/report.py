"""`minilm-cache report`: writes a page about runs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minilm_cache.cli.console import print_json, print_pairs
from minilm_cache.cli.environment import quiet_libraries
from minilm_cache.cli.interrupt import shown_session
from minilm_cache.cli.options import Given, JsonOption, options
from minilm_cache.cli.tables import print_summary
from minilm_cache.report.config import ReportConfig
from minilm_cache.settings import validated

if TYPE_CHECKING:
    from minilm_cache.report.similarity import LayerSimilarity


@options(ReportConfig)
def report(
    given: Given,
    *,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, chains or studies.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File of the page.")] = Path("report.html"),
    json: JsonOption = False,
) -> None:
    """Write one page about runs: curves, sizes, attention maps, layers.

    Example: minilm-cache report RUN --teacher mini --text "The cat sat on the mat."
    """
    config = validated(ReportConfig, given)

    from minilm_cache.report.run import report_runs  # noqa: PLC0415 - importing it takes seconds
    from minilm_cache.report.tables import summary_table  # noqa: PLC0415 - importing it takes seconds

    quiet_libraries()
    with shown_session() as session:
        result = report_runs(runs, config, out=out, session=session)
    page = result.report
    if json:
        print_json(
            {
                "report": str(page.path),
                "num_bytes": page.num_bytes,
                "students": result.students.to_pylist(),
                "similarity": [_as_json(layers) for layers in page.similarity],
                "agreement": [asdict(relation) for relation in page.agreement],
            }
        )
        return
    print_pairs({"report": page.path, "bytes": f"{page.num_bytes:,}"})
    print_summary(summary_table(result.students))


def _as_json(layers: "LayerSimilarity") -> dict[str, Any]:
    return {
        "student": layers.student,
        "num_tokens": layers.num_tokens,
        "cka": layers.cka.tolist(),
        "svcca": layers.svcca.tolist(),
    }
