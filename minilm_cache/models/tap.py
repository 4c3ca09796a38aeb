"""Q, K, V of chosen layers from any forward pass of a teacher or student; also hidden states and logits.

The only file that knows transformers' internals. One attention function is registered with transformers'
`AttentionInterface`, its mask function with `AttentionMaskInterface` (without it the mask is silently
None). A recorder is passed as a keyword of the forward pass to every attention call. After the last chosen
layer an exception ends the forward pass, unless hidden states or logits are requested;
`TappedModel.forward` catches it. No model code is changed. Layers are found by counting calls, because
families name and share their modules differently.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import ModelOutput

from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.device import attention
from minilm_cache.models.families import family_of, is_served
from minilm_cache.models.inputs import Inputs
from minilm_cache.relations.scores import Vectors, widened

ATTENTION = "minilm_cache"
"""Name of the attention implementation to load a model with."""


_COMPILATIONS: Final = 256
"""Most compiled forms of the forward pass: up to eight for each shape of a student.

There are two for lengths (the first one, then any), each in training and in evaluation, with padding and
without. After eight in all, torch would leave the passes of all further students uncompiled.
"""

_USE = "Use an encoder such as BERT, RoBERTa, XLM-R, ELECTRA, DistilBERT or ModernBERT."
_OTHER_SIGNALS = (
    "Of any other model, pooled vectors and logits can be dumped: --codec none with --pooled or --logits."
)


class _RecordingDone(Exception):  # noqa: N818 - not an error: it ends a forward pass early
    """Everything that was requested has been recorded."""

    def __init__(self, vectors: "dict[int, Vectors]") -> None:
        self.vectors = vectors


Head = Literal["tokens", "sequences"]
"""What a model's logits score: the vocabulary at masked tokens, or the classes of sequences."""


class Tap(NamedTuple):
    """What a forward pass returns."""

    layers: tuple[int, ...] = ()
    """Layers whose queries, keys and values are returned: numbers of attention calls, counted from 0."""
    hidden: tuple[int, ...] = ()
    """Hidden states that are returned, as transformers numbers them: 0 is the output of the embeddings."""
    head: Head | None = None
    """Head whose logits are returned; the model must have it. None means no logits."""

    def with_(self, other: "Tap") -> "Tap":
        """Return a tap of both."""
        return Tap(
            tuple(sorted({*self.layers, *other.layers})),
            tuple(sorted({*self.hidden, *other.hidden})),
            self.head or other.head,
        )


class Reading(NamedTuple):
    """The outputs of a tapped forward pass."""

    vectors: list[Vectors]
    """Queries, keys and values of each chosen layer, in the order chosen."""
    hidden: dict[int, Float[Tensor, "batch length hidden"]]
    """Chosen hidden states, as transformers numbers them: 0 is the output of the embeddings."""
    logits: Float[Tensor, "rows classes"] | None
    """Logits of the head, `(chosen tokens, vocabulary)` or `(batch, classes)`. None means not requested."""


class _Recorder:
    """Collects the vectors of one forward pass's attention calls."""

    def __init__(self, layers: Sequence[int] | None, *, stops: bool = True) -> None:
        """Choose what to record.

        Args:
            layers: numbers of the attention calls to record. None means that calls are only counted.
            stops: whether to end the forward pass after the last of them.
        """
        self.layers = layers
        self.stops = stops
        self.num_calls = 0
        self.vectors: dict[int, Vectors] = {}

    def counts(self) -> bool:
        """Count an attention call, and return whether its vectors are recorded."""
        self.num_calls += 1
        return self.layers is not None and self.num_calls - 1 in self.layers

    def record(self, vectors: Vectors) -> None:
        """Keep the vectors of the call that was counted last; end the forward pass if they are the last."""
        assert self.layers is not None
        self.vectors[self.num_calls - 1] = vectors
        if self.stops and len(self.vectors) == len(self.layers):
            raise _RecordingDone(self.vectors)


