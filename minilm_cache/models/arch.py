"""Student shapes: reading `--arch`, and checking that the sizes fit."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from minilm_cache.errors import InvalidConfigError
from minilm_cache.wording import counted

_OWN_SEED: Final = re.compile(r":s(\d+)")
_PATTERN: Final = re.compile(  # numbers as people write them: 03x384 would be a second name of 3x384
    r"(0|[1-9]\d{0,3})x(0|[1-9]\d{0,5})((?::(?:ff|h|e|b|s)(?:0|[1-9]\d{0,5}))*)", re.ASCII
)
_OPTION: Final = re.compile(r":(ff|h|e|b|s)(\d+)")
_MAX_LAYERS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentShape:
    """`LAYERSxHIDDEN[:ffN][:hN][:eN][:bN][:sN]`."""

    arch: str
    """The shape as the user wrote it; it names the student."""
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    embedding_size: int
    """Width of the embedding; below hidden_size, the embedding is factorised."""
    bottleneck_size: int | None
    """Width inside layers, at most hidden_size, the width between them. None means no bottlenecks."""
    seed: int | None
    """Seed of its initial weights and dropout. None means the seed of the run."""


def parse_arch(
    arch: str, relation_heads: int, *, split_into: int | None = None, compares_heads: bool = True
) -> StudentShape:
    """Read a student shape.

    Args:
        arch: `3x384`, `4x312:ff1200`, `12x384:e128`, ... Defaults: `ff` 4 x hidden, `h` the relation heads of
            the cache, `e` hidden, `b` no bottlenecks (with `b`, the defaults of `ff` and `e` are 4 x `b` and
            `b`), `s` the seed of the run.
        relation_heads: relation heads of the cache.
        split_into: relation heads that the objective splits vectors into. None means that it splits nothing.
        compares_heads: whether the objective compares heads with heads.

    Raises:
        InvalidConfigError: `arch` is not a shape, or its heads do not fit.
    """
    match = _matched(arch)
    layers, hidden = int(match[1]), int(match[2])
    pairs = _OPTION.findall(match[3])
    options = {name: int(number) for name, number in pairs}
    if len(options) < len(pairs):
        raise InvalidConfigError(f"--arch {arch} gives one of ff, h, e, b and s twice.")
    shape = StudentShape(
        arch=arch,
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=options.get("ff", 4 * options.get("b", hidden)),
        num_heads=options.get("h", relation_heads),
        embedding_size=options.get("e", options.get("b", hidden)),
        bottleneck_size=options.get("b"),
        seed=options.get("s"),
    )
    _check_shape(shape)
    if compares_heads:
        _check_heads(shape, relation_heads, split_into)
    return shape


def own_seed(arch: str) -> int | None:
    """Return the seed that a shape names. None means that it names none."""
    found = _OWN_SEED.search(arch)
    return None if found is None else int(found[1])


def num_layers_of(arch: str) -> int:
    """Return the number of layers of a shape.

    Raises:
        InvalidConfigError: `arch` is not a shape.
    """
    return int(_matched(arch)[1])


def refuse_same_shapes(archs: Sequence[str], seed: int) -> None:
    """Raise InvalidConfigError for a text that is no shape, and for two shapes that are the same student.

    Args:
        archs: shapes as the user wrote them.
        seed: seed of the run.
    """
    known: dict[object, str] = {}
    for arch in archs:
        num_layers_of(arch)
        try:  # heads that are not given are the cache's
            shape = parse_arch(arch, 1, compares_heads=False)
        except InvalidConfigError:
            continue  # the cache's heads decide whether it fits
        own = seed if shape.seed is None else shape.seed
        key = replace(shape, arch="", seed=own), ":h" in arch
        if key in known:
            same = "given twice" if known[key] == arch else f"the same student as {known[key]}"
            raise InvalidConfigError(f"--arch {arch} is {same}. Leave one out.")
        known[key] = arch


def _matched(arch: str) -> re.Match[str]:
    match = _PATTERN.fullmatch(arch)
    if match is None:
        raise InvalidConfigError(
            f"--arch {arch}: write LAYERSxHIDDEN[:ffN][:hN][:eN][:bN][:sN], such as 3x384 or 4x312:ff1200."
        )
    return match


def _check_shape(shape: StudentShape) -> None:
    arch, heads = shape.arch, shape.num_heads
    inside = shape.hidden_size if shape.bottleneck_size is None else shape.bottleneck_size
    if 0 in {shape.num_layers, shape.hidden_size, shape.ffn_size, heads, shape.embedding_size, inside}:
        raise InvalidConfigError(f"--arch {arch}: every size must be at least 1. Take larger ones.")
    if shape.num_layers > _MAX_LAYERS:
        raise InvalidConfigError(f"--arch {arch}: more than {_MAX_LAYERS} layers. Take fewer.")
    if shape.hidden_size % heads:
        below = shape.hidden_size - shape.hidden_size % heads
        fitting = [size for size in (below, below + heads) if size]
        raise InvalidConfigError(
            f"--arch {arch}: hidden size {shape.hidden_size} is not divisible by {heads} heads. "
            f"Take {' or '.join(f'{shape.num_layers}x{size}' for size in fitting)}."
        )
    if inside > shape.hidden_size or inside % heads:
        raise InvalidConfigError(
            f"--arch {arch}: a bottleneck of {inside} is above hidden size {shape.hidden_size}, or is not "
            f"divisible by {heads} heads. Take another :b."
        )
    if shape.embedding_size > shape.hidden_size:
        raise InvalidConfigError(
            f"--arch {arch}: embedding size {shape.embedding_size} is above hidden size "
            f"{shape.hidden_size}. Take a smaller :e, or leave it out."
        )


def _check_heads(shape: StudentShape, relation_heads: int, split_into: int | None) -> None:
    arch, heads = shape.arch, shape.num_heads
    if split_into is None and heads != relation_heads:
        raise InvalidConfigError(
            f"--arch {arch}: {heads} heads, but the cache holds relations of {relation_heads} heads, and the "
            f"objective compares head with head. Leave out :h{heads}, or use --objective minilmv2 with a "
            "cache of codec vectors."
        )
    width = shape.bottleneck_size or shape.hidden_size
    if split_into is not None and width % split_into:
        raise InvalidConfigError(
            f"--arch {arch}: width {width} is not divisible by {split_into} relation heads. "
            "Give other --relation-heads."
        )


def refuse_no_layer(numbers: Sequence[int], num_layers: int, teacher: str) -> None:
    """Raise InvalidConfigError if a teacher has no layer of one of the numbers, counted from 0."""
    if max(numbers, default=-1) >= num_layers:
        raise InvalidConfigError(
            f"--layers {max(numbers)}: teacher {teacher} has layers 0 to {num_layers - 1}. Choose among them."
        )


def refuse_no_state(numbers: Sequence[int], num_layers: int, *, option: str, teacher: str) -> None:
    """Raise InvalidConfigError if a teacher has no hidden state of one of an option's numbers."""
    if max(numbers, default=-1) > num_layers:
        raise InvalidConfigError(
            f"{option} {max(numbers)}: teacher {teacher} has hidden states 0 (the output of its "
            f"embeddings) to {num_layers}. Choose among them."
        )


