"""Fit a head for masked tokens to a corpus, for teachers that have none; the encoder is not changed.

Sentence encoders, and many encoders on the hub, come without the head that they were pre-trained with; soft
labels need such a head. It predicts as well as what the frozen encoder has kept of masked language modelling
allows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from minilm_cache.corpus.formats import lines_hint
from minilm_cache.corpus.sequences import SHARE, Masker, SequenceTable
from minilm_cache.corpus.template import packing_of
from minilm_cache.corpus.tokenise import tokens_of
from minilm_cache.dump.audit import audit_sequences
from minilm_cache.dump.config import HeadConfig
from minilm_cache.errors import CorpusError, DivergedError, TeacherError
from minilm_cache.models.device import choose_device
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.load import load_weights
from minilm_cache.models.locate import locate_teacher
from minilm_cache.models.pooling import copy_pooling
from minilm_cache.models.tap import Tap, TappedModel
from minilm_cache.models.teacher import check_length
from minilm_cache.models.tokenizer import load_tokenizer, mask_token, refuse_ids_beyond
from minilm_cache.models.truncate import saving
from minilm_cache.relations.signals import MaskedSequences
from minilm_cache.session import ALONE, Session
from minilm_cache.storage_schema.states import Masking
from minilm_cache.store.durable import new_folder, prepare_new

_MAX_CHECKED = 256
"""Most held-out sequences that the fitted head is measured on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedHead:
    """Result of the fit of a head."""

    path: Path
    steps: int
    accuracy: float
    """Share of masked tokens of held-out sequences that the model predicts correctly, from 0 to 1."""
    cross_entropy: float
    """Mean cross-entropy of these tokens, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """A padded batch of sequences."""

    inputs: Inputs
    """Sequences without masked tokens."""
    masked: MaskedSequences
    """The same sequences with tokens masked."""


def fit_head(config: HeadConfig, out: Path, *, session: Session = ALONE) -> FittedHead:
    """Fit a head for masked tokens to a frozen encoder, and write both as one model folder.

    Args:
        config: what to fit, and to which text.
        out: folder to write, which must not exist.
        session: its progress shows sequences done. Its `should_stop` is called before each step; True stops,
            and nothing is written.

    Raises:
        TeacherError: the teacher has such a head already, or is not an encoder.
        CorpusError: there is too little text.
        InterruptedRunError: a stop was requested.
        DivergedError: the loss is NaN or infinite.
        StorageError: the folder exists, or cannot be written.
    """
    prepare_new(out)
    source = locate_teacher(config.teacher, config.revision)
    device = choose_device(config.device)
    tokenizer = load_tokenizer(source.folder)
    torch.manual_seed(config.seed)
    model, lacking = load_weights(source.folder, "tokens")
    if not lacking:
        raise TeacherError(f"{source.folder} has a head for masked tokens already: dump with it as it is.")
    refuse_ids_beyond(tokenizer, model.config.vocab_size, source.folder)
    tapped = TappedModel(model).to(device)
    check_length(tapped, source.name, token=tokenizer.cls_token_id, max_length=config.max_length)
    sequences = _load_sequences(config, tokenizer, session=session)
    masker = Masker.of(Masking(share=SHARE, mask_token=mask_token(tokenizer), seed=config.seed), tokenizer)
    reader = _MaskedReader(sequences, masker, tokenizer.pad_token_id, device)
    steps = config.epochs * (sequences.num_train // config.batch_size)
    session.progress.start("fit head", steps * config.batch_size, "sequences")
    _train(tapped, reader.epochs(sequences.num_train, config), lr=config.lr, steps=steps, session=session)
    checked = audit_sequences(sequences.num_train, sequences.num_sequences, _MAX_CHECKED)
    cross_entropy, accuracy = _measure(tapped, reader, numbers=checked, config=config)
    with saving("write", out), new_folder(out, replaces=False) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        try:
            copy_pooling(source.folder, folder, model.config)
        except TeacherError as error:  # it is not needed for masked tokens
            session.progress.note(f"left out of {out}, how {source.name} pools: {error}")
        (folder / "README.md").write_text(
            f"# {source.name} with a head for masked tokens\n\nThe encoder is {source.name}, unchanged. The "
            f"head was fitted by minilm-cache to {config.corpus} ({steps} steps of {config.batch_size} "
            f"sequences); it tells {accuracy:.1%} of masked held-out tokens.\n",
            encoding="utf-8",
        )
    return FittedHead(path=out, steps=steps, accuracy=accuracy, cross_entropy=cross_entropy)


def _load_sequences(
    config: HeadConfig, tokenizer: PreTrainedTokenizerFast, *, session: Session
) -> SequenceTable:
    """Return the corpus as packed sequences.

    Raises:
        CorpusError: there is too little text.
    """
    packing = packing_of(
        tokenizer, mode="packed", max_length=config.max_length, max_tokens=config.max_tokens, seed=config.seed
    )
    tokens = tokens_of(config, tokenizer, session=session)
    sequences = SequenceTable(tokens, packing)
    num_train = sequences.num_train
    if num_train < config.batch_size:
        raise CorpusError(
            f"corpus {config.corpus} has {num_train} training sequences, fewer than --batch-size "
            f"{config.batch_size}. Give more text.{lines_hint(config.corpus, config.documents)}"
        )
    return sequences


def _train(model: TappedModel, batches: Iterator[_Batch], *, lr: float, steps: int, session: Session) -> None:
    """Train the weights that are not the encoder's; the learning rate falls linearly to 0."""
    encoder = model.model.base_model.requires_grad_(requires_grad=False)
    shared = {id(weight) for weight in encoder.parameters()}
    head_weights = [weight for weight in model.parameters() if id(weight) not in shared]
    optimizer = torch.optim.AdamW(head_weights, lr=lr)
    for step, batch in enumerate(batches):
        session.stop_if_asked("interrupted: nothing was written. Run the same command again.")
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        loss, _ = _loss(model, batch)
        if not bool(loss.isfinite()):
            remedy = "Lower --lr" if step else "The encoder gives such numbers: get its weights again"
            raise DivergedError(f"the loss is NaN or infinite at step {step}. {remedy}.")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        session.progress.advance(len(batch.inputs.ids))


