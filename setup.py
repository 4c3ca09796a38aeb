"""The description on the package index: README, with links that lead into the repository."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
README = (ROOT / "README.md").read_text()
PICTURES = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{SOURCE}/raw/main/", README)
LINKS = re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\1{SOURCE}/blob/main/", PICTURES)
setup(long_description=LINKS, long_description_content_type="text/markdown")
