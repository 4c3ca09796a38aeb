"""Tasks whose answers are generated: features, models, decoding, and scores by their libraries.

Fine-tuning predicts masked copies of a target's tokens, 80 % of them as [MASK], 10 % as another token and 10
% as they are (s2s-ft of UniLM; Bao et al. 2020, arXiv 2002.12804, section 3.2).
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, set_seed

from minilm_cache.errors import needs
from minilm_cache.evaluate.examples import GenerationExample, Track
from minilm_cache.evaluate.files import Source
from minilm_cache.evaluate.generation_data import read_generation_task
from minilm_cache.evaluate.kind import EncodedSet, Features, Kind, Scores
from minilm_cache.evaluate.models import Evaluated, load_with_head
from minilm_cache.evaluate.settings import EvaluateConfig
from minilm_cache.evaluate.tasks import Generation, GenerationTask
from minilm_cache.models.decoding import is_of_pairs, read_decoding, refuse_other_sources
from minilm_cache.models.generation import (
    NOT_PREDICTED,
    MaskedTargets,
    TextGenerator,
    check_generates,
    encode_sources,
    lengthened,
    positions_of,
)
from minilm_cache.models.inputs import Inputs, Part, padded
from minilm_cache.models.load import draw_weights, read_config
from minilm_cache.models.tokenizer import mask_token

with needs("evaluate", "eval"):
    import sacrebleu
    from nltk.translate.meteor_score import meteor_score
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

_RANDOM: Final = 0.1
"""Share of copies that are another token, as in s2s-ft."""
_KEPT: Final = 0.1
"""Share of copies that are the token itself, as in s2s-ft."""
_DECODED: Final = 32
"""Most sources of a batch that is decoded."""
_ROUGE: Final = ("rouge1", "rouge2", "rougeL")
_LATIN: Final = re.compile("[a-z0-9]")
_WORD: Final = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


@dataclass(frozen=True, slots=True)
class _EncodedTexts(EncodedSet[GenerationExample]):
    """Sources and targets as tokens, with the tokenizer that decodes generated ones."""

    tokenizer: PreTrainedTokenizerFast


class GenerationKind(Kind[GenerationTask, GenerationExample]):
    """Texts that are generated from texts. Predictions are the generated texts, in order."""

    def configured(self, config: EvaluateConfig) -> "GenerationKind":
        """Return the kind with the task's settings as they were given; see `Kind.configured`."""
        generation = self.task.generation
        changes = {
            name: getattr(config, name)
            for name in ("label_smoothing", "target_mask_prob", "positions")
            if getattr(config, name) is not None
        }
        decoding = generation.decoding.changed(config, config.max_length)
        generation = generation.with_changes(decoding=decoding, **changes)
        return self.of(replace(self.task, generation=generation))

    def as_tuned(self, model: Evaluated, config: EvaluateConfig) -> "GenerationKind":
        """Return the kind with the decoding of a model that generates texts already; see `Kind.as_tuned`."""
        refuse_other_sources(model.name, num_texts=len(self.task.sources), pairs=is_of_pairs(model.folder))
        decoding = read_decoding(model.folder).changed(config, config.max_length)
        generation = self.task.generation.with_changes(decoding=decoding, positions=None)
        return self.of(replace(self.task, generation=generation))

    @property
    def generation(self) -> Generation:
        """How texts are generated."""
        return self.task.generation

    def read(self, source: Source) -> list[Track[GenerationExample]]:
        """Return the one track of the task; see `Kind.read`."""
        return read_generation_task(self.task, source)

    def predicts(self, track: Track[GenerationExample]) -> bool:
        """Return whether a track has a test set, whose texts take hours to generate."""
        return bool(track.test)

    def load(self, model: Evaluated, seed: int) -> nn.Module:
        """Return a masked language model that learns to predict targets; see `Kind.load`."""
        loaded = load_with_head(model, "tokens", seed)
        if self.generation.positions is not None:
            loaded = lengthened(loaded, self.generation.decoding.positions)
        set_seed(seed)
        return MaskedTargets(loaded, self.generation.label_smoothing)

    def load_as_is(self, model: Evaluated) -> nn.Module:
        """Return a model that was fine-tuned to generate texts; see `Kind.load_as_is`."""
        generator = TextGenerator.load(model.folder)
        return MaskedTargets(generator.model.model, self.generation.label_smoothing)

    @property
    def must_read(self) -> int:
        """One token, as `check` compares the positions with those of source and text together."""
        return 1

    def check(self, model: Evaluated, tokenizer: PreTrainedTokenizerFast) -> str:
        """Raise an error for a model that cannot generate the task's texts; see `Kind.check`."""
        with torch.device("meta"):
            shape = draw_weights(read_config(model.folder), "tokens", attention="sdpa")
        mask_token(tokenizer)
        own, needed = positions_of(shape, model.name), self.generation.decoding.positions
        if self.generation.positions is None or needed <= own:
            remedy = "Lower one of them, or fine-tune with --positions copied."
            check_generates(shape, self.generation.decoding, model.name, remedy=remedy)
            return ""
        tokenizer.model_max_length = needed
        return f"{model.name} has {own} positions; {needed - own} more are copies of the first ones"

    def save(
        self,
        model: Any,  # noqa: ANN401 - see `Kind`
        tokenizer: PreTrainedTokenizerFast,
        *,
        track: Track[GenerationExample],
        folder: Path,
    ) -> None:
        """Write a fine-tuned model, its tokenizer and how it generates; see `Kind.save`."""
        assert isinstance(model, MaskedTargets)
        pairs = len(track.train[0].source) > 1
        TextGenerator(model.model, tokenizer, self.generation.decoding, pairs=pairs).save(folder)

    def encode(
        self, examples: Sequence[GenerationExample], tokenizer: PreTrainedTokenizerFast
    ) -> EncodedSet[GenerationExample]:
        """Return the tokens of sources and targets; both are cut where they are too long."""
        decoding = self.generation.decoding
        texts = [example.source for example in examples]
        sources, are_cut = encode_sources(tokenizer, texts, decoding.max_source)
        targets = tokenizer(
            [example.target for example in examples],
            add_special_tokens=False,
            truncation=True,
            max_length=decoding.max_new_tokens - 1,
        )
        are_short = [bool(each.overflowing) for each in targets.encodings or ()]
        features = [
            {"source": source, "target": [*target, tokenizer.sep_token_id]}
            for source, target in zip(sources, targets["input_ids"], strict=True)
        ]
        learned = sum(map(max, are_cut, are_short))
        return _EncodedTexts(examples, features, tokenizer, num_cut=sum(are_cut), num_learned_cut=learned)

    def longest_learned(self, max_length: int) -> str:
        """Return the greatest lengths of a source and of a target; see `Kind.longest_learned`."""
        most = self.generation.decoding.max_new_tokens
        return f"{max_length} tokens, or targets at {most} (--max-new-tokens)"

    def collator(self, tokenizer: PreTrainedTokenizerFast) -> Callable[[Features], dict[str, Any]]:
        """Return what makes a batch of masked targets; it draws from `random`, which the Trainer seeds."""
        return _Collator(tokenizer, self.generation.target_mask_prob)

    def predict(
        self,
        trainer: Any,  # noqa: ANN401 - see `Kind`
        encoded: EncodedSet[GenerationExample],
        advance: Callable[[int], None],
    ) -> list[str] | None:
        """Return the text that is generated from each source; see `Kind.predict`."""
        assert isinstance(encoded, _EncodedTexts)
        model = trainer.model.model.to(trainer.args.device).eval()
        if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
            return None
        generator = TextGenerator(model, encoded.tokenizer, self.generation.decoding)
        sources = [example.source for example in encoded.examples]
        size = min(_DECODED, trainer.args.per_device_train_batch_size)
        device = trainer.args.device.type
        with torch.autocast(device, torch.bfloat16, enabled=trainer.args.bf16):
            return generator.generate(sources, batch_size=size, advance=advance)

    def scores(self, name: str, examples: Sequence[GenerationExample], predicted: Sequence[str]) -> Scores:
        """Return BLEU-4, ROUGE and, where WordNet is installed, METEOR of a set."""
        return generation_scores([example.target for example in examples], predicted)

    def headline(self, scores: Mapping[str, Scores]) -> float:
        """Return the mean of ROUGE-L over dev sets."""
        return sum(each["rougeL"] for each in scores.values()) / len(scores)

    def file(self, set_name: str) -> str:
        """Return the name of the file for the generated texts of a set."""
        return f"{set_name}.jsonl"

    def write(
        self, folder: Path, set_name: str, *, examples: Sequence[GenerationExample], predicted: Sequence[str]
    ) -> None:
        """Write a JSON object a line: the source, the right text as `tgt`, and the generated one."""
        rows = [
            {"src": " [SEP] ".join(example.source), "tgt": example.target, "generated": text}
            for example, text in zip(examples, predicted, strict=True)
        ]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / self.file(set_name)).write_text(lines, encoding="utf-8")


