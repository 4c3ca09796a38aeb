"""`minilm-cache push`, `pull`, `merge`, `export`, `import`: share caches in a team, and vectors."""

import shlex
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from minilm_cache.cli.console import print_json, print_pairs
from minilm_cache.cli.early import refuse_files, refuse_missing, refuse_no_export
from minilm_cache.cli.interrupt import quiet_session, stoppable_session
from minilm_cache.cli.options import Given, JsonOption, options, out_option
from minilm_cache.cli.tables import fidelity_table
from minilm_cache.dump.config import ImportConfig, refuse_no_file
from minilm_cache.errors import InvalidConfigError
from minilm_cache.settings import cache_home, validated
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store.durable import refuse_existing

StoreArgument = Annotated[
    str, typer.Argument(metavar="STORE", help="s3://, gs://, az:// or hf:// URL, or a folder.")
]


def push(
    cache: Annotated[Path, typer.Argument(metavar="CACHE", help="Folder of the cache.")],
    store: StoreArgument,
    *,
    full: Annotated[
        bool, typer.Option("--full", help="Read files that are already there and replace those that differ.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Copy a complete cache into a store; the same command resumes.

    Files that are already there with the right size are kept. --full also reads them, and repairs a cache
    that is damaged in the store.

    Example: minilm-cache push notes.cache s3://team/caches
    """
    from minilm_cache.store.push import push as run_push  # noqa: PLC0415 - importing it takes seconds

    with stoppable_session() as session:
        done = run_push(cache, store, session=session, full=full)
    _print_shared(
        "url", done.place, manifest=done.manifest, shards=(done.shards_copied, done.shards_kept), json=json
    )
    if not json:
        print_pairs({"next": f"minilm-cache pull {shlex.quote(done.place)}"})


def pull(
    url: Annotated[str, typer.Argument(metavar="URL", help="URL of a cache, as `ls` shows it.")],
    out: Annotated[Path | None, out_option("Folder of the cache. [default: in the cache home]")] = None,
    json: JsonOption = False,
) -> None:
    """Copy a cache from a store, checked; the same command resumes.

    Example: minilm-cache pull s3://team/caches/NAME --out notes.cache
    """
    from minilm_cache.store.pull import pull as run_pull  # noqa: PLC0415 - importing it takes seconds

    refuse_files(out=out)
    name = url.rstrip("/").rsplit("/", 1)[-1]
    if out is None and name in (".", ".."):
        raise InvalidConfigError(f"{url} names no cache by its end. Give --out, the folder of the copy.")
    target = out or cache_home() / "caches" / name
    with stoppable_session() as session:
        done = run_pull(url, target, session=session)
    _print_shared(
        "cache", done.place, manifest=done.manifest, shards=(done.shards_copied, done.shards_kept), json=json
    )


def merge(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the cache, new or begun before.")],
    parts: Annotated[list[Path], typer.Argument(metavar="PART...", help="Folders that dumps have written.")],
    json: JsonOption = False,
) -> None:
    """Join the parts of a cache that several machines have dumped.

    Example: minilm-cache merge whole.cache part0.cache part1.cache
    """
    from minilm_cache.store.merge import merge as run_merge  # noqa: PLC0415 - importing it takes seconds

    refuse_files(OUT=out)
    with stoppable_session() as session:
        done = run_merge(parts, out, session=session)
    if json:
        counts = {"shards_copied": done.shards_copied, "shards_missing": done.shards_missing}
        print_json({"cache": done.path, "shards": done.num_shards, **counts})
        return
    missing, folder = done.shards_missing, shlex.quote(str(done.path))
    state = f"{missing} shards are missing: dump them" if missing else "every shard is there"
    finished_by = f"the dump command with --out {folder} and no --rank finishes it"
    print_pairs(
        {
            "cache": done.path,
            "shards": f"{done.shards_copied} copied, {done.num_shards} in all",
            "state": "complete" if done.is_complete else f"{state}; {finished_by}",
        }
    )


def _print_shared(
    name: str, place: str, *, manifest: CacheManifest, shards: tuple[int, int], json: bool
) -> None:
    """Print what a push or a pull has copied."""
    copied, kept = shards
    if json:
        counts = {"shards_copied": copied, "shards_kept": kept}
        print_json({name: place, "fingerprint": manifest.fingerprint, **counts})
        return
    print_pairs(
        {name: place, "fingerprint": manifest.fingerprint, "shards": f"{copied} copied, {kept} were there"}
    )


def export(
    cache: Annotated[str, typer.Argument(metavar="CACHE", help="Folder or URL of a cache.")],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="Parquet file to write, or with --scores a folder. It must not exist yet."
        ),
    ],
    *,
    scores: Annotated[
        bool, typer.Option("--scores", help="Write a data set of the teacher's scores, with a card.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Write the texts and pooled vectors of a cache to a Parquet file, or its scores as a data set.

    Example: minilm-cache export CACHE vectors.parquet
    """
    refuse_missing(cache=cache)
    refuse_existing(out, "OUT")
    if not scores and out.suffix != ".parquet":
        raise InvalidConfigError(f"{out}: vectors are written as Parquet. Give a name that ends in .parquet.")
    refuse_no_export(cache, scores=scores)
    from minilm_cache.workflows.export import export_scores, export_vectors  # noqa: PLC0415 - it takes seconds

    if scores:
        with quiet_session() as session:
            written = export_scores(cache, out, session=session)
        if json:
            print_json(written)
            return
        upload = f"hf upload NAME {quote(str(written.path))} --repo-type dataset"
        columns = ", ".join(written.columns)
        print_pairs(
            {"folder": written.path, "rows of": columns, "answers": f"{written.num_pairs:,}", "next": upload}
        )
        return
    with quiet_session() as session:
        result = export_vectors(cache, out, session=session)
    if json:
        print_json({"file": result.path, "num_rows": result.num_rows, "width": result.width})
    else:
        print_pairs({"file": result.path, "rows": f"{result.num_rows:,}", "width": result.width})


@options(ImportConfig, leave_out={ImportConfig: ("vectors",)})
def import_file(
    given: Given,
    *,
    vectors: Annotated[
        str, typer.Argument(metavar="FILE", help="Parquet file of texts and vectors, or records of scores.")
    ],
    out: Annotated[Path | None, out_option("Folder of the cache. [default: in the cache home]")] = None,
    json: JsonOption = False,
) -> None:
    """Make a cache of vectors or scores that another model computed.

    Example: minilm-cache import vectors.parquet --tokenizer mini --out CACHE
    """
    config = validated(ImportConfig, {**given, "vectors": vectors})
    has_scores = config.score_columns is not None
    refuse_no_file(config)
    refuse_files(out=out)
    refuse_missing(models=[config.tokenizer])
    from minilm_cache.dump.answers import check_answers  # noqa: PLC0415 - pyarrow takes a while

    check_answers(config)
    from minilm_cache.dump.imported import import_answers  # noqa: PLC0415 - importing it takes seconds

    with quiet_session() as session:
        result = import_answers(config, out=out, session=session)
    manifest = result.manifest
    if json:
        print_json(
            {
                "cache": result.path,
                "fingerprint": manifest.fingerprint,
                "num_sequences": manifest.num_sequences,
                "cut": manifest.cut,
                "measured": manifest.measured,
            }
        )
        return
    cache = quote(str(result.path))
    print_pairs(
        {
            "cache": result.path,
            "pairs" if has_scores else "texts": f"{manifest.num_sequences:,}, {manifest.held_out_in_words}",
            **({"cut off": manifest.cut.in_words} if manifest.cut else {}),
            "next": f"minilm-cache train {cache} --objective {'score' if has_scores else 'embedding'} "
            "--arch 3x384 --init random",
        }
    )
    fidelity_table(manifest)
