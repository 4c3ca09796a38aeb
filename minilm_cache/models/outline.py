"""What the configuration of a model says, before libraries are imported that take seconds."""

from dataclasses import dataclass
from typing import Any

from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.locate import CONFIG, locate_teacher, read_json, refuse_no_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A model as its config.json describes it, in the names that most families use for their sizes."""

    name: str
    num_layers: int | None
    """None means that only transformers can tell, here and below."""
    num_heads: int | None
    hidden_size: int | None
    embedding_size: int | None
    positions: int | None
    """Greatest length of a sequence, with the positions that some families reserve."""
    answers: int | None
    """Classes that it tells apart, or 1 for a score. None means that it does not classify."""

    @classmethod
    def of(cls, name: str, revision: str | None = None) -> "Outline":
        """Read the configuration of a model; weights are not downloaded.

        Args:
            name: name of the model, or its folder.
            revision: revision of a model from the hub. None means the default revision.

        Raises:
            TeacherError: the model does not exist, or has no configuration that can be read.
            InvalidConfigError: a revision of a model that is not from the hub.
        """
        source = locate_teacher(name, revision, without_weights=True)
        refuse_no_config(source.folder)
        config = read_json(source.folder / CONFIG)
        return cls(
            name=source.name,
            num_layers=_number(config.get("num_hidden_layers")),
            num_heads=_number(config.get("num_attention_heads")),
            hidden_size=_number(config.get("hidden_size")),
            embedding_size=_number(config.get("embedding_size", config.get("hidden_size"))),
            positions=_number(config.get("max_position_embeddings")),
            answers=_answers(config, pools=(source.folder / "modules.json").is_file()),
        )


def _number(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _answers(config: dict[str, Any], *, pools: bool) -> int | None:
    """Return the number of answers; a fine-tuned sentence encoder pools them, and names its kind of task."""
    if not says_classifier(config.get("architectures")) and not (pools and config.get("problem_type")):
        return None
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, dict) and labels else _number(config.get("num_labels")) or 2


def says_classifier(architectures: object) -> bool:
    """Return whether the architectures of a model classify sequences, or give them a score.

    Args:
        architectures: what its configuration says, a list of names unless it is damaged.
    """
    names = architectures if isinstance(architectures, list | tuple) else ()
    return any("SequenceClassification" in str(name) for name in names)


def positions_of(config: object) -> int | None:
    """Return the greatest length of a sequence by a configuration of transformers. None means any length."""
    return _number(getattr(config, "max_position_embeddings", None))


def too_long(length: int, limit: int, *, name: str, option: str) -> InvalidConfigError:
    """Return the error of a model that has fewer positions than a sequence.

    Args:
        length: tokens of the sequence.
        limit: positions of the model.
        name: name of the model in the message.
        option: command-line option that set the length.
    """
    return InvalidConfigError(
        f"{option} {length} is more than {name} has positions for (its configuration says {limit}, special "
        "positions included). Choose a smaller one."
    )


def no_reranker(name: str, answers: int | None) -> InvalidConfigError:
    """Return the error of a model that is no cross-encoder of one score; `answers` as in `Outline`."""
    what = "scores no pairs" if answers is None else f"answers with {answers} classes"
    return InvalidConfigError(
        f"{name} {what}; rerank takes cross-encoders with one score. Train one: "
        "`minilm-cache train CACHE --objective score`."
    )
