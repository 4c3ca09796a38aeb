"""Searches the best shape of a student within a budget of latency, weights or bytes.

Shapes are measured before any is trained, with random weights. Those within the budget are trained together
from the cache, in rounds: after each, the better ones by held-out loss go on from their weights for more
steps, and the last one is the student (successive halving, Jamieson and Talwalkar 2016, arXiv 1502.07943).
Each round is an ordinary run, so that a search goes on where it was stopped.
"""

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from minilm_cache.cache import Cache, open_cache
from minilm_cache.deploy.forms import FORMS, write_form
from minilm_cache.errors import DivergedError, IdentityMismatchError, InvalidConfigError
from minilm_cache.models.arch import parse_arch
from minilm_cache.models.exported import FILES, IDS, MASK, SEGMENTS
from minilm_cache.models.load import check_positions
from minilm_cache.models.pooling import projection_to
from minilm_cache.models.student import (
    build_model,
    model_size,
    seconds_in_turns,
    student_config,
    teacher_config,
)
from minilm_cache.models.student_tokens import Vocabulary
from minilm_cache.models.vocabulary import trimmed_config
from minilm_cache.objectives.check import choose_objective
from minilm_cache.report.front import Candidate, Round, SearchRecord, candidate_name, read_search
from minilm_cache.report.page import write_report
from minilm_cache.report.runs import TrainedRun, cautions, open_runs
from minilm_cache.report.tables import students_table
from minilm_cache.session import ALONE, Session
from minilm_cache.settings import FrozenSettings, validated
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG
from minilm_cache.storage_schema.upgrades import defaults_of_later, without_defaults
from minilm_cache.store.durable import storage_errors, write_file
from minilm_cache.train.config import TrainConfig
from minilm_cache.train.folder import ROUND, SEARCH_RECORD
from minilm_cache.train.initial import initial_weights
from minilm_cache.train.run import TrainResult, refuse_other_texts, train_students
from minilm_cache.train.setup import num_steps, student_shapes
from minilm_cache.train.vocabulary import student_vocabulary
from minilm_cache.wording import counted, differing_values
from minilm_cache.workflows.config import (
    SearchConfig,
    about_widths,
    numbers_of,
    refuse_of_one_shape,
    vocabularies_of,
)
from minilm_cache.workflows.stages import check_training, refuse_foreign

