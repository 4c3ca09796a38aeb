"""A YAML document whose mistakes are reported with their line and key."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml
from pydantic import ValidationError

from minilm_cache.corpus.formats import PYTHON_DOCS
from minilm_cache.errors import InvalidConfigError, first_line
from minilm_cache.models.locate import ALIASES, MINI
from minilm_cache.settings import OF_CACHE, OF_TEXTS, Settings, first_problem
from minilm_cache.store.durable import regular_bytes
from minilm_cache.store.urls import is_url, place_of
from minilm_cache.train.config import FROM_TEACHER, RANDOM

PATHS_OF_DUMPS: Final = ("teacher", "corpus")
"""Settings of a dump that may be paths."""
_NO_PATHS: Final = frozenset({MINI, *ALIASES, PYTHON_DOCS, RANDOM, *FROM_TEACHER, OF_TEXTS, OF_CACHE})
"""Values of settings that may be paths, and are none."""
_MAX_BYTES: Final = 2**20
_ODD_NUMBER: Final = re.compile(r"[-+]?(?:0[0-9_]+|[0-9_]+(?::[0-9]+)+)")
"""Whole numbers that YAML 1.1 reads to another base than ten."""
_MAX_DIGITS: Final = 72
"""Most characters of a whole number: 64 binary digits, and what separates them."""
Location = tuple[str | int, ...]
"""Keys and indices from the document's root to a value."""


