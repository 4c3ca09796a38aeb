"""Initial weights of students: cut from a teacher, some of its layers, another model's, or random weights."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from transformers import PreTrainedConfig, PreTrainedModel

from minilm_cache.cache import Cache
from minilm_cache.corpus.template import pair_template_of
from minilm_cache.errors import InvalidConfigError, TeacherError
from minilm_cache.models.arch import StudentShape, layers_for
from minilm_cache.models.files import first_setting_that_differs, weights_sha256
from minilm_cache.models.load import keep_layers, load_weights, read_config, refuse_segments, take_settings
from minilm_cache.models.student import check_family_positions, reads_past_alone, shape_config, teacher_config
from minilm_cache.models.student_tokens import OtherTokenizer, StudentTokens, Vocabulary
from minilm_cache.models.tap import Head
from minilm_cache.models.tokenizer import has_tokenizer, load_tokenizer, some_token, tokenizer_sha256
from minilm_cache.slicing.cut import Recipe
from minilm_cache.slicing.forward import check_text
from minilm_cache.slicing.parts import check_cut, check_sizes
from minilm_cache.slicing.slices import SlicePlan, SliceSource, has_slice, load_slice
from minilm_cache.slicing.source import TeacherWeights, donor_config, teacher_weights
from minilm_cache.storage_schema.identity import canonical_sha256
from minilm_cache.storage_schema.manifest import TEACHER_CONFIG
from minilm_cache.store.urls import place_of
from minilm_cache.train.card import cached_tokenizer
from minilm_cache.train.config import (
    EMBEDDINGS,
    FROM_TEACHER,
    RANDOM,
    SLICE,
    TEACHER_LAYERS,
    TrainConfig,
    refuse_no_beginning,
)
from minilm_cache.train.folder import RunFolder, is_run
from minilm_cache.train.record import ANOTHER_MODEL, load_record
from minilm_cache.train.students import refuse_other_weights
from minilm_cache.train.vocabulary import student_vocabulary

_NO_DONOR: Final = "--first: the second training goes on with students like the teacher of this cache"
_NO_FIRST: Final = "Leave out --first or --init-teacher, or take a donor like the teacher."


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialWeights(ABC):
    """The initial weights of one student."""

    kind: str
    """Their source as `--init` names it, or `another model`."""
    name: str
    """What identifies them: `random`, or the kind and a hash of their source."""
    in_words: str
    """What the student begins with, for people."""
    is_trimmed: bool = False
    """Whether the source has the pieces of `--vocab` already, and no others."""

    @property
    def takes_time(self) -> bool:
        """Whether the weights have to be fitted first."""
        return False

    @property
    def donor(self) -> PreTrainedConfig | None:
        """Configuration of another model than the cache's teacher whose family students are of.

        None means that students are of the teacher's family.
        """
        return None

    def adapt(self, config: PreTrainedConfig) -> None:  # noqa: B027 - most need no other configuration
        """Change the student's configuration where these weights need it."""

    @abstractmethod
    def begin(self, model: PreTrainedModel, head: Head | None, shared: SliceSource) -> None:
        """Give a student its initial weights; a head or pooler that the source lacks stays as drawn.

        Raises:
            InvalidConfigError: the source does not fit the student.
            TeacherError: the folder holds no model.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWeights(InitialWeights):
    """Weights that are drawn from the seed."""

    def begin(self, model: PreTrainedModel, head: Head | None, shared: SliceSource) -> None:
        """Leave the weights as they were drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderWeights(InitialWeights):
    """Weights of another model of the same shape."""

    arch: str
    folder: Path

    def adapt(self, config: PreTrainedConfig) -> None:
        """Give layers the kinds of attention that the model's layers have."""
        source = read_config(self.folder)
        if source.num_hidden_layers == config.num_hidden_layers:
            take_settings(config, source, range(config.num_hidden_layers))

    def begin(self, model: PreTrainedModel, head: Head | None, shared: SliceSource) -> None:
        """Take the weights of the model."""
        source, lacking = load_weights(self.folder, head)
        begun = f"--init {self.folder}"
        _refuse_other_shape(model, source, lacking, begun=begun, arch=self.arch)
        setting = first_setting_that_differs(source.config, model.config)
        if setting is not None and source.config.model_type == model.config.model_type:
            raise InvalidConfigError(
                f"--init {self.folder}: {setting} is {getattr(source.config, setting, None)!r} there and "
                f"{getattr(model.config, setting, None)!r} in student {self.arch}. Take a model of the "
                "student's family and shape."
            )
        _copy(source, model, lacking)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights(InitialWeights):
    """Whole layers of the teacher, unchanged (DistilBERT, arXiv 1910.01108, section 3)."""

    arch: str
    weights: TeacherWeights
    layers: tuple[int, ...]
    """The teacher's layer for each layer of the student, counted from 0."""

    @property
    def donor(self) -> PreTrainedConfig | None:
        """Configuration of the donor, if it is one."""
        return self.weights.config if self.weights.is_donor else None

    def adapt(self, config: PreTrainedConfig) -> None:
        """Give layers the kinds of attention that the teacher's layers have."""
        take_settings(config, self.weights.config, self.layers)

    def begin(self, model: PreTrainedModel, head: Head | None, shared: SliceSource) -> None:
        """Take the layers."""
        source, lacking = self.weights.load(head)
        try:
            kept = keep_layers(source, self.layers)
        except TeacherError as error:
            raise InvalidConfigError(
                f"--init {TEACHER_LAYERS}: {error} Name layers by --init-layers, or use --init {SLICE}."
            ) from error
        _refuse_other_shape(model, kept, lacking, begun=f"--init {TEACHER_LAYERS}", arch=self.arch)
        _copy(kept, model, lacking)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedWeights(InitialWeights):
    """Weights that are cut from the teacher."""

    plan: SlicePlan
    home: Path

    @property
    def takes_time(self) -> bool:
        """Whether this machine does not have the slice yet."""
        return not has_slice(self.plan, self.home)

    @property
    def donor(self) -> PreTrainedConfig | None:
        """Configuration of the donor, if it is one."""
        return self.plan.weights.config if self.plan.weights.is_donor else None

    def adapt(self, config: PreTrainedConfig) -> None:
        """Give layers the kinds of attention that the teacher's layers have."""
        if self.plan.recipe.cuts_layers:
            take_settings(config, self.plan.weights.config, self.plan.layers)

    def begin(self, model: PreTrainedModel, head: Head | None, shared: SliceSource) -> None:
        """Take the slice, which is made first where this machine does not have it."""
        model.load_state_dict(load_slice(self.plan, self.home, model.config, source=shared), strict=False)


