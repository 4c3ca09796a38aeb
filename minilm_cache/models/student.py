"""Building students from a shape and the configuration of the teacher only, and what they cost."""

import json
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from minilm_cache.errors import CacheCorruptError, InvalidConfigError
from minilm_cache.models.arch import StudentShape, parse_arch
from minilm_cache.models.device import enough_memory
from minilm_cache.models.families import FAMILIES, family_of
from minilm_cache.models.files import library_errors, model_description, out_of_bounds
from minilm_cache.models.load import check_positions, draw_weights, lists_of_layers
from minilm_cache.models.outline import positions_of, too_long
from minilm_cache.models.tap import ATTENTION, Head
from minilm_cache.storage_schema.base import REMEDY
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG, CacheManifest
from minilm_cache.wording import printable

_SHARED_FIELDS: Final = (
    "vocab_size",
    "max_position_embeddings",
    "type_vocab_size",
    "pad_token_id",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "initializer_range",
)
_FFN_FIELDS: Final = ("intermediate_size", "hidden_dim")
_TEACHER_FIELDS: Final = frozenset(
    {"model_type", "architectures", "id2label", "label2id", "num_labels", "problem_type"}
)
"""Keys of a teacher's configuration that a student does not get: the family is set, labels differ."""
_MAX_NAME: Final = 256
_MAX_WEIGHT_RATIO: Final = 4
"""Greatest ratio of a model's weights to what its sizes suggest: a stranger's must not fill memory."""
_BAD_CONFIG: Final = (
    StrictDataclassError,
    AssertionError,
    AttributeError,
    ImportError,
    KeyError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that transformers raises on configurations that do not describe a model."""


@contextmanager
def _usable() -> Iterator[None]:
    """Raise CacheCorruptError where a configuration does not describe a model."""
    try:
        yield
    except _BAD_CONFIG as error:
        raise _unusable(error) from error


def _config_of(family: str, content: Mapping[str, Any]) -> PreTrainedConfig:
    with _usable():
        config = AutoConfig.for_model(family, **content)
    assert isinstance(config, PreTrainedConfig)
    return config


def student_config(shape: StudentShape, teacher_config: bytes, manifest: CacheManifest) -> PreTrainedConfig:
    """Return the configuration of a student: the teacher's, with its own sizes.

    Args:
        shape: sizes of the student.
        teacher_config: `teacher/config.json` of the cache, untrusted.
        manifest: manifest of the cache.

    Raises:
        InvalidConfigError: the family has no such shape.
        CacheCorruptError: the configuration is not that of the teacher in the manifest.
    """
    content = _read_teacher_config(teacher_config, manifest)
    return shape_config(shape, content, manifest.identity.teacher.model_type)


def shape_config(shape: StudentShape, content: Mapping[str, Any], family: str) -> PreTrainedConfig:
    """Return a teacher's configuration with the sizes of a shape.

    Args:
        shape: sizes of the student.
        content: configuration of the teacher.
        family: model family of the teacher.

    Raises:
        InvalidConfigError: the family has no such shape.
        CacheCorruptError: the configuration does not describe a model.
    """
    kept = _model_fields(content)
    if shape.bottleneck_size is not None:
        return _bottleneck_config(shape, shape.bottleneck_size, kept=kept, family=family)
    if shape.embedding_size != shape.hidden_size:
        factorised = family_of(family).factorised
        if factorised is None:
            raise InvalidConfigError(
                f"--arch {shape.arch}: family {family!r} has no factorised embedding; "
                f"{_names_with('factorised')} have. Leave out :e{shape.embedding_size}."
            )
        family = factorised
    for name, values in lists_of_layers(kept, content.get("num_hidden_layers")).items():
        # As in MiniLM, the student's last layers correspond to the teacher's last layers.
        kept[name] = _last_of(values, shape)
    fields = [name for name in _FFN_FIELDS if name in kept]
    if not fields:
        raise InvalidConfigError(
            f"--arch {shape.arch}: students of the family {family!r} are not made here (it has no size of "
            "the FFN to set). Cut them from an encoder of another: --init slice --init-teacher ENCODER."
        )
    sizes = {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        fields[0]: shape.ffn_size,
    }
    sizes |= _sizes_of_heads(kept, shape)
    if family == family_of(family).factorised:
        sizes["embedding_size"] = shape.embedding_size
    attribute_names = CONFIG_MAPPING[family].attribute_map
    kept |= {attribute_names.get(name, name): size for name, size in sizes.items()}
    return _config_of(family, kept)


def _sizes_of_heads(kept: Mapping[str, Any], shape: StudentShape) -> dict[str, int]:
    """Return what some families say of their heads, of attention and of classes, for a shape."""
    sizes = {}
    if kept.get("num_key_value_heads") is not None:  # students share no keys and values among heads
        sizes["num_key_value_heads"] = shape.num_heads
    if kept.get("num_key_value_heads") is not None or kept.get("head_dim") is not None:
        sizes["head_dim"] = shape.hidden_size // shape.num_heads
    if kept.get("pooler_hidden_size") is not None:  # of DeBERTa's classifiers
        sizes["pooler_hidden_size"] = shape.hidden_size
    return sizes


def check_family_positions(
    config: PreTrainedConfig, folder: Path, *, name: str, token: int, max_length: int
) -> None:
    """Raise InvalidConfigError if students of a configuration would have fewer positions than a sequence.

    Some families reserve positions, which their configuration does not say, so a tiny student is run.

    Args:
        config: configuration of the model that students are of the family of.
        folder: folder of that model, for messages.
        name: name of that model in the message.
        token: id of a token that is not padding.
        max_length: most tokens of a sequence.

    Raises:
        InvalidConfigError: they would have fewer.
        TeacherError: the configuration describes no model.
    """
    with library_errors(f"{folder}/config.json describes no model"), torch.no_grad():
        longest, model = torch.full((1, max_length), token), _tiny_student(config)
        check_positions(lambda ids: model(input_ids=ids), model.config, name=name, ids=longest)


def reads_past_alone(config: PreTrainedConfig, folder: Path) -> bool:
    """Return whether tokens of a configuration's students read only those before them, as decoders' do.

    Args:
        config: configuration of the model that students are of the family of.
        folder: folder of that model, for messages.

    Raises:
        TeacherError: the configuration describes no model.
    """
    with library_errors(f"{folder}/config.json describes no model"), torch.no_grad():
        ids = torch.tensor([[1, 2], [1, 3]]) % config.vocab_size
        first, other = _tiny_student(config)(input_ids=ids)[0][:, 0]
        return torch.equal(first, other)


def _tiny_student(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a student of one layer with random weights, in evaluation mode.

    Its states have several numbers, as two that a norm scales would be 1 and -1 whatever is read.
    """
    heads = config.num_attention_heads
    shape = parse_arch(f"1x{8 * heads}", heads, compares_heads=False)
    tiny = shape_config(shape, config.to_dict(), config.model_type)
    model: PreTrainedModel = draw_weights(tiny, None, attention="sdpa").eval()
    return model


def _names_with(field: str) -> str:
    """Return the families whose row has something in a field, for messages."""
    return ", ".join(name for name, row in FAMILIES.items() if getattr(row, field))


def _bottleneck_config(
    shape: StudentShape, bottleneck: int, *, kept: Mapping[str, Any], family: str
) -> PreTrainedConfig:
    """Return the configuration of a student with bottlenecks: MobileBERT's layers in the sizes of the shape.

    The rest (normalisation, activation, four feed-forward networks in each layer) stays as in MobileBERT.
    """
    if not family_of(family).has_bottlenecks:
        raise InvalidConfigError(
            f"--arch {shape.arch}: family {family!r} has no layers with bottlenecks; "
            f"{_names_with('has_bottlenecks')} have. Leave out :b{bottleneck}."
        )
    shared = {name: kept[name] for name in _SHARED_FIELDS if name in kept}
    sizes = {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.ffn_size,
        "intra_bottleneck_size": bottleneck,
        "embedding_size": shape.embedding_size,
    }
    return _config_of("mobilebert", {**shared, **sizes})


def teacher_config(document: bytes, manifest: CacheManifest) -> PreTrainedConfig:
    """Return the configuration of the teacher that a cache holds.

    Args:
        document: `teacher/config.json` of the cache, untrusted.
        manifest: manifest of the cache.

    Raises:
        CacheCorruptError: it is not that of the teacher in the manifest.
    """
    return _config_of(manifest.identity.teacher.model_type, _read_teacher_config(document, manifest))


def class_names(document: bytes, manifest: CacheManifest) -> dict[int, str]:
    """Return the names of the classes that a teacher tells apart, by their number in its logits.

    It is empty where a cache has no logits, or its teacher has names for another number of classes.

    Args:
        document: `teacher/config.json` of the cache, untrusted.
        manifest: manifest of the cache.

    Raises:
        CacheCorruptError: it is not that of the teacher in the manifest, or a name is no text.
    """
    _read_teacher_config(document, manifest)
    num_classes = manifest.identity.num_classes or 0
    names = json.loads(document).get("id2label") or {}
    if names.keys() != set(map(str, range(num_classes))):
        return {}
    if not all(isinstance(name, str) and len(name) <= _MAX_NAME for name in names.values()):
        raise _unusable("a name of a class is no text, or is far too long")
    return {number: printable(names[str(number)]) for number in range(num_classes)}


def _last_of(values: list[Any], shape: StudentShape) -> list[Any]:
    if shape.num_layers > len(values):
        raise InvalidConfigError(
            f"--arch {shape.arch}: more layers than the teacher's {len(values)}, whose kinds of attention "
            "the student's layers repeat. Take fewer layers."
        )
    return values[-shape.num_layers :]


def _read_teacher_config(document: bytes, manifest: CacheManifest) -> dict[str, Any]:
    """Read the teacher's configuration, without the keys that would choose code or attention."""
    teacher, longest = manifest.identity.teacher, manifest.identity.packing.max_length
    with _usable():
        content = json.loads(document)
        problem = out_of_bounds(content)
        if problem is not None:
            raise _unusable(problem)
        kept = _model_fields(content)
        config = AutoConfig.for_model(teacher.model_type, **kept)
        plausible = (
            config.vocab_size == teacher.vocab_size
            and config.num_attention_heads == teacher.num_heads
            and config.hidden_size == teacher.hidden_size
            and getattr(config, "num_hidden_layers", teacher.num_layers) == teacher.num_layers
            and (positions_of(config) or longest) >= longest
            and 0 <= (config.pad_token_id or 0) < teacher.vocab_size
        )
    if not plausible:
        raise _unusable("it does not belong to the teacher that the manifest names")
    return kept


def _model_fields(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a configuration that a student gets as well."""
    return {key: value for key, value in model_description(content).items() if key not in _TEACHER_FIELDS}


def _unusable(reason: object) -> CacheCorruptError:
    return CacheCorruptError(f"{TEACHER_CONFIG} of the cache cannot be used: {reason}. {REMEDY}")


def build_student(config: PreTrainedConfig, seed: int, head: Head | None = None) -> PreTrainedModel:
    """Return a student with initial weights drawn from the seed, ready to be tapped.

    Args:
        config: configuration of the student.
        seed: seed of the initial weights.
        head: head that it gets. None means no head.

    Raises:
        CacheCorruptError: the configuration, which comes from a cache, does not describe a model.
    """
    torch.manual_seed(seed)
    return build_model(config, ATTENTION, head)


def build_model(config: PreTrainedConfig, attention: str, head: Head | None = None) -> PreTrainedModel:
    """Return a model with random weights.

    Args:
        config: configuration of the model.
        attention: name of an implementation of attention, as transformers knows it.
        head: head that it gets. None means no head.

    Raises:
        DeviceError: the model is too large for memory.
        CacheCorruptError: the configuration does not describe a model.
    """
    with _usable():
        _refuse_oversized(config, attention, head)
        with enough_memory(torch.device("cpu"), "Take a smaller --arch"):
            return draw_weights(config, head, attention=attention)


def _refuse_oversized(config: PreTrainedConfig, attention: str, head: Head | None) -> None:
    """Raise CacheCorruptError for a model with far more weights than its sizes suggest; none is drawn."""
    described = num_weights(config, attention, head)
    width = config.hidden_size
    ffn_size = next((getattr(config, name) for name in _FFN_FIELDS if hasattr(config, name)), 4 * width)
    tables = (config.vocab_size + (positions_of(config) or 0)) * width
    suggested = tables + config.num_hidden_layers * width * (8 * width + 4 * ffn_size)
    if described > _MAX_WEIGHT_RATIO * suggested + 2**24:
        raise _unusable(f"it describes a model of {described:,} weights, far more than its sizes suggest")


def num_weights(config: PreTrainedConfig, attention: str, head: Head | None = None) -> int:
    """Return the number of weights of the model that a configuration describes; none is drawn.

    Args:
        config: configuration of the model.
        attention: name of an implementation of attention, as transformers knows it.
        head: head of the model. None means no head.

    Raises:
        CacheCorruptError: the configuration does not describe a model.
    """
    with _usable(), torch.device("meta"):
        model = draw_weights(config, head, attention=attention)
    return sum(weight.numel() for weight in model.parameters())


_TURNS: Final = 5
_REPEATS: Final = 2
_ENOUGH_S: Final = 0.25
"""Seconds of a model's passes in a turn after which none is repeated: long passes wobble less."""
_BATCH_SIZE: Final = 8
_MAX_PARAMETERS: Final = 2**32
"""Greatest number of weights of a model that is timed: a stranger's configuration must not fill memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Size of a whole encoder."""

    embedding_parameters: int
    """Weights of embedding tables (words, positions, token types), which cost memory and no time."""
    transformer_parameters: int
    """Weights of the layers (MiniLM, Wang et al. 2020, arXiv 2002.10957, table 4 lists them separately)."""
    num_parameters: int
    """All weights, also norms, projections and the pooler outside layers."""
    flops_per_token: float
    """Operations of a forward pass, including attention; a multiplication and an addition count as 2."""
    stopped_flops_per_token: float
    """Operations of the layers up to the queries, keys and values of the last layer, where a training of
    relations stops."""

    def pass_flops(self, *, stops_early: bool) -> float:
        """Return the operations per token of a pass, which may stop at the last queries, keys and values."""
        return self.stopped_flops_per_token if stops_early else self.flops_per_token


def _read_without_values(model: PreTrainedModel, ids: Tensor) -> None:
    """Run a model on the device `meta`: some families look at the values of a mask, others at those of ids.

    These are none there, and a model that looks at them raises RuntimeError.
    """
    try:
        model(input_ids=ids)
    except RuntimeError:
        model(input_ids=ids, attention_mask=torch.ones_like(ids))


def model_size(config: PreTrainedConfig, length: int) -> ModelSize:
    """Return the size of an encoder from its configuration; no weights are made.

    Args:
        config: configuration of the model.
        length: tokens of the sequence that floating point operations are counted over.

    Raises:
        CacheCorruptError: the configuration does not describe a model.
        InvalidConfigError: the model has fewer positions than `length`.
    """
    return _size(_Described(config.to_json_string(use_diff=False), config), length)


@dataclass(frozen=True, slots=True)
class _Described:
    """A configuration, which equals another one with the same JSON."""

    json: str
    config: PreTrainedConfig = field(compare=False)


@lru_cache(maxsize=256)
def _size(described: _Described, length: int) -> ModelSize:
    """Count weights and operations, once for a shape: a study has each shape with many seeds."""
    config, name = described.config, f"a model of the family {described.config.model_type}"
    if length > (most := positions_of(config) or length):
        raise too_long(length, most, name=name, option="--max-length")
    counter = FlopCounterMode(display=False)
    try:
        with torch.device("meta"):
            model = build_model(config, "eager").eval().requires_grad_(requires_grad=False)
            ids = torch.zeros((1, length), dtype=torch.int64)
            with torch.no_grad(), counter:
                _read_without_values(model, ids)
    except RuntimeError:  # it looks at values, or has fewer positions than its configuration says
        model = build_model(config, "eager").eval().requires_grad_(requires_grad=False)
        with torch.no_grad(), (counter := FlopCounterMode(display=False)):
            check_positions(
                lambda ids: model(input_ids=ids),
                config,
                name=name,
                ids=torch.zeros((1, length), dtype=torch.int64),
            )
    tables = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding))
    depth, total = config.num_hidden_layers, counter.get_total_flops()
    (name, layers), counts = _layers(model, depth), counter.get_flop_counts()
    names = [f"{type(model).__name__}.{name}.{number}" for number in range(depth - 1)]
    # ALBERT has no list of layers: one layer runs several times.
    transformer = _num_weights(model) - tables if layers is None else sum(map(_num_weights, layers))
    if {*names} <= {*counts}:
        stopped = sum(sum(counts[name].values()) for name in names)
    else:  # ALBERT's layers, and those of SqueezeBERT, which calls them past torch's hooks, have no counts
        stopped = total * (depth - 1) / depth
    vectors = 3 * 2 * getattr(config, "true_hidden_size", config.hidden_size) ** 2
    return ModelSize(
        embedding_parameters=tables,
        transformer_parameters=transformer,
        num_parameters=_num_weights(model),
        flops_per_token=total / length,
        stopped_flops_per_token=stopped / length + vectors,
    )