class Source:
    """A YAML document, and the lines of its keys."""

    def __init__(self, path: Path) -> None:
        """Read a document.

        Raises:
            InvalidConfigError: the document cannot be read, is not YAML, or gives a key twice.
        """
        self.path = path
        try:
            content = regular_bytes(path, _MAX_BYTES + 1, follow_links=True)
            text = content.decode("utf-8") if len(content) <= _MAX_BYTES else ""
            _refuse_costly(path, text, len(content))
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            _refuse_odd_numbers(path, root)
            self.content = yaml.safe_load(text)
        except InvalidConfigError:
            raise
        except UnicodeDecodeError as error:
            raise InvalidConfigError(
                f"{path} is not UTF-8 text. Convert it: iconv -f utf-16 -t utf-8, or with its own encoding."
            ) from error
        except OSError as error:
            raise InvalidConfigError(f"cannot read {path}: {first_line(error)}. Check the path.") from error
        except (RecursionError, ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
            raise InvalidConfigError(
                f"{path}: a value in it cannot be read: {first_line(error)}. Fix it, or put it in quotes."
            ) from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = "" if mark is None else f", line {mark.line + 1}"
            problem = getattr(error, "problem", None) or first_line(error)
            raise InvalidConfigError(f"{path}{line}: this is not YAML: {problem}. Fix it.") from error
        if not isinstance(root, yaml.MappingNode):
            raise InvalidConfigError(
                f"{path}: this is no mapping of keys to values. docs/chains-and-studies.md shows one."
            )
        self._root: yaml.Node = root
        for node in (each for each in _nodes(root) if isinstance(each, yaml.MappingNode)):
            counts = Counter(str(key.value) for key, _ in node.value)
            repeated = next((key for key, _ in node.value if counts[str(key.value)] > 1), None)
            if repeated is not None:
                line = f"line {repeated.start_mark.line + 1}"
                raise InvalidConfigError(
                    f"{path}, {line}, {repeated.value}: this key is given twice. Keep one."
                )

    def resolve(self, path: str) -> Path:
        """Return a path that the document gives, relative to the folder of the document."""
        try:
            return self.path.parent / Path(path).expanduser()
        except RuntimeError as error:
            raise InvalidConfigError(
                f"{self.path}: {path}: {first_line(error)}. Give the whole path."
            ) from error

    def with_paths(self, settings: Mapping[str, Any], *keys: str) -> dict[str, Any]:
        """Return settings in which these keys, where their values are paths that exist, have whole paths.

        What is a name for a command is one here, whatever is beside the document.

        Raises:
            InvalidConfigError: a value is a path in the current folder, and none beside the document.
        """
        found = dict(settings)
        for key in keys:
            value = settings.get(key)
            if not isinstance(value, str) or value in _NO_PATHS:
                continue  # the check of the settings says what is wrong with other types
            path = self.resolve(value)
            if path.exists():
                found[key] = str(path)
            elif Path(value).exists():
                raise InvalidConfigError(
                    f"{self.path}, {key}: there is no {path}. Paths are relative to the document, and "
                    f"{value} is in the current folder: give the path from the document, or the whole one."
                )
        return found

    def with_caches(self, training: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings of a training in which paths of caches and labels are absolute; URLs stay."""
        labels = training.get("own_labels")
        if isinstance(labels, str):
            training = {**training, "own_labels": str(self.resolve(labels))}
        also = training.get("also")
        if not isinstance(also, list | tuple) or not all(isinstance(place, str) for place in also):
            return dict(training)  # the check of the settings says what is wrong
        places = [place if is_url(place) else place_of(str(self.resolve(place))) for place in also]
        return {**training, "also": places}

    def holds(self, location: Location) -> bool:
        """Return whether the document gives a value at a location."""
        node: yaml.Node | None = self._root
        for part in location:
            found = None if node is None else _child(node, part)
            node = None if found is None else found[1]
        return node is not None

    def fail(self, location: Location, problem: str) -> NoReturn:
        """Raise InvalidConfigError that names the file, the line and the key."""
        line, node = self._root.start_mark.line, self._root
        for part in location:
            child = _child(node, part)
            if child is None:
                break
            line, node = child
        key = ".".join(map(str, location)) or "the document"
        raise InvalidConfigError(f"{self.path}, line {line + 1}, {key}: {problem.rstrip('. ')}.")

    def check(
        self, model: type[Settings], values: Mapping[str, Any], locate: Mapping[str, Location]
    ) -> Settings:
        """Build settings from values of the document.

        Args:
            model: class of the settings.
            values: values by name.
            locate: location of the mapping that holds each name; the key "" is for mistakes without a name.

        Raises:
            InvalidConfigError: a value is invalid; the message has the line and key of the first mistake.
        """
        try:
            return model(**values)
        except ValidationError as error:
            problem, message = first_problem(error, model)
            loc = problem["loc"]
            if not loc:
                self.fail(locate[""], message)
            base = locate.get(str(loc[0]), locate[""])
            self.fail((*base, *loc), message[0].lower() + message[1:])


def _refuse_costly(path: Path, text: str, num_bytes: int) -> None:
    """Raise InvalidConfigError for a text that could fill memory.

    Aliases are refused because one may contain itself, and a few may expand to billions of values.
    """
    if num_bytes > _MAX_BYTES:
        raise InvalidConfigError(
            f"{path} is longer than {_MAX_BYTES >> 10} KiB. Give the file of a study or a chain."
        )
    alias = next((event for event in yaml.parse(text) if isinstance(event, yaml.AliasEvent)), None)
    if alias is not None:
        line = "" if alias.start_mark is None else f", line {alias.start_mark.line + 1}"
        raise InvalidConfigError(
            f"{path}{line}: a document cannot have aliases (*{alias.anchor}). Write the value again."
        )


def _refuse_odd_numbers(path: Path, root: yaml.Node | None) -> None:
    """Raise InvalidConfigError for a whole number that is read as another one, or has too many digits.

    YAML 1.1 reads 010 as 8 and 1:30 as 90. Python does not turn numbers of many digits back into text.
    """
    for node in _nodes(root):
        if not isinstance(node, yaml.ScalarNode) or node.tag != "tag:yaml.org,2002:int":
            continue
        if len(node.value) > _MAX_DIGITS:
            raise InvalidConfigError(
                f"{path}, line {node.start_mark.line + 1}: {node.value[:12]}... has {len(node.value)} "
                "digits. Give a smaller number."
            )
        if _ODD_NUMBER.fullmatch(node.value) and yaml.safe_load(node.value) != _decimal(node.value):
            raise InvalidConfigError(
                f"{path}, line {node.start_mark.line + 1}: YAML reads {node.value} as "
                f"{yaml.safe_load(node.value)}. Write a decimal number, or put it in quotes."
            )


def _decimal(number: str) -> int | None:
    """Return a whole number as people read it. None means that it has colons."""
    return None if ":" in number else int(number.replace("_", ""))


def _nodes(node: yaml.Node | None) -> Iterator[yaml.Node]:
    """Yield a node, and every key and value below it."""
    if node is None:
        return
    yield node
    parts = node.value if isinstance(node, yaml.MappingNode | yaml.SequenceNode) else ()
    for part in parts:
        for each in part if isinstance(part, tuple) else (part,):
            yield from _nodes(each)


def _child(node: yaml.Node, part: str | int) -> tuple[int, yaml.Node] | None:
    """Return the line, from 0, and the value of a key or an index. None means that it does not exist."""
    if isinstance(node, yaml.MappingNode):
        return next(
            ((key.start_mark.line, value) for key, value in node.value if key.value == str(part)), None
        )
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part].start_mark.line, node.value[part]
    return None
