"""Reading a model's folder: exactly the weights that are hashed, sound, and a configuration within bounds.

A folder may come from a stranger. Its index of weights may point elsewhere, its configuration may name
another file, require code, or describe a model that fills memory before anything is compared.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Final

import safetensors
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from minilm_cache.errors import MiniLMCacheError, TeacherError, first_line, is_panic
from minilm_cache.models.locate import CONFIG, read_json, refuse_no_config
from minilm_cache.storage_schema.documents import Xxh3
from minilm_cache.store.checked import sha256_files, xxh3_file
from minilm_cache.store.durable import open_regular
from minilm_cache.store.layout import exported_files

_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_ADAPTER: Final = "adapter_config.json"
_OTHER_WEIGHTS: Final = frozenset({"quantization_config", "transformers_weights", "compression_config"})
"""Configuration keys that choose another file of weights, or another format."""
_LIMITS: Final = {
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers", "num_hidden_groups"), 2**10),
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_key_value_heads"), 2**10),
    **dict.fromkeys(("hidden_size", "dim", "d_model", "embedding_size", "head_dim"), 2**16),
    **dict.fromkeys(("intermediate_size", "hidden_dim"), 2**20),
    **dict.fromkeys(("max_position_embeddings", "max_2d_position_embeddings"), 2**20),
    **dict.fromkeys(("type_vocab_size", "num_labels"), 2**16),
    "vocab_size": 2**24,
}
"""Greatest value of each key of a configuration that is a size."""
_MAX_INTEGER: Final = 2**24
"""Greatest integer that any other key of a configuration may have."""
_MAX_WAVELENGTH: Final = 2**40
"""Greatest base of the wavelengths of rotary positions (`rope_theta`)."""


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights that transformers loads from a folder; these are hashed.

    Raises:
        TeacherError: the folder holds none, or its index names files elsewhere or files that are not there.
    """
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        raise TeacherError(_no_weights(folder))
    index = read_json(folder / _INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise TeacherError(f"{folder / _INDEX} has no weight_map. Save the model again.")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise TeacherError(
                f"{folder / _INDEX} names {name!r}, which is not the plain name of a .safetensors file in "
                "this folder. Save the model again where you trust it."
            )
        if not (folder / name).is_file():
            raise TeacherError(f"{folder / name} is missing, and {_INDEX} names it. Fetch the model again.")
    return [folder / name for name in names]


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights of safetensors, or an index of them."""
    return any((folder / name).is_file() for name in (_WEIGHTS, _INDEX))


def _no_weights(folder: Path) -> str:
    if exported := exported_files(folder):
        return (
            f"{folder} holds a model that was exported ({exported[0].relative_to(folder)}), which can be "
            "measured and run, and nothing else. Give the model that it was made from."
        )
    pickled = next(iter([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.ckpt")]), None)
    if pickled is None:
        return f"{folder} holds no weights: neither {_WEIGHTS} nor {_INDEX}. Give a model's folder."
    return (
        f"{folder} has its weights only as {pickled.name}, a pickle that may run code when it is read. "
        "Convert it where you trust it: AutoModel.from_pretrained(OLD).save_pretrained(NEW), then give NEW."
    )


def weight_stamps(folder: Path) -> list[tuple[int, int, int]]:
    """Return number, size and time of change of each file that a model's weights and settings are read from.

    Two equal lists mean that nothing was replaced between them.

    Raises:
        TeacherError: same as for `weight_files`.
    """
    states = [file.stat() for file in [folder / CONFIG, *weight_files(folder)] if file.exists()]
    return [(state.st_ino, state.st_size, state.st_mtime_ns) for state in states]


def weights_sha256(folder: Path) -> str:
    """Return one SHA-256 (hex) for the weights that are loaded from a folder.

    Raises:
        TeacherError: same as for `weight_files`.
    """
    return sha256_files(weight_files(folder))


def _refuse_unreadable(folder: Path) -> None:
    """Raise TeacherError for a setting of a model that cannot be read, and would be taken as not there.

    Links to nothing are what copies of the hub's folders hold whose files lay elsewhere.
    """
    with os.scandir(folder) as entries:
        named = [each for each in entries if each.name.endswith(".json") and not each.name.startswith(".")]
        names = [each.name for each in named if not (each.is_file() or each.is_dir())]
    if names:
        raise TeacherError(
            f"{folder / min(names)} is a link to nothing, or a pipe. Copy the model with "
            "its files (cp -rL), or remove it."
        )


def read_config_file(folder: Path) -> dict[str, Any]:
    """Return `config.json` of a model's folder, checked.

    Raises:
        TeacherError: it does not exist, is not a JSON object, gives a size that is out of bounds, or chooses
            other weights than the whole ones that are loaded here.
    """
    refuse_no_config(folder)
    _refuse_unreadable(folder)
    if (folder / _ADAPTER).exists():
        raise TeacherError(
            f"{folder} holds an adapter ({_ADAPTER}), whose base model lies elsewhere. Merge the two, and "
            "give the folder of the whole model."
        )
    content = read_json(folder / CONFIG)
    problem = out_of_bounds(content)
    if problem is None and not isinstance(content.get("model_type"), str):
        problem = "model_type, the model's family, is not there"
    if problem is not None:
        raise TeacherError(f"{folder / CONFIG}: {problem}. Give another model.")
    other = next(
        (key for key in _OTHER_WEIGHTS if content.get(key) and not _is_whole(key, content[key])), None
    )
    if other is not None:
        raise TeacherError(
            f"{folder / CONFIG} has {other}, which chooses quantised weights or another file of them, and "
            "only whole weights in model.safetensors are loaded here. Give the model that it was made from."
        )
    return {key: value for key, value in content.items() if key not in _OTHER_WEIGHTS}


def _is_whole(key: str, value: object) -> bool:
    """Return whether a key of other weights only says that whole ones were once read from a GGUF file.

    transformers leaves it behind when it saves such a model; the weights that it saves are plain floats.
    """
    return key == "quantization_config" and isinstance(value, Mapping) and value.get("quant_method") == "gguf"


def model_description(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the keys that would choose its code, its attention or its weights."""
    refused = {"auto_map", *_OTHER_WEIGHTS}
    return {key: value for key, value in content.items() if not key.startswith("_") and key not in refused}


VOLATILE: Final = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})
"""Configuration keys that do not affect what the model computes."""
_HARMLESS: Final = frozenset(
    {
        # What a model was made with or for, and what only training, heads or poolers read.
        *("model_type", "finetuning_task", "task_specific_params", "tokenizer_class", "torch_dtype"),
        *("auto_map", "language", "name", "num_labels", "sentence_transformers", "transformers.js_config"),
        *("gradient_checkpointing", "reference_compile", "repad_logits_with_grad", "output_past"),
        *("tie_weights_", "directionality", "is_llama_config", "dense_act_fn", "is_gated_act"),
        *(
            "generator_size",
            "generator_hidden_size",
            "output_attentions",
            "torchscript",
            "use_bfloat16",
            "n_positions",
        ),
        # Settings of ALBERT and XLNet that no released code reads.
        *("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks"),
    }
)
"""Keys that no code of transformers reads, and that change nothing of what a model computes."""
_BEGINNINGS_OF_HARMLESS: Final = (
    "_",
    "pooler_",
    "summary_",
    "classifier_",
    "adapter",
    "sbert_",
    "encoder_no_",
)
_OF_TRAINING: Final = frozenset(
    {
        *(
            "architectures",
            "id2label",
            "label2id",
            "num_labels",
            "problem_type",
            "initializer_range",
            "use_cache",
            "is_encoder_decoder",  # the encoder of T5, saved alone, says that it is alone
        ),
        *("return_dict", "output_hidden_states", "chunk_size_feed_forward", "tie_word_embeddings"),
    }
)
"""Further ones, which say how weights were drawn, what labels are called, and what is returned."""


