"""Reads calibration sequences, runs encoders on them, and runs single layers again on other inputs."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from minilm_cache.cache import Cache
from minilm_cache.corpus.sequences import SequenceTable
from minilm_cache.corpus.template import packing_of
from minilm_cache.errors import InvalidConfigError
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.tokenizer import load_tokenizer
from minilm_cache.settings import SliceConfig
from minilm_cache.slicing.parts import EncoderParts, LayerParts, encoder_parts
from minilm_cache.storage_schema.identity import PairTemplate

_BATCH_SIZE = 16
States = list[Tensor]
"""Hidden states of every batch, `(batch, length, hidden)` each."""


class _ReachedError(Exception):
    """The forward pass has come to the module whose inputs are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Sequences that slices are fitted to, in padded batches."""

    ids: list[Int[Tensor, "_ _"]]
    valid: list[Bool[Tensor, "_ _"]]
    segments: list[Int[Tensor, "_ _"]] | None = None
    """Segment of each token of pairs of texts. None means that there is one segment."""

    @classmethod
    def of(
        cls, sequences: Sequence[Int[Tensor, " _"]], pad_token: int, pair: PairTemplate | None = None
    ) -> "Calibration":
        """Return sequences as padded batches, sorted by length.

        Args:
            sequences: token ids of each sequence.
            pad_token: id that fills rows up.
            pair: what stands around and between the texts of a sequence. None means that sequences are no
                pairs.
        """
        ordered = sorted(sequences, key=len)
        starts = range(0, len(ordered), _BATCH_SIZE)
        batches = [
            Inputs.of(ordered[start : start + _BATCH_SIZE], pad_token).paired(pair) for start in starts
        ]
        segments = [batch.segments for batch in batches if batch.segments is not None]
        return cls(
            ids=[batch.ids for batch in batches],
            valid=[batch.valid for batch in batches],
            segments=segments or None,
        )

    def calls(self) -> Iterator[dict[str, Tensor]]:
        """Yield the arguments with which a model reads each batch."""
        for at, (ids, valid) in enumerate(zip(self.ids, self.valid, strict=True)):
            segments = {} if self.segments is None else {"token_type_ids": self.segments[at]}
            yield {"input_ids": ids, "attention_mask": valid.to(torch.int64), **segments}

    @property
    def num_tokens(self) -> int:
        """Number of tokens, padding not counted."""
        return sum(int(valid.sum()) for valid in self.valid)

    def flat(self, states: States) -> Float[Tensor, "tokens size"]:
        """Return the states of all tokens, padding left out."""
        return torch.cat([state[valid] for state, valid in zip(states, self.valid, strict=True)])

    def padded(self, rows: Float[Tensor, "tokens size"], like: States) -> States:
        """Return rows of tokens as states of the batches; padding is zero."""
        counts = [int(valid.sum()) for valid in self.valid]
        states = [torch.zeros_like(state) for state in like]
        for state, valid, part in zip(states, self.valid, rows.split(counts), strict=True):
            state[valid] = part
        return states


class LayerCall(NamedTuple):
    """The arguments of a layer apart from the hidden states: masks, positions."""

    positional: tuple[Any, ...]
    keywords: dict[str, Any]

    def __call__(self, parts: LayerParts, state: Tensor) -> None:
        """Call a layer again, on other hidden states."""
        parts.module(state, *self.positional, **self.keywords)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderRun:
    """What a teacher gave on calibration sequences, at the layers that are cut."""

    sums: States
    """Sums of the tables' rows: inputs of the embeddings' norm."""
    states: dict[int, States]
    """Hidden states: 0 is the input of the first layer, n the output of the n-th."""
    sums_after: dict[int, States]
    """Residual stream at the end of each layer, before a norm there."""
    calls: dict[int, list[LayerCall]]
    """How each layer was called, for each batch."""


@torch.no_grad()
def run_encoder(model: PreTrainedModel, calibration: Calibration, layers: Sequence[int]) -> EncoderRun:
    """Run an encoder, and keep the inputs and outputs of some of its layers.

    Args:
        model: the encoder, with or without a head.
        calibration: sequences to run it on.
        layers: numbers of the layers, counted from 0, ascending.

    Raises:
        InvalidConfigError: the parts of its family are not known.
    """
    parts = encoder_parts(model)
    states: dict[int, States] = {number: [] for layer in layers for number in (0, layer, layer + 1)}
    calls: dict[int, list[LayerCall]] = {layer: [] for layer in layers}
    sums: States = []
    sums_after: dict[int, States] = {layer: [] for layer in layers}
    with ExitStack() as stack:
        for number, kept in states.items():
            if number < len(parts.layers):
                stack.callback(_keep_call(parts.layers[number], kept, calls.get(number)).remove)
            else:
                stack.callback(_keep_output(parts.layers[-1].module, kept).remove)
        stack.callback(_keep_input(parts.norm, sums).remove)
        for layer, kept in sums_after.items():
            if not parts.layers[layer].is_pre_norm:
                stack.callback(_keep_input(parts.layers[layer].ffn_norm, kept).remove)
        for arguments in calibration.calls():
            model.base_model(**arguments)
    for layer in layers:
        if parts.layers[layer].is_pre_norm:
            sums_after[layer] = states[layer + 1]
    return EncoderRun(sums=sums, states=states, sums_after=sums_after, calls=calls)


@torch.no_grad()
def layer_calls(
    model: PreTrainedModel, parts: EncoderParts, calibration: Calibration
) -> tuple[States, list[list[LayerCall]]]:
    """Return the input of an encoder's first layer, and how each layer is called; the layers are not run."""
    states: list[States] = [[] for _ in parts.layers]
    calls: list[list[LayerCall]] = [[] for _ in parts.layers]
    with ExitStack() as stack:
        for layer, own_states, own_calls in zip(parts.layers, states, calls, strict=True):
            stack.callback(_keep_call(layer, own_states, own_calls).remove)
            stack.enter_context(_passing_on(layer))
        for arguments in calibration.calls():
            model.base_model(**arguments)
    return states[0], calls


