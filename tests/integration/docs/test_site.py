"""The notebook runs, and the site is built without a warning."""

import re
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[3]


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", mpl.get_configdir())  # its list of fonts takes long to make
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    page = str(ROOT / "docs/embeddings.md")  # the documentation of Python takes seconds to read
    notebook = nbformat.read(ROOT / "docs/first-look.ipynb", 4)  # type: ignore[no-untyped-call]
    for cell in notebook.cells:
        cell.source = (
            cell.source.replace('"8k"', '"2k"')
            .replace("max_train=128", "max_train=16, max_dev=16")
            .replace("steps=20", "steps=2")
            .replace("python-docs", page)
        )
    paths = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=paths).execute()
    outputs = {cell["id"]: str(cell.get("outputs")) for cell in notebook.cells}
    assert "held-out loss of 3x384" in outputs["cell-8"]
    assert "image/png" in outputs["cell-10"]
    assert "kl_attention" in outputs["cell-12"]
    assert "accuracy" in outputs["cell-15"]


def test_the_site_is_built_without_a_warning() -> None:
    done = subprocess.run([sys.executable, "docs/site.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (
        "index",
        "docs/tutorial/index",
        "docs/cli/index",
        "docs/api/index",
        "storage_schema/SPEC/index",
    ):
        assert (ROOT / f"build/site/{page}.html").is_file()
    assert "--matryoshka" in (ROOT / "build/site/docs/cli/index.html").read_text()
    assert "train_students" in (ROOT / "build/site/docs/api/index.html").read_text()
    site = ROOT / "build/site"
    link = re.compile(r'(?:<img[^>]* src|<link[^>]* href)="(?!https?:|data:)([^"#?]+)')
    for written in site.rglob("*.html"):
        for place in link.findall(written.read_text()):
            folder = site if place.startswith("/") else written.parent
            target = folder / place.removeprefix("/minilm-cache/")
            assert target.resolve().exists(), f"{written}: {place} is not there"
