"""What a search measured and trained: its record, what became of each shape, and quality against latency."""

import math
from pathlib import Path
from typing import Annotated, Any, Final

import altair as alt
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    field_validator,
    model_validator,
)

from minilm_cache.errors import IdentityMismatchError
from minilm_cache.report.plots import (
    HEIGHT,
    INK,
    Picture,
    Rows,
    colour_of,
    inline_data,
    named_line,
    shown_of_mark,
)
from minilm_cache.store.durable import bounded_bytes
from minilm_cache.train.folder import SEARCH_RECORD
from minilm_cache.wording import counted

_MAX_RECORD_BYTES: Final = 2**22
_Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Candidate(_Document):
    """A shape, measured before it is trained."""

    arch: str
    vocab: str | None = None
    """Value of `--vocab`. None means all pieces of the teacher's."""
    num_parameters: int
    num_bytes: int
    """Bytes of its file in the form that is shipped; in torch, of its weights in float32."""
    latency_ms: _Milliseconds
    """Milliseconds of a pass in that form: the median of 21 passes in three turns, each after another one of
    the same model."""
    fits: bool
    """Whether it is within the budget."""
    is_tried: bool
    """Whether it is trained: within the budget, and no other one there is at least as large in everything."""

    @property
    def name(self) -> str:
        """What the options of a training for it are: the shape, and its vocabulary if it has one."""
        return candidate_name(self.arch, self.vocab)


class Round(_Document):
    """A round of trainings."""

    run: str
    """Folder of the run, below that of the search."""
    more_runs: tuple[str, ...] = ()
    """Folders of the runs of the round's other vocabularies."""
    steps: int
    losses: dict[str, FiniteFloat | None]
    """Held-out loss of each shape, by `Candidate.name`, the best one first. None means that it diverged."""


class _Asked(BaseModel):
    """The settings of a search that its page and its messages name.

    The record holds all settings, so that they can be compared.
    """

    model_config = ConfigDict(frozen=True)
    max_latency_ms: _Milliseconds | None = None
    speedup: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    pass_texts: int
    runtime: str


class SearchRecord(_Document):
    """What a search measured and trained, and the settings that it depends on."""

    settings: dict[str, Any]
    fingerprint: str
    """Fingerprint of the cache."""
    pass_length: int
    """Tokens of each text of a timed pass."""
    teacher_latency_ms: _Milliseconds
    """Milliseconds of a pass of the teacher's shape in torch."""
    candidates: tuple[Candidate, ...]
    """All shapes, the fastest one first."""
    rounds: tuple[Round, ...] = ()
    """Rounds that are over."""

    @model_validator(mode="after")
    def _belongs_together(self) -> "SearchRecord":
        names = [each.name for each in self.candidates]
        tried = {each.name for each in self.candidates if each.is_tried}
        if not tried or len({*names}) < len(names):
            raise ValueError("no shape is tried, or one is there twice")
        if any(not done.losses or done.losses.keys() - tried for done in self.rounds):
            raise ValueError("a round has other shapes than were tried")
        return self

    @field_validator("settings")
    @classmethod
    def _say_what_was_asked(cls, settings: dict[str, Any]) -> dict[str, Any]:
        _Asked.model_validate(settings.get("search"))
        return settings

    @property
    def _asked(self) -> _Asked:
        return _Asked.model_validate(self.settings.get("search"))

    @property
    def max_latency_ms(self) -> float | None:
        """Most milliseconds that a pass may take. None means that any time is fast enough."""
        asked = self._asked
        return asked.max_latency_ms if asked.speedup is None else self.teacher_latency_ms / asked.speedup

    @property
    def timed(self) -> str:
        """What was timed, in words."""
        asked = self._asked
        texts = counted(asked.pass_texts, "text")
        return f"a pass of {texts} of {self.pass_length} tokens in {asked.runtime}"

    def doubts(self, name: str, latency_ms: float) -> list[str]:
        """Return why a winner may not be what was asked for: its time when measured anew, and its losses."""
        found, most = [], self.max_latency_ms
        if most is not None and latency_ms > most:
            found.append(
                f"{name} took {latency_ms:.2f} ms when measured anew, above the budget of {most:.2f} ms. "
                "Search again on an idle machine, into another --out."
            )
        losses = [loss for each in self.rounds if (loss := each.losses.get(name)) is not None]
        if losses and losses[-1] > min(losses):
            found.append(
                f"{name} ended at a loss of {losses[-1]:.4f}, after {min(losses):.4f} in an earlier round. "
                "Give more steps, or a lower rate."
            )
        return found

    def outcome(self, candidate: Candidate) -> str:
        """Return what became of a shape, in words."""
        if not candidate.fits:
            return "over the budget"
        if not candidate.is_tried:
            return "a larger one fits"
        trained = [done for done in self.rounds if candidate.name in done.losses]
        if not trained:
            return "not trained yet"
        losses, steps = trained[-1].losses, trained[-1].steps
        if losses[candidate.name] is None:
            return f"diverged within {counted(steps, 'step')}"
        place = list(losses).index(candidate.name) + 1
        if trained[-1] is self.rounds[-1]:
            return "found" if len(losses) == 1 else f"place {place} of {len(losses)} so far"
        return f"stopped after {counted(steps, 'step')}: place {place} of {len(losses)}"