@contextmanager
def _passing_on(layer: LayerParts) -> Iterator[None]:
    """Let a layer return its input."""
    layer.module.forward = lambda state, *_args, **_kwargs: (state,) if layer.gives_tuple else state
    try:
        yield
    finally:
        del layer.module.forward  # the method of its class is back


def _keep_call(
    layer: LayerParts, states: States, calls: list[LayerCall] | None
) -> torch.utils.hooks.RemovableHandle:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(args[0])
        if calls is not None:
            calls.append(LayerCall(args[1:], kwargs))

    return layer.module.register_forward_pre_hook(hook, with_kwargs=True)


def _keep_output(module: nn.Module, into: States) -> torch.utils.hooks.RemovableHandle:
    return module.register_forward_hook(lambda _module, _args, output: into.append(_tensor(output)))


def _tensor(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """What a layer of the teacher gave on calibration sequences, padding left out."""

    attention_input: Float[Tensor, "tokens hidden"]
    """Input of queries, keys and values."""
    attended: Float[Tensor, "tokens hidden"]
    """Residual stream after the attention, before any norm."""
    ffn_input: Float[Tensor, "tokens hidden"]
    """Input of the feed-forward network."""
    units: Float[Tensor, "tokens units"]
    """Units of the feed-forward network."""
    summed: Float[Tensor, "tokens hidden"]
    """Residual stream after the feed-forward network, before any norm."""


@torch.no_grad()
def run_layer(
    parts: LayerParts, states: States, *, calls: Sequence[LayerCall], calibration: Calibration
) -> LayerRun:
    """Run a layer, and return what its parts received and gave."""
    kept: dict[str, States] = {"attention": [], "output": [], "ffn": [], "units": []}
    hooks = [
        _keep_input(parts.query.linear, kept["attention"]),
        parts.output.register_forward_hook(lambda _module, _args, output: kept["output"].append(output)),
        _keep_input(parts.up.linear, kept["ffn"]),
        _keep_input(parts.down, kept["units"]),
    ]
    try:
        for state, call in zip(states, calls, strict=True):
            call(parts, state)
    finally:
        for hook in hooks:
            hook.remove()
    flat = {name: calibration.flat(values) for name, values in kept.items()}
    attended = calibration.flat(states) + flat["output"]
    stream = attended if parts.is_pre_norm else flat["ffn"]
    return LayerRun(
        attention_input=flat["attention"],
        attended=attended,
        ffn_input=flat["ffn"],
        units=flat["units"],
        summed=stream + parts.down(flat["units"]),
    )


def _keep_input(module: nn.Module, into: States) -> torch.utils.hooks.RemovableHandle:
    return module.register_forward_pre_hook(lambda _module, args: into.append(args[0]))


@torch.no_grad()
def contexts(
    parts: LayerParts, states: States, *, calls: Sequence[LayerCall], calibration: Calibration
) -> Float[Tensor, "tokens _"]:
    """Return what a layer's heads gather, before the output projection; the rest of the layer is not run."""
    gathered: States = []
    with _stopping_at(parts.output, gathered):
        for state, call in zip(states, calls, strict=True):
            try:
                call(parts, state)
            except _ReachedError:
                continue
    return calibration.flat(gathered)


@torch.no_grad()
def inputs_of(
    model: PreTrainedModel, module: nn.Module, calibration: Calibration
) -> Float[Tensor, "tokens size"]:
    """Return the inputs of one module; what follows it is not run."""
    inputs: States = []
    with _stopping_at(module, inputs):
        for arguments in calibration.calls():
            try:
                model(**arguments)
            except _ReachedError:
                continue
    return calibration.flat(inputs)


@contextmanager
def _stopping_at(module: nn.Module, into: States) -> Iterator[None]:
    """Keep the input of a module, and end the forward pass there."""

    def keep(_module: nn.Module, args: tuple[Any, ...]) -> None:
        into.append(args[0])
        raise _ReachedError

    handle = module.register_forward_pre_hook(keep)
    try:
        yield
    finally:
        handle.remove()


_MOST_TOKENS = 2**14
"""Most tokens that slices are fitted to; twice as many gain 1 % (docs/adr/0014)."""
_MOST_NUMBERS = _MOST_TOKENS * 384
"""Most numbers in a hidden state of all these tokens, so that wide teachers take little longer."""
CHECKED_SEQUENCES = 64
"""Sequences after those, which the finished slice is compared with its teacher on."""


def num_tokens(hidden_size: int) -> int:
    """Return the number of tokens that a slice is fitted to, given the teacher's hidden size."""
    return min(_MOST_TOKENS, _MOST_NUMBERS // hidden_size)


def of_cache(cache: Cache, most: int) -> list[Int[Tensor, " _"]]:
    """Return the first training sequences of a cache, `most` tokens or all.

    Documents are shuffled when a cache is made, so the first ones are a sample. Only their token ids are
    read; the reader does not count them, because a slice is made once for all trainings.
    """
    found, yielded = list[Tensor](), 0
    for segment, number in cache.reader.sequences(range(cache.manifest.num_train)):
        found.append(torch.from_numpy(segment.rows_of("tokens", number).astype("int64")))
        yielded += segment.length(number)
        if yielded >= most:
            break
    return found


def of_corpus(config: SliceConfig, folder: Path, most: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return sequences of a corpus to fit to, and further ones to check on; few texts have none of those.

    Args:
        config: settings of the slice.
        folder: folder of the teacher, whose tokenizer reads the text.
        most: number of tokens to fit to.
    """
    tokenizer = load_tokenizer(folder)
    from minilm_cache.corpus.tokenise import tokens_of  # noqa: PLC0415 - it takes a while

    packing = packing_of(
        tokenizer,
        mode="packed",
        max_length=config.max_length,
        max_tokens=most + CHECKED_SEQUENCES * config.max_length,
        seed=0,
        split=None,
    )
    table = SequenceTable(tokens_of(config, tokenizer), packing)
    ids = [torch.from_numpy(row) for row in table.read(0, table.num_sequences).ids]
    num_fitted = max(1, most // config.max_length)
    return ids[:num_fitted], ids[num_fitted:]


def check_text(num_tokens: int, hidden_size: int) -> None:
    """Raise InvalidConfigError if a text has fewer tokens than a student's states have dimensions."""
    if num_tokens < hidden_size:
        raise InvalidConfigError(
            f"a slice of hidden size {hidden_size} is fitted to {hidden_size} tokens at least, and the text "
            f"has {num_tokens}. Give more text, or use --init random."
        )
