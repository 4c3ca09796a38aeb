"""A masked language model that generates a text from another one, under the mask of UniLM.

The source sees itself; each generated token sees the source and the tokens before it (Dong et al. 2019, arXiv
1905.03197, section 2.3). A token is predicted at a [MASK] that stands at its position: while training at
masked copies of the target, all of them in one pass (Bao et al. 2020, arXiv 2002.12804, section 3.2), and
while decoding at one that is appended to the text so far, whose keys and values are then removed again.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput

from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.decoding import GENERATION_FILE, Decoding, is_of_pairs, read_decoding
from minilm_cache.models.device import choose_device
from minilm_cache.models.inputs import Inputs, Part
from minilm_cache.models.load import draw_weights, has_sides, load_weights
from minilm_cache.models.locate import read_json
from minilm_cache.models.tap import gathered
from minilm_cache.models.tokenizer import load_tokenizer, mask_token, refuse_more_words

NOT_PREDICTED: Final = -100
"""Label of a token that is not predicted, as transformers has it."""
_PAIR: Final = 2
_ADVICE: Final = "Take a model of BERT's family, such as BERT, RoBERTa, XLM-R or ELECTRA."


def logits_of(
    model: PreTrainedModel, inputs: Inputs, places: Int[Tensor, " chosen"]
) -> Float[Tensor, "chosen vocabulary"]:
    """Return the logits of tokens of a batch whose parts are given.

    Args:
        model: a masked language model.
        inputs: sequences with `parts` and `positions`, on the model's device.
        places: places of the tokens, in the batch as one row.
    """
    assert inputs.parts is not None
    assert inputs.positions is not None
    with gathered(model, places):
        output = model(
            input_ids=inputs.ids,
            attention_mask=inputs.mask,
            position_ids=inputs.positions + _first_position(model),
            **_segments(model, inputs.parts != Part.SOURCE),
        )
    logits: Tensor = output.logits[0]
    return logits


def _first_position(model: PreTrainedModel) -> int:
    """Return the row of the first position: RoBERTa's tables have that of padding before it."""
    padding = _positions(model).padding_idx
    return 0 if padding is None else padding + 1


def _positions(model: Any) -> Any:  # noqa: ANN401 - an embedding, or None where the family has no such table
    return getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)


def _segments(model: PreTrainedModel, is_target: Tensor) -> dict[str, Tensor]:
    """Return the segments of tokens, 1 in the target, where the model's family has two."""
    has_two = has_sides(model.config)
    return {"token_type_ids": is_target.to(torch.int64)} if has_two else {}


def check_generates(
    model: PreTrainedModel,
    decoding: Decoding,
    name: str,
    *,
    options: tuple[str, str] = ("--max-length", "--max-new-tokens"),
    remedy: str = "Lower one of them.",
) -> None:
    """Raise an error if a model cannot generate texts, or has too few positions for them.

    Args:
        model: a masked language model.
        decoding: how long its texts are.
        name: name of the model, for the message.
        options: options that the lengths of source and text come from, for the message.
        remedy: what helps where positions lack, for the message.

    Raises:
        TeacherError: its family keeps no keys and values of earlier tokens, or has no table of positions.
        InvalidConfigError: it has too few positions.
    """
    available = positions_of(model, name)
    if decoding.positions > available:
        raise InvalidConfigError(
            f"{options[0]} {decoding.max_source} and {options[1]} {decoding.max_new_tokens} need "
            f"{decoding.positions} positions together, and {name} has {available}. {remedy}"
        )


def positions_of(model: PreTrainedModel, name: str) -> int:
    """Return the number of positions of a masked language model that can generate texts.

    Args:
        model: the model; it may be on the device `meta`.
        name: name of the model, for the message.

    Raises:
        TeacherError: its family keeps no keys and values of earlier tokens, or has no table of positions.
    """
    parameters = inspect.signature(type(model.base_model).forward).parameters
    table = _positions(model)
    if "past_key_values" not in parameters or not isinstance(table, nn.Embedding):
        raise TeacherError(
            f"{name}: transformers keeps no keys and values of earlier tokens for the family "
            f"{model.config.model_type}, which generating a text needs. {_ADVICE}"
        )
    return table.num_embeddings - _first_position(model)


