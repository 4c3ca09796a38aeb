"""Finding existing models, and loading them safely.

Safetensors only, no code from a model's folder, fast tokenizers only (their whole state is one JSON).
"""

import copy
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import safetensors
import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.complete import (
    pools_texts,
    refuse_ignored_settings,
    refuse_incomplete,
    refuse_other_family,
)
from minilm_cache.models.families import family_of, is_served
from minilm_cache.models.files import header_of, library_errors, read_config_file, weight_files
from minilm_cache.models.outline import positions_of, says_classifier, too_long
from minilm_cache.models.tap import ATTENTION, Head
from minilm_cache.storage_schema.identity import PairTemplate

TaskHead = Head | Literal["spans"]
"""What a head's logits score: tokens, sequences, or spans of a context."""

HEADS: Final = {
    None: AutoModel,
    "tokens": AutoModelForMaskedLM,
    "sequences": AutoModelForSequenceClassification,
    "spans": AutoModelForQuestionAnswering,
}
"""Class of a model, by its head. None means that it has no head."""


def _usable_attention(head: TaskHead | None, config: PreTrainedConfig, attention: str) -> str | None:
    """Return an implementation of attention that a family can use. None means transformers' choice."""
    classes = _class_for(head, config)._model_mapping.get(type(config), None)  # noqa: SLF001 - nothing public
    model_class = classes[0] if isinstance(classes, tuple) else classes
    if model_class is None:
        return attention
    is_usable = {
        ATTENTION: is_served(model_class, config),
        "sdpa": model_class._supports_sdpa,  # noqa: SLF001 - no public attribute has it
    }
    return attention if is_usable.get(attention, True) else None


def _class_for(head: TaskHead | None, config: PreTrainedConfig) -> Any:  # noqa: ANN401 - has no common class
    """Return the class of a model; of an encoder with a decoder it is the encoder, where it has one alone.

    Raises:
        TeacherError: the family has no such head.
    """
    # The encoders of T5 and mT5 write configurations that say nothing of a decoder.
    has_decoder = config.is_encoder_decoder or family_of(config.model_type).has_decoder
    is_encoder = has_decoder and type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING
    chosen: Any = AutoModelForTextEncoding if head is None and is_encoder else HEADS[head]
    if head is not None and type(config) not in chosen._model_mapping:  # noqa: SLF001 - nothing public
        raise TeacherError(
            f"transformers has no model of the family {config.model_type} with a head for {head}. Give one "
            "of another family."
        )
    return chosen


_ONE_AT_A_TIME: Final = threading.Lock()
"""Held while transformers makes a model. It replaces functions of its classes until the model is made, so two
threads at once would leave tied weights without memory, in every later model too."""


_QUIET_LOCK: Final = threading.Lock()
_quiet: Final[set[object]] = set()
"""One object for each use of `quietly` at the moment: the last one out restores what the first one found."""
_before: Final[dict[str, int]] = {}


@contextmanager
def quietly() -> Iterator[None]:
    """Turn off transformers' own bars and reports while a model is loaded or saved.

    Its report calls the folder of an encoder without a head corrupted. What a folder lacks is checked here.
    """
    mine = object()
    try:
        with _QUIET_LOCK:
            if not _quiet:
                _before.update(bars=logging.is_progress_bar_enabled(), verbosity=logging.get_verbosity())
                logging.disable_progress_bar()
                logging.set_verbosity_error()
            _quiet.add(mine)
        yield
    finally:
        with _QUIET_LOCK:
            was_here = mine in _quiet  # it is not where an interruption came first
            _quiet.discard(mine)
            if was_here and not _quiet:
                logging.set_verbosity(_before["verbosity"])
                if _before["bars"]:
                    logging.enable_progress_bar()


def is_classifier(config: PreTrainedConfig) -> bool:
    """Return whether a configuration is that of a model which classifies sequences, or gives them a score."""
    return says_classifier(config.architectures)


def read_config(folder: Path) -> PreTrainedConfig:
    """Return the configuration in the folder of a teacher.

    Raises:
        TeacherError: its folder holds no configuration of an encoder.
    """
    config = _config_of(folder)
    if not hasattr(config, "num_attention_heads"):
        raise TeacherError(
            f"{folder}/config.json: models of the family {config.model_type} have no attention heads, which "
            "relations and students are made of. Give a model of another family."
        )
    with library_errors(f"cannot read {folder}/config.json"):
        int(config.num_attention_heads)
    return config


