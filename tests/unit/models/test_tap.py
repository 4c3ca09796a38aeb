"""Oracle: what the tap hands out against transformers' own eager attention, and plain torch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.load import draw_weights, load_model
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.tap import ATTENTION, Tap, TappedModel
from minilm_cache.relations.scores import key_mask, relation_probs
from minilm_cache.storage_schema.identity import RelationKind
from tests.support import TINY, VOCABULARY, tiny_model

LENGTHS = torch.tensor([20, 13, 1])
VALUE_PROJECTIONS = {
    "bert": "encoder.layer.{}.attention.self.value",
    "roberta": "encoder.layer.{}.attention.self.value",
    "xlm-roberta": "encoder.layer.{}.attention.self.value",
    "electra": "encoder.layer.{}.attention.self.value",
    "distilbert": "transformer.layer.{}.attention.v_lin",
    "modernbert": "layers.{}.attn.Wqkv",
}


BERT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
BIASES: dict[str, dict[str, Any]] = {"deberta": RELATIVE, "deberta-v2": RELATIVE | {"share_att_key": True}}
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 6},
    "gemma3_text": {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 6},
    "gpt2": {},
}
"""Decoders: heads that share keys and values, heads wider than the hidden size, sliding windows."""
T5: dict[str, Any] = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64}


def padded_ids() -> Tensor:
    ids = torch.randint(5, len(VOCABULARY), (3, 20), generator=torch.Generator().manual_seed(1))
    return ids.masked_fill(~key_mask(LENGTHS, 20), 0)


def with_attention(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """Return the same weights under another implementation of attention."""
    config = copy.deepcopy(model.config)
    other = AutoModel.from_config(config, attn_implementation=attention)
    other.load_state_dict(model.state_dict())
    return other.eval()  # type: ignore[no-any-return]


def assert_attention_is_eagers(eager: PreTrainedModel, layer: int) -> None:
    ids, valid = padded_ids(), key_mask(LENGTHS, 20)
    inputs = Inputs(ids, LENGTHS)
    tapped = TappedModel(with_attention(eager, ATTENTION))
    with torch.no_grad():
        expected = eager(ids, attention_mask=valid.long(), output_attentions=True).attentions[layer]
        (vectors,) = tapped(inputs, Tap((layer % tapped.num_layers,))).vectors
        found = relation_probs(vectors, RelationKind.ATTENTION, LENGTHS)

    rows = valid[:, None, :, None].expand_as(expected)
    torch.testing.assert_close(found[rows], expected[rows], atol=1e-5, rtol=0)


@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("family", TINY)
def test_attention_is_that_of_the_eager_model(family: str, layer: int) -> None:
    assert_attention_is_eagers(tiny_model(family), layer)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("family", ["mpnet", "t5", "mt5", "umt5", "deberta", "deberta-v2"])
def test_attention_with_a_bias_is_that_of_the_eager_model(family: str, layer: int) -> None:
    """T5 does not scale its products; the others are served by hooks, and DeBERTa's bias reads the text."""
    sizes = T5 if family.endswith("t5") else BERT | {"pad_token_id": 1} | BIASES.get(family, {})
    config = AutoConfig.for_model(family, vocab_size=len(VOCABULARY), **sizes)
    eager, tapped = (
        draw_weights(copy.deepcopy(config), None, attention=name).eval() for name in ("eager", ATTENTION)
    )
    with torch.no_grad():
        for weight in eager.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1)
    tapped.load_state_dict(eager.state_dict())
    ids, valid = padded_ids(), key_mask(LENGTHS, 20)
    ids[~valid] = 1
    with torch.no_grad():
        outputs = eager(ids, attention_mask=valid.long(), output_attentions=True)
        reading = TappedModel(tapped)(Inputs(ids, LENGTHS), Tap((layer,), (2,)))
        (alone,) = TappedModel(tapped)(Inputs(ids, LENGTHS), Tap((layer,))).vectors
    rows = valid[:, None, :, None].expand_as(outputs.attentions[layer])
    for vectors in (reading.vectors[0], alone):
        assert vectors.bias is not None
        found = relation_probs(vectors, RelationKind.ATTENTION, LENGTHS)
        torch.testing.assert_close(found[rows], outputs.attentions[layer][rows], atol=1e-5, rtol=0)
    torch.testing.assert_close(
        reading.hidden[2][valid], outputs.last_hidden_state[valid], atol=1e-4, rtol=1e-4
    )


