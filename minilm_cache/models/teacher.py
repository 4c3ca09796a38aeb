"""A teacher: its identity by content, and the outputs of its layers."""

import json
from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float, Int
from rich.filesize import decimal
from torch import Tensor, nn
from transformers import PreTrainedModel

from minilm_cache.errors import DeviceError, InvalidConfigError, TeacherError
from minilm_cache.models.arch import refuse_no_layer
from minilm_cache.models.classifier import load_pooled_head, refuse_padded_ends
from minilm_cache.models.complete import refuse_longer_texts
from minilm_cache.models.device import CPU, free_bytes
from minilm_cache.models.files import VOLATILE, library_errors, weight_stamps, weights_sha256
from minilm_cache.models.inputs import Inputs
from minilm_cache.models.load import check_positions, draw_weights, load_model, read_config, refuse_segments
from minilm_cache.models.locate import TeacherSource
from minilm_cache.models.pooling import SentencePooler, leaves_prompts_out, load_pooler, refuse_other_scores
from minilm_cache.models.prompts import Prompts, read_prompts, says
from minilm_cache.models.tap import ATTENTION, Head, Tap, TappedModel, last_states
from minilm_cache.models.tokenizer import load_tokenizer, refuse_ids_beyond, some_token, tokenizer_sha256
from minilm_cache.models.truncate import saving
from minilm_cache.relations.scores import LayerRelations, Vectors
from minilm_cache.relations.transfer import products_in, send
from minilm_cache.storage_schema.identity import (
    MAX_LAYERS,
    PairTemplate,
    Precision,
    TeacherIdentity,
    canonical_sha256,
)
from minilm_cache.storage_schema.manifest import (
    TEACHER_CONFIG,
    TEACHER_FOLDER,
    TEACHER_PROMPTS,
    TOKENIZER_FILES,
)
from minilm_cache.storage_schema.states import PoolingMode

_LOADED_BYTES: Final = 4
"""Bytes of a weight while it is loaded, and of a row's scale in 8 bits: float32."""
_MOST_OF_BYTE: Final = 127
_SAME: Final = 1e-2
"""Greatest relative difference of hidden states behind padding that count as the same, in any precision."""
_PADDING_CHANGES: Final = 1e-3
"""Relative difference of hidden states before padding above which padding changes them, in float32."""
_PADDING_CHANGES_ROUNDED: Final = 5e-2
"""The same in other precisions, in which two kernels of a GPU differ by about a percent."""