def lengthened(model: PreTrainedModel, positions: int) -> PreTrainedModel:
    """Return a model with at least so many positions.

    New positions are copies of the first ones, in their order, which train faster than random ones (UniLM's
    fine-tuning for long sources; Bao et al. 2020, arXiv 2002.12804, read 608 + 160 tokens so).

    Args:
        model: a masked language model that `positions_of` has passed.
        positions: positions that are needed. A model that has them is returned as it is.
    """
    table, first = _positions(model).weight.detach(), _first_position(model)
    own = len(table) - first
    if positions <= own:
        return model
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = first + positions
    longer = draw_weights(config, "tokens", attention="sdpa")
    rows = torch.arange(positions) % own + first
    state = model.state_dict()
    for name, weights in longer.state_dict().items():
        if weights.shape != state[name].shape:
            state[name] = torch.cat([table[:first], table[rows]])
    longer.load_state_dict(state)
    longer.train(model.training)
    return longer


class MaskedTargets(nn.Module):
    """A masked language model that learns to predict the masked copies of targets."""

    def __init__(self, model: PreTrainedModel, label_smoothing: float) -> None:
        """Take the model, and the share of the labels' probability that is spread over all tokens."""
        super().__init__()
        self.model = model
        self._label_smoothing = label_smoothing

    def forward(
        self,
        ids: Int[Tensor, "batch length"],
        lengths: Int[Tensor, " batch"],
        *,
        parts: Int[Tensor, "batch length"],
        positions: Int[Tensor, "batch length"],
        labels: Int[Tensor, "batch length"],
    ) -> MaskedLMOutput:
        """Return the mean cross-entropy, nats, of the tokens with a label, as `loss`."""
        places = (labels.flatten() != NOT_PREDICTED).nonzero()[:, 0]
        logits = logits_of(self.model, Inputs(ids, lengths, parts=parts, positions=positions), places)
        loss = F.cross_entropy(
            logits.float(), labels.flatten()[places], label_smoothing=self._label_smoothing
        )
        return MaskedLMOutput(loss=loss)


class SequenceToSequence(PreTrainedModel, GenerationMixin):
    """A masked language model as one that transformers' `generate` decodes."""

    _supports_sdpa = True

    def __init__(self, model: PreTrainedModel, mask_token: int) -> None:
        """Take the model, and the id of the token at which the next one is predicted."""
        super().__init__(copy.deepcopy(model.config))
        self.model = model
        self._mask_token = mask_token

    def prepare_inputs_for_generation(  # type: ignore[override] # called by keyword
        self,
        input_ids: Int[Tensor, "batch length"],
        past_key_values: Cache | None = None,
        attention_mask: Int[Tensor, "batch length"] | None = None,
        **_: object,
    ) -> dict[str, Any]:
        """Return what the next pass reads: the tokens whose keys and values are not kept yet."""
        assert past_key_values is not None, "generating a text keeps keys and values"
        return {
            "input_ids": input_ids[:, past_key_values.get_seq_length() :],
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
        }

    def forward(
        self,
        input_ids: Int[Tensor, "batch new"],
        attention_mask: Int[Tensor, "batch length"] | None,
        past_key_values: Cache,
        **_: object,
    ) -> CausalLMOutputWithPast:
        """Return the logits of the next token, `(batch, 1, vocabulary)`.

        Args:
            input_ids: the whole source in the first pass, and one token in each later one.
            attention_mask: 1 at all tokens so far, 0 at padding, which is on the left. None means no padding.
            past_key_values: keys and values of earlier passes, to which those of the new tokens are added.
        """
        batch, new = input_ids.shape
        kept = past_key_values.get_seq_length()
        mask = torch.full_like(input_ids[:, :1], self._mask_token)
        so_far = input_ids.new_ones(batch, kept + new) if attention_mask is None else attention_mask
        valid = F.pad(so_far, (0, 1), value=1).bool()
        seen = valid[:, None, None, :].repeat(1, 1, new + 1, 1)
        seen[:, :, :-1, -1] = False  # no other token sees the one that is predicted
        is_target = torch.full((batch, new + 1), kept > 0, device=input_ids.device)
        is_target[:, -1] = True
        positions = (valid.cumsum(-1) - 1).clamp(min=0)[:, kept:]
        last = torch.arange(1, batch + 1, device=input_ids.device) * (new + 1) - 1
        with gathered(self.model, last):
            output = self.model(
                input_ids=torch.cat([input_ids, mask], 1),
                attention_mask=seen,
                position_ids=positions + _first_position(self.model),
                past_key_values=past_key_values,
                **_segments(self.model, is_target),
            )
        past_key_values.crop(-1)  # transformers removes this many where a number is negative
        logits = output.logits.transpose(0, 1)
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)