def candidate_name(arch: str, vocab: str | None) -> str:
    """Return the options of a training for a shape with a vocabulary; None means all pieces."""
    return arch if vocab is None else f"{arch} --vocab {vocab}"


def read_search(folder: Path) -> SearchRecord | None:
    """Return the record of the search in a folder. None means that there is none.

    Raises:
        IdentityMismatchError: it is damaged.
    """
    file = folder / SEARCH_RECORD
    if not file.exists():
        return None
    try:
        return SearchRecord.model_validate_json(bounded_bytes(file, _MAX_RECORD_BYTES))
    except ValidationError as error:
        raise IdentityMismatchError(
            f"{file} is damaged: it is not a record of a search. Choose another --out."
        ) from error


def front_figure(record: SearchRecord) -> Picture:
    """Draw the held-out loss of each shape after each round against the milliseconds of a pass.

    A line joins the rounds of a shape. Shapes that were not trained have no loss, and are left out.
    """
    rows: Rows = []
    for candidate in record.candidates:
        losses = [(done.steps, done.losses.get(candidate.name)) for done in record.rounds]
        known = [(steps, loss) for steps, loss in losses if loss is not None and math.isfinite(loss)]
        for number, (steps, loss) in enumerate(known):
            rows.append(
                {
                    "shape": candidate.name,
                    "milliseconds": candidate.latency_ms,
                    "held-out loss": loss,
                    "trained for": counted(steps, "step"),
                    "outcome": record.outcome(candidate),
                    "label": candidate.name if number == len(known) - 1 else "",
                }
            )
    axis = alt.X("milliseconds:Q", title=f"milliseconds of {record.timed}").scale(zero=False, padding=30)
    base = alt.Chart(inline_data(rows)).encode(
        x=axis, y=alt.Y("held-out loss:Q").scale(zero=False, padding=20)
    )
    line = base.mark_line(strokeWidth=1, opacity=0.4, color=INK).encode(detail="shape:N")
    points = base.mark_point(filled=True, size=80).encode(
        color=colour_of(rows, "trained for"), tooltip=shown_of_mark(rows, without=("label",))
    )
    text = base.mark_text(align="left", dx=9, dy=9).encode(text="label:N")
    layers = [line, points, text]
    if record.max_latency_ms is not None:
        layers += named_line(axis, field="milliseconds", value=record.max_latency_ms, name="budget")
    return Picture(alt.layer(*layers).properties(width="container", height=HEIGHT))
