"""Figures and names as people read them, in terminals, on pages and on cards."""

import html
import re


def number_text(value: int | float | None, digits: int = 4) -> str:
    """Return a figure for a table; None becomes a dash."""
    if value is None:
        return "-"
    return f"{value:,.{digits}f}"


def printable(text: str) -> str:
    """Return a name with question marks for what no terminal should be sent."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def markdown(text: str) -> str:
    """Return a name from elsewhere as Markdown that shows it as it is, without tags or links."""
    return re.sub(r"([\\`*_{}\[\]()#!|~])", r"\\\1", html.escape(printable(text), quote=False))