def _config_of(folder: Path, **changes: object) -> PreTrainedConfig:
    """Return the configuration in a model's folder, with these attributes changed."""
    content = read_config_file(folder)
    family = content.pop("model_type")
    if family not in CONFIG_MAPPING:
        raise TeacherError(
            f"{folder}/config.json: transformers has no model family {family!r}, and no code from a model's "
            "folder is run. Give a model of another family."
        )
    with library_errors(f"cannot read {folder}/config.json"):
        config = AutoConfig.for_model(family, **content)
        for name, value in changes.items():
            setattr(config, name, value)
        assert isinstance(config, PreTrainedConfig)
        refuse_other_family(folder, content, config)
        refuse_ignored_settings(folder, content, config)
    return config


_MOST_TENSORS: Final = 2**16
"""Most tensors of a file of weights."""
_NO_HEAD: Final = {
    "tokens": "head for masked tokens. `minilm-cache head` fits one: give the folder that it makes",
    "sequences": "head that classifies sequences. Fine-tune it first, and give the folder of that",
}


def refuse_no_head(folder: Path, head: Head, *, name: str | None = None) -> None:
    """Raise TeacherError if a folder has no weight of a head, without loading the model.

    Args:
        folder: folder of the model, with its weights.
        head: head that the model needs.
        name: name of the model in errors. None means its folder.
    """
    files, config = weight_files(folder), _config_of(folder)
    with library_errors(f"cannot read the weights of {folder}"):
        with torch.device("meta"):
            model = draw_weights(config, head, attention="sdpa")
        held = {key for file in files for key in header_of(file, most=_MOST_TENSORS, follow_links=True)}
    of_head = [key for key in model.state_dict() if not key.startswith(f"{model.base_model_prefix}.")]
    if held.isdisjoint(of_head):
        raise TeacherError(
            f"{name or folder} has no {_NO_HEAD[head]} ({min(of_head)} is not among its weights)."
        )


IN_FLOAT32: Final[Mapping[str, Any]] = {"use_safetensors": True, "dtype": torch.float32}
"""How sentence-transformers has to load a model: as `load_model` does, whatever its weights are stored as."""


def load_model(
    folder: Path, head: Head | None = None, attention: str = ATTENTION, *, name: str | None = None
) -> PreTrainedModel:
    """Load a model from safetensors, ready to be tapped: an encoder, or an encoder with a head.

    Args:
        folder: folder of the model.
        head: head that the model needs. None means the encoder alone.
        attention: name of the implementation of attention in transformers.
        name: name of the model in errors. None means its folder.

    Raises:
        TeacherError: the folder holds no such model.
    """
    model, lacking = load_weights(folder, head, attention=attention)
    if head is not None and lacking:
        raise TeacherError(
            f"{name or folder} has no {_NO_HEAD[head]} ({min(lacking)} is not among its weights)."
        )
    return model


def load_for_task(folder: Path, head: TaskHead, labels: Sequence[str] | None) -> PreTrainedModel:
    """Load a model with a head for a task; a head that it lacks, or has of another size, is new.

    Args:
        folder: folder of a model, with or without a head.
        head: what the head's logits score.
        labels: labels of sequences, in the order of their numbers. Empty means one number on a scale; None
            goes with spans.

    Raises:
        TeacherError: the folder holds no model.
    """
    model, _ = load_weights(folder, head, attention="sdpa", labels=labels)
    return model


_HEADS: Final[Mapping[str, TaskHead]] = {
    "ForMaskedLM": "tokens",
    "ForSequenceClassification": "sequences",
    "ForQuestionAnswering": "spans",
}
"""Head of a model by the end of the name of its class."""
_NOTHING_WITHOUT: Final = ("sequences", "spans")
"""Heads that a model was fine-tuned for. A head for masked tokens is often left out on purpose."""