def test_attention_of_mini_is_that_of_the_eager_model() -> None:
    assert_attention_is_eagers(load_model(locate_teacher("mini").folder, attention="eager"), -1)


@pytest.mark.parametrize("family", TINY)
def test_value_relation_is_a_plain_torch_computation(family: str) -> None:
    eager = tiny_model(family)
    ids, valid = padded_ids(), key_mask(LENGTHS, 20)
    inputs = Inputs(ids, LENGTHS)
    tapped = TappedModel(with_attention(eager, ATTENTION))
    projected: list[Tensor] = []
    projection = eager.get_submodule(VALUE_PROJECTIONS[family].format(tapped.num_layers - 1))
    assert isinstance(projection, nn.Module)
    projection.register_forward_hook(lambda module, args, output: projected.append(output))
    with torch.no_grad():
        eager(ids, attention_mask=valid.long())
        (vectors,) = tapped(inputs, Tap((tapped.num_layers - 1,))).vectors
        found = relation_probs(vectors, RelationKind.VALUE, LENGTHS)
    value = projected[0].chunk(3, -1)[2] if family == "modernbert" else projected[0]

    for at, length in enumerate(LENGTHS.tolist()):
        for head in range(4):
            rows = value[at, :length, head * 8 : head * 8 + 8]
            expected = torch.softmax(rows @ rows.T / 8**0.5, -1)
            torch.testing.assert_close(found[at, head, :length, :length], expected, atol=1e-5, rtol=0)


def test_the_forward_pass_stops_at_the_tapped_layer() -> None:
    model = with_attention(tiny_model("bert"), ATTENTION)
    reached: list[str] = []
    for name in ("encoder.layer.2.attention.self.query", "encoder.layer.2.output.dense"):
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: reached.append(name)
        )
    tapped = TappedModel(model)
    reached.clear()
    tapped(Inputs(padded_ids(), LENGTHS), Tap((2,)))

    assert reached == ["encoder.layer.2.attention.self.query"]


def test_gradients_are_those_of_the_untapped_model() -> None:
    """The student's loss sees Q, K, V only: stopping there must change no gradient."""
    model = with_attention(tiny_model("bert"), ATTENTION)
    ids, valid = padded_ids(), key_mask(LENGTHS, 20)
    inputs = Inputs(ids, LENGTHS)
    (vectors,) = TappedModel(model)(inputs, Tap((2,))).vectors
    vectors.query.square().sum().backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    eager = with_attention(model, "sdpa")
    outputs: list[Tensor] = []
    eager.get_submodule("encoder.layer.2.attention.self.query").register_forward_hook(
        lambda module, args, output: outputs.append(output)
    )
    eager(ids, attention_mask=valid.long())
    outputs[0].square().sum().backward()

    for name, weight in eager.named_parameters():
        torch.testing.assert_close(found[name], weight.grad)


FAMILIES = (
    *("albert", "bert", "big_bird", "bloom", "camembert", "cohere", "convbert", "data2vec-text", "deberta"),
    *(
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "gpt2",
        "gpt_neox",
        "gte",
        "ibert",
        "jina_embeddings_v3",
    ),
    *(
        "layoutlm",
        "llama",
        "luke",
        "megatron-bert",
        "mobilebert",
        "mpnet",
        "nomic_bert",
        "nystromformer",
        "olmo",
    ),
    *("opt", "phi", "rembert", "roberta", "roc_bert", "roformer", "splinter", "starcoder2", "xlm"),
    *("mt5", "t5", "umt5"),
)