@dataclass(frozen=True, slots=True)
class _MaskedReader:
    """Reads sequences with tokens masked."""

    sequences: SequenceTable
    masker: Masker
    pad_token: int
    device: torch.device

    def epochs(self, num_train: int, config: HeadConfig) -> Iterator[_Batch]:
        """Yield the full batches of every epoch; each epoch masks other tokens."""
        generator = torch.Generator().manual_seed(config.seed)
        for epoch in range(config.epochs):
            order = torch.randperm(num_train, generator=generator)
            for numbers in order.split(config.batch_size):
                if len(numbers) == config.batch_size:
                    yield self.batch(numbers.tolist(), epoch * num_train)

    def batch(self, numbers: list[int], shift: int = 0) -> _Batch:
        """Return a batch; number plus shift of a sequence determine which of its tokens are masked."""
        rows = [torch.from_numpy(self.sequences.read(number, number + 1).ids[0]) for number in numbers]
        inputs = Inputs.of(rows, self.pad_token)
        masked = self.masker.mask(inputs, [number + shift for number in numbers])
        return _Batch(inputs=inputs.to(self.device), masked=masked.to(self.device))


def _loss(model: TappedModel, batch: _Batch) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy of chosen tokens, nats, and their logits, `(chosen, vocabulary)`."""
    inputs = batch.inputs.with_ids(batch.masked.ids)
    logits = model(inputs, Tap(head="tokens"), batch.masked.places).logits
    targets = batch.inputs.ids.flatten()[batch.masked.places]
    return F.cross_entropy(logits, targets, reduction="sum") / max(len(targets), 1), logits


@torch.no_grad()
def _measure(
    model: TappedModel, reader: _MaskedReader, *, numbers: range, config: HeadConfig
) -> tuple[float, float]:
    """Return the mean cross-entropy, nats, and the accuracy on chosen tokens of some sequences."""
    model.eval()
    total, right, count = 0.0, 0, 0
    for first in range(numbers.start, numbers.stop, config.batch_size):
        batch = reader.batch(list(range(first, min(first + config.batch_size, numbers.stop))))
        loss, logits = _loss(model, batch)
        targets = batch.inputs.ids.flatten()[batch.masked.places]
        total += float(loss) * len(targets)
        right += int((logits.argmax(-1) == targets).sum())
        count += len(targets)
    return total / max(count, 1), right / max(count, 1)