def spaced_layers(num_layers: int, num_teacher_layers: int) -> tuple[int, ...]:
    """Return layers of the teacher at even distances, counted from 0, the last one included."""
    return tuple((number + 1) * num_teacher_layers // num_layers - 1 for number in range(num_layers))


def read_layers(text: str, num_layers: int, option: str, *, ascending: bool = True) -> tuple[int, ...]:
    """Return layers that are given like `0,2,5`.

    Raises:
        InvalidConfigError: they are not different numbers of layers, or not ascending.
    """
    parts = [part.strip() for part in text.split(",")]
    layers = tuple(int(part) if part.isdecimal() else num_layers for part in parts)
    in_order = list(layers) == sorted(layers) or not ascending
    if not in_order or len(set(layers)) < len(layers) or max(layers) >= num_layers:
        raise InvalidConfigError(
            f"{option} {text}: give different numbers from 0 to {num_layers - 1}, "
            f"{'ascending, ' if ascending else ''}with commas between them."
        )
    return layers


def layers_for(
    shape: StudentShape, depth: int, given: str | None, *, option: str = "--init-layers"
) -> tuple[int, ...]:
    """Return the teacher's layer for each layer of a student.

    Args:
        shape: shape of the student.
        depth: layers of the teacher.
        given: layers like `0,2,5`. None means layers at even distances, the last one included.
        option: command-line option that gave them.

    Raises:
        InvalidConfigError: the student has more layers than the teacher, or another number than given.
    """
    if shape.num_layers > depth:
        raise InvalidConfigError(
            f"--arch {shape.arch}: more layers than the teacher's {depth}, so it cannot be cut from it. Take "
            f"fewer layers{', or --init random' if option == '--init-layers' else ''}."
        )
    if given is None:
        return spaced_layers(shape.num_layers, depth)
    layers = read_layers(given, depth, option)
    if len(layers) != shape.num_layers:
        raise InvalidConfigError(
            f"{option} {given} names {counted(len(layers), 'layer')}, and --arch {shape.arch} has "
            f"{shape.num_layers}. Name one for each layer of the student."
        )
    return layers


def refuse_larger(shape: StudentShape, hidden_size: int, embedding_size: int) -> None:
    """Raise InvalidConfigError for a shape that is wider than the teacher it is cut from.

    Args:
        shape: shape of the student.
        hidden_size: hidden size of the teacher.
        embedding_size: width of the teacher's embedding.
    """
    sizes = [("hidden size", shape.hidden_size, hidden_size)]
    if shape.embedding_size != shape.hidden_size:
        sizes = [*sizes, ("embedding size", shape.embedding_size, embedding_size)]
    for what, wanted, most in sizes:
        if wanted > most:
            raise InvalidConfigError(
                f"--arch {shape.arch}: {what} {wanted} is above the teacher's {most}, so it cannot be cut "
                "from it. Take a narrower shape, or --init random."
            )
