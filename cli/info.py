"""`minilm-cache info` and `report`: what a cache holds and how faithful it is; what runs trained."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from minilm_cache.cli.console import TerminalProgress, print_json, print_pairs
from minilm_cache.cli.early import refuse_missing, refuse_no_runs
from minilm_cache.cli.environment import chosen_place, quiet_libraries
from minilm_cache.cli.interrupt import shown_session
from minilm_cache.cli.options import Given, JsonOption, options, out_option
from minilm_cache.cli.tables import fidelity_table, print_summary, students_table
from minilm_cache.dump.fidelity import kl_infinite_because, max_kl_in_words, states_in_words, verdict
from minilm_cache.errors import IdentityMismatchError
from minilm_cache.report.config import ReportConfig
from minilm_cache.session import Session
from minilm_cache.settings import DEFAULT_LOCAL_BYTES, cache_home, validated
from minilm_cache.storage_schema.manifest import TEACHER_WEIGHTS, CacheManifest
from minilm_cache.train.folder import is_run
from minilm_cache.wording import counted


def info(
    cache: Annotated[
        str | None,
        typer.Argument(
            metavar="[CACHE]",
            help="Folder of a cache or of a run, or URL of a cache. [default: the newest complete cache]",
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Also show KL(stored, teacher) and the share of probability that is kept."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show what a cache holds and how faithful it is, or what a run trained.

    Example: minilm-cache info notes.cache --json
    """
    from minilm_cache.store.mirror import MirrorReader  # noqa: PLC0415 - importing it takes seconds
    from minilm_cache.store.reader import CacheReader  # noqa: PLC0415 - importing it takes seconds

    if cache is not None and is_run(Path(cache)):
        _show_run(Path(cache), json=json)
        return
    path = chosen_place(cache, Session(progress=TerminalProgress()))
    reader = (
        CacheReader(path, partial=True)
        if isinstance(path, Path)
        else MirrorReader(path, cache_home(), DEFAULT_LOCAL_BYTES)
    )
    manifest = reader.manifest
    if json:
        print_json(
            {
                "cache": path,
                "shards": len(reader.ranges),
                "shards_committed": len(reader.records),
                "kl_over_max": manifest.kl_over_max,
                "kl_infinite_because": kl_infinite_because(manifest),
                "verdict": verdict(manifest),
                "manifest": manifest.model_dump(mode="json", exclude={"files"}),
            }
        )
        return
    print_pairs({"cache": path, **_pairs(manifest, len(reader.records), len(reader.ranges))})
    if manifest.measured is not None:
        fidelity_table(manifest, verbose=verbose)


def _show_run(path: Path, *, json: bool) -> None:
    from minilm_cache.train.record import last_logged_step, load_record  # noqa: PLC0415 - it takes seconds
    from minilm_cache.train.students import refuse_other_weights  # noqa: PLC0415 - it takes seconds

    record, caution = load_record(path), {}
    try:
        refuse_other_weights(path, record)
    except IdentityMismatchError as error:
        caution = {"caution": str(error)}
    if json:
        print_json({"run": path, "record": record, **caution})
        return
    identity = record.identity
    pairs: dict[str, object] = {
        "run": path,
        "state": "complete" if record.complete else _unfinished(last_logged_step(path), identity.steps),
        "cache": record.cache,
        **({"also": ", ".join(record.also)} if record.also else {}),
        "objective": f"{identity.objective}, from {identity.describes_layers()}"
        + (f", and of {counted(len(record.also), 'other')}" if record.also else ""),
        "steps": f"{identity.steps} of {identity.batch_size} sequences, seed {identity.seed}"
        + "".join(f", over at step {step:,} and continued" for step in record.continued_at),
    }
    begun = {
        student.arch: f"began with {student.begun_with}"
        for student in record.students
        if student.begun_with is not None
    }
    if record.vocabulary is not None:
        pairs["vocabulary"] = record.vocabulary.in_words
    print_pairs(pairs | begun | caution)
    if record.complete:
        students_table(record.students, identity)


def _unfinished(step: int | None, steps: int) -> str:
    """Return how far a run has come, whether or not a process is at it."""
    reached = "no step is logged yet" if step is None else f"at step {step:,} of {steps:,}"
    return f"unfinished, {reached}; the same `minilm-cache train` resumes it where no process is at it"