UNTAPPED = {
    "big_bird",
    "bloom",
    "convbert",
    "ibert",
    "layoutlm",
    "luke",
    "megatron-bert",
    "nystromformer",
} | {*("rembert", "roformer", "splinter", "xlm")}


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_not_seen_whatever_the_family_knows_of_attention(family: str) -> None:
    """Families that do not use the attention interface would get a mask that they cannot read.

    Relations of the others are those of the eager model, causal where its rows see nothing later.
    """
    sizes = T5 if family.endswith("t5") else {**BERT, "pad_token_id": 1}
    if family == "luke":
        sizes = {**sizes, "entity_vocab_size": 64, "entity_emb_size": 16}  # half a million by default
    config = AutoConfig.for_model(family, vocab_size=512, **sizes)
    eager, ours, plain = (
        draw_weights(copy.deepcopy(config), None, attention=name).eval()
        for name in ("eager", ATTENTION, "sdpa")
    )
    inputs = Inputs(padded_ids(), LENGTHS)
    valid = inputs.valid
    for other in (ours, plain):
        other.load_state_dict(eager.state_dict())
        with torch.no_grad():
            expected = eager(inputs.ids, attention_mask=inputs.mask).last_hidden_state
            found = TappedModel(other)(inputs, Tap(hidden=(2,))).hidden[2]
        torch.testing.assert_close(found[valid], expected[valid], atol=1e-4, rtol=1e-3)
    if family in UNTAPPED:
        with pytest.raises(TeacherError, match="does not use transformers' attention interface"):
            TappedModel(ours)(inputs, Tap((1,)))
        return
    with torch.no_grad():
        attention = eager(inputs.ids, attention_mask=inputs.mask, output_attentions=True).attentions[1]
        (vectors,) = TappedModel(ours)(inputs, Tap((1,))).vectors
    probs = relation_probs(vectors, RelationKind.ATTENTION, LENGTHS)
    rows = valid[:, None, :, None].expand_as(attention)
    torch.testing.assert_close(probs[rows], attention[rows], atol=1e-5, rtol=0)
    assert vectors.is_causal == (not attention[0].triu(1).any())


@pytest.mark.parametrize("family", ["convbert", "roformer"])
def test_families_with_attention_of_their_own_are_refused_by_name(family: str) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 100,
    }
    model = AutoModel.from_config(AutoConfig.for_model(family, **sizes))
    model.config._attn_implementation = ATTENTION

    tapped, inputs = TappedModel(model.eval()), Inputs(padded_ids() % 100, LENGTHS)
    with pytest.raises(TeacherError, match=f"'{family}' does not use transformers' attention interface"):
        tapped(inputs, Tap((1,)))
    with torch.no_grad():
        expected = model(inputs.ids, attention_mask=inputs.mask).last_hidden_state
        torch.testing.assert_close(tapped(inputs, Tap(hidden=(2,))).hidden[2], expected)


def test_a_family_without_checkpointing_is_named() -> None:
    sizes = {"hidden_size": 32, "embedding_size": 16, "intermediate_size": 64, "num_attention_heads": 4}
    config = AutoConfig.for_model("albert", vocab_size=100, num_hidden_layers=2, **sizes)
    model = TappedModel(AutoModel.from_config(config, attn_implementation=ATTENTION))
    with pytest.raises(InvalidConfigError, match=r"none for the family albert. Leave it out"):
        model.checkpoint_layers()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("family", CAUSAL)
def test_rows_of_decoders_see_their_past_as_in_the_eager_model(family: str, layer: int) -> None:
    """Groups of heads share keys and values; each head is recorded with its own."""
    config = AutoConfig.for_model(
        family, vocab_size=len(VOCABULARY), **BERT, **CAUSAL[family], pad_token_id=0, initializer_range=0.4
    )
    eager, ours = (
        draw_weights(copy.deepcopy(config), None, attention=name).eval() for name in ("eager", ATTENTION)
    )
    ours.load_state_dict(eager.state_dict())
    inputs, valid = Inputs(padded_ids(), LENGTHS), key_mask(LENGTHS, 20)
    with torch.no_grad():
        expected = eager(inputs.ids, attention_mask=inputs.mask, output_attentions=True).attentions[layer]
        (vectors,) = TappedModel(ours)(inputs, Tap((layer,))).vectors
        found = relation_probs(vectors, RelationKind.ATTENTION, LENGTHS)
        values = relation_probs(vectors, RelationKind.VALUE, LENGTHS)

    assert vectors.is_causal
    assert vectors.key.shape == vectors.value.shape == vectors.query.shape
    rows = valid[:, None, :, None].expand_as(expected)
    torch.testing.assert_close(found[rows], expected[rows], atol=1e-5, rtol=0)
    own, size = vectors.value[0, 1], vectors.value.shape[-1]
    for row in range(20):
        plain = torch.softmax(own[: row + 1] @ own[row] / size**0.5, -1)
        torch.testing.assert_close(values[0, 1, row, : row + 1], plain, atol=1e-5, rtol=0)
        assert not values[0, 1, row, row + 1 :].any()