class Teacher:
    """A frozen encoder, its tokenizer, and what identifies them."""

    def __init__(
        self,
        source: TeacherSource,
        device: torch.device,
        *,
        layers: str | Sequence[int] = "last",
        head: Head | None = None,
        precision: Precision = "float32",
    ) -> None:
        """Load a teacher.

        Args:
            source: folder and name of the teacher.
            device: device that it runs on.
            layers: layers whose relations are wanted: `last`, `all`, or numbers counted from 0, ascending.
            head: head that it must have. None means that an encoder without a head is enough.
            precision: what it computes in. Relations and softmaxes are computed in float32 in any case.

        Raises:
            InvalidConfigError: the teacher has no such layer, or the device cannot compute in TF32.
            TeacherError: no safetensors weights, no tokenizer, no such head, or a family that cannot be
                tapped.
            DeviceError: it is too large for the device's memory.
        """
        self.name = source.name
        self.folder = source.folder
        self.tokenizer = load_tokenizer(source.folder, has_ends=False)
        self._classifier = load_pooled_head(source.folder) if head == "sequences" else None
        if self._classifier is not None:
            head = None
        self.memory = TeacherMemory.of(source, device, precision, head=head)
        """What its weights take of the device's memory."""
        model = self._load(head)
        vocab_size = getattr(model.config, "vocab_size", None)  # models of images, refused below, have none
        if vocab_size is not None:
            refuse_ids_beyond(self.tokenizer, vocab_size, source.folder)
        if precision == "tf32" and device.type != "cuda":
            raise InvalidConfigError(
                f"--precision tf32: only NVIDIA GPUs compute in TF32, and device {device} is none. "
                "Choose float32 or bfloat16."
            )
        self.device, self.precision, self._head = device, precision, head
        tapped = TappedModel(model).eval().requires_grad_(requires_grad=False)
        _round_weights(tapped, precision)  # before the device, which would hold all of them in float32 first
        self._tapped = tapped.to(device)
        if self._classifier is not None:
            self._classifier.to(device)
        if head == "sequences" and self._is_causal():
            # Decoders answer at the last token that is not this one; batches have the tokenizer's padding.
            refuse_padded_ends(self.tokenizer, source.folder)
            model.config.pad_token_id = self.tokenizer.pad_token_id
        self.layers: tuple[int, ...] = self._layer_numbers(layers, tapped.num_layers)
        """Layers whose relations are wanted of it, counted from 0, ascending."""

    def _load(self, head: Head | None) -> PreTrainedModel:
        """Load the model, and note the hash of exactly these weights.

        Raises:
            TeacherError: the folder changed meanwhile, or holds no such model.
        """
        before = weight_stamps(self.folder)
        model = load_model(self.folder, head, name=self.name)
        self._weights_sha256 = weights_sha256(self.folder)
        if weight_stamps(self.folder) != before:
            raise TeacherError(f"{self.folder} changed while it was read. Run the same command again.")
        return model

    @property
    def model(self) -> PreTrainedModel:
        """The model as transformers made it."""
        return self._tapped.model

    def _layer_numbers(self, layers: str | Sequence[int], num_layers: int) -> tuple[int, ...]:
        if layers == "all" and num_layers > MAX_LAYERS:
            raise InvalidConfigError(
                f"--layers all: teacher {self.name} has {num_layers}, and a cache holds {MAX_LAYERS} at most."
            )
        if isinstance(layers, str):
            return tuple(range(num_layers)) if layers == "all" else (num_layers - 1,)
        refuse_no_layer(layers, num_layers, self.name)
        return tuple(layers)

    @property
    def num_layers(self) -> int:
        """Number of all its layers."""
        return self._tapped.num_layers

    @property
    def num_classes(self) -> int:
        """Numbers of an answer of a teacher with a head of classes, or of one score."""
        return self.model.config.num_labels or 1

    @property
    def problem_type(self) -> str | None:
        """What kind of answers a classifier gives, as its config.json says. None means that it does not."""
        return getattr(self.model.config, "problem_type", None)

    @cached_property
    def identity(self) -> TeacherIdentity:
        """What identifies the teacher: hashes of its content, and its sizes."""
        config, described = self.model.config, canonical_sha256(self._config())
        if self._classifier is not None:  # students are cut from the encoder, whose weights are found by hash
            described = canonical_sha256([described, self._classifier.mode, self._classifier.dense_sha256()])
        return TeacherIdentity(
            model_type=config.model_type,
            weights_sha256=self._weights_sha256,
            config_sha256=described,
            num_layers=self._tapped.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            vocab_size=config.vocab_size,
        )

    def _config(self) -> dict[str, Any]:
        content = self.model.config.to_dict()
        return {key: value for key, value in content.items() if key not in VOLATILE}

    @cached_property
    def tokenizer_sha256(self) -> str:
        """SHA-256 (hex) of the whole tokenizer and of the special tokens that sequences are made with."""
        return tokenizer_sha256(self.tokenizer)

    def attachments(self) -> dict[str, bytes]:
        """Return the files that a student is built from: path in the cache to content. No weights."""
        files = {TEACHER_CONFIG: json.dumps(self._config(), indent=1, sort_keys=True).encode()}
        # A tokenizer is saved with the truncation and padding of its last call, or those that it came with.
        self.tokenizer.backend_tokenizer.no_truncation()
        self.tokenizer.backend_tokenizer.no_padding()
        with TemporaryDirectory() as folder:
            with saving("write", Path(folder)):
                self.tokenizer.save_pretrained(folder)
            for name in TOKENIZER_FILES:
                file = Path(folder, name)
                if file.is_file():
                    files[f"{TEACHER_FOLDER}/{name}"] = file.read_bytes()
        if (prompts := self.prompts_file) is not None:
            files[TEACHER_PROMPTS] = prompts
        return files

    @property
    def prompts_file(self) -> bytes | None:
        """Content of the file of its prompts and of its similarity. None means that it declares neither."""
        prompts = self.prompts
        # Students pool all tokens: prompts that the teacher leaves out would change their vectors.
        if leaves_prompts_out(self.folder):
            prompts = Prompts({}, similarity=prompts.similarity)
        return None if prompts == Prompts({}) else prompts.to_json()

    def has_other_prompts(self, stored: bytes | None) -> bool:
        """Return whether it declares other prompts, or another similarity, than one of its caches has.

        Args:
            stored: content of the cache's file of prompts. None means that it has none.
        """
        try:
            known = says(stored, TEACHER_PROMPTS)
        except TeacherError:  # it is damaged, and is to be written again
            return True
        return says(self.prompts_file, str(self.folder)) != known

    @property
    def prompts(self) -> Prompts:
        """The prompts that its folder declares."""
        return read_prompts(self.folder)

    def refuse_other_texts(self, max_length: int) -> None:
        """Refuse sequences that are not what the teacher's own `encode` reads of a text.

        Args:
            max_length: most tokens of a sequence, special tokens included.

        Raises:
            InvalidConfigError: it reads fewer tokens of a text.
            TeacherError: it is a cross-encoder that reads texts in another way, or see `refuse_left_padding`.
        """
        refuse_other_scores(self.folder)
        refuse_longer_texts(self.folder, self.tokenizer, self.model.config, max_length=max_length)
        self.refuse_left_padding()

    def refuse_left_padding(self) -> None:
        """Raise TeacherError if it pads batches on the left, and computes other hidden states then."""
        if self.tokenizer.padding_side == "left" and not self._change_by_padding(is_before=True) < _SAME:
            raise TeacherError(
                f"the tokenizer in {self.folder} pads on the left, which gives this model other hidden "
                "states, so its vectors and answers depend on the batch. Set padding_side to right in its "
                "tokenizer_config.json."
            )

    @cached_property
    def reads_padding(self) -> bool:
        """Whether padding behind a sequence changes what it computes, as convolutions over tokens let it."""
        least = _PADDING_CHANGES if self.precision == "float32" else _PADDING_CHANGES_ROUNDED
        return not self._change_by_padding(is_before=False) < least  # also where it is not a number

    def at_once(self, most: int) -> int:
        """Return how many sequences share a forward pass: `most`, or one where padding would change them."""
        return 1 if self.reads_padding else most

    @torch.no_grad()
    def _change_by_padding(self, *, is_before: bool) -> float:
        """Return the relative change of last hidden states by padding before or behind a sequence."""
        padding = torch.full((1, 3), int(self.tokenizer.pad_token_id), device=self.device)
        special = {*self.tokenizer.all_special_ids, self.tokenizer.pad_token_id}
        # Ordinary tokens: embeddings of padding, and all that follows from them, may be 0.
        ordinary = (number for number in range(len(self.tokenizer)) if number not in special)
        ids = torch.tensor([list(islice(ordinary, 5))], device=self.device)
        order = 1 if is_before else -1
        padded = torch.cat([padding, ids][::order], 1)
        mask = torch.cat([torch.zeros_like(padding), torch.ones_like(ids)][::order], 1)
        chosen = slice(-ids.shape[1], None) if is_before else slice(ids.shape[1])
        alone, beside = (
            last_states(self.model, words, seen)[0, chosen].float()
            for words, seen in ((ids, None), (padded, mask))
        )
        return float(torch.linalg.norm(beside - alone) / torch.linalg.norm(alone))

    def pooler(self, mode: PoolingMode | None) -> SentencePooler:
        """Return what pools its last hidden states, on its device.

        Args:
            mode: mode of a teacher whose folder does not say how it pools. None means that it must say so.

        Raises:
            InvalidConfigError: neither or both say how to pool, and differently.
            TeacherError: its `modules.json` is damaged, or names a module that cannot be computed here.
        """
        pooler = (
            load_pooler(self.folder, mode, self.identity.hidden_size)
            .eval()
            .requires_grad_(requires_grad=False)
        )
        if pooler.mode == "cls":
            self.refuse_first_token("--pooling cls")
        return pooler.to(self.device)

    def refuse_first_token(self, option: str) -> None:
        """Refuse the first token's state of a model whose tokens read only those before them.

        Args:
            option: option that asks for the state, for the message.

        Raises:
            TeacherError: the state is the same whatever the next token is.
        """
        if self._is_causal():
            raise TeacherError(
                f"{option}: in teacher {self.name} the first token reads nothing but itself, so its state "
                "says nothing of the text. Choose --pooled --pooling lasttoken, or mean."
            )

    @cached_property
    @torch.no_grad()
    def _some_vectors(self) -> list[Vectors]:
        """Vectors of a few tokens, which show how the layers whose relations are wanted attend."""
        ids = torch.full((1, 4), some_token(self.tokenizer), device=self.device)
        return self._tapped(Inputs.full(ids), Tap(self.layers)).vectors if self.layers else []

    @property
    def has_causal_relations(self) -> bool:
        """Whether rows of the wanted relations see columns up to their own alone.

        Raises:
            TeacherError: its attention does not say what its hidden states show.
        """
        found = {layer.is_causal for layer in self._some_vectors}
        if found and found != {self._is_causal()}:
            says = "causal" if True in found else "not causal"
            raise TeacherError(
                f"teacher {self.name}: its layers call their attention {says}, and its hidden states show "
                "otherwise, so its relations cannot be tapped exactly. Dump other signals: --codec none with "
                "--pooled."
            )
        return True in found

    def refuse_bias(self) -> None:
        """Refuse a teacher whose relations are not those of queries, keys and values of one size alone.

        Raises:
            TeacherError: it adds a bias to the scores of one of its layers, or its values have another size.
        """
        if (why := self.why_no_vectors) is not None:
            raise TeacherError(f"--codec vectors: {why}. Dump with --codec topk or dense.")

    @property
    def why_no_vectors(self) -> str | None:
        """Why codec `vectors` cannot hold its relations. None means that it can."""
        if any(layer.bias is not None for layer in self._some_vectors):
            return (
                f"teacher {self.name} adds a bias to the scores of its attention, which its queries and keys "
                "do not hold"
            )
        if any(layer.query.shape != layer.value.shape for layer in self._some_vectors):
            return f"values and queries of teacher {self.name} differ in size, and this codec stores one size"
        return None

    @torch.no_grad()
    def _is_causal(self) -> bool:
        """Return whether the first token's last hidden state is the same whatever the next token is."""
        token = some_token(self.tokenizer)
        other = (token + 1) % self.model.config.vocab_size
        ids = torch.tensor([[token, token], [token, other]], device=self.device)
        one, another = last_states(self.model, ids)[:, 0]
        return torch.equal(one, another)

    def refuse_large_weights(self) -> None:
        """Raise TeacherError for a weight that float16, in which a cache keeps weights, cannot hold."""
        _refuse_large_weights(self._tapped.model, self.name)

    def half_weights(self) -> bytes:
        """Return the teacher's weights in float16, as the content of a safetensors file.

        Raises:
            TeacherError: a weight is too large for float16.
        """
        expected = self._weights_sha256
        half = self._load(self._head).half()
        if self._weights_sha256 != expected:
            raise TeacherError(f"{self.folder} holds another model than it did. Run the same command again.")
        _refuse_large_weights(half, self.name)
        with TemporaryDirectory() as folder:
            half.save_pretrained(folder, max_shard_size="1TB")
            return Path(folder, "model.safetensors").read_bytes()

    def compile_forward(self) -> None:
        """Compile the forward pass with torch.compile on its first call."""
        self._tapped.compile_forward(self._head, taps_layers=bool(self.layers))

    def check_length(self, max_length: int) -> None:
        """Run the teacher on a sequence of the greatest length.

        Raises:
            InvalidConfigError: it has fewer positions.
            TeacherError: its family's relations cannot be tapped exactly.
        """
        token = some_token(self.tokenizer)
        check_length(self._tapped, self.name, token=token, max_length=max_length, layers=self.layers)

    def refuse_segments(self, pair: PairTemplate | None) -> None:
        """Raise TeacherError if its tokenizer gives pairs of texts segments that the model does not know.

        Args:
            pair: tokens and segments of pairs. None means that texts are single.
        """
        refuse_segments(self.model.config, pair, f"teacher {self.name}")

    def relations(self, inputs: Inputs, layers: Sequence[int] | None = None) -> list[LayerRelations]:
        """Return the relations of some layers, in their order. None means the layers of this teacher."""
        return self.read(inputs, Tap(self.layers if layers is None else tuple(layers))).relations

    @torch.no_grad()
    def read(
        self, inputs: Inputs, tap: Tap, places: Int[Tensor, " chosen"] | None = None
    ) -> "TeacherReading":
        """Return the teacher's outputs for a padded batch, on its device.

        Args:
            inputs: what it reads, on any device.
            tap: what is returned; the teacher must be loaded with the head that it names.
            places: places of the tokens, in the batch as one row, that logits are computed for, with head
                `tokens`. None means all.
        """
        inputs = inputs.to(self.device)
        if tap.head == "sequences" and self._classifier is not None:
            return self._read_pooled(inputs, tap, self._classifier)
        with products_in(self.precision):
            outputs = self._tapped(inputs, tap, None if places is None else send(places, self.device))
        relations = [LayerRelations(vectors, inputs.lengths) for vectors in outputs.vectors]
        states = {number: values.float() for number, values in outputs.hidden.items()}
        return TeacherReading(relations, states, None if outputs.logits is None else outputs.logits.float())

    def _read_pooled(self, inputs: Inputs, tap: Tap, classifier: SentencePooler) -> "TeacherReading":
        """Return the outputs of a teacher whose answers are made of the vector that it pools."""
        last = self._tapped.num_layers
        found = self.read(inputs, tap._replace(head=None, hidden=tuple(sorted({*tap.hidden, last}))))
        logits = classifier(found.hidden[last], inputs.lengths)
        hidden = {number: state for number, state in found.hidden.items() if number in tap.hidden}
        return found._replace(hidden=hidden, logits=logits.float())