def _pairs(manifest: CacheManifest, committed: int, num_shards: int) -> dict[str, object]:
    """Return names and values that describe a cache, given the numbers of its committed and of all shards."""
    identity = manifest.identity
    teacher = identity.teacher
    state = (
        "complete" if manifest.complete else "unfinished: finish it with the same `minilm-cache dump` command"
    )
    prompt, roles = identity.packing.prompt, manifest.labels.role_column
    pairs: dict[str, object] = {
        "state": state,
        "format": f"version {manifest.format_version}, by {manifest.labels.created_by}",
        "fingerprint": manifest.fingerprint,
        "teacher": f"{manifest.labels.teacher} ({teacher.model_type}, {teacher.num_layers} layers, hidden "
        f"{teacher.hidden_size}, {teacher.num_heads} heads), weights sha256 {teacher.weights_sha256[:12]}...",
        **({"revision": manifest.labels.revision} if manifest.labels.revision else {}),
        **({"imported": "given in a file; no teacher ran"} if manifest.labels.imported else {}),
        "corpus": f"{manifest.labels.corpus} ({identity.corpus.num_documents:,} documents), "
        f"sha256 {identity.corpus.sha256[:12]}...",
        **({"texts": f"of column {manifest.labels.text_column}"} if manifest.labels.text_column else {}),
        **({} if prompt is None else {"prompt": f"{prompt!r} before every text"}),
        **({"pairs": f"of columns {manifest.labels.pair_columns}"} if manifest.labels.pair_columns else {}),
        **({} if roles is None else {"prompts": f"of the teacher, named by column {roles!r} of the records"}),
        "sequences": f"{manifest.num_sequences:,} of at most {identity.packing.max_length} tokens "
        f"({identity.packing.mode}), {manifest.held_out_in_words}",
        "tokens": f"{manifest.num_tokens:,}",
        **({"cut off": manifest.cut.in_words} if manifest.cut else {}),
        **({"precision": f"the teacher computed in {identity.precision}"} if identity.precision else {}),
        "relations": _relations(manifest),
        "codec": " ".join(
            f"{name}={value}" if name != "name" else str(value)
            for name, value in identity.codec.model_dump().items()
            if value is not None
        ),
        "shards": f"{committed} of {num_shards} committed, {manifest.shard_tokens:,} rows each",
    }
    if TEACHER_WEIGHTS in manifest.files:
        size = manifest.files[TEACHER_WEIGHTS].size
        pairs["weights"] = f"of the teacher, in float16, {size / 1e6:,.1f} MB: students can be cut from them"
    if identity.states is not None:
        pairs["states"] = identity.states.in_words
    bound = max_kl_in_words(manifest)
    if bound is not None:
        pairs["KL bound"] = bound
    beyond = states_in_words(manifest)
    if beyond is not None:
        pairs["bounds of states"] = beyond
    if manifest.measured is not None:
        measured = manifest.measured
        pairs["size of shards"] = (
            f"{measured.total_bytes:,} bytes, {measured.bytes_per_token:.1f} bytes per token"
        )
    return pairs


def _relations(manifest: CacheManifest) -> str:
    """Return which relations of which layers a cache holds."""
    calibration, identity = manifest.calibration, manifest.identity
    if not identity.has_relations:
        return "none"
    heads = f"{identity.relation_heads} heads" + (", rows see their past" if identity.is_causal else "")
    if calibration is None or not calibration.layers:
        return f"{', '.join(identity.relations)} of layer {identity.layers[0]}, {heads}"
    parts = [f"{layer.components} components of layer {layer.layer}" for layer in calibration.layers]
    return f"all, from queries, keys and values in {', '.join(parts)}, {heads}"


@options(ReportConfig)
def report(
    given: Given,
    *,
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, chains, studies or searches.")
    ],
    out: Annotated[Path, out_option("File of the page.")] = Path("report.html"),
    json: JsonOption = False,
) -> None:
    """Write one page about runs: curves, sizes, attention maps, layers.

    Example: minilm-cache report RUN --teacher mini --text "The cat sat on the mat."
    """
    config = validated(ReportConfig, given)
    refuse_no_runs(runs)
    config.refuse_page(out)
    is_one = len(runs) == 1 and is_run(runs[0])
    refuse_missing(teacher=config.teacher, cache=config.cache if is_one else None)
    from minilm_cache.report.page import report_runs  # noqa: PLC0415 - importing it takes seconds
    from minilm_cache.report.tables import summary_table  # noqa: PLC0415 - importing it takes seconds

    quiet_libraries()
    with shown_session() as session:
        result = report_runs(runs, config, out=out, session=session)
    page = result.report
    if json:
        print_json(
            {
                "report": page.path,
                "num_bytes": page.num_bytes,
                "students": result.students.to_pylist(),
                "similarity": [
                    asdict(each) | {"cka": each.cka.tolist(), "svcca": each.svcca.tolist()}
                    for each in page.similarity
                ],
                "agreement": [asdict(relation) for relation in page.agreement],
                "cautions": result.cautions,
            }
        )
        return
    print_pairs({"report": page.path, "bytes": f"{page.num_bytes:,}"})
    print_summary(summary_table(result.students))
    for line in result.cautions:
        print_pairs({"note": line})