def _refuse_other_shape(
    model: PreTrainedModel, source: PreTrainedModel, lacking: frozenset[str], *, begun: str, arch: str
) -> None:
    """Raise InvalidConfigError if a model's weights do not fit a student; `begun` names it in the message."""
    problem = _first_difference(model, source, lacking)
    if problem is not None:
        raise InvalidConfigError(
            f"{begun}: {problem} is not of the same shape there as in student {arch}, or not in both. Take a "
            "model of the student's family and shape."
        )


def _copy(source: PreTrainedModel, model: PreTrainedModel, lacking: frozenset[str]) -> None:
    """Give a student the weights of a model, but for those that the model's folder lacks."""
    kept = {name: value for name, value in source.state_dict().items() if name not in lacking}
    model.load_state_dict(kept, strict=False)


def _first_difference(model: PreTrainedModel, source: PreTrainedModel, lacking: frozenset[str]) -> str | None:
    """Return the first weight, or the number of heads, that differs. None means that the models fit."""
    student_weights, source_weights = model.state_dict(), source.state_dict()
    for name in [*student_weights, *source_weights]:
        if name not in student_weights or name not in source_weights:
            return name
        if name not in lacking and student_weights[name].shape != source_weights[name].shape:
            return name
    if source.config.num_attention_heads != model.config.num_attention_heads:
        return "the number of heads"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginnings:
    """The initial weights of all students of a run."""

    of: Mapping[str, InitialWeights]
    """Initial weights of each student, by shape."""
    tokens: StudentTokens | None = None
    """How students of a donor, or with some pieces alone, read sequences. None means by the cache's ids."""
    of_record: str | None = None
    """Name in the record of a run whose checkpoint replaces the weights. None means a run that begins."""

    @property
    def name(self) -> str:
        """What identifies the initial weights of all students: `random`, or a kind and a hash."""
        if self.of_record is not None:
            return self.of_record
        names = list(dict.fromkeys(weights.name for weights in self.of.values()))
        if len(names) == 1:
            return names[0]
        kinds = {name.rsplit("-", 1)[0] for name in names if name != RANDOM}
        return f"{'-'.join(sorted(kinds))}-{canonical_sha256(names)}"

    def refuse_random(self) -> None:
        """Raise InvalidConfigError if a student of a new run begins with random weights to freeze."""
        for arch, weights in self.of.items():
            if self.of_record is None and weights.kind == RANDOM:
                raise InvalidConfigError(
                    f"--frozen embeddings: {arch} begins with {weights.in_words}. Leave it out, or choose "
                    "another --init."
                )

    @property
    def in_words(self) -> list[str]:
        """A line for each different beginning: the students, and what they begin with."""
        if self.of_record is not None:
            return ["students go on with what they began with"]
        groups: dict[str, list[str]] = {}
        for arch, weights in self.of.items():
            groups.setdefault(weights.in_words, []).append(arch)
        lines = [
            f"{', '.join(shapes)} {'begin' if len(shapes) > 1 else 'begins'} with {words}"
            for words, shapes in groups.items()
        ]
        fitted = [arch for arch, weights in self.of.items() if weights.takes_time]
        if fitted:
            each = " each" if len(fitted) > 1 else ""
            lines.append(f"fitting {', '.join(fitted)}: this takes up to a minute{each}, once")
        return lines


