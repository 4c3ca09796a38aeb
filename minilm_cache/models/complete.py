"""Refuses a model's folder that says more, or less, than the model that transformers makes of it.

Transformers draws weights that the files lack at random, passes over weights that the model does not use, and
keeps settings that its code never reads. Each of these gives another model than the folder describes.
"""

import copy
import inspect
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    configuration_utils,
    modeling_rope_utils,
)
from transformers.models.auto import modeling_auto

from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.files import computes_nothing, header_of
from minilm_cache.models.locate import read_json
from minilm_cache.models.outline import positions_of
from minilm_cache.models.prompts import read_prompts
from minilm_cache.storage_schema.manifest import PROMPTS_FILE

_POOLER: Final = "pooler."
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
_HEADS: Final = (
    modeling_auto.MODEL_FOR_PRETRAINING_MAPPING,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING,
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    modeling_auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING,
)
_MEANS_NOTHING: Final[Mapping[str, object]] = {"position_embedding_type": "absolute"}
"""Values that say what a model does anyway."""


def refuse_ignored_settings(folder: Path, content: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Raise TeacherError if `config.json` has a setting that transformers does not read.

    A setting is read if its family's code declares it or mentions it. Settings that are off (None, False,
    empty) and settings that repeat another one's value under an older name are let pass.

    Args:
        folder: folder of the model.
        content: content of its `config.json`.
        config: configuration that transformers made of it.
    """
    declared = {*(field.name for field in fields(config)), *config.attribute_map}
    odd = [name for name in content if name not in declared and not _says_nothing(name, content)]
    if not odd:
        return
    read = _Code.of(config)
    ignored = next((name for name in odd if not read.mentions(name)), None)
    if ignored is not None:
        raise TeacherError(
            f"{folder}/config.json sets {ignored} to {str(content[ignored])[:40]!r}, which transformers "
            f"ignores for models of family {config.model_type!r}, so the model that it loads may be another "
            "one. If the setting has no effect on the model, remove it there."
        )


def refuse_other_family(folder: Path, content: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Raise TeacherError if `config.json` names a class of another family than its `model_type`.

    Families share names of weights: RoBERTa loads every weight of a BERT and counts positions in another way.

    Args:
        folder: folder of the model.
        content: content of its `config.json`.
        config: configuration that transformers made of it.
    """
    named = content.get("architectures") or ()
    for name in named if isinstance(named, list) else ():
        families = _FAMILIES.get(name, frozenset()) if isinstance(name, str) else frozenset()
        if families and config.model_type not in families:
            raise TeacherError(
                f"{folder}/config.json names the architecture {name}, which is of family "
                f"{' or '.join(map(repr, sorted(families)))}, and model_type {config.model_type!r}. Correct "
                "the one that is wrong."
            )


def _families() -> dict[str, frozenset[str]]:
    """Return the values of `model_type` that each class of models belongs to, by the name of the class."""
    by_class: dict[str, set[str]] = {}
    for name, mapping in vars(modeling_auto).items():
        if name.endswith("_MAPPING_NAMES"):
            for family, classes in mapping.items():
                for each in (classes,) if isinstance(classes, str) else classes:
                    by_class.setdefault(each, set()).add(family)
    return {name: frozenset(families) for name, families in by_class.items()}


_FAMILIES: Final = _families()


def _says_nothing(name: str, content: Mapping[str, Any]) -> bool:
    """Return whether a setting has no effect, or says what a model does anyway."""
    value = content[name]
    if computes_nothing(name) or name.endswith(("_token_id", "_token_ids")):
        return True
    is_name_of_token = name.endswith("_token") and isinstance(value, str)
    if is_name_of_token or "dropout" in name:
        return True
    if value is None or value is False or value in ("", [], {}) or _MEANS_NOTHING.get(name) == value:
        return True
    older = ("layer_norm_eps", "norm_eps", "rms_norm_eps", "layer_norm_epsilon")
    return name in older and value in [content[each] for each in older if each in content and each != name]