def computes_nothing(name: str) -> bool:
    """Return whether a setting of a configuration never has an effect on what an encoder computes."""
    return name in _HARMLESS or name.startswith(_BEGINNINGS_OF_HARMLESS)


def first_setting_that_differs(first: PreTrainedConfig, second: PreTrainedConfig) -> str | None:
    """Return the name of a setting that makes two models of equal weights compute differently.

    Dropouts, labels and how weights were drawn are passed over, and so is a setting that is off in one and
    absent in the other. None means that they compute the same.
    """
    mine, theirs = first.to_dict(), second.to_dict()
    for name in sorted({*mine, *theirs} - VOLATILE - _OF_TRAINING):
        is_token = name.endswith("_token_id") and name != "pad_token_id"
        if is_token or "dropout" in name or computes_nothing(name):
            continue
        values = [
            None if content.get(name) in (False, "absolute") else content.get(name)
            for content in (mine, theirs)
        ]
        if values[0] != values[1] and str(values[0]) != str(values[1]):
            return name
    return None


def out_of_bounds(content: Mapping[str, Any]) -> str | None:
    """Return which value of a configuration is out of bounds, in words. None means that all are within."""
    for key, value in content.items():
        most = _LIMITS.get(key, _MAX_WAVELENGTH if key.endswith("theta") else _MAX_INTEGER)
        is_size = key in _LIMITS
        if isinstance(value, bool) or value is None:
            continue
        if is_size and not isinstance(value, int):
            return f"{key} is {str(value)[:20]!r}, and should be a whole number"
        least = 1 if is_size and key != "type_vocab_size" else -most
        if isinstance(value, int) and not least <= value <= most:
            return f"{key} is {str(value)[:20]}, and should be between {least} and {most}"
    labels = content.get("id2label")
    if labels is not None and (not isinstance(labels, dict) or len(labels) > _LIMITS["num_labels"]):
        return "id2label is not a table of names, or is far too long"
    return None