def initial_weights(
    config: TrainConfig, cache: Cache, *, shapes: Sequence[StudentShape], head: Head | None, home: Path
) -> Beginnings:
    """Return the initial weights of a run's students.

    Args:
        config: settings of the run.
        cache: cache that the students learn from.
        shapes: shapes of the students.
        head: head of the students. None means no head.
        home: folder of caches, runs and slices.

    Raises:
        InvalidConfigError: there is no such folder, a shape cannot be cut, or the pieces do not exist.
        IdentityMismatchError: `--init-teacher` is not the teacher that the cache was dumped from.
        TeacherError: there is no such teacher.
    """
    vocabulary = student_vocabulary(config, cache)
    if config.init == RANDOM:
        return Beginnings(of={shape.arch: random_weights() for shape in shapes}, tokens=vocabulary)
    if config.init is None or config.init in FROM_TEACHER:
        may_be_donor = config.init in (SLICE, TEACHER_LAYERS)
        weights = teacher_weights(cache, home, config.init_teacher, may_be_donor=may_be_donor)
        tokens = None if weights is None or not weights.is_donor else donor_tokens(config, cache, weights)
        if weights is not None and weights.is_donor:
            _refuse_causal_donor(config, cache, weights)
        cutter = _FromTeacher(
            config=config, cache=cache, weights=weights, head=head, home=home, tokens=tokens
        )
        begun = {shape.arch: cutter.begin(shape) for shape in shapes}
        return Beginnings(of=begun, tokens=tokens or vocabulary)
    refuse_no_beginning(config.init)
    folder = Path(config.init)
    folders = {shape.arch: model_folder(folder, shape.arch) for shape in shapes}
    trimmed = {arch: _is_trimmed(path, cache, vocabulary) for arch, path in folders.items()}
    name = name_of_folder(config.init, tuple(folders))
    return Beginnings(
        of={
            arch: FolderWeights(
                kind=ANOTHER_MODEL,
                name=name,
                in_words=f"the weights in {folder.name}",
                arch=arch,
                folder=path,
                is_trimmed=trimmed[arch],
            )
            for arch, path in folders.items()
        },
        tokens=vocabulary,
    )


def name_of_folder(init: str, arch: Sequence[str]) -> str:
    """Return what identifies the weights of a folder, or of a run, that students of these shapes begin with.

    Raises:
        MiniLMCacheError: see `model_folder`; or it has no weights.
    """
    return canonical_sha256([weights_sha256(model_folder(Path(init), each)) for each in arch])


