"""`minilm-cache ls` and `rm`: list and remove caches and runs."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from minilm_cache.cli.console import TerminalProgress, print_json, print_table
from minilm_cache.cli.options import JsonOption
from minilm_cache.dump.fidelity import kl_infinite_because
from minilm_cache.errors import CacheNotFoundError, InvalidConfigError, MiniLMCacheError
from minilm_cache.settings import cache_home
from minilm_cache.storage_schema.manifest import CacheManifest
from minilm_cache.store.urls import is_url

if TYPE_CHECKING:
    from minilm_cache.store.catalogue import CatalogueEntry


def ls(
    store: Annotated[
        str | None, typer.Argument(metavar="[STORE]", help="URL or folder. [default: MINILM_CACHE_HOME]")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the caches and runs of this machine, of a folder, chain or study, or the caches of a store.

    Example: minilm-cache ls s3://team/caches
    """
    from minilm_cache.store.catalogue import catalogue  # noqa: PLC0415 - importing it takes seconds

    place = store or str(cache_home() / "caches")
    is_remote = is_url(place)
    path = "" if store is None else store.removeprefix("file://")
    folder = Path(path).expanduser() if path != store else Path(path)  # as fsspec reads URLs
    if path and not is_url(path) and not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise CacheNotFoundError(f"{store} {problem}. Give the URL or the folder of a store.")
    runs_place = cache_home() / "runs" if store is None else folder
    if path and not is_remote and ((folder / "caches").is_dir() or (folder / "runs").is_dir()):
        place, runs_place = str(folder / "caches"), folder / "runs"  # a home, a chain or a study
    entries = catalogue(place)
    runs = [] if is_remote else _runs(runs_place)
    if json:
        caches = [{"url": entry.url, "problem": entry.problem, **_described(entry)} for entry in entries]
        print_json({"store": place, "caches": caches} | ({} if is_remote else {"runs": runs}))
        return
    if entries:
        _print_caches(place, entries)
    else:
        TerminalProgress().note(f"no cache in {place}; `minilm-cache ls FOLDER` lists another folder")
    if runs:
        _print_runs(runs_place, runs)


def _described(entry: "CatalogueEntry") -> dict[str, Any]:
    """Return what describes a complete cache."""
    manifest = entry.manifest
    if manifest is None:
        return {}
    measured = manifest.measured
    assert measured is not None
    return {
        "teacher": manifest.labels.teacher,
        "corpus": manifest.labels.corpus,
        "codec": manifest.identity.codec.name,
        "layers": manifest.identity.layers,
        "tokens": manifest.num_tokens,
        "bytes": measured.total_bytes,
        "kl_teacher_to_stored": _kls(manifest),
        "kl_infinite_because": kl_infinite_because(manifest),
        "fingerprint": manifest.fingerprint,
    }


def _kls(manifest: CacheManifest) -> dict[str, float | None]:
    """Return KL(teacher || stored) of the last stored layer, nats, by relation; empty for pooled vectors.

    A value is None where the KL is infinite.
    """
    assert manifest.measured is not None
    fidelity = manifest.measured.fidelity[-1:]
    return {kind: kls.kl_teacher_to_stored for layer in fidelity for kind, kls in layer.relations.items()}


def _runs(folder: Path) -> list[dict[str, Any]]:
    """Return what describes the runs below a folder."""
    from minilm_cache.train.folder import runs_in  # noqa: PLC0415 - importing it takes seconds
    from minilm_cache.train.record import load_record  # noqa: PLC0415 - with it

    described: list[dict[str, Any]] = []
    for run in runs_in(folder):
        try:
            record = load_record(run)
        except MiniLMCacheError as error:
            described.append({"run": str(run), "problem": str(error)})
            continue
        described.append(
            {
                "run": str(run),
                "problem": None,
                "students": [student.arch for student in record.students],
                "objective": record.identity.objective,
                "steps": record.identity.steps,
                "complete": record.complete,
                "cache": record.cache,
            }
        )
    return described


def _print_caches(place: str, entries: "Sequence[CatalogueEntry]") -> None:
    rows = []
    for entry in entries:
        name = entry.url if is_url(place) else Path(entry.url).name  # `pull` takes the URL
        if entry.manifest is None:
            rows.append([name, "-", "-", str(entry.problem)])
            continue
        described = _described(entry)
        kls = [kl for kl in described["kl_teacher_to_stored"].values() if kl is not None]
        fidelity = described["kl_infinite_because"] or " / ".join(f"{kl:.4f}" for kl in kls) or "no relations"
        rows.append([name, f"{described['tokens']:,}", decimal(described["bytes"]), fidelity])
    columns = ["cache", "tokens", "size of shards", "KL(teacher, stored), nats"]
    print_table(f"Caches in {place}", columns, rows)


def _print_runs(place: Path, runs: Sequence[dict[str, Any]]) -> None:
    rows = []
    for run in runs:
        described = ["-", "-", run["problem"]]
        if not run["problem"]:
            trained = f"{run['objective']}, {run['steps']:,} steps"
            described = [", ".join(run["students"]), trained, "complete" if run["complete"] else "unfinished"]
        rows.append([str(Path(run["run"]).relative_to(place)), *described])
    print_table(f"Runs in {place}", ["run", "students", "objective", "state"], rows)


def rm(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="Folders, names of caches and runs of the home, or URLs of caches."
        ),
    ],
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also remove what other runs need.")] = False,
    json: JsonOption = False,
) -> None:
    """Remove caches and runs from this machine, and caches from stores, after asking.

    A cache that runs of the home or of the same folder were trained from is kept, and so is a run that others
    began with, and an unfinished cache of a store.

    Example: minilm-cache rm notes.cache
    """
    from minilm_cache.workflows.remove import find_removal, remove  # noqa: PLC0415 - it takes seconds

    named = (find_removal(name, cache_home()) for name in names)
    places = {removal.place: removal for removal in named}
    removals = list(places.values())
    for removal in removals:
        if removal.is_unfinished and not force:
            raise InvalidConfigError(
                f"{removal.place} is unfinished, and a process may be writing it. Give --force if none is."
            )
        needing = [run for run in removal.needed_by if str(run.resolve()) not in places]
        if needing and not force:
            runs = ", ".join(run.name for run in needing)
            raise InvalidConfigError(
                f"{removal.place} is needed by {runs}. Remove these, too, or give --force: their "
                "students stay, but these runs can no longer be resumed or reported."
            )
    if not yes:
        rows = [[removal.place, decimal(removal.num_bytes)] for removal in removals]
        if json or not sys.stdin.isatty():
            raise InvalidConfigError("there is no terminal to ask on. Give --yes to remove without asking.")
        print_table("To be removed", ["folder", "size"], rows)
        if not typer.confirm("Remove for good?", err=True):
            return
    for removal in removals:
        remove(removal)
        TerminalProgress().note(f"removed {removal.place} ({decimal(removal.num_bytes)})")
    if json:
        num_bytes = sum(removal.num_bytes for removal in removals)
        print_json({"removed": [removal.place for removal in removals], "bytes": num_bytes})