def own_head(folder: Path, name: str) -> TaskHead | None:
    """Return the head that a folder names and holds. None means that it is an encoder alone.

    A sentence encoder may name any other head: its pooling takes that one's place.

    Raises:
        InvalidConfigError: it holds another head, which would be lost.
        TeacherError: the folder holds no model, or names a fine-tuned head and holds none.
    """
    config = read_config(folder)
    of_class = (config.architectures or [""])[0]
    head = next((head for end, head in _HEADS.items() if of_class.endswith(end)), None)
    if not (head or re.search(r"For[A-Z]|LMHead", of_class)):
        return None
    if not _has_head(folder, config):
        if head in _NOTHING_WITHOUT and not pools_texts(folder):
            raise TeacherError(
                f"{name} is a {of_class}, and its weights have no head. Get its weights again, or save it as "
                "an encoder: AutoModel.from_pretrained(OLD).save_pretrained(NEW)."
            )
        return None
    if head is None and not pools_texts(folder):
        raise InvalidConfigError(
            f"{name} is a {of_class}, whose head would be lost. Save the model without it: "
            "AutoModel.from_pretrained(OLD).save_pretrained(NEW)."
        )
    return head


def _has_head(folder: Path, config: PreTrainedConfig) -> bool:
    """Return whether files of weights hold more than an encoder; a decoder behind it is no head."""
    if config.is_encoder_decoder or family_of(config.model_type).has_decoder:
        return False
    with library_errors(f"cannot make a model of {folder}"), _ONE_AT_A_TIME, quietly(), torch.device("meta"):
        encoder = _class_for(None, config).from_config(config)
    known = {encoder.base_model_prefix, *(each for each, _ in encoder.named_children())}
    known |= {each for each, _ in encoder.named_parameters(recurse=False)}
    for file in weight_files(folder):
        with library_errors(f"read {file}"), safetensors.safe_open(file, "pt") as opened:
            if any(each.partition(".")[0] not in known for each in opened.keys()):  # noqa: SIM118 - no dictionary
                return True
    return False


def load_with_own_head(folder: Path, name: str) -> PreTrainedModel:
    """Load a model in evaluation mode with the head that its folder names and holds.

    Raises:
        InvalidConfigError: its head is one that would be lost.
        TeacherError: the folder holds no model that can be loaded.
    """
    head = own_head(folder, name)
    model, lacking = load_weights(folder, head, attention="sdpa")
    if head is not None and lacking and (pools_texts(folder) or head not in _NOTHING_WITHOUT):
        model, _ = load_weights(folder, attention="sdpa")  # what is left of a head says nothing
    elif head is not None and lacking:
        raise TeacherError(
            f"{name} lacks a part of its head ({min(lacking)} is not among its weights). Get its weights "
            "again, or save it without the head: AutoModel.from_pretrained(OLD).save_pretrained(NEW)."
        )
    model.eval()
    return model


def load_weights(
    folder: Path,
    head: TaskHead | None = None,
    *,
    attention: str = ATTENTION,
    labels: Sequence[str] | None = None,
) -> tuple[PreTrainedModel, frozenset[str]]:
    """Load a model from safetensors, and return the names of the weights that the folder lacks.

    Args:
        folder: folder of the model.
        head: head that the model gets. None means no head.
        attention: name of an implementation of attention, as transformers knows it.
        labels: labels of a head for sequences. None means those of the configuration.

    Returns:
        The model, and the names of the lacking weights, which are new: those of a pooler, and of a head that
        the folder does not have.

    Raises:
        TeacherError: the folder holds no model, or not exactly the weights of the model that it describes, or
            weights that are NaN or infinite.
    """
    config = _config_of(folder, **head_config(head, labels))
    files = weight_files(folder)  # refuses an index that points elsewhere
    reads_pooler = head == "sequences"
    with library_errors(f"cannot load a model from {folder}"), _ONE_AT_A_TIME, quietly():
        model, loaded = _class_for(head, config).from_pretrained(
            folder,
            output_loading_info=True,
            config=config,
            attn_implementation=_usable_attention(head, config, attention),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # so that the message names the weight
        )
        assert isinstance(model, PreTrainedModel)
        mismatched = {key for key, *_ in loaded["mismatched_keys"]}
        refuse_incomplete(
            folder,
            files,
            model,
            missing=loaded["missing_keys"],
            mismatched=mismatched,
            may_differ=labels is not None or head == "spans",
            unexpected=loaded["unexpected_keys"],
            has_head=head is not None,
            reads_pooler=reads_pooler,
        )
    lacking = frozenset([*loaded["missing_keys"], *mismatched])
    _refuse_not_finite(folder, model, lacking, reads_pooler=reads_pooler)
    if head is None or not lacking:
        return model, lacking
    encoder, _ = load_weights(folder, None, attention=attention)
    return _with_new_head(encoder, config, head=head, attention=attention), lacking