def _layers(model: nn.Module, depth: int) -> tuple[str, nn.ModuleList | None]:
    """Return the name and the list of an encoder's layers: the outermost list of `depth` modules.

    None means that there is no such list, because layers share their weights.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return next((pair for pair in lists if len(pair[1]) == depth), ("", None))


def _num_weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


@dataclass(frozen=True, slots=True)
class Timed:
    """A model whose speed is to be measured."""

    config: PreTrainedConfig
    length: int
    """Tokens of each sequence."""


def inference_rates(models: Mapping[str, Timed], device: torch.device) -> dict[str, float]:
    """Return the tokens per second of encoders' forward passes, medians over turns of all models.

    Weights are random, which does not change the time. Batches have 8 sequences; attention is sdpa.

    Args:
        models: models by name.
        device: device that they run on.

    Raises:
        CacheCorruptError: a configuration does not describe a model, or has more than 2**32 weights.
    """
    built = {name: _random_model(timed, device) for name, timed in models.items()}
    ids = {
        name: torch.zeros((_BATCH_SIZE, timed.length), dtype=torch.int64, device=device)
        for name, timed in models.items()
    }
    passes = {name: partial(model, input_ids=ids[name]) for name, model in built.items()}
    seconds = seconds_in_turns(passes, device, _TURNS, repeats=_REPEATS)
    return {name: _BATCH_SIZE * models[name].length / taken for name, taken in seconds.items()}


_Name = TypeVar("_Name", bound=Hashable)


@torch.no_grad()
def seconds_in_turns(
    passes: Mapping[_Name, Callable[[], object]],
    device: torch.device,
    turns: int,
    *,
    repeats: int = 1,
    before_each: Callable[[], None] = lambda: None,
) -> dict[_Name, float]:
    """Return the seconds of each pass by name: medians over turns, in each of which every pass is timed.

    Args:
        passes: functions to time, by name.
        device: device that they compute on.
        turns: number of measured turns; one more comes first and is not counted.
        repeats: most times that a pass is timed in a turn. More than one is preceded by a pass that is not
            counted, so that the weights are in the processor's caches, as when one model serves alone. Passes
            of a quarter of a second are neither repeated nor preceded.
        before_each: called before each turn; it may raise an error, which ends them.
    """
    seconds: dict[_Name, list[float]] = {name: [] for name in passes}
    for turn in range(turns + 1):
        before_each()
        for name, run in passes.items():
            taken = [_seconds(run, device)]
            while repeats > 1 and len(taken) <= repeats and sum(taken) < _ENOUGH_S:
                taken.append(_seconds(run, device))
            if turn:
                seconds[name] += taken[1:] or taken
    return {name: median(taken) for name, taken in seconds.items()}


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _random_model(timed: Timed, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        num_weights = _num_weights(build_model(timed.config, "sdpa"))
    if num_weights > _MAX_PARAMETERS:
        raise CacheCorruptError(f"a configuration asks for {num_weights:,} weights. Fetch the cache again.")
    model: nn.Module = build_model(timed.config, "sdpa").eval()
    return model.to(device)