def _is_trimmed(folder: Path, cache: Cache, vocabulary: Vocabulary | None) -> bool:
    """Return whether a model has the pieces that students are to have, and not all of a cache's tokenizer.

    A folder without a tokenizer cannot be asked, and has all.

    Raises:
        InvalidConfigError: its tokenizer gives words other ids than both.
    """
    if not has_tokenizer(folder):
        return False
    own = load_tokenizer(folder, has_ends=False)
    is_same = tokenizer_sha256(own) == cache.manifest.identity.tokenizer_sha256
    if not is_same and own.get_vocab() != cached_tokenizer(cache.reader).get_vocab():
        if vocabulary is not None and own.get_vocab() == vocabulary.tokenizer.get_vocab():
            return True
        raise InvalidConfigError(
            f"--init {folder}: its tokenizer is not the one of this cache, so its embeddings belong to other "
            "tokens. Take a model with the tokenizer of the cache's teacher. If its pieces are some of that "
            f"one's, add --vocab {folder}."
        )
    return False


def donor_tokens(config: TrainConfig, cache: Cache, donor: TeacherWeights) -> StudentTokens | None:
    """Return how students of a donor read a cache's sequences. None means that it has the same tokenizer.

    Raises:
        InvalidConfigError: the objective learns of single tokens, and the donor has others; or it reads
            shorter texts.
    """
    cached, own = cached_tokenizer(cache.reader), load_tokenizer(donor.folder, has_ends=False)
    longest = cache.manifest.identity.packing.max_length
    check_family_positions(
        donor.config, donor.folder, name=donor.in_words, token=some_token(own), max_length=longest
    )
    pair = cache.manifest.identity.packing.pair
    if (
        tokenizer_sha256(own) == cache.manifest.identity.tokenizer_sha256
        or own.get_vocab() == cached.get_vocab()
    ):
        refuse_segments(donor.config, pair, donor.in_words)
        return None
    needs = config.spec.needs
    if needs.of_tokens or not (needs.pooled or needs.logits):
        raise InvalidConfigError(
            f"--init-teacher {config.init_teacher}: its tokenizer is not the one of this cache, and "
            f"objective {config.objective} learns of single tokens. Take a donor with that tokenizer, or "
            "objective embedding, which learns of whole texts."
        )
    if config.vocab is not None:
        raise InvalidConfigError(
            f"--vocab is about the tokenizer of the cache, and {donor.in_words} has another. Trim the donor "
            "first: minilm-cache trim."
        )
    if pair is None:
        return OtherTokenizer(cached, own)
    own_pair = pair_template_of(own).model_copy(update={"cut": pair.cut})
    refuse_segments(donor.config, own_pair, donor.in_words)
    return OtherTokenizer(cached, own, pairs=(pair, own_pair))


def _refuse_causal_donor(config: TrainConfig, cache: Cache, donor: TeacherWeights) -> None:
    """Raise InvalidConfigError for a donor whose tokens read only those before, where more is learned."""
    identity, spec = cache.manifest.identity, config.spec
    is_of_cls = spec.needs.pooled and identity.pooled is not None and identity.pooled.mode == "cls"
    of_first = spec.needs.first is not None or is_of_cls
    of_rows = spec.compares_heads and not identity.is_causal
    if not (of_first or of_rows) or not reads_past_alone(donor.config, donor.folder):
        return
    what = "vectors of the first token" if of_first else "attention on all tokens"
    raise InvalidConfigError(
        f"--init-teacher {config.init_teacher}: tokens of {donor.in_words} read only those before them, and "
        f"students would learn {what}. Take an encoder as the donor."
    )


def check_beginning(
    config: TrainConfig, shape: StudentShape, *, teacher: PreTrainedConfig, source: PreTrainedConfig
) -> None:
    """Check a shape against `--init`, before anything is dumped; `source` is what the student is cut from.

    Raises:
        InvalidConfigError: students of this shape cannot begin so.
    """
    if config.first is not None and config.init_teacher is not None:
        _refuse_other_than_teacher(config.init_teacher, shape, teacher)
    if folder_of(config.init) is not None:
        _refuse_folder_of_other_sizes(str(config.init), shape, source)
    elif config.init == SLICE or (config.init is None and config.names_beginning):
        check_cut(shape, source, config.init_layers)
    elif config.init == EMBEDDINGS:
        check_sizes(shape, source)
    elif config.init == TEACHER_LAYERS:
        layers_for(shape, source.num_hidden_layers, config.init_layers)
        _refuse_other_heads(source)
        own = (shape.hidden_size, shape.num_heads)
        if own != (source.hidden_size, source.num_attention_heads):
            raise InvalidConfigError(
                f"--init {TEACHER_LAYERS}: the teacher's layers have width {source.hidden_size} and "
                f"{source.num_attention_heads} heads, --arch {shape.arch} has {own[0]} and {own[1]}. "
                f"Use --init {SLICE}."
            )


