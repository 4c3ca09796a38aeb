"""Searches the best shape of a student within a budget of latency, weights or bytes.

Shapes are measured before any is trained, with random weights. Those within the budget are trained together
from the cache, in rounds: after each, the better ones by held-out loss go on from their weights for more
steps, and the last one is the student (successive halving, Jamieson and Talwalkar 2016, arXiv 1502.07943).
Each round is an ordinary run, so that a search goes on where it was stopped.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minilm_cache.cache import open_cache
from minilm_cache.errors import DivergedError, IdentityMismatchError, InvalidConfigError
from minilm_cache.report.front import Candidate, Round, SearchRecord, candidate_name, read_search
from minilm_cache.report.page import write_report
from minilm_cache.report.runs import TrainedRun, cautions, open_runs
from minilm_cache.report.tables import students_table
from minilm_cache.session import ALONE, Session
from minilm_cache.settings import FrozenSettings, validated
from minilm_cache.storage_schema.upgrades import defaults_of_later, without_defaults
from minilm_cache.store.durable import storage_errors, write_file
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.folder import ROUND, SEARCH_RECORD
from minilm_cache.train.run import TrainResult, train_students
from minilm_cache.wording import counted, differing_values
from minilm_cache.workflows.config import SearchConfig, vocabularies_of
from minilm_cache.workflows.search_space import SearchSpace
from minilm_cache.workflows.stages import check_training, refuse_foreign

REPORT_FILE: Final = "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The student that a search found."""

    path: Path
    record: SearchRecord
    winner: Candidate
    student: Path
    """Folder of the student."""
    latency_ms: float
    """Milliseconds of a pass of the winner's shape, measured anew when all was trained."""
    report: Path
    """File of the page."""
    ended_worse: bool
    """Whether the student ended its last round worse than it began it."""
    cautions: tuple[str, ...]
    """What readers must know, such as students that ended worse than they began."""


def search(
    config: SearchConfig, train: Mapping[str, Any], cache: str | Path, *, out: Path, session: Session = ALONE
) -> SearchResult:
    """Find the best student within a budget.

    Args:
        config: budget, form and shapes.
        train: settings of `TrainConfig` that are given; `steps` or `epochs` are those of the last round.
        cache: folder or URL of the cache, which has held-out sequences.
        out: folder of the search; the same command goes on with it.
        session: its home is the folder of what is kept of caches at URLs. Its progress shows shapes that are
            measured, and tokens of trainings. Its `should_stop` is called before each step.

    Raises:
        InvalidConfigError: settings do not fit, or nothing is within the budget; the message names the
            nearest shape.
        IdentityMismatchError: the folder holds another search.
        MiniLMCacheError: whatever a training raises; what was measured and trained is kept.
    """
    space = SearchSpace.of(config, train, open_cache(cache, home=session.home), home=session.home)
    check_training(validated(TrainConfig, {**train, "arch": space.arch}))
    if alike := set(vocabularies_of(config)) - set(space.vocabularies):
        names = ", ".join(sorted(map(str, alike)))
        session.progress.note(
            f"--vocabularies: {names} left out, the same pieces as another one in this cache"
        )
    record = _read(out, space) or _begin(out, space, session)
    tried = [each.name for each in record.candidates if each.is_tried]
    runs: dict[str | None, TrainResult] = {}
    plan = _plan(len(tried), space.last_steps, config.keep)
    for number, (count, steps) in enumerate(plan):
        session.progress.note(
            f"round {number + 1} of {len(plan)}: {counted(count, 'shape')}, {counted(steps, 'step')}"
        )
        shapes = _by_vocabulary(record, tried[:count])
        place = out / f"{ROUND}{number + 1}"
        trained = _trained(shapes, {**train, "steps": steps}, runs, place=place, cache=cache, session=session)
        done = _done(shapes, trained, steps=steps) if trained else None
        if done is None or set(done.losses.values()) == {None}:
            raise _all_diverged(place, record, number, steps=steps, names=tried[:count])
        runs |= trained
        record = record.model_copy(update={"rounds": (*record.rounds[:number], done)})
        _write(out, record)
        tried = [name for name, loss in done.losses.items() if loss is not None]
    winner = next(each for each in record.candidates if each.name == tried[0])
    last = runs[winner.vocab]
    latency_ms = space.measured([winner.name], session)[0][winner.name].latency_ms
    trained_runs = open_runs(out, cache_place=str(cache), home=session.home)
    return SearchResult(
        path=out,
        record=record,
        winner=winner,
        student=last.student_path(winner.arch),
        latency_ms=latency_ms,
        report=_write_page(record, trained_runs, out=out, session=session),
        ended_worse=winner.arch in last.record.ended_worse(last.num_held_out),
        cautions=(*record.doubts(winner.name, latency_ms), *cautions(trained_runs)),
    )