def _tapped_attention(  # noqa: PLR0917 - the signature is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    minilm_tap: _Recorder | None = None,
    **kwargs: Any,  # noqa: ANN401 - differs by model family
) -> tuple[Tensor, Tensor | None]:
    if minilm_tap is not None and minilm_tap.counts():
        _refuse_inexact(module, attention_mask, kwargs)
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        heads, bias = query.shape[1], kwargs.get("position_bias")
        key_heads, value_heads = _for_heads(key, heads), _for_heads(value, heads)
        reads_both_ways = getattr(getattr(module, "config", None), "is_causal", None) is False
        is_causal = bool(getattr(module, "is_causal", False)) and not reads_both_ways
        window = kwargs.get("sliding_window")
        is_windowed = window is not None and window < query.shape[-2] and attention_mask is not None
        vectors = Vectors(query, key_heads, value_heads, attention_mask, factor, bias, is_causal, is_windowed)
        minilm_tap.record(vectors)
    return attention(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def _for_heads(part: Tensor, num_heads: int) -> Tensor:
    """Return keys or values with a head for each head of the queries; a group of those shares one."""
    return part if part.shape[1] == num_heads else part.repeat_interleave(num_heads // part.shape[1], 1)


def _refuse_inexact(module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raise TeacherError for attention whose distributions are not those of its scores and a mask of them."""
    reason = None
    if kwargs.get("softcap") is not None:
        reason = "it caps its scores"
    elif kwargs.get("s_aux") is not None:
        reason = "its rows have a sink beside the tokens"
    elif mask is not None and mask.dtype != torch.bool:
        reason = "its mask holds numbers that are added to scores"
    if reason is not None:
        raise _inexact(type(module).__name__, reason)


def _inexact(name: str, reason: str) -> TeacherError:
    """Return the error for an attention whose distributions are not those of its scores."""
    return TeacherError(f"{name} cannot be tapped exactly: {reason}. {_USE} {_OTHER_SIGNALS}")


def _attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:  # noqa: ANN401 - transformers' arguments
    """Return the mask as for sdpa.

    Only on a CPU is it looked at whether anything is padded at all: a GPU would be waited for. Callers leave
    out the mask of a batch that is not padded.
    """
    padding = kwargs.get("attention_mask")
    if padding is not None and padding.device.type != "cpu":
        kwargs["allow_is_bidirectional_skip"] = False
    return sdpa_mask(*args, **kwargs)


AttentionInterface.register(ATTENTION, _tapped_attention)
AttentionMaskInterface.register(ATTENTION, _attention_mask)


def _is_tapped(model: PreTrainedModel) -> bool:
    """Return whether a model's attention comes by the tap."""
    is_loaded_so = model.config._attn_implementation == ATTENTION  # noqa: SLF001 - no public attribute has it
    return is_loaded_so and is_served(type(model), model.config)


def _refuse_untapped(model: PreTrainedModel) -> None:
    """Raise TeacherError for a family that does not use the attention interface."""
    hooked = family_of(model.config.model_type).hooked
    if hooked is not None and hooked.refused is not None and getattr(model.config, hooked.refused[0], False):
        raise _inexact(hooked.module, hooked.refused[1])
    if not _is_tapped(model) and hooked is None:
        raise TeacherError(
            f"model family {model.config.model_type!r} does not use transformers' attention interface, "
            f"so its Q, K, V cannot be tapped exactly. {_USE} {_OTHER_SIGNALS}"
        )


class TappedModel(nn.Module):
    """A model whose forward pass returns Q, K, V of chosen layers, and stops there if possible."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap a model loaded with `attn_implementation=ATTENTION`.

        The model may have a head for masked tokens or for classes. What its family does not allow is refused
        when it is wanted: hidden states and logits can be had of any model that reads text.

        Raises:
            TeacherError: the model does not read text.
        """
        super().__init__()
        self.model = model
        self._num_calls = _num_calls(model)
        self.num_layers = int(getattr(model.config, "num_hidden_layers", self._num_calls or 0))

    def freeze_unused(self, tap: Tap) -> "TappedModel":
        """Freeze the weights that nothing of a tap depends on, such as the pooler."""
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        self.eval()  # draws no dropout
        ids = torch.zeros((1, 4), dtype=torch.int64, device=weights[0].device)
        places = torch.arange(ids.numel(), device=ids.device)
        outputs = self(Inputs.full(ids), tap, places)
        parts = [part for layer in outputs.vectors for part in (layer.query, layer.key, layer.value)]
        parts += [layer.bias for layer in outputs.vectors if layer.bias is not None]
        parts += [*outputs.hidden.values(), *(() if outputs.logits is None else (outputs.logits,))]
        total = torch.stack([part.sum() for part in parts]).sum()
        for weight, gradient in zip(
            weights, torch.autograd.grad(total, weights, allow_unused=True), strict=True
        ):
            weight.requires_grad_(gradient is not None)
        return self

    def checkpoint_layers(self) -> "TappedModel":
        """Do not keep activations inside layers: the backward pass computes them again.

        Raises:
            InvalidConfigError: transformers has no checkpointing for the model's family.
        """
        try:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise InvalidConfigError(
                f"--gradient-checkpointing: transformers has none for the family "
                f"{self.model.config.model_type}. Leave it out."
            ) from error
        return self

    def train_checkpointed(self) -> None:
        """Mark layers, but not what is in them, as training: others keep their activations."""
        for module in self.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True

    def compile_forward(self, head: Head | None, *, taps_layers: bool, replays: bool = False) -> None:
        """Compile the forward pass, up to the last chosen output, with torch.compile on its first call.

        It is one graph. Nothing ends it early: the compiler leaves out what no output depends on. A head for
        masked tokens gets some of the tokens, by a hook that would be compiled again for each batch, so
        layers are compiled one by one with it.

        Args:
            head: head that the model will be tapped with.
            taps_layers: whether it will be tapped for vectors of layers.
            replays: let a GPU replay the whole graph with one launch. Outputs and gradients are then valid
                until the next forward pass of any model that is replayed.
        """
        family = self.model.config.model_type
        if taps_layers and family_of(family).hooked is not None:
            raise InvalidConfigError(
                f"--compile: the queries and keys of the family {family} are taken by hooks, which are not "
                "compiled. Leave it out."
            )
        settings = torch._dynamo.config  # noqa: SLF001 - torch's messages name it
        settings.recompile_limit = max(settings.recompile_limit, _COMPILATIONS)
        settings.specialize_int = True  # numbers of layers are constants of a form, not inputs of its graph
        if head != "tokens":
            mode = "reduce-overhead" if replays else None
            self._outputs = torch.compile(self._outputs, mode=mode)  # type: ignore[method-assign]
            return
        for modules in self.modules():
            if isinstance(modules, nn.ModuleList):
                for layer in modules:
                    layer.compile()

    def forward(self, inputs: Inputs, tap: Tap, places: Int[Tensor, " chosen"] | None = None) -> Reading:
        """Run the model up to Q, K, V of the last chosen layer, or to its end if more is chosen.

        Args:
            inputs: what the model reads, on its device.
            tap: what is returned.
            places: places of the tokens, in the batch as one row, whose logits a head for masked tokens
                computes. None means all.
        """
        assert all(0 <= layer < self.num_layers for layer in tap.layers)
        assert all(0 <= number <= self.num_layers for number in tap.hidden)
        if tap.layers:
            _refuse_untapped(self.model)
            if self._num_calls not in (None, self.num_layers):
                raise TeacherError(
                    f"model family {self.model.config.model_type!r} attends {self._num_calls} times in "
                    f"{self.num_layers} layers, so its relations have no layers of their own. {_USE} "
                    f"{_OTHER_SIGNALS}"
                )
        with gathered(self.model, places if tap.head == "tokens" else None):
            try:
                return self._outputs(tap, inputs.ids, mask=inputs.mask, segments=inputs.segments)
            except _RecordingDone as done:
                return Reading([done.vectors[layer] for layer in tap.layers], {}, None)

    def _outputs(self, tap: Tap, ids: Tensor, *, mask: Tensor | None, segments: Tensor | None) -> Reading:
        needs_end = bool(tap.hidden or tap.head or torch.compiler.is_compiling())
        recorder = _Recorder(tap.layers, stops=not needs_end)
        is_hooked = family_of(self.model.config.model_type).hooked is not None
        # Heads cost more than layers where a vocabulary is large.
        model = self.model if tap.head else self.model.base_model
        with _hooked(self.model, recorder if tap.layers and is_hooked else None):
            output = model(
                input_ids=ids,
                attention_mask=mask,
                output_hidden_states=bool(tap.hidden),
                return_dict=True,
                **({"minilm_tap": recorder} if tap.layers and not is_hooked else {}),
                **({} if segments is None else {"token_type_ids": segments}),
            )
        return Reading(
            vectors=[recorder.vectors[layer] for layer in tap.layers],
            hidden={number: self._state(output, number) for number in tap.hidden},
            logits=output.logits.flatten(0, -2) if tap.head else None,
        )

    def _state(self, output: ModelOutput, number: int) -> Tensor:
        """Return a hidden state: the embeddings' output, a layer's, or what the model itself calls its last.

        Raises:
            TeacherError: the family has other states than those of its layers.
        """
        last = output.get("last_hidden_state")
        if number == self.num_layers and last is not None:
            return last  # type: ignore[no-any-return]
        states = output["hidden_states"]
        if len(states) != self.num_layers + 1:
            raise TeacherError(
                f"model family {self.model.config.model_type!r} gives {len(states)} hidden states in "
                f"{self.num_layers} layers, so they are not those of its layers. Take --pooled, which is "
                "made of the last one."
            )
        return states[number]  # type: ignore[no-any-return]


@contextmanager
def _hooked(model: PreTrainedModel, recorder: _Recorder | None) -> Iterator[None]:
    """Record the vectors of a family without the attention interface, before each attention call."""
    if recorder is None:
        yield
        return
    hooked, heads = family_of(model.config.model_type).hooked, model.config.num_attention_heads
    assert hooked is not None

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not recorder.counts():
            return
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        query, key, value = hooked.split(module, given["hidden_states"], heads)
        vectors = Vectors(query, key, value, None, query.shape[-1] ** -0.5, given.get("position_bias"))
        if hooked.distributions is None:
            recorder.record(vectors)
        else:
            waiting.append(vectors)

    def record_with_bias(_module: nn.Module, args: tuple[Any, ...]) -> None:
        if waiting:
            recorder.record(_with_bias(waiting.pop(), args[0]))

    waiting: list[Vectors] = []
    found = [module for module in model.modules() if type(module).__name__ == hooked.module]
    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in found]
    if hooked.distributions is not None:
        inner = [module.get_submodule(hooked.distributions) for module in found]
        hooks += [module.register_forward_pre_hook(record_with_bias) for module in inner]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _with_bias(vectors: Vectors, probs: Float[Tensor, "batch heads length length"]) -> Vectors:
    """Return vectors with the bias that makes their distributions these, up to a constant of each row."""
    probs = widened(probs)
    products = (widened(vectors.query) * vectors.scaling) @ widened(vectors.key).mT
    return vectors._replace(bias=probs.clamp(min=torch.finfo(probs.dtype).tiny).log() - products)


@contextmanager
def gathered(model: PreTrainedModel, places: Tensor | None) -> Iterator[None]:
    """Give a head only the last hidden states of the chosen tokens; it treats each token separately.

    Logits are then `(1, chosen, vocabulary)`.

    Args:
        model: model with a head.
        places: places of the tokens, in the batch as one row. None means all tokens.
    """
    if places is None:
        yield
        return

    def gather(_module: nn.Module, _inputs: object, output: Any) -> Any:  # noqa: ANN401 - of any family
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1).index_select(0, places)[None]
        return output

    hook = model.base_model.register_forward_hook(gather)
    try:
        yield
    finally:
        hook.remove()


def _num_calls(model: PreTrainedModel) -> int | None:
    """Return the number of attention calls of a pass. None means that attention does not come by the tap.

    Raises:
        TeacherError: the model is not a text encoder, or no attention call reaches the tap.
    """
    recorder, has_tap = _Recorder(None), _is_tapped(model)
    device = next(model.parameters()).device
    ids = torch.zeros((1, 4), dtype=torch.int64, device=device)
    if model.config.is_encoder_decoder and hasattr(model.base_model, "decoder"):
        raise _not_a_text_encoder(model, "it is an encoder with a decoder")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **({"minilm_tap": recorder} if has_tap else {}),
            )
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _not_a_text_encoder(model, str(error).split("\n")[0]) from error
    finally:
        model.train(was_training)
    if not has_tap:
        return None
    if not recorder.num_calls:
        raise _not_a_text_encoder(model, "no attention call reaches the tap")
    return recorder.num_calls


def last_states(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return a model's last hidden states, `(batch, length, hidden)`.

    Raises:
        TeacherError: its encoder gives none, as those that are wrapped in another one.
    """
    outputs = model.base_model(input_ids=ids, attention_mask=mask)
    states: Tensor | None = getattr(outputs, "last_hidden_state", None)
    if states is None:
        raise _not_a_text_encoder(model, "its encoder gives no last hidden states")
    return states


def _not_a_text_encoder(model: PreTrainedModel, reason: str) -> TeacherError:
    return TeacherError(
        f"model family {model.config.model_type!r} does not read token ids as a text encoder does "
        f"({reason}). {_USE}"
    )
