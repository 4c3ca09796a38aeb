"""What is known of each family of models: one row a family, which taps, students, slices and sizes read.

A family without a row runs as transformers runs it: it gives vectors, hidden states and logits. Relations
need an attention whose queries, keys and values can be seen: by transformers' `AttentionInterface`, or by
hooks that a row names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

Split = Callable[[nn.Module, Tensor, int], tuple[Tensor, Tensor, Tensor]]
"""Queries, keys and values, `(batch, heads, length, size)` each, of an attention module, its input
`(batch, length, hidden)` and the number of its heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookedAttention:
    """An attention that does not use transformers' interface, so that its parts are taken by hooks."""

    module: str
    """Name of its class."""
    split: Split
    distributions: str | None = None
    """Name of the submodule that gets the distributions, where the scores have a bias that depends on the
    text. None means that `position_bias`, an argument of the attention, is all that is added to them."""
    refused: tuple[str, str] | None = None
    """A setting with which the distributions are not all there is, and why. None means no such setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNames:
    """Names of the parts that slices are cut from, relative to the encoder or to a layer."""

    layers: str
    query: str
    key: str
    value: str
    output: str
    attention_norm: str
    up: str
    down: str
    ffn_norm: str
    activation: str
    is_fused: bool = False
    """Query, key and value are rows of one map, and so are units and their gates."""
    tables: tuple[str, ...] = ("word_embeddings", "position_embeddings", "token_type_embeddings")
    norm: str = "LayerNorm"
    final_norm: str | None = None
    head_bias: str | None = None
    """Table of what is added to the scores of each head, `(distances, heads)`. None means that there is
    none."""
    gives_tuple: bool = False
    """Whether a layer returns its hidden states as the first of several outputs."""
    logits_dense: str | None = None
    """The linear map of the head for masked tokens. None means that it stays as it was drawn."""
    logits_norm: str | None = None
    """The norm after that map."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models."""

    models: str
    """Well-known models of the family, for people."""
    uses_interface: bool | None = None
    """Whether its attention uses transformers' interface. None means that its class says so."""
    hooked: HookedAttention | None = None
    """How its attention is tapped otherwise. None means that it is not."""
    has_bias: bool = False
    """Whether a bias is added to its scores, which queries and keys do not hold."""
    is_decoder: bool = False
    """Whether its tokens see themselves and those before them alone, as a rule."""
    has_decoder: bool = False
    """Whether its configuration, whatever it says, is that of an encoder with a decoder."""
    parts: PartNames | None = None
    """Parts that slices are cut from. None means that it cannot be cut."""
    factorised: str | None = None
    """The family that computes the same and has an embedding size of its own. None means that there is
    none."""
    has_bottlenecks: bool = False
    """Whether its students may have MobileBERT's bottlenecks: both read text the same way."""


