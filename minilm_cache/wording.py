"""Figures and names as people read them, in terminals, on pages and on cards."""

import html
import re
from collections.abc import Mapping


def number_text(value: int | float | None, digits: int = 4) -> str:
    """Return a figure for a table; None becomes a dash."""
    if value is None:
        return "-"
    return f"{value:,.{digits}f}"


def html_table(title: str, pairs: Mapping[str, object]) -> str:
    """Return names and values as a table for notebooks; names from elsewhere are escaped."""
    rows = "".join(
        f"<tr><th style='text-align: left'>{html.escape(name)}</th>"
        f"<td style='text-align: left'>{html.escape(printable(str(value)))}</td></tr>"
        for name, value in pairs.items()
    )
    return f"<table><caption>{html.escape(title)}</caption>{rows}</table>"


def printable(text: str) -> str:
    """Return a name with question marks for what no terminal should be sent."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def markdown(text: str) -> str:
    """Return a name from elsewhere as Markdown that shows it as it is, without tags or links."""
    return re.sub(r"([\\`*_{}\[\]()#!|~])", r"\\\1", html.escape(printable(text), quote=False))
