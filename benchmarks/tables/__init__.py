"""Write the tables of README and docs from the result files of the benchmarks.

A table stands between `<!-- table NAME -->` and `<!-- end of table -->`. Never edit one by hand.

    python -m benchmarks.tables
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.tables import caches, device, embeddings, families, scale, students

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK: Final = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

TABLES: Final[dict[str, Callable[[], str]]] = {
    name: table
    for module in (caches, device, embeddings, families, scale, students)
    for name, table in vars(module).items()
    if getattr(table, "__annotations__", None) == {"return": str} and not name.startswith("_")
}
"""Each function of these modules that takes nothing and returns a text is the table of its name."""


def rendered(text: str) -> str:
    """Return the text of a page with every table written again from the results."""
    return _BLOCK.sub(lambda block: block[1] + TABLES[block[2]]() + block[3], text)