def _maps(query: str, key: str, value: str) -> Split:
    """Return a split by three linear maps of these names."""

    def split(module: nn.Module, hidden: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        first, second, third = (
            module.get_submodule(name)(hidden).unflatten(-1, (heads, -1)).transpose(1, 2)
            for name in (query, key, value)
        )
        return first, second, third

    return split


def _one_map(module: Any, hidden: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401 - DeBERTa's
    """Split by DeBERTa's one linear map, whose rows are a head's queries, keys and values in turn."""
    query, key, value = module.in_proj(hidden).unflatten(-1, (heads, -1)).transpose(1, 2).chunk(3, dim=-1)
    query_bias, value_bias = (
        bias.unflatten(-1, (heads, -1))[:, None, :] for bias in (module.q_bias, module.v_bias)
    )
    return query + query_bias, key, value + value_bias


def _bert(dense: str, norm: str) -> PartNames:
    """Return the parts of a family with BERT's layers, and those of its head for masked tokens."""
    return PartNames(
        layers="encoder.layer",
        query="attention.self.query",
        key="attention.self.key",
        value="attention.self.value",
        output="attention.output.dense",
        attention_norm="attention.output.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        ffn_norm="output.LayerNorm",
        activation="intermediate.intermediate_act_fn",
        logits_dense=dense,
        logits_norm=norm,
    )


_DISTILBERT: Final = PartNames(
    layers="transformer.layer",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    ffn_norm="output_layer_norm",
    activation="ffn.activation",
    tables=("word_embeddings", "position_embeddings"),
    logits_dense="vocab_transform",
    logits_norm="vocab_layer_norm",
)
_MODERNBERT: Final = PartNames(
    layers="layers",
    query="attn.Wqkv",
    key="attn.Wqkv",
    value="attn.Wqkv",
    output="attn.Wo",
    attention_norm="attn_norm",
    up="mlp.Wi",
    down="mlp.Wo",
    ffn_norm="mlp_norm",
    activation="mlp.act",
    is_fused=True,
    tables=("tok_embeddings",),
    norm="norm",
    final_norm="final_norm",
)
_MPNET: Final = PartNames(
    layers="encoder.layer",
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    output="attention.attn.o",
    attention_norm="attention.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    ffn_norm="output.LayerNorm",
    activation="intermediate.intermediate_act_fn",
    tables=("word_embeddings", "position_embeddings"),
    head_bias="encoder.relative_attention_bias",
    gives_tuple=True,
)
_MIXES_HEADS: Final = ("talking_head", "it mixes the distributions of its heads")

FAMILIES: Final = {
    "bert": Family(
        models="BERT, bge, e5, gte, all-MiniLM-L12-v2",
        parts=_bert("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
        factorised="electra",
        has_bottlenecks=True,
    ),
    "roberta": Family(
        models="RoBERTa, all-distilroberta-v1", parts=_bert("lm_head.dense", "lm_head.layer_norm")
    ),
    "xlm-roberta": Family(
        models="XLM-R, multilingual-e5, bge-m3", parts=_bert("lm_head.dense", "lm_head.layer_norm")
    ),
    "electra": Family(
        models="ELECTRA",
        parts=_bert("generator_predictions.dense", "generator_predictions.LayerNorm"),
        factorised="electra",
    ),
    "distilbert": Family(models="DistilBERT", parts=_DISTILBERT),
    "modernbert": Family(models="ModernBERT, gte-modernbert-base, Ettin", parts=_MODERNBERT),
    "mobilebert": Family(models="MobileBERT", has_bottlenecks=True),
    "mpnet": Family(
        models="MPNet, all-mpnet-base-v2",
        hooked=HookedAttention(module="MPNetSelfAttention", split=_maps("q", "k", "v")),
        has_bias=True,
        parts=_MPNET,
    ),
    "deberta": Family(
        models="DeBERTa",
        hooked=HookedAttention(
            module="DisentangledSelfAttention", split=_one_map, distributions="dropout", refused=_MIXES_HEADS
        ),
        has_bias=True,
    ),
    "deberta-v2": Family(
        models="DeBERTa-v2, DeBERTa-v3",
        hooked=HookedAttention(
            module="DisentangledSelfAttention",
            split=_maps("query_proj", "key_proj", "value_proj"),
            distributions="dropout",
        ),
        has_bias=True,
    ),
    "t5": Family(models="T5, sentence-t5, GTR", uses_interface=True, has_bias=True, has_decoder=True),
    "mt5": Family(models="mT5", uses_interface=True, has_bias=True, has_decoder=True),
    "umt5": Family(models="umT5", uses_interface=True, has_bias=True),
    "eurobert": Family(models="EuroBERT"),
    "nomic_bert": Family(models="nomic-embed-text"),
    "gemma3_text": Family(models="Gemma 3", is_decoder=True),
    "llama": Family(models="Llama, SmolLM2", is_decoder=True),
    "mistral": Family(models="Mistral, e5-mistral", is_decoder=True),
    "qwen2": Family(models="Qwen2", is_decoder=True),
    "qwen3": Family(models="Qwen3, Qwen3-Embedding", is_decoder=True),
}
"""The families with a row, by `model_type`."""
_UNKNOWN: Final = Family(models="any other that transformers loads and that reads text")


def family_of(model_type: str) -> Family:
    """Return what is known of a family; one without a row has the defaults."""
    return FAMILIES.get(model_type, _UNKNOWN)


def is_served(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Return whether a family's attention may come by transformers' interface.

    transformers accepts the name of an implementation for any family. One that does not use the attention
    interface would get a mask that it cannot read, and so would see padding.
    """
    serves = family_of(config.model_type).uses_interface
    if serves is None:
        serves = bool(model_class._supports_attention_backend)  # noqa: SLF001 - no public attribute has it
    caps = getattr(config, "attn_logit_softcapping", None) is not None
    # What sdpa cannot compute, such as sinks, cannot be computed by the tap, which calls it.
    is_plain = bool(model_class._supports_sdpa) or family_of(config.model_type).uses_interface  # noqa: SLF001
    return bool(serves and is_plain and not caps)