class _BytesLinear(nn.Module):
    """A linear layer whose weights are held in 8 bits, each row with a scale of its own.

    Activations stay as they are, so that what a token becomes does not depend on its batch.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        """Round the weights of a layer."""
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / _MOST_OF_BYTE
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale[:, 0])
        self.bias = linear.bias

    def forward(self, values: Tensor) -> Tensor:
        """Return the layer's outputs, in the precision of the inputs."""
        products = nn.functional.linear(values, self.weight.to(values.dtype)) * self.scale
        return (products if self.bias is None else products + self.bias).to(values.dtype)


def _linear_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return the linear layers that are held in 8 bits: the module of each, its name there, and the layer.

    A head whose weights are those of the embeddings stays: it would be a copy.
    """
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    return [
        (parent, name, part)
        for parent in model.modules()
        for name, part in parent.named_children()
        if isinstance(part, nn.Linear) and id(part.weight) not in tables
    ]


def _round_weights(model: nn.Module, precision: Precision) -> None:
    """Round weights to bfloat16, or also those of linear layers to 8 bits."""
    if precision not in ("bfloat16", "int8"):
        return
    for parent, name, part in _linear_layers(model) if precision == "int8" else ():
        setattr(parent, name, _BytesLinear(part))
    for weight in model.parameters():  # buffers such as the frequencies of rotary positions need float32
        weight.data = weight.data.bfloat16()


class TeacherMemory(NamedTuple):
    """What the weights of a teacher take of memory."""

    num_weights: int
    num_saved: int
    """Bytes that int8 saves beside bfloat16: a byte for each weight of a linear layer, but for the scales."""
    precision: Precision
    device: torch.device
    free: int | None
    """Bytes of the device that are not in use before it is loaded. None means that it does not say."""

    @classmethod
    def of(
        cls, source: TeacherSource, device: torch.device, precision: Precision, *, head: Head | None
    ) -> "TeacherMemory":
        """Count a teacher's weights, none of which is read, and look at a device.

        Raises:
            TeacherError: the folder describes no model, or one that 8 bits would not make smaller.
            DeviceError: the weights take more memory than is free.
        """
        config = read_config(source.folder)
        with library_errors(f"{source.folder}/config.json describes no model"), torch.device("meta"):
            model = draw_weights(config, head, attention=ATTENTION)
        count = sum(weight.numel() for weight in model.parameters())
        rows = [(part.out_features, part.in_features) for _, _, part in _linear_layers(model)]
        saved = sum(num_rows * (num_columns - _LOADED_BYTES) for num_rows, num_columns in rows)
        if precision == "int8" and saved <= 0:
            raise TeacherError(
                f"--precision int8: teacher {source.name} has no linear layers that 8 bits would make "
                "smaller. Take bfloat16."
            )
        found = cls(count, saved, precision, device, free_bytes(device))
        if found.free is not None and found.num_bytes > found.free:
            remedy = "a smaller teacher, or a device with more memory"
            smaller = [found._replace(precision=each) for each in ("bfloat16", "int8")]
            fitting = next((each for each in smaller if each.num_bytes <= found.free), None)
            if fitting is not None:
                needed = decimal(fitting.num_bytes)
                remedy = f"`dump --precision {fitting.precision}`, which takes {needed}, or {remedy}"
            raise DeviceError(f"teacher {source.name} does not fit: {found.in_words}. Take {remedy}.")
        host = free_bytes(CPU)
        if host is not None and _LOADED_BYTES * count > host:
            needed = decimal(_LOADED_BYTES * count)
            raise DeviceError(
                f"teacher {source.name} does not fit: loading its weights in float32 takes {needed} of this "
                f"machine's memory, of which {decimal(host)} are free. Take a smaller teacher, or a machine "
                "with more memory."
            )
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights on the device; on a CPU they are there in float32 first."""
        if self.precision not in ("bfloat16", "int8") or self.device.type == "cpu":
            return self.num_weights * _LOADED_BYTES
        return 2 * self.num_weights - (self.num_saved if self.precision == "int8" else 0)

    @property
    def in_words(self) -> str:
        """What the weights take, for people."""
        free = "" if self.free is None else f"; {decimal(self.free)} are free"
        return (
            f"{self.num_weights:,} weights in {self.precision} need {decimal(self.num_bytes)} of memory on "
            f"{self.device}{free}"
        )