class _Collator:
    """Makes a batch of sources, targets, and masked copies of the targets' tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, target_mask_prob: float) -> None:
        self._pad, self._mask = tokenizer.pad_token_id, mask_token(tokenizer)
        special = {*tokenizer.all_special_ids}
        self._ordinary = [token for token in range(len(tokenizer)) if token not in special]
        self._share = target_mask_prob

    def __call__(self, features: Features) -> dict[str, Tensor]:
        rows = [self._row(feature["source"], feature["target"]) for feature in features]
        ids, parts, positions, labels = (
            [torch.tensor(row[column]) for row in rows] for column in range(len(rows[0]))
        )
        inputs = Inputs.of(ids, self._pad)
        return {
            "ids": inputs.ids,
            "lengths": inputs.lengths,
            "parts": padded(parts, Part.MASKED),
            "positions": padded(positions, 0),
            "labels": padded(labels, NOT_PREDICTED),
        }

    def _row(self, source: list[int], target: list[int]) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return the ids, parts, positions and labels of a sequence."""
        places = [place for place in range(len(target)) if random.random() < self._share]  # noqa: S311 - no secret
        places = places or [random.randrange(len(target))]  # noqa: S311 - no secret
        known = len(source) + len(target)
        return (
            [*source, *target, *(self._copy(target[place]) for place in places)],
            [int(Part.SOURCE)] * len(source)
            + [int(Part.TARGET)] * len(target)
            + [int(Part.MASKED)] * len(places),
            [*range(known), *(len(source) + place for place in places)],
            [NOT_PREDICTED] * known + [target[place] for place in places],
        )

    def _copy(self, token: int) -> int:
        """Return what stands for a token that is predicted."""
        draw = random.random()  # noqa: S311 - no secret
        if draw < _KEPT:
            return token
        return random.choice(self._ordinary) if draw < _KEPT + _RANDOM else self._mask  # noqa: S311 - no secret