def _write_page(record: SearchRecord, runs: Sequence[TrainedRun], *, out: Path, session: Session) -> Path:
    """Write the page about all rounds, and return its file."""
    session.progress.note("measuring sizes and speed of the students of all rounds")
    students = students_table(runs, device="cpu")
    write_report(out / REPORT_FILE, runs, students, title=out.name, searches=[record])
    return out / REPORT_FILE


def _trained(
    shapes: Mapping[str | None, tuple[str, ...]],
    train: Mapping[str, Any],
    before: Mapping[str | None, TrainResult],
    *,
    place: Path,
    cache: str | Path,
    session: Session,
) -> dict[str | None, TrainResult]:
    """Train the shapes of a round, those of each vocabulary in a run, and go on from the runs before.

    A vocabulary whose students all diverge is left out.
    """
    done: dict[str | None, TrainResult] = {}
    for vocab, arch in shapes.items():
        settings = {**train, "epochs": None, "arch": arch, "vocab": vocab}
        folder = place.with_name(_run_name(place.name, vocab))
        if vocab in before:  # what was learned first, and cut from a teacher, is in its students
            settings |= {"init": str(before[vocab].path), "init_layers": None, "init_teacher": None}
            # Searches of earlier releases learned what is first in every round, and go on so.
            if not folder.with_name(f"{folder.name}-first").exists():
                settings |= {"first": None, "first_steps": None}
        with suppress(DivergedError):
            training = validated(TrainConfig, settings)
            done[vocab] = train_students(training, cache, out=folder, session=session)
    return done


def _run_name(of_round: str, vocab: str | None) -> str:
    """Return the name of the run of a vocabulary in a round."""
    return of_round if vocab is None else f"{of_round}-vocab-{vocab}"


def _done(
    shapes: Mapping[str | None, tuple[str, ...]], trained: Mapping[str | None, TrainResult], *, steps: int
) -> Round:
    """Return what a round has shown; students of a vocabulary that was not trained diverged."""
    lost = shapes.keys() - trained.keys()
    diverged = {candidate_name(arch, vocab) for vocab in lost for arch in shapes[vocab]}
    losses = _ranked(trained) | dict.fromkeys(sorted(diverged), None)
    folders = [run.path.name for run in trained.values()]
    return Round(run=folders[0], more_runs=tuple(folders[1:]), steps=steps, losses=losses)


def _by_vocabulary(record: SearchRecord, names: Sequence[str]) -> dict[str | None, tuple[str, ...]]:
    """Return the shapes of candidates by their vocabularies, which are trained in runs of their own."""
    found: dict[str | None, tuple[str, ...]] = {}
    for each in (next(one for one in record.candidates if one.name == name) for name in names):
        found[each.vocab] = (*found.get(each.vocab, ()), each.arch)
    return found


def _all_diverged(
    place: Path, record: SearchRecord, number: int, *, steps: int, names: Sequence[str]
) -> DivergedError:
    """Return the error of a round whose students all diverged, which names the best one of the round before.

    Args:
        place: folder of the round's run.
        record: the search.
        number: number of the round, from 0.
        steps: steps of the round.
        names: what it trained.
    """
    kept = ""
    if number:
        last = record.rounds[number - 1]
        name = next(iter(last.losses))
        best = next(each for each in record.candidates if each.name == name)
        run = _run_name(f"{ROUND}{number}", best.vocab)
        kept = f" The best student of the round before is {name}, of {counted(last.steps, 'step')}, in {run}."
    who = names[0] if len(names) == 1 else f"every student ({', '.join(names)})"
    return DivergedError(
        f"{place}: {who} diverged within {counted(steps, 'step')}.{kept} Lower --lr, and choose "
        "another --out."
    )


def _ranked(runs: Mapping[str | None, TrainResult]) -> dict[str, float | None]:
    """Return the held-out loss of each student of a round, the best one first."""
    losses = {
        candidate_name(each.arch, vocab): each.loss_after
        for vocab, run in runs.items()
        for each in run.record.students
    }
    finite = {name: loss for name, loss in losses.items() if loss is not None and math.isfinite(loss)}
    order = sorted(finite, key=lambda name: finite[name])
    return {name: finite.get(name) for name in [*order, *(each for each in losses if each not in finite)]}


