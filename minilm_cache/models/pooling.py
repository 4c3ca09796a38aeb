"""From hidden states to one vector of a text, in the format of sentence-transformers; models of texts.

A folder of sentence-transformers lists its modules in `modules.json`. The modules read here are Transformer,
Pooling, Dense and Normalize, in this order; they are computed here and not imported, since `modules.json`
names the code to run.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, Final, get_args

import safetensors
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from minilm_cache.errors import InvalidConfigError, TeacherError, first_line
from minilm_cache.models.complete import (
    MODULES,
    is_cross_encoder,
    load_floats,
    reading_files,
    refuse_other_reading,
    text_length,
)
from minilm_cache.models.exported import ExportedModel, load_to_run
from minilm_cache.models.files import header_of, library_errors
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.load import read_config, usable_length
from minilm_cache.models.locate import read_json
from minilm_cache.models.prompts import read_prompts
from minilm_cache.models.tokenizer import has_tokenizer, load_tokenizer, refuse_more_words
from minilm_cache.relations.scores import key_mask
from minilm_cache.storage_schema.manifest import PROMPTS_FILE
from minilm_cache.storage_schema.states import POOLING_MODES, Pooling, PoolingMode

_TYPES: Final = "sentence_transformers.models"
"""Package of the modules in `modules.json`, by the name that every release of sentence-transformers reads."""
_ACTIVATIONS: Final[dict[str, type[nn.Module]]] = {
    "torch.nn.modules.linear.Identity": nn.Identity,
    "torch.nn.modules.activation.Tanh": nn.Tanh,
    "torch.nn.modules.activation.ReLU": nn.ReLU,
    "torch.nn.modules.activation.GELU": nn.GELU,
}
_MAX_WIDTH: Final = 2**16
_LEGACY_MODES: Final[dict[str, PoolingMode]] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Switches that older releases of sentence-transformers wrote."""


class DenseLayer(nn.Module):
    """A linear map of vectors, and its activation."""

    def __init__(self, linear: nn.Linear, activation: nn.Module) -> None:
        """Join a linear map and its activation."""
        super().__init__()
        self.linear, self.activation = linear, activation

    def forward(self, vectors: Float[Tensor, "batch width"]) -> Float[Tensor, "batch new_width"]:
        """Return the mapped vectors."""
        return self.activation(self.linear(vectors))  # type: ignore[no-any-return]