class _NoRepeats(LogitsProcessor):
    """Lets no n-gram of the generated text come twice; those of the source may."""

    def __init__(self, size: int, prompt: int) -> None:
        self._inner = NoRepeatNGramLogitsProcessor(size)
        self._prompt = prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen: Tensor = self._inner(input_ids[:, self._prompt :], scores)
        return chosen


def generation_config(
    decoding: Decoding, tokenizer: PreTrainedTokenizerFast, **others: object
) -> GenerationConfig:
    """Return settings for transformers' `generate`, by which the only special token is the end of a text.

    N-grams are not among them: transformers would count those of the source, too.

    Args:
        decoding: the settings.
        tokenizer: tokenizer of the model.
        **others: settings to write beside them.
    """
    end = tokenizer.sep_token_id
    return GenerationConfig(
        do_sample=False,
        use_cache=True,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=[token for token in tokenizer.all_special_ids if token != end],
        max_new_tokens=decoding.max_new_tokens,
        min_new_tokens=decoding.min_new_tokens,
        num_beams=decoding.num_beams,
        length_penalty=decoding.length_penalty,
        **others,
    )


class TextGenerator:
    """A model and its tokenizer, which generate texts from texts.

    from minilm_cache import TextGenerator
    TextGenerator.load("tuned").generate(["Paris is the capital of France."])
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        decoding: Decoding,
        *,
        pairs: bool = False,
    ) -> None:
        """Make a generator.

        Args:
            model: a masked language model.
            tokenizer: its tokenizer.
            decoding: how it generates by default.
            pairs: whether it was tuned on pairs of texts, such as passages and answers.
        """
        model.set_attn_implementation("sdpa")  # others may read a mask of true and false as one of numbers
        self.model = SequenceToSequence(model, mask_token(tokenizer))
        self.model.eval()  # type: ignore[no-untyped-call]
        self.tokenizer = tokenizer
        self.decoding, self.pairs = decoding, pairs

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> "TextGenerator":
        """Return the generator in a folder that `evaluate --keep-models` or `save` wrote.

        Raises:
            TeacherError: the folder holds no such model.
            InvalidConfigError: its texts are longer than the model has positions, or this machine lacks the
                device.
        """
        folder, place = Path(folder), choose_device(device)
        decoding = read_decoding(folder)
        model, lacking = load_weights(folder, "tokens", attention="sdpa")
        if lacking:
            raise TeacherError(f"{folder} lacks weights of its head ({min(lacking)}). Get it again.")
        check_generates(model, decoding, str(folder))
        pairs, tokenizer = is_of_pairs(folder), load_tokenizer(folder)
        refuse_more_words(tokenizer, model, folder)
        return cls(model.to(place), tokenizer, decoding, pairs=pairs)  # type: ignore[arg-type]

    def save(self, folder: str | Path) -> None:
        """Write a folder that `load` reads, and that transformers opens as a masked language model.

        Raises:
            OSError: the file system refused.
        """
        self.model.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        save_decoding(self.decoding, self.tokenizer, Path(folder), pairs=self.pairs)

    def generate(
        self,
        texts: Iterable[str | tuple[str, ...]],
        *,
        decoding: Decoding | None = None,
        batch_size: int = 32,
        advance: Callable[[int], object] | None = None,
    ) -> list[str]:
        """Return the text that is generated from each text.

        Args:
            texts: sources; a pair is a passage and an answer, as question generation has it. What is longer
                than `max_source` tokens is cut, the longer text of a pair first.
            decoding: how to generate. None means as the model was tuned to.
            batch_size: texts of a pass.
            advance: called with the number of texts after each pass. None means that nothing is called.

        Raises:
            InvalidConfigError: the texts are longer than the model has positions, or are no list of texts or
                of pairs; or a pass has no text.
        """
        decoding = decoding or self.decoding
        known = _known_sources(texts)
        if self.pairs and any(isinstance(each, str) or len(each) == 1 for each in known):
            raise InvalidConfigError(
                "the model was tuned on passages with answers: give pairs of texts, not single ones"
            )
        if batch_size < 1:
            raise InvalidConfigError(f"batch_size {batch_size}: a pass has at least one text")
        check_generates(self.model.model, decoding, "the model")
        sources, _ = encode_sources(self.tokenizer, known, decoding.max_source)
        # The longest come first, so that too little memory shows at once.
        order = sorted(range(len(sources)), key=lambda number: -len(sources[number]))
        generated = [""] * len(sources)
        for first in range(0, len(order), batch_size):
            numbers = order[first : first + batch_size]
            batch = self.tokenizer.pad(
                {"input_ids": [sources[number] for number in numbers]},
                padding_side="left",
                return_attention_mask=True,
                return_tensors="pt",
            ).to(self.model.device)
            ids = self.generate_ids(batch["input_ids"], batch["attention_mask"], decoding=decoding)
            # Word pieces stand apart from signs until they are cleaned up.
            words = self.tokenizer.batch_decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=True
            )
            for number, text in zip(numbers, words, strict=True):
                generated[number] = text.strip()
            if advance is not None:
                advance(len(numbers))
        return generated

    @torch.inference_mode()
    def generate_ids(
        self, ids: Int[Tensor, "batch length"], mask: Int[Tensor, "batch length"], *, decoding: Decoding
    ) -> Int[Tensor, "batch new"]:
        """Return the ids that are generated from ids of sources, filled up with padding.

        Args:
            ids: sources with their special tokens; padding is on the left.
            mask: 1 at tokens, 0 at padding.
            decoding: how to generate.
        """
        prompt = ids.shape[1]
        size = decoding.no_repeat_ngram_size
        model: Any = self.model  # transformers types the method for models with a class of its own
        generated = model.generate(
            ids,
            attention_mask=mask,
            generation_config=generation_config(decoding, self.tokenizer),
            logits_processor=LogitsProcessorList([_NoRepeats(size, prompt)] if size else []),
        )
        assert isinstance(generated, Tensor)
        return generated[:, prompt:]


def _known_sources(texts: Any) -> list[str | tuple[str, ...]]:  # noqa: ANN401 - it is checked here
    """Return texts and pairs of texts as a list.

    Raises:
        InvalidConfigError: it is something else.
    """
    known: list[Any] = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else [None]
    for each in known:
        parts: Any = (each,) if isinstance(each, str) else each
        is_known = isinstance(parts, tuple | list) and 0 < len(parts) <= _PAIR
        if not is_known or not all(isinstance(part, str) for part in parts):
            raise InvalidConfigError("give a list of texts, or of pairs of texts")
    return known


def encode_sources(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str | tuple[str, ...]], max_source: int
) -> tuple[list[list[int]], list[bool]]:
    """Return the token ids of sources, with special tokens, and which were cut to `max_source` tokens."""
    pairs = [(text,) if isinstance(text, str) else text for text in texts]
    encoded: dict[int, list[int]] = {}
    are_cut: dict[int, bool] = {}
    for size in {len(pair) for pair in pairs}:
        numbers = [number for number, pair in enumerate(pairs) if len(pair) == size]
        columns = [[pairs[number][at] for number in numbers] for at in range(size)]
        read = tokenizer(*columns, truncation=True, max_length=max_source)
        encoded |= dict(zip(numbers, read["input_ids"], strict=True))
        are_cut |= {
            number: bool(each.overflowing) for number, each in zip(numbers, read.encodings, strict=True)
        }
    order = range(len(pairs))
    return [encoded[number] for number in order], [are_cut[number] for number in order]


def copy_decoding(source: Path, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write how the model of another folder generates texts, where it does, by the ids of a tokenizer.

    Raises:
        TeacherError: the file of the source is damaged.
        OSError: the file system refused.
    """
    if (source / GENERATION_FILE).is_file() and read_json(source / GENERATION_FILE).get("max_source"):
        save_decoding(read_decoding(source), tokenizer, folder, pairs=is_of_pairs(source))


def save_decoding(
    decoding: Decoding, tokenizer: PreTrainedTokenizerFast, folder: Path, *, pairs: bool
) -> None:
    """Write how a model generates texts, and whether from pairs, for `read_decoding` and for transformers.

    Raises:
        OSError: the file system refused.
    """
    config = generation_config(
        decoding,
        tokenizer,
        max_source=decoding.max_source,
        pairs=pairs,
        no_repeat_ngram_size=decoding.no_repeat_ngram_size,
    )
    config.save_pretrained(folder, config_file_name=GENERATION_FILE)
