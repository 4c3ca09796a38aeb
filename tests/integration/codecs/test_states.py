"""What a cache holds beside relations, judged by transformers' own outputs on the same sequences."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from minilm_cache.cache import open_cache
from minilm_cache.errors import TeacherError
from minilm_cache.relations.signals import SparseLabels
from minilm_cache.storage_schema.states import LOGITS, SignalName, StateFamily
from minilm_cache.store.index import committed_shards
from tests.integration.codecs.conftest import EVERYTHING, MASK, held_out, outputs, relative, world_of
from tests.support import VOCABULARY, World, write_corpus


def test_hidden_states_are_transformers_within_the_error_that_the_manifest_says(stored: World) -> None:
    model = AutoModelForMaskedLM.from_pretrained(stored.teacher)
    sequences = held_out(stored)
    said = [outputs(model, one.input_ids)["hidden"] for one in sequences]
    found = [one.states() for one in sequences]
    measured = open_cache(stored.root / "cache").manifest.measured
    assert measured is not None
    errors = {one.path: one.relative_error for one in measured.states}
    for number in range(4):
        name = SignalName(StateFamily.HIDDEN, number)
        error = relative(torch.cat([one[number] for one in said]), torch.cat([one[name][0] for one in found]))

        assert errors[name.folder] == pytest.approx(error, rel=0.02)
        assert 0 < error < 0.07
        first = SignalName(StateFamily.FIRST, number)
        assert (errors[first.folder] or 0) < 2**-10
        for one, own in zip(said, found, strict=True):
            torch.testing.assert_close(own[first][0], one[number, 0], rtol=2**-10, atol=1e-4)


def test_masked_readings_are_those_of_the_masked_sequence(stored: World) -> None:
    model = AutoModelForMaskedLM.from_pretrained(stored.teacher)
    name = SignalName(StateFamily.MASKED, 3)
    said, found = [], []
    for sequence in held_out(stored):
        states = sequence.states()
        assert states.masked is not None
        ids, chosen = states.masked.ids[0], states.masked.chosen[0]
        labelled = states.masked.with_labels  # of all tokens, as DistilBERT's authors compare them
        assert len(labelled) == len(sequence.input_ids)
        assert bool((ids[~chosen] == sequence.input_ids[~chosen]).all())
        answer = outputs(model, ids)
        said.append(answer["hidden"][3])
        found.append(states[name][0])
        probs = (answer["logits"][labelled] / 2.0).softmax(-1)  # the temperature that DistilBERT asks for
        assert states.masked.temperature == 2.0
        assert isinstance(states.masked.labels, SparseLabels)
        token, weight = states.masked.labels
        torch.testing.assert_close(weight.sum(-1), torch.ones(len(weight)))
        kept = weight > 1 / 12 * 1.05  # above any equal share: stored by themselves
        own = probs.gather(-1, token)[kept]
        torch.testing.assert_close(weight[kept], own, rtol=0.031, atol=0)
        assert bool((weight[kept] <= own * 1.0001).all())  # what rounding leaves is drawn from
    assert relative(torch.cat(said), torch.cat(found)) < 0.07


@pytest.mark.parametrize("family", ["roberta", "electra", "distilbert", "modernbert", "xlm-roberta"])
def test_every_family_says_its_states_and_labels(tmp_path: Path, family: str) -> None:
    world = world_of(tmp_path, "tokens", family)
    world.dump(hidden="all", labels=True, label_k=len(VOCABULARY), max_error=0.05)
    model = AutoModelForMaskedLM.from_pretrained(world.teacher)
    said, found = [], []
    for sequence in held_out(world):
        states = sequence.states()
        last = max(name.number for name in states.values)
        said.append(outputs(model, sequence.input_ids)["hidden"][last])
        found.append(states[SignalName(StateFamily.HIDDEN, last)][0])
        assert states.masked is not None
        assert isinstance(states.masked.labels, SparseLabels)
        chosen = states.masked.chosen[0]
        probs = outputs(model, states.masked.ids[0])["logits"][chosen].softmax(-1)
        dense = torch.zeros_like(probs).scatter_add_(-1, *states.masked.labels)
        # With as many entries as tokens hardly anything is left to chance.
        assert float((dense - probs).abs().sum(-1).mean()) < 0.2
    assert relative(torch.cat(said), torch.cat(found)) < 0.07


def test_answers_of_a_classifier_are_stored_as_they_are(tmp_path: Path) -> None:
    world = world_of(tmp_path, "sequences")
    manifest = world.dump(packing="records", logits=True, first_hidden="all").manifest
    assert manifest.identity.states is not None
    assert manifest.identity.states.num_classes == 2
    model = AutoModelForSequenceClassification.from_pretrained(world.teacher)
    for sequence in held_out(world):
        found = sequence.states()[LOGITS]
        torch.testing.assert_close(found[0], outputs(model, sequence.input_ids)["logits"])


def test_a_state_that_float16_cannot_hold_ends_the_dump_at_once(tmp_path: Path) -> None:
    world = world_of(tmp_path, "tokens")
    model = AutoModelForMaskedLM.from_pretrained(world.teacher)
    model.bert.encoder.layer[-1].output.LayerNorm.weight.data *= 1e6
    model.save_pretrained(world.teacher)
    with pytest.raises(TeacherError, match=r"states/first/\d would have NaN, infinity or a number"):
        world.dump(codec="none", first_hidden="last", shard_tokens=256)
    assert list(committed_shards(world.root / "cache", 4)) == []


def test_masks_are_berts(tmp_path: Path) -> None:
    world = world_of(tmp_path, "tokens")
    write_corpus(world.corpus, num_documents=900)
    cache = open_cache(world.dump(labels=True, label_k=2, shard_tokens=4096).path)
    counts = {"chosen": 0, "mask": 0, "same": 0, "other": 0}
    tokens = 0
    for number in range(len(cache)):
        masked, ids = cache[number].states().masked, cache[number].input_ids
        assert masked is not None
        chosen, read = masked.chosen[0], masked.ids[0]
        assert not bool(chosen[ids < 5].any()), "a special token was chosen"
        ordinary = int((ids >= 5).sum())
        assert int(chosen.sum()) == max(1, round(0.15 * ordinary))
        assert bool((read[chosen] != 0).all())
        tokens += ordinary
        counts["chosen"] += int(chosen.sum())
        counts["mask"] += int((read[chosen] == MASK).sum())
        counts["same"] += int((read[chosen] == ids[chosen]).sum())
        counts["other"] += int(((read[chosen] != ids[chosen]) & (read[chosen] != MASK)).sum())
    share = {name: count / counts["chosen"] for name, count in counts.items()}

    assert counts["chosen"] / tokens == pytest.approx(0.15, abs=0.02)
    assert share["mask"] == pytest.approx(0.8, abs=0.03)
    assert share["same"] == pytest.approx(0.1, abs=0.025)
    assert share["other"] == pytest.approx(0.1, abs=0.025)


def test_labels_and_masks_depend_on_no_batch(stored: World) -> None:
    stored.dump("other", **{"for": EVERYTHING}, codec="vectors", max_error=0.05, label_k=12, batch_size=3)
    for path in ("labels/read/c/0", "labels/index/c/1/0", "labels/weight/c/1/0"):
        own, other = stored.root / "cache" / path, stored.root / "other" / path
        assert own.read_bytes() == other.read_bytes()