def _with_new_head(
    encoder: PreTrainedModel, config: PreTrainedConfig, *, head: TaskHead, attention: str
) -> PreTrainedModel:
    """Return a model with an encoder's weights and a new head.

    transformers may leave tied weights of a missing head without memory, so all of the head is drawn here.
    But the square map of a head for masked tokens is the identity, so that words which the encoder brings to
    a place are scored from the first step; a random map hides them from the table of words. Fitted for 285
    steps to `mini`, such a head tells 10.9 % of masked tokens, and one with a random map 9.1 %.
    """
    model = draw_weights(config, head, attention=attention)
    model.base_model.load_state_dict(encoder.state_dict(), strict=False)
    if head == "tokens":
        for name, weight in model.named_parameters():
            is_of_head = not name.startswith(f"{model.base_model_prefix}.")
            if is_of_head and weight.shape == weight.shape[:1] * 2 and len(weight) != config.vocab_size:
                nn.init.eye_(weight)
    model.eval()
    return model


def _refuse_not_finite(
    folder: Path, model: PreTrainedModel, lacking: Collection[str], *, reads_pooler: bool
) -> None:
    """Raise TeacherError if a weight that came from the folder and is read is NaN or infinite."""
    for name, weight in model.named_parameters():
        is_read = name not in lacking and (reads_pooler or "pooler." not in name)
        if is_read and not bool(weight.isfinite().all()):
            raise TeacherError(f"{folder} has weights that are NaN or infinite: {name}. Get them again.")


def draw_weights(config: PreTrainedConfig, head: TaskHead | None, *, attention: str) -> PreTrainedModel:
    """Return a model in float32 with random weights.

    Args:
        config: configuration of the model.
        head: head that the model gets. None means no head.
        attention: name of an implementation of attention, as transformers knows it.
    """
    with _ONE_AT_A_TIME:
        usable = _usable_attention(head, config, attention)
        model = _class_for(head, config).from_config(
            config, attn_implementation=usable, dtype=torch.float32, trust_remote_code=False
        )
    assert isinstance(model, PreTrainedModel)
    return model


def head_config(head: TaskHead | None, labels: Sequence[str] | None) -> dict[str, object]:
    """Return the configuration of a task's head; it replaces that of an earlier task."""
    if head == "spans":
        return {"num_labels": 2}
    if labels is None:
        return {}
    if not labels:
        return {"num_labels": 1, "problem_type": "regression"}
    names = dict(enumerate(labels))
    return {
        "id2label": names,
        "label2id": {name: number for number, name in names.items()},
        "problem_type": "single_label_classification",
    }


def has_sides(config: PreTrainedConfig) -> bool:
    """Return whether a model tells the sides of a pair of texts apart, by segments."""
    return (getattr(config, "type_vocab_size", 0) or 0) > 1


def refuse_segments(config: PreTrainedConfig, pair: PairTemplate | None, name: str) -> None:
    """Raise TeacherError for a model that does not know the segments that a tokenizer gives pairs of texts.

    Args:
        config: configuration of the model.
        pair: tokens and segments of pairs. None means that texts are single.
        name: name of the model in the message.
    """
    kinds = getattr(config, "type_vocab_size", None)
    if pair is not None and pair.has_segments and kinds == 1:
        raise TeacherError(
            f"{name}: its tokenizer gives the second text of a pair segment 1, and its configuration knows "
            "one segment alone (type_vocab_size 1). Take token_type_ids out of model_input_names in its "
            "tokenizer_config.json."
        )


@torch.no_grad()
def usable_length(model: PreTrainedModel, length: int) -> int:
    """Return the most tokens, up to `length`, of a sequence that a model reads.

    Some families keep positions back, as many as the id of the padding token says.
    """
    limit, kept = positions_of(model.config), (model.config.pad_token_id or 0) + 1
    if limit is None or length <= limit - kept:
        return length
    length = min(length, limit)
    try:
        model(torch.full((1, length), model.config.vocab_size - 1))
    except (IndexError, RuntimeError):
        if kept >= limit:
            raise
        return limit - kept
    return length


