"""What `info` says about the students of a cache is what the benchmark measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import RESULTS
from minilm_cache.dump.fidelity import kl_infinite_because, verdict
from minilm_cache.storage_schema.manifest import CacheManifest

GOLDEN = Path(__file__).parents[2] / "golden"
MEASURED: dict[str, Any] = json.loads((RESULTS / "many_epochs.json").read_text())["kl_nats"]


def manifest_of(name: str, **codec: Any) -> CacheManifest:
    """Return the manifest of a golden cache with other settings of its codec."""
    manifest = CacheManifest.model_validate_json((GOLDEN / name / "manifest.json").read_bytes())
    changed = manifest.identity.codec.model_copy(update=codec)
    return manifest.model_copy(update={"identity": manifest.identity.model_copy(update={"codec": changed})})


@pytest.mark.parametrize(
    ("name", "codec", "measured"),
    [
        ("v1", {"k": 16, "select": "pps", "tail": None}, "topk pps k=16"),
        ("v1-vectors", {"max_kl": 0.005}, "vectors, KL at most 0.005"),
        ("v1-vectors", {"max_kl": 0.01}, "vectors, KL at most 0.01"),
        ("v1-vectors", {"max_kl": 0.015}, "vectors, KL at most 0.015"),
    ],
)
def test_the_verdict_is_the_measured_figure(
    monkeypatch: pytest.MonkeyPatch, name: str, codec: dict[str, Any], measured: str
) -> None:
    monkeypatch.setattr(CacheManifest, "kl_over_max", 1.0)
    said = verdict(manifest_of(name, **codec))
    percent = 100 * (MEASURED[measured]["training text"]["over_dense"] - 1)
    assert said is not None
    assert f"about {percent:.1f} % above" in said


@pytest.mark.parametrize(
    ("name", "codec", "ratio"),
    [
        ("v1", {"k": 32, "select": "pps", "tail": None}, 1.0),
        ("v1", {"k": 4, "select": "pps", "tail": None}, 1.0),
        ("v1", {"k": 16, "select": "largest", "tail": "uniform"}, 1.0),
        ("v1-vectors", {"max_kl": 0.1}, 1.0),
        ("v1-vectors", {"max_kl": 0.015}, 2.0),
    ],
)
def test_what_was_not_measured_has_no_figure(
    monkeypatch: pytest.MonkeyPatch, name: str, codec: dict[str, Any], ratio: float
) -> None:
    monkeypatch.setattr(CacheManifest, "kl_over_max", ratio)
    said = verdict(manifest_of(name, **codec))
    assert said is not None
    assert "no benchmark says" in said
    assert "%" not in said


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        ({"select": "pps", "tail": None}, "sampled, unbiased"),
        ({"select": "largest", "tail": "renormalise"}, "infinite: largest only"),
        ({"select": "largest", "tail": "uniform"}, None),
    ],
)
def test_an_infinite_kl_has_a_word(codec: dict[str, Any], words: str | None) -> None:
    assert kl_infinite_because(manifest_of("v1", **codec)) == words