class TeacherReading(NamedTuple):
    """A teacher's outputs for a padded batch."""

    relations: list[LayerRelations]
    """Relations of each requested layer, in order."""
    hidden: dict[int, Float[Tensor, "batch length hidden"]]
    """Requested hidden states, by number; 0 is the output of the embeddings."""
    logits: Float[Tensor, "rows classes"] | None
    """Logits of the head. None means not requested."""


def _refuse_large_weights(model: nn.Module, name: str) -> None:
    """Raise TeacherError for a weight that float16 cannot hold; `name` is that of the teacher."""
    if not all(bool(weight.half().isfinite().all()) for weight in model.parameters()):
        raise TeacherError(
            f"--keep-weights: teacher {name} has weights above 65504, which float16 cannot hold. "
            "Leave it out."
        )


@torch.no_grad()
def check_length(
    model: TappedModel, name: str, *, token: int, max_length: int, layers: Sequence[int] = ()
) -> None:
    """Raise InvalidConfigError if a model has fewer positions than a sequence.

    Args:
        model: model to run.
        name: name of the model in the message.
        token: id of any token in its vocabulary.
        max_length: greatest length of a sequence, tokens.
        layers: layers whose relations are wanted.
    """
    last = Tap(tuple(layers), hidden=(model.num_layers,))

    def read(ids: Tensor) -> None:
        model(Inputs.full(ids), last)

    longest = torch.full((1, max_length), token, device=next(model.parameters()).device)
    check_positions(read, model.model.config, name=f"teacher {name}", ids=longest)