@dataclass(frozen=True, slots=True)
class _Code:
    """The source of what reads a family's configuration."""

    configuration: str
    modelling: str

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "_Code":
        """Return the source of a family's own modules, and of shared ones where the family uses them."""
        package = type(config).__module__.rpartition(".")[0]
        names = {name for name in list(sys.modules) if name.startswith(f"{package}.")}
        model_class = modeling_auto.MODEL_MAPPING.get(type(config), None)
        classes = model_class if isinstance(model_class, tuple) else (model_class,)
        names |= {each.__module__ for each in classes if each is not None}
        sources = {name: inspect.getsource(sys.modules[name]) for name in sorted(names)}
        own = "\n".join(text for name, text in sources.items() if "configuration_" in name)
        modelling = "\n".join(sources.values())
        if "rope" in modelling.lower():
            shared = "\n".join(map(inspect.getsource, (configuration_utils, modeling_rope_utils)))
            own, modelling = own + shared, modelling + shared
        return cls(own, modelling)

    def mentions(self, name: str) -> bool:
        """Return whether the code reads a setting, from the configuration or from the file's keys."""
        word = re.escape(name)
        in_configuration = rf"""self\.{word}\b|kwargs(\.\w+\(|\[)["']{word}["']"""
        anywhere = rf"""config\.{word}\b|getattr\([\w.]*config, ["']{word}["']"""
        return bool(re.search(in_configuration, self.configuration) or re.search(anywhere, self.modelling))


def refuse_incomplete(
    folder: Path,
    files: Sequence[Path],
    model: PreTrainedModel,
    *,
    missing: Collection[str],
    mismatched: Collection[str],
    may_differ: bool,
    unexpected: Collection[str],
    has_head: bool,
    reads_pooler: bool,
) -> None:
    """Raise TeacherError if not every weight of a model comes from its files, and every one of them is used.

    Poolers may be missing and unused, since nothing here reads them. A whole head may be missing, which is
    for the caller to decide, and heads that transformers has for the family may be unused.

    Args:
        folder: folder of the model.
        files: its files of weights.
        model: the model that transformers loaded.
        missing: names of the weights that the files lack.
        mismatched: names of the weights that have another shape in the files.
        may_differ: whether weights of a head may have another shape; the model then draws its own.
        unexpected: names in the files that transformers did not use.
        has_head: whether the model has a head.
        reads_pooler: whether that head reads the pooler.
    """
    prefix = f"{model.base_model_prefix}."
    types = _types(files)
    own = prefix if has_head else ""
    of_encoder = [
        name
        for name in [*missing, *mismatched]
        if name.startswith(own) and not name[len(own) :].startswith(_POOLER)
    ]
    differing = [name for name in sorted(mismatched) if not may_differ or name in of_encoder]
    if differing:
        raise TeacherError(
            f"{folder}: weight {differing[0]} has another shape in its files than config.json describes. "
            "Correct config.json, or save the whole model there."
        )
    if of_encoder:
        lost = min(of_encoder)
        other = next((name for name in sorted(types) if name.endswith(f".{lost.removeprefix(own)}")), None)
        named = (
            f" (it has {other}: rename its weights)"
            if other and other.removeprefix(prefix) != lost.removeprefix(own)
            else ""
        )
        raise TeacherError(
            f"{folder} lacks weights that its configuration describes, such as {lost}{named}, and random "
            "ones would take their place. Save the whole model there, or correct its config.json."
        )
    _refuse_unused(folder, model, sorted(unexpected), prefix=prefix)
    _refuse_strange(folder, model, types, prefix=prefix, reads_pooler=reads_pooler)


def _refuse_strange(
    folder: Path, model: PreTrainedModel, types: Mapping[str, str], *, prefix: str, reads_pooler: bool
) -> None:
    """Raise TeacherError if a weight that the model uses is not stored as floats, or is stored twice."""
    used = {name.removeprefix(prefix) for name, _ in model.named_parameters()}
    seen: dict[str, str] = {}
    for name, kind in types.items():
        bare = _as_used(name, prefix)
        if bare not in used or (bare.startswith(_POOLER) and not reads_pooler):
            continue
        _refuse_codes(folder, name, kind)
        if bare in seen:
            raise TeacherError(
                f"{folder} holds the same weight twice, as {seen[bare]} and {name}. Save the model again."
            )
        seen[bare] = name


