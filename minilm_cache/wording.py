"""Format numbers and names for people: in terminals, on pages and on cards."""

import difflib
import html
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from jinja2 import Template

_LONGEST: Final = 200
"""Most characters of a value in a message."""
_MOST_NAMES: Final = 5
"""Most names of a list in a message, where more than one are left out."""
_HASH: Final = re.compile("([0-9a-f]{13})[0-9a-f]{11,}")
"""A hash, and its beginning."""


def number_text(value: int | float | None, digits: int = 4) -> str:
    """Return a number with `digits` decimals for a table; None becomes a dash."""
    if value is None:
        return "-"
    return f"{value:,.{digits}f}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    plural = f"{noun.removesuffix('y')}ies" if noun.endswith("y") and noun[-2] not in "aeou" else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def cut_in_words(num_cut: int, num_all: int, noun: str, *, most: str) -> str:
    """Return how many of all texts, pairs, ... are cut at a length (`most`, in words), and what to do."""
    are = "is" if num_cut == 1 else "are"
    cut = f"{num_cut:,} of {counted(num_all, noun)} {are} cut at {most}"
    return f"{cut}. Give a greater --max-length if the model has positions for it"


def some_of(names: Sequence[str]) -> str:
    """Return names with commas between them: the first ones, and how many more there are."""
    left = len(names) - _MOST_NAMES
    if left <= 1:
        return ", ".join(names)
    return f"{', '.join(names[:_MOST_NAMES])} and {left:,} more"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names what was probably meant by an unknown name; empty if nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def html_table(title: str, pairs: Mapping[str, object]) -> str:
    """Return names and values as an HTML table for notebooks; all text is escaped."""
    rows = "".join(
        f"<tr><th style='text-align: left'>{html.escape(name)}</th>"
        f"<td style='text-align: left'>{html.escape(printable(str(value)))}</td></tr>"
        for name, value in pairs.items()
    )
    return f"<table><caption>{html.escape(title)}</caption>{rows}</table>"


def printable(text: str) -> str:
    """Return a text with a question mark in place of each character that is not printable."""
    return "".join(character if character.isprintable() else "?" for character in text)


def markdown(text: str) -> str:
    """Return Markdown that shows an untrusted text literally, without tags or links."""
    return re.sub(r"([\\`*_{}\[\]()#!|~])", r"\\\1", html.escape(printable(text), quote=False))


def rendered(package: str, template: str, **values: object) -> str:
    """Return a text made from one of this package's own templates.

    `markdown` shows an untrusted text literally; `number` formats a number, or gives a word for None.

    Args:
        package: package that the template is a file of.
        template: name of the file, whose syntax is Jinja's.
        values: what the template names; naming another is an error.
    """
    return _template(package, template).render(values)


@cache
def _template(package: str, template: str) -> "Template":
    """Return a compiled template: a study writes hundreds of cards from three of them."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 - only cards need it

    environment = Environment(
        loader=PackageLoader(package, ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - the text is Markdown, and `markdown` escapes what is not ours
    )
    environment.filters["markdown"] = markdown
    environment.filters["number"] = _number_or
    return environment.get_template(template)


def _number_or(value: float | None, form: str, otherwise: str = "") -> str:
    return otherwise if value is None else form.format(value)


class Described(ABC):
    """Base of objects that print what they are: a line in a terminal, a table in a notebook."""

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Return what it is, by names for people; the first value identifies it."""

    def __repr__(self) -> str:
        (_, first), *others = self.describe().items()
        return f"<{type(self).__name__} {first}: {', '.join(f'{name} {value}' for name, value in others)}>"

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self.describe())


Place = str | os.PathLike[str]
"""Where something is: a path or a URL, or the result of what made it."""


class Made(Described):
    """Base of results of what was made, each of which stands for its folder wherever a path is wanted."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)


def differing_values(
    existing: Mapping[str, object], expected: Mapping[str, object], prefix: str = ""
) -> Iterator[str]:
    """Yield each difference of two documents as `name (existing value there, expected value asked)`."""
    for name in sorted(existing.keys() | expected.keys()):
        left, right = existing.get(name), expected.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from differing_values(left, right, f"{prefix}{name}.")
        elif left != right:
            yield f"{prefix}{name} ({_shown(left)} there, {_shown(right)} asked)"


def _shown(value: object) -> str:
    """Return a value for a message: a group of values as `some`, hashes by their beginnings."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "some"
    text = (", ".join(map(str, value)) or "none") if isinstance(value, list | tuple) else str(value)
    text = _HASH.sub(r"\1...", text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