def test_what_is_not_the_softmax_of_scores_is_refused() -> None:
    """Mixed heads, capped scores, sinks: each family still gives the hidden states of its eager model."""
    mixing = AutoConfig.for_model("deberta", vocab_size=100, **BERT, **RELATIVE, talking_head=True)
    small = {"vocab_size": 100, **BERT, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    capping = AutoConfig.for_model("gemma2", **small)
    sinking = AutoConfig.for_model("gpt_oss", **small, num_local_experts=2, num_experts_per_tok=1)
    for config, says in (
        (mixing, "mixes the distributions"),
        (capping, "does not use transformers'"),
        (sinking, "does not use transformers'"),
    ):
        model, eager = (
            draw_weights(copy.deepcopy(config), None, attention=name).eval() for name in (ATTENTION, "eager")
        )
        eager.load_state_dict(model.state_dict())
        inputs = Inputs(padded_ids() % 95 + 5, LENGTHS)
        with pytest.raises(TeacherError, match=f"{says}.*--codec none with --pooled"):
            TappedModel(model)(inputs, Tap((1,)))
        with torch.no_grad():
            hidden = TappedModel(model)(inputs, Tap(hidden=(2,))).hidden[2]
            expected = eager(inputs.ids, attention_mask=inputs.mask, output_hidden_states=True).hidden_states[
                2
            ]
        torch.testing.assert_close(hidden[inputs.valid], expected[inputs.valid], atol=1e-4, rtol=1e-3)


def test_a_decoder_that_is_told_to_read_both_ways_is_not_causal() -> None:
    config = AutoConfig.for_model("llama", vocab_size=100, **BERT, num_key_value_heads=2, pad_token_id=0)
    config.is_causal = False
    model = draw_weights(copy.deepcopy(config), None, attention=ATTENTION).eval()
    eager = draw_weights(copy.deepcopy(config), None, attention="eager").eval()
    eager.load_state_dict(model.state_dict())
    inputs = Inputs(padded_ids() % 95 + 5, LENGTHS)
    with torch.no_grad():
        (vectors,) = TappedModel(model)(inputs, Tap((1,))).vectors
        expected = eager(inputs.ids, attention_mask=inputs.mask, output_attentions=True).attentions[1]
    assert not vectors.is_causal
    found = relation_probs(vectors, RelationKind.ATTENTION, LENGTHS)
    rows = inputs.valid[:, None, :, None].expand_as(expected)
    torch.testing.assert_close(found[rows], expected[rows], atol=1e-5, rtol=0)


def test_layers_that_do_not_all_attend_have_hidden_states_and_no_relations() -> None:
    types = ["conv", "conv", "full_attention", "conv"]
    sizes = {**BERT, "num_hidden_layers": 4, "num_key_value_heads": 2, "layer_types": types}
    config = AutoConfig.for_model("lfm2", vocab_size=100, **sizes, pad_token_id=0)
    model = draw_weights(config, None, attention=ATTENTION).eval()
    tapped, inputs = TappedModel(model), Inputs(padded_ids() % 95 + 5, LENGTHS)
    assert tapped.num_layers == 4
    with torch.no_grad():
        hidden = tapped(inputs, Tap(hidden=(4,))).hidden[4]
        expected = model(inputs.ids, attention_mask=inputs.mask).last_hidden_state
    torch.testing.assert_close(hidden[inputs.valid], expected[inputs.valid])
    with pytest.raises(TeacherError, match="attends 1 times in 4 layers"):
        tapped(inputs, Tap((0,)))
