"""What is installed is exactly what is in the checkout, under one top-level name."""

import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "datasets", "zarr", "pyarrow")


def test_the_wheel_holds_exactly_the_modules_of_the_checkout(tmp_path: Path) -> None:
    copytree(
        ROOT,
        tmp_path / "copy",
        symlinks=True,
        ignore=ignore_patterns(".git", ".venv", "build", "*.egg-info", "tests"),
    )
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, tmp_path / "copy"],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "minilm_cache").rglob("*.py")
        if not {"cli", "storage_schema"} & set(file.relative_to(ROOT / "minilm_cache").parts[:1])
    }
    for folder in ("cli", "storage_schema"):
        modules |= {f"minilm_cache/{folder}/{file.name}" for file in (ROOT / folder).glob("*.py")}
    data = {"minilm_cache/py.typed"}
    data |= {f"minilm_cache/storage_schema/{name}" for name in ("SPEC.md", "manifest.schema.json")}
    data |= {f"minilm_cache/{part}/card.md.jinja" for part in ("store", "train")}
    data |= {f"minilm_cache/workflows/{name}.md.jinja" for name in ("exported", "scores", "trim")}
    data |= {f"minilm_cache/report/page.{ending}" for ending in ("html", "css", "js")}

    assert found == modules | data


def test_links_agree_with_the_mapping() -> None:
    for folder in ("cli", "storage_schema"):
        assert (ROOT / "minilm_cache" / folder).resolve() == ROOT / folder


def test_format_and_command_line_load_nothing_heavy() -> None:
    """`--help` answers at once, and the format can be read where there is no torch."""
    code = (
        "import sys; import minilm_cache, minilm_cache.cli.main, minilm_cache.storage_schema.manifest, "
        "minilm_cache.storage_schema.arrays, minilm_cache.storage_schema.arrays; "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert printed == "[]\n"


def test_import_contracts_hold() -> None:
    subprocess.run(
        [Path(sys.executable).with_name("lint-imports")], cwd=ROOT, check=True, capture_output=True
    )
