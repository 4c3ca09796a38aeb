"""Figures as people read them, in terminals and on pages."""


def number_text(value: int | float | None, digits: int = 4) -> str:
    """Return a figure for a table; none: a dash."""
    if value is None:
        return "-"
    return f"{value:,.{digits}f}"