@contextmanager
def library_errors(doing: str) -> Iterator[None]:
    """Turn any error that transformers and its libraries raise on a bad folder into a TeacherError.

    They raise all kinds, from KeyError to ZeroDivisionError, so this catches every exception, and what
    libraries in Rust raise where they give up.

    Args:
        doing: what failed, as the beginning of the message.
    """
    try:
        yield
    except MiniLMCacheError:
        raise
    except MemoryError as error:
        raise TeacherError(f"{doing}: there is too little memory for what its files describe.") from error
    except UnicodeEncodeError as error:
        raise TeacherError(f"{doing}: its path is not UTF-8. Rename the folder.") from error
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise TeacherError(f"{doing}: {first_line(error)}. Save it again, or give another one.") from error


TENSOR_ERRORS: Final = (OSError, ValueError, KeyError, RuntimeError, safetensors.SafetensorError)
"""Errors of files of tensors that are missing, damaged or not what they should be."""
_HEADER_BYTES: Final = 2**20
_TENSOR_HEADER_BYTES: Final = 512
_TYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Header = dict[str, tuple[tuple[int, ...], str]]
"""Shape and type of each tensor of a file, by name."""


class StoredFile(BaseModel):
    """Size and hash of a file, which tell decay, not malice."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int = Field(ge=0, lt=2**53)
    """Size in bytes."""
    xxh3_128: Xxh3

    @classmethod
    def of(cls, file: BufferedIOBase) -> "StoredFile":
        """Return size and hash of an open file."""
        file.seek(0)
        return cls(size=os.fstat(file.fileno()).st_size, xxh3_128=xxh3_file(file))


def distinct_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return weights and buffers by name, as a file has them; one that has several names is returned once."""
    weights: dict[int, tuple[str, Tensor]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        weights.setdefault(id(value), (name, value))
    return dict(weights.values())


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> StoredFile:
    """Write tensors durably, and return what the file is; its permissions follow the umask.

    safetensors writes files that only their owner may read.

    Raises:
        OSError: the file system refused.
        SafetensorError: the same, for some reasons.
    """
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    save_file(dict(tensors), file)
    file.chmod(mode)
    with file.open("rb") as written:
        os.fsync(written.fileno())
        return StoredFile.of(written)


def header_of(file: Path, *, most: int, follow_links: bool = False) -> Header:
    """Return shapes and types of the tensors in a file, none of which is read.

    Args:
        file: a file in the format of safetensors.
        most: number of tensors that it may have; a longer header is refused.
        follow_links: whether a symbolic link to a regular file is accepted.

    Raises:
        OSError: it is missing, or not a regular file.
        ValueError: its header is longer than it can be.
        SafetensorError: it is not such a file.
    """
    with open_regular(file, follow_links=follow_links) as opened:
        if int.from_bytes(opened.read(8), "little") > _HEADER_BYTES + _TENSOR_HEADER_BYTES * most:
            raise ValueError("its header is longer than it can be")
    with safe_open(file, framework="pt") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - no dictionary
        return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


def load_tensors(
    file: Path,
    expected: Mapping[str, Tensor],
    *,
    stored: StoredFile | None = None,
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of a file, which must have exactly the names, shapes and types that are expected.

    Args:
        file: a file that `save_tensors` wrote.
        expected: tensors like those that it should hold.
        stored: size and hash of the file. None means that they were not noted.
        device: device to load them to. None means the CPU.

    Raises:
        OSError: it is missing, or not a regular file.
        ValueError: it is not the file that was written, or holds other tensors.
        SafetensorError: it is damaged.
    """
    header = header_of(file, most=len(expected))
    if stored is not None:
        with open_regular(file) as opened:
            if StoredFile.of(opened) != stored:
                raise ValueError("its bytes are not those that were written")
    wanted = {name: (tuple(tensor.shape), _TYPES[tensor.dtype]) for name, tensor in expected.items()}
    odd = next((name for name in sorted({*header, *wanted}) if header.get(name) != wanted.get(name)), None)
    if odd is not None:
        raise ValueError(f"{odd} is {_in_words(header.get(odd))}, and should be {_in_words(wanted.get(odd))}")
    with safe_open(file, framework="pt", device=str(device or "cpu")) as tensors:
        return {name: tensors.get_tensor(name) for name in wanted}


def _in_words(described: tuple[tuple[int, ...], str] | None) -> str:
    if described is None:
        return "not there"
    shape, kind = described
    return f"{kind} of shape {list(shape)}"