REPORT_FILE: Final = "report.html"
_LAYERS: Final = (2, 3, 4, 6, 9, 12)
_SHARES: Final = (0.25, 0.5, 0.75, 1.0)
"""Widths that are tried, as shares of the teacher's."""
_USUAL_RATIO: Final = 4
"""Size of the feed-forward network, in multiples of the width, of a shape that does not name it."""
_FLOAT32_BYTES: Final = 4
_HEADER_UNIT: Final = 8
_TURNS: Final = 3
_REPEATS: Final = 7
_TEACHER: Final = "teacher"
_PASS_LENGTH: Final = 128
_CHANGE_NO_STUDENT: Final = {
    *("checkpoint_steps", "device", "keep_checkpoints", "local_bytes", "max_hours", "tracker")
}
"""Settings of trainings that may differ between commands for the same search."""


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
    space = _Space.of(config, train, open_cache(cache, home=session.home))
    of_all = validated(TrainConfig, {**train, "arch": space.arch})
    check_training(of_all)
    space.refuse_other_students(session.home)
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
    finite = {name: loss for name, loss in losses.items() if loss is not None}
    order = sorted(finite, key=lambda name: finite[name])
    return {name: losses[name] for name in [*order, *(each for each in losses if each not in finite)]}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    latency_ms: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    arch: str
    vocab: str | None
    config: PreTrainedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class _Space:
    """The shapes of a search, and how they are measured."""

    config: SearchConfig
    train: Mapping[str, Any]
    cache: Cache
    last_steps: int
    shapes: Mapping[str, "_Shape"]
    """What is measured, by `Candidate.name`."""
    vocabularies: Mapping[str | None, Vocabulary | None]
    """Pieces of each vocabulary, by the value of `--vocab`. None means all."""
    teacher: PreTrainedConfig

    @property
    def arch(self) -> tuple[str, ...]:
        """The shapes, each once."""
        return tuple(dict.fromkeys(each.arch for each in self.shapes.values()))

    @classmethod
    def of(cls, config: SearchConfig, train: Mapping[str, Any], cache: Cache) -> "_Space":
        """Return the shapes that the teacher's family and the objective have.

        Raises:
            InvalidConfigError: a setting does not go with a search, a shape is none, or nothing is held out.
        """
        manifest = cache.manifest
        if not manifest.num_held_out:
            raise InvalidConfigError(
                "a search compares students on held-out sequences, and this cache has none. Dump more text."
            )
        document = cache.reader.attachment(TEACHER_CONFIG)
        teacher = teacher_config(document, manifest)
        heads = manifest.identity.relation_heads
        depth, width = teacher.num_hidden_layers, teacher.hidden_size
        layers = numbers_of(config.layers, "--layers") or [each for each in _LAYERS if each <= depth]
        widths = numbers_of(config.widths, "--widths") or [
            round(share * width) for share in _SHARES if not share * width % heads
        ]
        ratios = numbers_of(config.feed_forward, "--feed-forward")
        tables = numbers_of(config.embedding_widths, "--embedding-widths")
        if tables and tables[0] >= max(widths):
            raise InvalidConfigError(
                f"--embedding-widths {config.embedding_widths}: none is below the shapes' widths, which "
                f"are at most {max(widths)}. Give smaller ones."
            )
        configs: dict[str, PreTrainedConfig] = {}
        probe = validated(TrainConfig, {**train, "arch": (f"{depth}x{width}",)})
        refuse_of_one_shape(probe, layers)
        for num_layers, size, ratio, table in product(layers, widths, ratios, [None, *tables]):
            if table is not None and table >= size:
                continue
            arch = f"{num_layers}x{size}" + ("" if ratio == _USUAL_RATIO else f":ff{ratio * size}")
            arch += "" if table is None else f":e{table}"
            with about_widths():
                shape = parse_arch(arch, heads, compares_heads=probe.spec.compares_heads)
            configs[arch] = student_config(shape, document, manifest)
        shapes = {}
        vocabularies = _vocabularies(config, probe, cache)
        for vocab, chosen in vocabularies.items():
            for arch, described in configs.items():
                kept = described if chosen is None else trimmed_config(described, chosen.kept)
                shapes[candidate_name(arch, vocab)] = _Shape(arch=arch, vocab=vocab, config=kept)
        return cls(
            config=config,
            train=train,
            cache=cache,
            last_steps=num_steps(probe, manifest),
            shapes=shapes,
            vocabularies=vocabularies,
            teacher=teacher,
        )

    def refuse_other_students(self, home: Path) -> None:
        """Raise InvalidConfigError if the cache cannot serve the objective, or a shape cannot begin so."""
        config = validated(TrainConfig, {**self.train, "arch": self.arch})
        objective = choose_objective(config, self.cache, arch=config.arch, home=home)
        shapes = student_shapes(config, objective)
        begun = initial_weights(config, self.cache, shapes=shapes, head=objective.head, home=home)
        if begun.tokens is not None:
            raise InvalidConfigError(
                f"--init-teacher {config.init_teacher} has another tokenizer than this cache, and rounds "
                "of a search go on from each other's weights. Search without it, or train shapes yourself."
            )
        try:
            for chosen in self.vocabularies.values():
                refuse_other_texts(self.cache, objective, chosen)
        except InvalidConfigError as error:
            raise InvalidConfigError(str(error).replace("--vocab:", "--vocabularies:")) from error

    @property
    def settings(self) -> dict[str, Any]:
        """What a search depends on, as JSON."""
        probe = validated(TrainConfig, {**self.train, "arch": self.arch})
        trained = probe.model_dump(mode="json", exclude=_CHANGE_NO_STUDENT)
        return {"search": self.config.model_dump(mode="json"), "train": trained}

    @property
    def pass_length(self) -> int:
        """Tokens of each text of a timed pass."""
        longest = self.cache.manifest.identity.packing.max_length
        return self.config.pass_length or min(_PASS_LENGTH, longest)

    def map_weights(self, name: str) -> int:
        """Return the weights of a student's linear map to the teacher's vectors; 0 where it needs none."""
        probe = validated(TrainConfig, {**self.train, "arch": (self.shapes[name].arch,)})
        pooled = self.cache.manifest.identity.pooled
        if not probe.spec.needs.pooled or pooled is None:
            return 0
        hidden_size = self.shapes[name].config.hidden_size
        if probe.also:  # students of several teachers keep a turned map of their own width
            return int(hidden_size**2)
        with torch.device("meta"):
            layers = projection_to(pooled.width, hidden_size)
        return sum(weight.numel() for layer in layers for weight in layer.parameters())

    def measured(self, names: Sequence[str], session: Session) -> tuple[dict[str, _Measured], float]:
        """Return latency and bytes of shapes with random weights, and the teacher's latency in torch, ms.

        A pass takes as long with any vocabulary, so that each shape is timed, and in memory, once.
        """
        config, form = self.config, FORMS.get(self.config.runtime)
        ids = torch.full((config.pass_texts, self.pass_length), 1)
        values = {IDS: ids, MASK: torch.ones_like(ids), SEGMENTS: torch.zeros_like(ids)}
        passes: dict[str, Any] = {}
        num_bytes = {}
        session.progress.start("measure", len(names), "shapes")
        with tempfile.TemporaryDirectory() as scratch:
            for each in names:
                session.stop_if_asked("interrupted while shapes were measured. Run the same command again.")
                shape = self.shapes[each]
                is_timed = shape.arch in passes
                with torch.device("meta" if is_timed and form is None else "cpu"):
                    model = build_model(shape.config, "sdpa").eval()
                num_bytes[each] = _file_bytes(model)
                if not is_timed:
                    check_positions(model, model.config, name=each, ids=ids[:1], option="--pass-length")
                    passes[shape.arch] = partial(_run, model, values)
                if form is not None:
                    folder = Path(scratch) / each.replace(":", "-").replace(" ", "")
                    folder.mkdir()
                    run, wanted = write_form(model, folder, form, inputs=[values] * 2, name=each)
                    if not is_timed:
                        passes[shape.arch] = partial(run, {name: values[name] for name in wanted})
                    file = (folder / FILES[form.runtime]).parent
                    num_bytes[each] = sum(part.stat().st_size for part in file.iterdir())
                session.progress.advance(1)
            teacher = build_model(self.teacher, "sdpa").eval()
            passes[_TEACHER] = partial(_run, teacher, values)
            seconds = seconds_in_turns(passes, torch.device("cpu"), _TURNS, repeats=_REPEATS)
        measured = {
            each: _Measured(
                latency_ms=1e3 * seconds[self.shapes[each].arch],
                num_bytes=num_bytes[each] + _FLOAT32_BYTES * self.map_weights(each),
            )
            for each in names
        }
        return measured, 1e3 * seconds[_TEACHER]


