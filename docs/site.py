"""Collect the pages of the documentation site, and build it; a warning, like a link to nowhere, is an error.

    python docs/site.py

Pages lie in build/pages as they lie in the repository, so that their links hold in both places. The reference
of the command line is generated from the commands.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build/pages"
COPIED = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
    *(
        "docs/**/*.md",
        "docs/*.ipynb",
        "docs/*.svg",
        "docs/site.css",
        "storage_schema/SPEC.md",
        "benchmarks/README.md",
        "benchmarks/results/*",
    ),
)


def main() -> None:
    """Build the site in build/site."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for pattern in COPIED:
        for file in ROOT.glob(pattern):
            copy = PAGES / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    programs = Path(sys.executable).parent
    reference = [programs / "typer", "minilm_cache.cli.main", "utils", "docs", "--name", "minilm-cache"]
    text = subprocess.run(reference, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    (PAGES / "docs/cli.md").write_text(text.replace("[:", r"\[:"))  # `ID[:CONFIG][:SPLIT]` is no link
    site = subprocess.run([programs / "zensical", "build", "--clean", "--strict"], cwd=ROOT, check=False)
    sys.exit(site.returncode)


if __name__ == "__main__":
    main()
