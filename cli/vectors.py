"""`minilm-cache export`, `import`: vectors of texts for other tools, and from them."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from minilm_cache.cli.console import print_json, print_pairs
from minilm_cache.cli.environment import quiet_libraries
from minilm_cache.cli.interrupt import stoppable_session
from minilm_cache.cli.options import Given, JsonOption, options
from minilm_cache.cli.tables import fidelity_table
from minilm_cache.dump.config import ImportConfig
from minilm_cache.settings import validated


def export(
    cache: Annotated[str, typer.Argument(metavar="CACHE", help="Folder or URL of a cache.")],
    out: Annotated[Path, typer.Argument(metavar="FILE", help="Parquet file, which must not exist yet.")],
    json: JsonOption = False,
) -> None:
    """Write the texts and pooled vectors of a cache to a Parquet file.

    Example: minilm-cache export CACHE vectors.parquet
    """
    from minilm_cache.workflows.export import export_vectors  # noqa: PLC0415 - importing it takes seconds

    quiet_libraries()
    with stoppable_session() as session:
        result = export_vectors(cache, out, session=session)
    if json:
        print_json({"file": str(result.path), "num_rows": result.num_rows, "width": result.width})
    else:
        print_pairs({"file": result.path, "rows": f"{result.num_rows:,}", "width": result.width})


@options(ImportConfig, leave_out={ImportConfig: ("vectors",)})
def import_file(
    given: Given,
    *,
    vectors: Annotated[str, typer.Argument(metavar="FILE", help="Parquet file of texts and vectors.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the cache. [default: in the cache home]")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make a cache of texts and vectors that another model computed.

    Example: minilm-cache import vectors.parquet --tokenizer mini --out CACHE
    """
    from minilm_cache.dump.imported import import_vectors  # noqa: PLC0415 - importing it takes seconds

    config = validated(ImportConfig, {**given, "vectors": vectors})
    quiet_libraries()
    with stoppable_session() as session:
        result = import_vectors(config, out=out, session=session)
    manifest = result.manifest
    if json:
        print_json(
            {
                "cache": str(result.path),
                "fingerprint": manifest.fingerprint,
                "num_sequences": manifest.num_sequences,
                "measured": manifest.measured.model_dump(mode="json") if manifest.measured else None,
            }
        )
        return
    cache = quote(str(result.path))
    print_pairs(
        {
            "cache": result.path,
            "texts": f"{manifest.num_sequences:,}, {manifest.held_out_in_words}",
            "next": f"minilm-cache train {cache} --objective embedding --arch 3x384 --init random",
        }
    )
    fidelity_table(manifest)
