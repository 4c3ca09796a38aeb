"""Names of runs and models in tables, without digests of settings."""

from minilm_cache.report.runs import short_models
from minilm_cache.wording import some_of


def test_digests_are_left_out_where_names_stay_apart() -> None:
    via = "cache-via-4x384-991bb790-minilm-s0-32687abc/3x384"
    assert short_models(["mini", via, "cache-minilm-s0-51905bbd/3x384"]) == {
        "mini": "mini",
        via: "cache-via-4x384-minilm-s0/3x384",
        "cache-minilm-s0-51905bbd/3x384": "cache-minilm-s0/3x384",
    }
    twice = ["cache-minilm-s0-51905bbd/3x384", "cache-minilm-s0-32687abc/3x384"]
    assert short_models(twice) == {name: name for name in twice}
    dated = "run-20261128/3x384"
    assert short_models([dated]) == {dated: dated}


def test_long_lists_of_names_are_cut() -> None:
    names = list("abcdefgh")
    assert some_of(names[:1]) == "a"
    assert some_of(names[:6]) == "a, b, c, d, e, f"
    assert some_of(names) == "a, b, c, d, e and 3 more"