def _plan(num_shapes: int, last_steps: int, keep: float) -> list[tuple[int, int]]:
    """Return how many shapes each round trains, and for how many steps; the last one trains one shape."""
    counts = [num_shapes]
    while counts[-1] > 1:
        counts.append(max(1, min(counts[-1] - 1, math.ceil(counts[-1] * keep))))
    steps = [round(last_steps * keep**left) for left in reversed(range(len(counts)))]
    if steps[0] < 1:
        raise InvalidConfigError(
            f"--steps: {last_steps} are too few for {len(counts)} rounds of {num_shapes} shapes. Give more."
        )
    return list(zip(counts, steps, strict=True))


def _begin(out: Path, space: SearchSpace, session: Session) -> SearchRecord:
    """Measure all shapes, and write what is within the budget.

    Raises:
        InvalidConfigError: nothing is.
    """
    config = space.config
    measured, of_teacher = space.measured(list(space.shapes), session)
    weights = {name: space.num_weights(name) for name in space.shapes}
    limits = {
        "ms": config.max_latency_ms or (of_teacher / config.speedup if config.speedup else None),
        "weights": config.max_parameters,
        "bytes": config.max_bytes,
    }
    costs = {
        arch: {"ms": each.latency_ms, "weights": weights[arch], "bytes": each.num_bytes}
        for arch, each in measured.items()
    }
    over = {
        arch: max(cost[name] / limit for name, limit in limits.items() if limit is not None)
        for arch, cost in costs.items()
    }
    fitting = [arch for arch in costs if over[arch] <= 1]
    if not fitting:
        nearest = min(over, key=lambda arch: over[arch])
        cost = costs[nearest]
        raise InvalidConfigError(
            f"no shape is within the budget. The nearest is {nearest}: {cost['ms']:.2f} ms, "
            f"{cost['weights']:,} weights, {cost['bytes']:,} bytes. Give a larger budget, other --layers and "
            "--widths, or another --runtime."
        )
    tried = fitting if config.every else [arch for arch in fitting if not space.is_covered(arch, fitting)]
    _plan(len(tried), space.last_steps, config.keep)  # refuses too few steps before anything is written
    candidates = tuple(
        Candidate(
            arch=space.shapes[name].arch,
            vocab=space.shapes[name].vocab,
            num_parameters=weights[name],
            num_bytes=measured[name].num_bytes,
            latency_ms=measured[name].latency_ms,
            fits=name in fitting,
            is_tried=name in tried,
        )
        for name in sorted(measured, key=lambda name: measured[name].latency_ms)
    )
    record = SearchRecord(
        settings=space.settings,
        fingerprint=space.cache.manifest.fingerprint,
        pass_length=space.pass_length,
        teacher_latency_ms=of_teacher,
        candidates=candidates,
    )
    _write(out, record)
    return record


def _read(out: Path, space: SearchSpace) -> SearchRecord | None:
    """Return the record of a search that was begun. None means that there is none.

    Raises:
        IdentityMismatchError: it is another search, or damaged.
    """
    record = read_search(out)
    if record is None:
        refuse_foreign(out, "search")
        return None
    is_same = _given(record.settings) == _given(space.settings)
    if not is_same or record.fingerprint != space.cache.manifest.fingerprint:
        differing = list(differing_values(_given(record.settings), _given(space.settings)))
        what = f"which differs in {', '.join(differing)}" if differing else "of another cache"
        raise IdentityMismatchError(f"{out} holds another search, {what}. Choose another --out.")
    if {each.name for each in record.candidates} != space.shapes.keys():
        raise IdentityMismatchError(
            f"{out} was begun with other shapes than these settings now give, perhaps by another release. "
            "Choose another --out."
        )
    return record


def _given(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return settings of a search without defaults, which later releases may add to."""
    models: Mapping[str, type[FrozenSettings]] = {"search": SearchConfig, "train": TrainConfig}
    return {
        name: without_defaults(settings.get(name, {}), defaults_of_later(model, ()))
        for name, model in models.items()
    }


def _write(out: Path, record: SearchRecord) -> None:
    with storage_errors("write", out):
        out.mkdir(parents=True, exist_ok=True)
        write_file(out / SEARCH_RECORD, (record.model_dump_json(indent=2) + os.linesep).encode())