def _vocabularies(
    config: SearchConfig, probe: TrainConfig, cache: Cache
) -> dict[str | None, Vocabulary | None]:
    """Return the vocabularies that differ, by the value of `--vocab`; None is all pieces.

    A cache has each piece once at most, so that large numbers of pieces may all mean the same ones.

    Raises:
        InvalidConfigError: there are fewer pieces than have to stay, or none may go.
    """
    found: dict[str | None, Vocabulary | None] = {}
    known: set[tuple[int, ...] | None] = set()
    for vocab in sorted(vocabularies_of(config), key=lambda name: name is not None):
        try:
            chosen = student_vocabulary(probe.model_copy(update={"vocab": vocab}), cache)
        except InvalidConfigError as error:
            raise InvalidConfigError(str(error).replace("--vocab", "--vocabularies")) from error
        kept = None if chosen is None or len(chosen.kept) == chosen.pieces.size else chosen.kept
        if kept not in known:
            known.add(kept)
            found[vocab] = chosen
    return found


def _file_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a model's weights as a file of safetensors, with its header."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    num_bytes = 0
    for name, weight in sorted(model.state_dict().items()):  # as such files have them
        end = num_bytes + _FLOAT32_BYTES * weight.numel()
        header[name] = {"dtype": "F32", "shape": list(weight.shape), "data_offsets": [num_bytes, end]}
        num_bytes = end
    length = len(json.dumps(header, separators=(",", ":")))
    return _HEADER_UNIT + -(-length // _HEADER_UNIT) * _HEADER_UNIT + num_bytes


def _run(model: PreTrainedModel, values: Mapping[str, torch.Tensor]) -> object:
    return model(input_ids=values[IDS], attention_mask=values[MASK])


def _begin(out: Path, space: _Space, session: Session) -> SearchRecord:
    """Measure all shapes, and write what is within the budget.

    Raises:
        InvalidConfigError: nothing is.
    """
    config = space.config
    length = space.cache.manifest.identity.packing.max_length
    measured, of_teacher = space.measured(list(space.shapes), session)
    weights = {
        name: model_size(shape.config, length).num_parameters + space.map_weights(name)
        for name, shape in space.shapes.items()
    }
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
    tried = fitting if config.every else [arch for arch in fitting if not _is_covered(space, arch, fitting)]
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


def _is_covered(space: _Space, name: str, fitting: Sequence[str]) -> bool:
    """Return whether another shape within the budget is at least as large in everything."""
    sizes = {
        each: (
            described.num_hidden_layers,
            described.hidden_size,
            described.intermediate_size,
            getattr(described, "embedding_size", described.hidden_size),
            described.vocab_size,
        )
        for each, described in ((name, shape.config) for name, shape in space.shapes.items())
    }
    return any(
        sizes[other] != sizes[name]
        and all(mine <= theirs for mine, theirs in zip(sizes[name], sizes[other], strict=True))
        for other in fitting
    )


def _read(out: Path, space: _Space) -> SearchRecord | None:
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