def check_positions(
    read: Callable[[Tensor], object],
    config: PreTrainedConfig,
    *,
    name: str,
    ids: Tensor,
    option: str = "--max-length",
) -> None:
    """Raise InvalidConfigError if a model has fewer positions than a sequence.

    Args:
        read: function that runs the model on token ids.
        config: configuration of the model.
        name: name of the model in the message.
        ids: a sequence of the greatest length, `(1, length)`.
        option: command-line option that set the length.
    """
    max_length = ids.shape[1]
    limit = positions_of(config) or max_length
    if max_length > limit:
        raise too_long(max_length, limit, name=name, option=option)
    try:
        read(ids)
    except (IndexError, RuntimeError) as error:  # some families reserve positions for themselves
        if ids.device.type == "cpu":  # on a GPU every later call would fail, too
            with library_errors(f"{name} cannot be run"):
                read(ids[:, :_SHORT])
        raise too_long(max_length, limit, name=name, option=option) from error


_SHORT: Final = 4
"""Tokens of a sequence that every model has positions for."""
_OF_LAYERS: Final = (
    *("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "layer_rope_theta"),
    *("attention_window", "kv_sharing_modes", "indexer_types"),
)
"""Settings that may be lists with an entry for each layer."""


def lists_of_layers(content: Mapping[str, Any], depth: object) -> dict[str, list[Any]]:
    """Return the settings of a configuration of `depth` layers that have an entry for each of them."""
    found = {name: content.get(name) for name in _OF_LAYERS}
    return {
        name: list(value) for name, value in found.items() if isinstance(value, list) and len(value) == depth
    }


def take_settings(config: PreTrainedConfig, source: PreTrainedConfig, layers: Sequence[int]) -> None:
    """Give a configuration what its source says of each of these layers, where layers differ by settings."""
    for name, values in lists_of_layers(source.to_dict(), source.num_hidden_layers).items():
        setattr(config, name, [values[layer] for layer in layers])


def keep_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return a copy of a model with only these layers (Poor Man's BERT, arXiv 2004.03844).

    Args:
        model: an encoder, or one with a head.
        layers: numbers of the layers, counted from 0, in their new order.

    Raises:
        TeacherError: its family has no list of layers, or these layers are not a model of the family, as what
            they compute depends on their numbers.
    """
    kept, family = copy.deepcopy(model).eval(), model.config.model_type
    depth = kept.config.num_hidden_layers
    lists = [
        (*name.rpartition(".")[::2], modules)
        for name, modules in kept.base_model.named_modules()
        if isinstance(modules, nn.ModuleList) and len(modules) == depth
    ]
    if not lists:
        raise TeacherError(
            f"model family {family!r} has no list of {depth} layers to take from. Take another model."
        )
    for parent, attribute, modules in lists:
        if parent == lists[0][0]:  # some families have a list of each part of a layer, side by side
            chosen = nn.ModuleList(modules[number] for number in layers)
            setattr(kept.base_model.get_submodule(parent), attribute, chosen)
    take_settings(kept.config, model.config, layers)
    kept.config.num_hidden_layers = len(layers)
    with library_errors(f"model family {family!r} cannot be cut to layers {', '.join(map(str, layers))}"):
        alone: PreTrainedModel = type(kept)(kept.config).to(dtype=kept.dtype).eval()
    sizes, theirs = (
        {name: value.shape for name, value in each.state_dict().items()} for each in (alone, kept)
    )
    if sizes.keys() == theirs.keys() and sizes != theirs:
        raise TeacherError(
            f"model family {family!r} has weights whose sizes depend on the number of layers, so that it "
            "cannot be cut. Take another model."
        )
    if sizes != theirs or not _compute_the_same(alone, kept):
        raise TeacherError(
            f"layers of model family {family!r} depend on their places: layers "
            f"{', '.join(map(str, layers))} alone are not a model of it. "
            + ("Take others." if layers[0] == 0 else "Keep layer 0, and keep it first.")
        )
    return alone


@torch.no_grad()
def _compute_the_same(alone: PreTrainedModel, kept: PreTrainedModel) -> bool:
    """Give a model the weights of another one, and return whether both have the same last hidden states."""
    alone.load_state_dict(kept.state_dict())
    ids = torch.arange(1, 1 + _SHORT)[None] % kept.config.vocab_size
    with library_errors(f"model family {kept.config.model_type!r} cannot be run with some of its layers"):
        own, theirs = (model.base_model(input_ids=ids, use_cache=False)[0] for model in (alone, kept))
    return bool(torch.allclose(own, theirs, atol=1e-4, rtol=1e-3, equal_nan=True))