def _refuse_folder_of_other_sizes(init: str, shape: StudentShape, teacher: PreTrainedConfig) -> None:
    """Raise InvalidConfigError where the model of a folder has other sizes than a shape."""
    refuse_no_beginning(init)
    there = read_config(model_folder(Path(init), shape.arch))
    wanted = shape_config(shape, teacher.to_dict(), teacher.model_type)
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"):
        mine, theirs = getattr(wanted, name, None), getattr(there, name, None)
        if None not in (mine, theirs) and mine != theirs:
            raise InvalidConfigError(
                f"--init {init}: its {name} is {theirs}, and --arch {shape.arch} has {mine}. Give a model of "
                "that shape."
            )


def _refuse_other_than_teacher(donor: str, shape: StudentShape, teacher: PreTrainedConfig) -> None:
    """Raise InvalidConfigError where a donor's students compute otherwise than those of the teacher do."""
    own, theirs = (
        shape_config(shape, each.to_dict(), each.model_type) for each in (donor_config(donor), teacher)
    )
    setting = "model_type" if own.model_type != theirs.model_type else first_setting_that_differs(own, theirs)
    if setting is not None:
        raise InvalidConfigError(f"{_NO_DONOR}, and in {donor} {setting} is another one. {_NO_FIRST}")


def refuse_donor_of_first(
    config: TrainConfig, cache: Cache, shapes: Sequence[StudentShape], *, home: Path
) -> None:
    """Raise InvalidConfigError for a donor whose students cannot go on from the training of `--first`."""
    if config.init_teacher is None:
        return
    teacher = teacher_config(cache.reader.attachment(TEACHER_CONFIG), cache.manifest)
    for shape in shapes:
        _refuse_other_than_teacher(config.init_teacher, shape, teacher)
    weights = teacher_weights(cache, home, config.init_teacher, may_be_donor=True)
    if weights is not None and weights.is_donor and donor_tokens(config, cache, weights) is not None:
        raise InvalidConfigError(f"{_NO_DONOR}, and {config.init_teacher} has another tokenizer. {_NO_FIRST}")


def folder_of(init: str | None) -> str | None:
    """Return the folder that students begin with, made absolute. None means that `--init` names none."""
    return None if init is None or init in (RANDOM, *FROM_TEACHER) else place_of(init)