def generation_scores(targets: Sequence[str], generated: Sequence[str]) -> Scores:
    """Return scores of generated texts, times 100, all without regard to case.

    BLEU-4 is sacrebleu's of the corpus with its tokenizer 13a. ROUGE-1, ROUGE-2 and ROUGE-L are F1 of
    rouge-score with stems, means over texts. Of a target without any letter of a to z and any digit, which
    is all that rouge-score reads, words of any script are counted, without stems. METEOR is nltk's, the mean
    over texts; it needs WordNet (`python -m nltk.downloader wordnet`), and is left out where that is not
    installed.

    Args:
        targets: right texts.
        generated: generated texts, in the same order.
    """
    bleu = sacrebleu.corpus_bleu(list(generated), [list(targets)], lowercase=True, tokenize="13a")
    latin = RougeScorer(list(_ROUGE), use_stemmer=True)
    others = RougeScorer(list(_ROUGE), tokenizer=_AnyScript())
    pairs = list(zip(targets, generated, strict=True))
    rouge = [
        (latin if _LATIN.search(target.lower()) else others).score(target, text) for target, text in pairs
    ]
    scores = {"BLEU-4": float(bleu.score)}
    scores |= {name: 100 * sum(each[name].fmeasure for each in rouge) / len(rouge) for name in _ROUGE}
    if has_wordnet():
        meteor = [meteor_score([_words(target)], _words(text)) for target, text in pairs]
        scores["METEOR"] = 100 * sum(meteor) / len(meteor)
    return scores


class _AnyScript:
    """Splits a text into words of any script, for `RougeScorer`."""

    def tokenize(self, text: str) -> list[str]:
        """Return the words, and each ideograph by itself."""
        return _WORD.findall(text.lower())


def has_wordnet() -> bool:
    """Return whether WordNet, which METEOR looks synonyms up in, is installed for nltk."""
    from nltk.data import find  # noqa: PLC0415 - looks for folders when it is imported

    for place in ("corpora/wordnet.zip", "corpora/wordnet"):
        with suppress(LookupError):
            find(place)
            return True
    return False


def _words(text: str) -> list[str]:
    tokenized: str = Tokenizer13a()(text.lower())  # type: ignore[no-untyped-call]
    return tokenized.split()
