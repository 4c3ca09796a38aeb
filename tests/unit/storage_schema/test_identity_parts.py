"""Codecs, relations, layers and states of an identity: what goes with what."""

import pytest

from minilm_cache.storage_schema.identity import (
    MAX_LAYERS,
    CacheIdentity,
    DenseParameters,
    RelationKind,
    TopKParameters,
    VectorsParameters,
    codec_words,
)
from tests.unit.storage_schema.test_base import Content, as_json, errors_of, with_value
from tests.unit.storage_schema.test_identity import (
    DENSE,
    FULL,
    LARGEST,
    LITTLE,
    OF_VECTORS,
    PPS,
    VECTORS,
    identity_of,
)


@pytest.mark.parametrize("select", ["pps", "largest"])
@pytest.mark.parametrize("tail", ["uniform", "renormalise", None])
def test_a_tail_goes_with_the_largest_entries_and_only_with_them(select: str, tail: str | None) -> None:
    content = LARGEST | {"select": select, "tail": tail}
    if (select == "largest") == (tail is not None):
        assert TopKParameters.model_validate_json(as_json(content)).tail == tail
    else:
        assert errors_of(TopKParameters, content) == [("", "value_error")]


@pytest.mark.parametrize("name", ["", "zstd", "TOPK", "pickle", "topk\n", None, 1, ["topk"]])
def test_only_three_codecs_have_a_name(name: object) -> None:
    places = errors_of(CacheIdentity, with_value(FULL, "codec.name", name))

    assert [place for place, _ in places] == ["codec"]


@pytest.mark.parametrize(
    ("codec", "model"), [(LARGEST, TopKParameters), (DENSE, DenseParameters), (VECTORS, VectorsParameters)]
)
def test_the_name_of_a_codec_decides_what_it_is(codec: Content, model: type) -> None:
    relations = [] if codec is VECTORS else ["attention"]

    assert type(identity_of(LITTLE | {"codec": codec, "relations": relations}).codec) is model


@pytest.mark.parametrize("codec", [DENSE | {"k": 4}, VECTORS | {"k": 4}, LARGEST | {"max_kl": 0.1}], ids=str)
def test_codecs_have_no_settings_of_one_another(codec: Content) -> None:
    relations = [] if codec["name"] == "vectors" else ["value"]
    (place,) = errors_of(CacheIdentity, LITTLE | {"codec": codec, "relations": relations})

    assert place[1] == "extra_forbidden"


@pytest.mark.parametrize("codec", [PPS, LARGEST, DENSE, VECTORS], ids=["pps", "largest", "dense", "vectors"])
def test_relations_are_stored_with_every_codec_but_vectors(codec: Content) -> None:
    for relations in ([], ["attention"], ["value"], ["attention", "value"]):
        content = LITTLE | {"codec": codec, "relations": relations}
        if bool(relations) == (codec is not VECTORS):
            assert list(identity_of(content).relations) == relations
        else:
            assert errors_of(CacheIdentity, content) == [("", "value_error")]


@pytest.mark.parametrize(
    "relations", [["Attention"], ["heads"], [""], [None], ["attention", "value", "query"]]
)
def test_relations_that_are_none_are_refused(relations: list[object]) -> None:
    (place,) = errors_of(CacheIdentity, LITTLE | {"relations": relations})

    assert place[0].startswith("relations")


def test_the_names_of_relations_are_part_of_the_format() -> None:
    assert [kind.value for kind in RelationKind] == ["attention", "value", "query", "key"]


@pytest.mark.parametrize("layers", [[1, 0], [1, 1], [0, 2, 1], [12], [0, 12]], ids=str)
def test_layers_ascend_and_are_the_teachers(layers: list[int]) -> None:
    assert errors_of(CacheIdentity, OF_VECTORS | {"layers": layers}) == [("", "value_error")]


def test_a_cache_without_relations_has_states() -> None:
    pooled = {"mode": "mean", "normalize": True, "width": 32, "min_cosine": 0.9, "calibration_sequences": 9}
    without_relations = OF_VECTORS | {"codec": {"name": "none"}, "layers": [], "states": {"pooled": pooled}}
    identity = identity_of(without_relations)

    assert (identity.has_relations, identity.last_layer) == (False, identity.teacher.num_layers - 1)
    for content in (
        without_relations | {"states": None},
        without_relations | {"layers": [0]},
        without_relations | {"relations": ["attention", "value"]},
        OF_VECTORS | {"states": {"pooled": pooled}, "layers": []},
    ):
        assert errors_of(CacheIdentity, content) == [("", "value_error")]


def test_the_last_layer_is_one_below_their_number() -> None:
    assert identity_of(OF_VECTORS | {"layers": [0, 11]}).layers == (0, 11)


def test_there_is_a_layer_and_no_more_than_a_shard_has_files_for() -> None:
    many = with_value(OF_VECTORS, "teacher.num_layers", 1024)

    assert errors_of(CacheIdentity, many | {"layers": []}) == [("", "value_error")]
    assert len(identity_of(many | {"layers": list(range(896, 1024))}).layers) == MAX_LAYERS
    assert errors_of(CacheIdentity, many | {"layers": list(range(MAX_LAYERS + 1))}) == [
        ("layers", "too_long")
    ]
    assert errors_of(CacheIdentity, many | {"layers": [-1, 5, 1024]})[:2] == [
        ("layers.0", "greater_than_equal"),
        ("layers.2", "less_than"),
    ]


@pytest.mark.parametrize("codec", [PPS, DENSE], ids=["topk", "dense"])
def test_only_vectors_are_stored_of_several_layers(codec: Content) -> None:
    content = OF_VECTORS | {"codec": codec, "relations": ["value"]}

    assert errors_of(CacheIdentity, content) == [("", "value_error")]
    identity_of(content | {"layers": [11]})


@pytest.mark.parametrize("family", ["hidden", "masked_hidden", "first"])
def test_states_are_the_teachers(family: str) -> None:
    """A teacher of 12 layers has 13 hidden states: the output of the embeddings comes first."""
    states = identity_of(with_value(FULL, f"states.{family}", [12])).states

    assert states is not None
    assert states.highest == 12
    assert errors_of(CacheIdentity, with_value(FULL, f"states.{family}", [13])) == [("", "value_error")]


def test_the_mask_is_a_token_of_the_vocabulary() -> None:
    identity_of(with_value(FULL, "states.masking.mask_token", 999))

    assert errors_of(CacheIdentity, with_value(FULL, "states.masking.mask_token", 1000)) == [
        ("", "value_error")
    ]


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        (LARGEST, ["topk", "k=4", "select=largest", "tail=uniform"]),
        (PPS, ["topk", "k=4", "select=pps"]),
        (DENSE, ["dense"]),
        (VECTORS, ["vectors", "max_kl=0.1"]),
    ],
    ids=["largest", "pps", "dense", "vectors"],
)
def test_words_of_a_codec_are_the_settings_that_users_choose(codec: Content, words: list[str]) -> None:
    relations = [] if codec is VECTORS else ["attention"]
    identity = identity_of(LITTLE | {"codec": codec, "relations": relations})

    assert codec_words(identity.codec).split(" ") == words


def test_parameters_of_vectors_are_there_with_no_other_codec() -> None:
    identity = identity_of(OF_VECTORS)

    assert identity.vectors is identity.codec
    assert identity_of(LITTLE).vectors is None
    assert identity_of(LITTLE | {"codec": DENSE}).vectors is None