def random_weights(why: str | None = None) -> RandomWeights:
    """Return weights that are drawn; `why` says why they are not cut. None means that they were asked for."""
    return RandomWeights(
        kind=RANDOM, name=RANDOM, in_words="random weights" if why is None else f"random weights ({why})"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FromTeacher:
    """Decides what students begin with where it is to come from the teacher."""

    config: TrainConfig
    cache: Cache
    weights: TeacherWeights | None
    """Weights of the teacher. None means that they are not at hand."""
    head: Head | None
    home: Path
    tokens: StudentTokens | None = None
    """How a donor reads the sequences of the cache. None means that it has the tokenizer of the cache."""

    def begin(self, shape: StudentShape) -> InitialWeights:
        """Return what one student begins with; without `--init`, random weights where it cannot be cut."""
        if self.config.init is not None:
            return self._wanted(shape, self.config.init)
        try:
            return self._wanted(shape, SLICE)
        except InvalidConfigError as error:
            if self.config.names_beginning:
                raise
            return random_weights(str(error).split(". ")[0].removesuffix("."))

    def _wanted(self, shape: StudentShape, init: str) -> InitialWeights:
        label = self.cache.manifest.labels.teacher
        if self.weights is None:
            raise InvalidConfigError(
                f"the weights of teacher {label} are not on this machine. Give --init-teacher, or use --init "
                f"{RANDOM}"
            )
        teacher = teacher_config(self.cache.reader.attachment(TEACHER_CONFIG), self.cache.manifest)
        if self.weights.is_donor:
            teacher = self.weights.config
        if init == TEACHER_LAYERS:
            layers = layers_for(shape, teacher.num_hidden_layers, self.config.init_layers)
            _refuse_other_sizes(shape, teacher)
            source = [self.weights.sha256, *([self.weights.config_sha256] if self.weights.is_donor else [])]
            return LayerWeights(
                kind=ANOTHER_MODEL if self.weights.is_donor else init,
                name=f"{TEACHER_LAYERS}-{canonical_sha256([*source, layers])}",
                in_words=f"layers {', '.join(map(str, layers))}, unchanged, of {self.weights.in_words}",
                arch=shape.arch,
                weights=self.weights,
                layers=layers,
            )
        plan = SlicePlan(
            weights=self.weights,
            shape=shape,
            layers=self._layers(shape, teacher, init),
            recipe=Recipe(cuts_layers=init == SLICE),
            cache=self.cache,
            head=self.head,
            tokens=self.tokens,
        )
        manifest = self.cache.manifest
        check_text(manifest.num_tokens * manifest.num_train // manifest.num_sequences, shape.hidden_size)
        kind = ANOTHER_MODEL if self.weights.is_donor else init
        return SlicedWeights(
            kind=kind, name=f"{init}-{plan.key}", in_words=plan.in_words, plan=plan, home=self.home
        )

    def _layers(self, shape: StudentShape, teacher: PreTrainedConfig, init: str) -> tuple[int, ...]:
        """Return the teacher's layers of a slice; its last one where only the embeddings are cut."""
        if init == EMBEDDINGS:
            check_sizes(shape, teacher)
            return (teacher.num_hidden_layers - 1,)
        return check_cut(shape, teacher, self.config.init_layers)


def _refuse_other_heads(teacher: PreTrainedConfig) -> None:
    """Raise InvalidConfigError for layers whose heads students do not have."""
    heads, width = teacher.num_attention_heads, teacher.hidden_size
    size = getattr(teacher, "head_dim", None) or width // heads
    if (getattr(teacher, "num_key_value_heads", None) or heads) != heads or size * heads != width:
        raise InvalidConfigError(
            f"--init {TEACHER_LAYERS}: heads of these layers share keys and values, or are not {width} / "
            f"{heads} wide, and students have no such heads. Use another --init."
        )


def _refuse_other_sizes(shape: StudentShape, teacher: PreTrainedConfig) -> None:
    """Raise InvalidConfigError for a shape that layers of the teacher do not fit into unchanged."""
    _refuse_other_heads(teacher)
    size = getattr(teacher, "intermediate_size", None) or shape.ffn_size
    if (shape.hidden_size, shape.ffn_size) != (teacher.hidden_size, size):
        raise InvalidConfigError(
            f"--init {TEACHER_LAYERS}: {shape.arch} has a width of {shape.hidden_size} and a feed-forward "
            f"size of {shape.ffn_size}, and the teacher's layers have {teacher.hidden_size} and {size}. Take "
            f"--arch {shape.num_layers}x{teacher.hidden_size}:ff{size}, or --init {SLICE}."
        )


def model_folder(folder: Path, arch: str, option: str = "--init") -> Path:
    """Return the folder of a run's student of this shape, or the folder itself if it is not a run.

    Args:
        folder: folder of a run, or of a model.
        arch: name of the shape.
        option: command-line option that named the folder.

    Raises:
        InvalidConfigError: the run has no such student, or it diverged.
        IdentityMismatchError: the student has other weights than those that the run has written.
    """
    if not is_run(folder):
        return folder
    record = load_record(folder)
    if any(student.arch == arch and student.diverged_at is not None for student in record.students):
        raise InvalidConfigError(f"{option} {folder}: student {arch} diverged. Give another run.")
    refuse_other_weights(folder, record, arch)
    student_folder = RunFolder(path=folder).student(arch)
    if not student_folder.is_dir():
        raise InvalidConfigError(
            f"{option} {folder}: this run has no student {arch}. Give a run with students of the same shapes."
        )
    return student_folder