def load_floats(file: Path, *, most: int) -> dict[str, Tensor]:
    """Return the tensors of a small file of weights.

    Args:
        file: a file in the format of safetensors, or a link to one.
        most: number of tensors that it may have.

    Raises:
        TeacherError: one is not stored as floats, so that it is no whole weight.
        OSError: it is missing, or not a regular file.
        ValueError: its header is longer than it can be.
        SafetensorError: it is not such a file.
    """
    for name, (_, kind) in header_of(file, most=most, follow_links=True).items():
        _refuse_codes(file, name, kind)
    return load_file(file)


def _refuse_codes(place: Path, name: str, kind: str) -> None:
    """Raise TeacherError for a weight that is not stored as floats: it stands for another number."""
    if kind not in _FLOATS:
        raise TeacherError(
            f"{place}: weight {name} is stored as {kind}, which is not a number format of whole "
            "weights. Give the model in float32, float16 or bfloat16."
        )


def _types(files: Sequence[Path]) -> dict[str, str]:
    """Return the type of each weight in these files, by name, as safetensors writes it."""
    types: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dictionary
                if name in types:
                    raise TeacherError(
                        f"{file} holds {name}, which another file of the model holds, too. Remove one."
                    )
                types[name] = opened.get_slice(name).get_dtype()
    return types


def _as_used(name: str, prefix: str) -> str:
    """Return the name that a weight has in a model without a head; older files name norms otherwise."""
    bare = name.removeprefix(prefix)
    for older, now in ((".gamma", ".weight"), (".beta", ".bias")):
        if bare.endswith(older):
            return bare.removesuffix(older) + now
    return bare


def _refuse_unused(folder: Path, model: PreTrainedModel, unexpected: Sequence[str], *, prefix: str) -> None:
    if not unexpected:
        return
    parts = {name for name, _ in model.base_model.named_children()}
    heads: frozenset[str] | None = None
    for name in unexpected:
        bare = name.removeprefix(prefix)
        if bare.startswith(_POOLER) or bare.endswith(("position_ids", "token_type_ids")):
            continue
        first = bare.split(".")[0]
        if not name.startswith(prefix) and first not in parts:
            heads = _head_names(model.config) if heads is None else heads
            if first in heads:
                continue
        raise TeacherError(
            f"{folder} holds weights that the model of its config.json does not use, such as {name}, so the "
            "model is not the one that was saved. Correct config.json; or, if they are of no use, save the "
            "model again: AutoModel.from_pretrained(OLD).save_pretrained(NEW)."
        )


_KNOWN_HEADS: Final[dict[type[PreTrainedConfig], frozenset[str]]] = {}
"""Names of the parts of all heads, by the configuration of the family: to make the heads takes a while."""


def _head_names(config: PreTrainedConfig) -> frozenset[str]:
    """Return the names of the parts of all heads that transformers has for a family."""
    if type(config) in _KNOWN_HEADS:
        return _KNOWN_HEADS[type(config)]
    names: set[str] = set()
    config = copy.deepcopy(config)
    config.num_labels = 2  # some heads have no other number
    for mapping in _HEADS:
        head_class = mapping.get(type(config), None)
        for each in head_class if isinstance(head_class, tuple) else (head_class,):
            if each is not None:
                with torch.device("meta"):
                    names |= {name for name, _ in each(config).named_children()}
    return _KNOWN_HEADS.setdefault(type(config), frozenset(names))


MODULES: Final = "modules.json"
"""File in which sentence-transformers lists the modules of a model."""
_READING: Final = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Files of a Transformer module's settings; sentence-transformers takes the first that exists."""
_AS_HERE: Final[Mapping[str, object]] = {
    "do_lower_case": False,
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
}
"""Settings of a Transformer module, and the only value of each that is computed here."""
_SCORES_AS_HERE: Final[Mapping[str, object]] = {
    **_AS_HERE,
    "transformer_task": "sequence-classification",
    "module_output_name": "scores",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
}
"""The same of a cross-encoder."""
_ANY_VALUE: Final = frozenset({"max_seq_length", "unpad_inputs"})
"""Settings that have no effect on a text's vector, or that are read elsewhere."""


