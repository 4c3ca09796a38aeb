"""How a text is generated: settings of the search for it, and the options of commands that change them."""

from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError, model_validator

from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.locate import read_json
from minilm_cache.settings import FrozenSettings

GENERATION_FILE: Final = "generation_config.json"
"""Name of the file that says how a model generates texts, which is transformers' own."""
_Tokens = Annotated[int, Field(ge=1, le=2**16)]
_Beams = Annotated[int, Field(ge=1, le=256)]
_Penalty = Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False)]
_Few = Annotated[int, Field(ge=0, le=2**16)]


class Decoding(FrozenSettings):
    """How a model generates a text. Fields are named as in transformers' `GenerationConfig`."""

    max_source: _Tokens
    """Most tokens of the text that is read, special ones included; transformers has no such setting."""
    max_new_tokens: _Tokens
    """Most tokens of the generated text, with the token that ends it."""
    min_new_tokens: _Few = 0
    """Fewest tokens of it."""
    num_beams: _Beams = 1
    """Beams of the search. 1 is greedy decoding."""
    length_penalty: _Penalty = 1.0
    """Exponent of the length by which the score of a beam is divided. 0 compares sums of
    log-probabilities."""
    no_repeat_ngram_size: _Few = 0
    """Length of the n-grams that a text has once only. 0 means that all may be repeated."""

    @model_validator(mode="after")
    def _can_end(self) -> "Decoding":
        if self.min_new_tokens >= self.max_new_tokens:
            raise ValueError(
                f"--min-new-tokens {self.min_new_tokens} is not below --max-new-tokens {self.max_new_tokens}"
            )
        return self

    def changed(self, options: "DecodingOptions", max_source: int | None) -> "Decoding":
        """Return these settings with those that were given as options; None means those that are here."""
        given = {name: getattr(options, name) for name in DecodingOptions.model_fields}
        given["max_source"] = max_source
        return self.with_changes(**{name: value for name, value in given.items() if value is not None})

    @property
    def positions(self) -> int:
        """Positions that a model needs."""
        return self.max_source + self.max_new_tokens


class DecodingOptions(FrozenSettings):
    """Options of commands that generate texts."""

    group = "Generation"
    max_new_tokens: _Tokens | None = None
    """Maximum tokens of a generated text. None means the task's own, or what the model was tuned for."""
    min_new_tokens: _Few | None = None
    """Minimum tokens of a generated text. None means the task's own, or what the model was tuned for."""
    num_beams: _Beams | None = None
    """Beams of the search; 1 is greedy decoding. None means the task's own, or what the model was tuned
    for."""
    length_penalty: _Penalty | None = None
    """Exponent of the length by which the score of a beam is divided. None means the task's own, or what the
    model was tuned for."""
    no_repeat_ngram_size: _Few | None = None
    """N-grams of this length occur only once in a generated text; 0 allows them to repeat. None means the
    task's own, or what the model was tuned for."""


def read_decoding(folder: Path) -> Decoding:
    """Return how the model in a folder generates texts.

    Raises:
        TeacherError: the folder has no such file, or one that is damaged or lacks a setting.
    """
    file = folder / GENERATION_FILE
    if not file.is_file():
        raise TeacherError(
            f"{folder} was not fine-tuned to generate texts: it has no {GENERATION_FILE}. Make such a model: "
            "`minilm-cache evaluate MODEL --task squad-qg --data DIR --keep-models`."
        )
    content: dict[str, Any] = read_json(file)
    known = {name: content[name] for name in Decoding.model_fields if content.get(name) is not None}
    try:
        return Decoding(**known)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "its settings"
        raise TeacherError(
            f"{file}: {where}: {first['msg']}. Take a folder that `minilm-cache evaluate --keep-models` "
            "wrote."
        ) from error


def is_of_pairs(folder: Path) -> bool:
    """Return whether the model in a folder generates from two texts, such as a passage and an answer."""
    return read_json(folder / GENERATION_FILE).get("pairs") is True


def refuse_other_sources(model: str, *, num_texts: int, pairs: bool) -> None:
    """Raise InvalidConfigError if a model gets single texts and was tuned on pairs, or gets pairs."""
    if pairs and num_texts == 1:
        raise InvalidConfigError(
            f"{model} was tuned on passages with answers. Give --answer for each text, or of a file "
            "--text-columns src,answer."
        )
    if not pairs and num_texts > 1:
        raise InvalidConfigError(
            f"{model} was tuned on single texts. Leave out --answer, or give one column of the file."
        )