class SentencePooler(nn.Module):
    """Pools the last hidden states of sequences: a mode, linear maps, and a division by the length."""

    def __init__(
        self,
        mode: PoolingMode,
        dense: Sequence[DenseLayer] = (),
        *,
        normalize: bool,
        includes_prompt: bool = True,
    ) -> None:
        """Join the steps.

        Args:
            mode: how hidden states become one vector.
            dense: linear maps that follow.
            normalize: whether vectors are divided by their length.
            includes_prompt: whether the tokens of a prompt are pooled, too; others are not computed here.
        """
        super().__init__()
        self.includes_prompt = includes_prompt
        self.mode: PoolingMode = mode
        self._dense = nn.ModuleList(dense)
        self.normalize = normalize

    @property
    def dense(self) -> list[DenseLayer]:
        """The linear maps, in order."""
        return [layer for layer in self._dense if isinstance(layer, DenseLayer)]

    def forward(
        self, hidden: Float[Tensor, "batch length hidden"], lengths: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch width"]:
        """Return the vector of each sequence, float32.

        Args:
            hidden: last hidden states, padded at the end.
            lengths: tokens of each sequence.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            vectors = self.pool(hidden.float(), lengths)
            for dense in self.dense:
                vectors = dense(vectors)
            return F.normalize(vectors, dim=-1) if self.normalize else vectors

    def pool(
        self, hidden: Float[Tensor, "batch length hidden"], lengths: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch hidden"]:
        """Return hidden states pooled by the mode alone, without linear maps; arguments as for `forward`."""
        if self.mode == "cls":
            return hidden[:, 0]
        if self.mode == "lasttoken":
            return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
        valid = key_mask(lengths, hidden.shape[1])[..., None]
        if self.mode == "max":
            return hidden.masked_fill(~valid, -torch.inf).amax(1)
        return (hidden * valid).sum(1) / lengths[:, None]

    @torch.no_grad()
    def turned(self) -> "SentencePooler":
        """Return a pooling whose vectors have the same products, in no more dimensions than hidden states.

        The one linear map, without a bias, is turned by the left singular vectors of its weight.
        """
        if not self.dense or self.dense[0].linear.out_features <= self.dense[0].linear.in_features:
            return self
        (layer,) = self.dense
        _, strengths, right = torch.linalg.svd(layer.linear.weight.double(), full_matrices=False)
        square = nn.Linear(len(strengths), len(strengths), bias=False)
        square.weight.copy_(strengths[:, None] * right)
        return SentencePooler(self.mode, [DenseLayer(square, nn.Identity())], normalize=self.normalize)

    def width(self, hidden_size: int) -> int:
        """Return the number of dimensions of a vector, given that of hidden states."""
        return int(self.dense[-1].linear.out_features) if self.dense else hidden_size

    def identity(self, hidden_size: int, *, min_cosine: float, calibration_sequences: int) -> Pooling:
        """Return what identifies the pooling in a cache, and how its vectors are stored.

        Args:
            hidden_size: number of dimensions of hidden states.
            min_cosine: least mean cosine of stored vectors with true ones.
            calibration_sequences: approximate number of sequences that the code is fitted to.
        """
        return Pooling(
            mode=self.mode,
            dense_sha256=self.dense_sha256(),
            normalize=self.normalize,
            width=self.width(hidden_size),
            min_cosine=min_cosine,
            calibration_sequences=calibration_sequences,
        )

    def has_made(self, stored: Pooling, hidden_size: int) -> bool:
        """Return whether vectors that are stored with this pooling are what it makes."""
        least, count = stored.min_cosine, stored.calibration_sequences
        return self.identity(hidden_size, min_cosine=least, calibration_sequences=count) == stored

    def dense_sha256(self) -> str | None:
        """Return the SHA-256 (hex) of the linear maps. None means that there are none."""
        if not self.dense:
            return None
        digest = hashlib.sha256()
        for layer in self.dense:
            digest.update(type(layer.activation).__name__.encode())
            for name, weight in layer.linear.state_dict().items():
                digest.update(f"{name}{tuple(weight.shape)}".encode())
                digest.update(weight.cpu().float().numpy().tobytes())
        return digest.hexdigest()

    def save(self, folder: Path, *, hidden_size: int, max_length: int) -> None:
        """Add what sentence-transformers reads to a folder with a model and its tokenizer.

        Args:
            folder: folder of the model.
            hidden_size: number of dimensions of its hidden states.
            max_length: most tokens of a sequence, special tokens included.

        Raises:
            OSError: the file system refused.
        """
        modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
        _write(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
        switches = {name: mode == self.mode for name, mode in _LEGACY_MODES.items()}
        left_out = {} if self.includes_prompt else {"include_prompt": False}
        pooling = {"word_embedding_dimension": hidden_size, **switches, **left_out}
        _write(folder / "1_Pooling/config.json", pooling)
        for number, layer in enumerate(self.dense, len(modules)):
            path, linear, kind = f"{number}_Dense", layer.linear, type(layer.activation)
            description = {
                "in_features": linear.in_features,
                "out_features": linear.out_features,
                "bias": linear.bias is not None,
                "activation_function": f"{kind.__module__}.{kind.__name__}",
            }
            _write(folder / path / "config.json", description)
            weights = {f"linear.{name}": value.detach().cpu() for name, value in linear.state_dict().items()}
            save_file(weights, folder / path / "model.safetensors")
            modules.append((path, "Dense"))
        if self.normalize:
            modules.append((f"{len(modules)}_Normalize", "Normalize"))
        listed = [
            {"idx": number, "name": str(number), "path": path, "type": f"{_TYPES}.{kind}"}
            for number, (path, kind) in enumerate(modules)
        ]
        _write(folder / MODULES, listed)


def refuse_other_scores(folder: Path) -> None:
    """Raise TeacherError if a folder is a cross-encoder's that reads texts as they cannot be read here."""
    if is_cross_encoder(folder):
        refuse_other_reading(folder, lower_cases=_lower_cases(folder), adds_prompts=False)


def copy_pooling(source: Path, folder: Path, config: PreTrainedConfig, *, most: int | None = None) -> None:
    """Add what sentence-transformers reads to a folder of a model, where the source of the model has it.

    Linear maps stay out where the new model has another width than its source.

    Args:
        source: folder of the model that it was made from.
        folder: folder of the new model.
        config: configuration of the new model.
        most: most tokens of a text that the new model can read. None means as many as its configuration and
            the source say.

    Raises:
        TeacherError: the source's pooling or prompts are damaged.
        OSError: the file system refused.
    """
    if is_cross_encoder(source):
        _modules(source)  # refuses a damaged list
        _refuse_foreign_code(read_json(source / MODULES, kind=list), source / MODULES)
        for file in reading_files(source):
            (folder / file.name).write_bytes(file.read_bytes())
        return
    if (source / MODULES).is_file():
        width, tokenizer = read_config(source).hidden_size, load_tokenizer(source, has_ends=False)
        pooler = load_pooler(source, None, width)
        if config.hidden_size != width:
            pooler = SentencePooler(
                pooler.mode, normalize=pooler.normalize, includes_prompt=pooler.includes_prompt
            )
        max_length = text_length(source, tokenizer, config)
        pooler.save(folder, hidden_size=config.hidden_size, max_length=min(max_length, most or max_length))
    if (source / PROMPTS_FILE).is_file():
        (folder / PROMPTS_FILE).write_bytes(read_prompts(source).to_json())


def projection_to(width: int, hidden_size: int, *, bias: bool = True) -> list[DenseLayer]:
    """Return the learned linear map of a student to vectors of `width`; empty where its width is the same."""
    if width == hidden_size:
        return []
    return [DenseLayer(nn.Linear(hidden_size, width, bias=bias), nn.Identity())]


def leaves_prompts_out(folder: Path) -> bool:
    """Return whether the pooling of a sentence encoder leaves out the tokens of its prompts.

    Raises:
        TeacherError: a file is damaged.
    """
    files = [path / "config.json" for kind, path in _modules(folder) if kind == "Pooling"]
    return any(read_json(file).get("include_prompt") is False for file in files if file.is_file())


def map_files(folder: Path) -> list[Path]:
    """Return the files of the linear maps behind a sentence encoder's pooling; empty where there are none.

    Raises:
        TeacherError: its list of modules is damaged.
    """
    files = [path / "model.safetensors" for kind, path in _modules(folder) if kind == "Dense"]
    return [file for file in files if file.is_file()]


def num_map_weights(folder: Path) -> int:
    """Return the weights of the linear maps in a sentence encoder's folder; 0 where there are none.

    Raises:
        TeacherError: a file is damaged.
    """
    count = 0
    for file in map_files(folder):
        with library_errors(f"read {file}"):
            count += sum(prod(shape) for shape, _ in header_of(file, most=2, follow_links=True).values())
    return count


def load_pooler(folder: Path, mode: PoolingMode | None, hidden_size: int) -> SentencePooler:
    """Return the pooling of a teacher: that of its `modules.json`, or the mean, the first token, ... alone.

    Args:
        folder: folder of the teacher.
        mode: mode for a folder without `modules.json`. None means that there must be one.
        hidden_size: number of dimensions of the teacher's hidden states.

    Raises:
        InvalidConfigError: neither or both say how to pool, and differently.
        TeacherError: `modules.json` is damaged, or names a module that cannot be computed here.
    """
    file = folder / MODULES
    if not file.is_file():
        if mode is None:
            raise InvalidConfigError(
                f"teacher {folder} has no {MODULES} that says how it pools. Give --pooling: "
                f"{', '.join(POOLING_MODES)}."
            )
        return SentencePooler(mode, normalize=True)
    pooler = _read_modules(folder, file)
    _check_widths(pooler, hidden_size, file)
    if mode not in (None, pooler.mode):
        raise InvalidConfigError(
            f"--pooling {mode}: {file} pools by {pooler.mode}. Leave it out, or remove that file."
        )
    return pooler


def _refuse_foreign_code(listed: Sequence[Any], file: Path) -> None:
    kinds = (str(each["type"]) for each in listed)
    foreign = next((kind for kind in kinds if not kind.startswith("sentence_transformers.")), None)
    if foreign is not None:
        raise TeacherError(
            f"{file} names {foreign}, which is code of its own, and none from a model's folder is run. Take "
            "another teacher, or a copy of its folder without this file and --pooling."
        )


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Return the kind and the folder of each module of a sentence encoder; empty where it names none.

    Raises:
        TeacherError: its list of modules is damaged, or names a folder outside its own.
    """
    file = folder / MODULES
    if not file.is_file():
        return []
    listed = read_json(file, kind=list)
    try:
        paths = [PurePosixPath(str(module["path"])) for module in listed]
        kinds = [str(module["type"]).rsplit(".", 1)[-1] for module in listed]
    except (KeyError, TypeError) as error:
        raise TeacherError(f"{file} is not a list of modules. Save the model again.") from error
    outside = next((path for path in paths if path.is_absolute() or ".." in path.parts), None)
    if outside is not None:
        raise TeacherError(
            f"{file} names {outside}, which is outside the model's folder. Do not use this model."
        )
    return [(kind, folder / path) for kind, path in zip(kinds, paths, strict=True)]


def _read_modules(folder: Path, file: Path) -> SentencePooler:
    modules = _modules(folder)
    refuse_other_reading(folder, lower_cases=_lower_cases(folder), adds_prompts=True)
    kinds = [kind for kind, _ in modules]
    dense = [path for kind, path in modules if kind == "Dense"]
    expected = [
        "Transformer",
        "Pooling",
        *(["Dense"] * len(dense)),
        *(["Normalize"] * ("Normalize" in kinds)),
    ]
    if kinds != expected:
        odd = next((kind for kind in kinds if kind not in expected), " then ".join(kinds))
        raise TeacherError(
            f"{file} names {odd}, and only Transformer, Pooling, Dense and Normalize, in this order, can be "
            "computed here. Take another teacher, or a copy of its folder without this file and --pooling."
        )
    _refuse_foreign_code(read_json(file, kind=list), file)
    normalising = [path / "config.json" for kind, path in modules if kind == "Normalize"]
    if any(path.is_file() and not _has_usual_names(read_json(path)) for path in normalising):
        raise TeacherError(
            f"{file}: its Normalize divides something else than vectors of texts. Take another teacher."
        )
    if modules[0][1] != folder:
        raise TeacherError(
            f"{file} has its Transformer in folder {modules[0][1].relative_to(folder)}, and it is read from "
            f"{folder} itself. Move its files there, and set the path to an empty one."
        )
    pooling = modules[1][1] / "config.json"
    return SentencePooler(
        _read_mode(pooling),
        [_read_dense(path) for path in dense],
        normalize="Normalize" in kinds,
        includes_prompt=read_json(pooling).get("include_prompt") is not False,
    )


def _check_widths(pooler: SentencePooler, hidden_size: int, file: Path) -> None:
    """Raise TeacherError for linear maps that do not follow each other, or hold NaN or infinity."""
    width = hidden_size
    for layer in pooler.dense:
        if layer.linear.in_features != width or not 1 <= layer.linear.out_features <= _MAX_WIDTH:
            raise TeacherError(
                f"{file}: a linear map takes vectors of width {layer.linear.in_features} to "
                f"{layer.linear.out_features}, where the vectors have {width}. Save the model again."
            )
        if not all(bool(weight.isfinite().all()) for weight in layer.parameters()):
            raise TeacherError(f"{file}: a linear map holds NaN or infinity. Take another teacher.")
        width = layer.linear.out_features


def _read_mode(file: Path) -> PoolingMode:
    config = read_json(file)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [
            _LEGACY_MODES.get(name, name)
            for name, value in config.items()
            if name.startswith("pooling_mode_") and value
        ]
    modes = [modes] if isinstance(modes, str) else modes
    for mode in get_args(PoolingMode):
        if modes == [mode]:
            return mode  # type: ignore[no-any-return]
    words = " and ".join(map(str, modes)) if isinstance(modes, list) and modes else "no mode that it names"
    raise TeacherError(
        f"{file} pools by {words}, and only one of {', '.join(POOLING_MODES)} can be computed here. Take "
        "another teacher."
    )


def _has_usual_names(config: Mapping[str, object]) -> bool:
    """Return whether a module reads and writes the vector of a text."""
    names = [config.get("module_input_name"), config.get("module_output_name")]
    return all(name in (None, "sentence_embedding") for name in names)


def _lower_cases(folder: Path) -> bool:
    """Return whether a tokenizer makes lower case of texts, so that `do_lower_case` says nothing new."""
    if not has_tokenizer(folder):
        return False
    normalizer = load_tokenizer(folder, has_ends=False).backend_tokenizer.normalizer
    return normalizer is not None and "A" not in normalizer.normalize_str("A")


def _read_dense(path: Path) -> DenseLayer:
    config = read_json(path / "config.json")
    activation = _ACTIVATIONS.get(str(config.get("activation_function", "torch.nn.modules.activation.Tanh")))
    if activation is None or config.get("use_residual") or not _has_usual_names(config):
        raise TeacherError(
            f"{path} is a linear map with an activation, a residual or names that cannot be computed here: "
            f"{json.dumps(config)[:200]}. Take another teacher."
        )
    file = path / "model.safetensors"
    try:
        weights = load_floats(file, most=2)
        weight = weights["linear.weight"]
        if weight.ndim != 2 or not all(1 <= size <= _MAX_WIDTH for size in weight.shape):  # noqa: PLR2004 - a matrix
            raise TeacherError(
                f"{file}: a linear map has the shape {tuple(weight.shape)}, and its sides should be between "
                f"1 and {_MAX_WIDTH}. Take another teacher."
            )
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias="linear.bias" in weights)
        linear.load_state_dict({name.removeprefix("linear."): value for name, value in weights.items()})
    except (OSError, KeyError, IndexError, RuntimeError, ValueError, safetensors.SafetensorError) as error:
        raise TeacherError(
            f"cannot read {file}: {first_line(error)}. Save the model again as safetensors."
        ) from error
    return DenseLayer(linear, activation())


def _write(file: Path, content: object) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class SentenceEncoder(nn.Module):
    """A model that makes vectors of token ids."""

    def __init__(self, model: PreTrainedModel | ExportedModel, pooler: SentencePooler) -> None:
        """Join a model without a head and its pooling."""
        super().__init__()
        self.model, self.pooler = model, pooler

    @classmethod
    def load(cls, folder: Path) -> "SentenceEncoder":
        """Load a folder with a `modules.json`, in evaluation mode on the CPU; also one that was exported.

        Raises:
            TeacherError: the folder holds no model, or a pooling that cannot be computed.
            InvalidConfigError: the folder does not say how it pools.
        """
        model = load_to_run(folder)
        return cls(model, load_pooler(folder, None, model.config.hidden_size)).eval()

    @property
    def num_parameters(self) -> int:
        """Number of weights of the model and its linear maps."""
        return sum(weight.numel() for weight in self.parameters())

    def forward(
        self,
        input_ids: Int[Tensor, "batch length"],
        attention_mask: Int[Tensor, "batch length"],
        token_type_ids: Int[Tensor, "batch length"] | None = None,
    ) -> Float[Tensor, "batch width"]:
        """Return the vector of each sequence.

        Args:
            input_ids: token ids, padded at the end.
            attention_mask: 1 at tokens, 0 at padding.
            token_type_ids: the side of a pair that a token belongs to, for families that tell them apart.
                None means one side.
        """
        sides = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **sides)
        vectors: Tensor = self.pooler(output.last_hidden_state, attention_mask.sum(1))
        return vectors


class SentenceModel:
    """A model that makes vectors of texts, in evaluation mode on the CPU."""

    def __init__(self, folder: Path, max_length: int) -> None:
        """Load a folder with a `modules.json`.

        Args:
            folder: folder of the model.
            max_length: most tokens of a text, special tokens included; a folder that reads fewer
                (`max_seq_length`) reads as many.

        Raises:
            TeacherError: the folder holds no model, or a pooling that cannot be computed.
            InvalidConfigError: the folder does not say how it pools.
        """
        self._encoder, self._folder = SentenceEncoder.load(folder), folder
        self._tokenizer = load_tokenizer(folder, has_ends=False)
        refuse_more_words(self._tokenizer, self._encoder.model, folder)
        model = self._encoder.model
        limit = min(max_length, text_length(folder, self._tokenizer, model.config))
        if isinstance(model, PreTrainedModel):
            limit = usable_length(model, limit)
        else:  # a file that was exported cannot be asked, and its tokenizer names its limit
            limit = min(limit, self._tokenizer.model_max_length)
        self.max_length, self._prompts = limit, read_prompts(folder)
        self.num_cut = 0  # texts that were longer, so far
        self._has_units = self._prompts.similarity != "dot"

    @property
    def num_parameters(self) -> int:
        """Number of weights of the model and its linear maps."""
        return self._encoder.num_parameters

    @torch.no_grad()
    def encode(
        self, texts: Sequence[str], batch_size: int = 64, role: str | None = None
    ) -> Float[Tensor, "texts width"]:
        """Return the vectors of texts, in their order; texts of about the same length share a batch.

        They have unit length, unless the folder says that their dot products are compared: the dot product of
        two vectors is what the model compares them by.

        Args:
            texts: the texts.
            batch_size: texts of a forward pass.
            role: what the texts are for, `query` or `document`, whose prompt they get if the model has one,
                and else none, as by `encode_query` of sentence-transformers. None means its default prompt.

        Raises:
            TeacherError: the prompt's tokens are left out of its pooling.
        """
        prompt = self._prompts.of_every_text if role is None else self._prompts.by_name.get(role, "")
        if prompt and not self._encoder.pooler.includes_prompt:
            raise TeacherError(
                f"{self._folder} leaves the tokens of its prompt out of its pooling (include_prompt), which "
                "is not done here. Take another model."
            )
        prompted = [prompt + text for text in texts]
        encoded = self._tokenizer(prompted, truncation=True, max_length=self.max_length)
        self.num_cut += sum(bool(each.overflowing) for each in encoded.encodings or ())
        ids = encoded["input_ids"]
        if [] in ids:
            raise TeacherError(
                f"{self._folder}: its tokenizer makes no token of the text "
                f"{texts[ids.index([])][:40]!r}, and such a text has no vector. Leave it out."
            )
        order = sorted(range(len(ids)), key=lambda number: len(ids[number]))
        vectors: list[Tensor] = []
        for first in range(0, len(order), batch_size):
            rows = [torch.tensor(ids[number]) for number in order[first : first + batch_size]]
            inputs = Inputs.of(rows, self._tokenizer.pad_token_id)
            vectors += self._encoder(inputs.ids, inputs.valid.to(torch.int64)).unbind()
        places = torch.tensor(order).argsort()
        stacked = torch.stack(vectors)[places]
        return F.normalize(stacked, dim=1) if self._has_units else stacked