def refuse_other_reading(folder: Path, *, lower_cases: bool, adds_prompts: bool) -> None:
    """Raise TeacherError if a folder says that texts are read as they cannot be read here.

    Args:
        folder: folder of the model, in the format of sentence-transformers.
        lower_cases: whether its tokenizer makes lower case of texts anyway.
        adds_prompts: whether the caller puts the prompt of every text before texts.

    Raises:
        TeacherError: it names a prompt that every text gets and the caller does not add, or settings of its
            Transformer module that would give other vectors or scores.
    """
    prompts = _settings(folder / PROMPTS_FILE)
    prompt = read_prompts(folder).of_every_text
    if prompt and not adds_prompts:
        raise TeacherError(
            f"{folder / PROMPTS_FILE} puts a prompt before every text ({prompt[:60]!r}), which is not done "
            "here. Put the prompt into your texts, and give a copy of the folder without default_prompt_name."
        )
    if prompts.get("truncate_dim") is not None:
        raise TeacherError(
            f"{folder / PROMPTS_FILE} cuts vectors to {prompts['truncate_dim']} dimensions, which is not "
            "done here. Remove truncate_dim in a copy of the folder; students learn shorter vectors by "
            "--matryoshka."
        )
    file, as_here = _reading_file(folder), _SCORES_AS_HERE if is_cross_encoder(folder) else _AS_HERE
    for key, value in _settings(file).items():
        if key in _ANY_VALUE or value in (None, {}, []) or as_here.get(key, object()) == value:
            continue
        if key == "do_lower_case" and lower_cases:
            continue
        lower = " Give texts in lower case, and set it to false." if key == "do_lower_case" else ""
        raise TeacherError(
            f"{file} sets {key} to {str(value)[:60]}, which is not done here.{lower} Take another "
            "teacher, or remove the setting from a copy of its folder."
        )


def is_cross_encoder(folder: Path) -> bool:
    """Return whether sentence-transformers saved a folder as a cross-encoder, with a list of modules."""
    is_listed = (folder / MODULES).is_file()
    return is_listed and _settings(_reading_file(folder)).get("transformer_task") == "sequence-classification"


def pools_texts(folder: Path) -> bool:
    """Return whether a folder says how it pools, as those of sentence encoders do."""
    return (folder / MODULES).is_file() and not is_cross_encoder(folder)


def reading_files(folder: Path) -> list[Path]:
    """Return the files of a folder that say how sentence-transformers runs its model."""
    files = (folder / MODULES, _reading_file(folder), folder / PROMPTS_FILE)
    return [file for file in files if file.is_file()]


def refuse_longer_texts(
    folder: Path, tokenizer: PreTrainedTokenizerFast, config: PreTrainedConfig, *, max_length: int
) -> None:
    """Raise InvalidConfigError if sequences are longer than what sentence-transformers has the model read.

    Args:
        folder: folder of the model.
        tokenizer: its tokenizer.
        config: its configuration.
        max_length: most tokens of a sequence, special tokens included.
    """
    limit = text_length(folder, tokenizer, config) if (folder / MODULES).is_file() else max_length
    if max_length > limit:
        raise InvalidConfigError(
            f"--max-length {max_length}: {folder} reads {limit} tokens of a text (max_seq_length), so its "
            f"own answers are to no more. Use --max-length {limit} at most."
        )


def text_length(folder: Path, tokenizer: PreTrainedTokenizerFast, config: PreTrainedConfig) -> int:
    """Return the most tokens that a sentence encoder or a cross-encoder reads, special tokens included.

    Raises:
        TeacherError: `max_seq_length` in its folder is not a whole number above 0.
    """
    file = _reading_file(folder)
    own, limit = _settings(file).get("max_seq_length"), positions_of(config) or math.inf
    if own is None:
        return int(min(tokenizer.model_max_length, limit))
    if type(own) is not int or own < 1:
        raise TeacherError(f"{file}: max_seq_length {own!r} is not a number of tokens. Correct it.")
    return int(min(own, limit))


def _reading_file(folder: Path) -> Path:
    return next((folder / name for name in _READING if (folder / name).is_file()), folder / _READING[0])


def _settings(file: Path) -> dict[str, Any]:
    """Return the settings in a file. A file that does not exist has none."""
    return dict(read_json(file)) if file.exists() else {}
