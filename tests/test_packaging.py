"""The wheel: one top-level name, patches inside it, C++ sources shipped."""
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if not (ROOT / "setup.py").is_file():
        pytest.skip("not a source checkout")
    source = tmp_path_factory.mktemp("source")  # a copy: building leaves folders behind
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("mindspeed_swap", "patches", "tests", "scripts"):
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(source), "."]
    subprocess.run(command, cwd=source, check=True)
    return next(source.glob("*.whl"))


def test_only_our_name_lands_in_site_packages(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"mindspeed_swap"}


def test_everything_needed_is_in_it(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = [p.relative_to(ROOT) for p in (ROOT / "mindspeed_swap").rglob("*") if p.suffix in (".py", ".cpp", ".h")]
    patches = [f"mindspeed_swap/{p.relative_to(ROOT)}" for p in (ROOT / "patches").rglob("*.py")]
    expected = {*map(str, inside), *patches, "mindspeed_swap/py.typed"}
    assert "mindspeed_swap/patches/__init__.py" in expected
    assert expected <= names


def test_wheel_imports_patches_without_the_checkout(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import mindspeed_swap.patches as p; print(p.__file__)"
    out = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        check=True, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert out.stdout.strip() == str(tmp_path / "mindspeed_swap/patches/__init__.py")


def test_a_checkout_beside_the_script_does_not_hide_the_package(tmp_path):
    """``git clone`` next to the training script: Python finds the folder first, as a namespace package."""
    (tmp_path / "mindspeed_swap").mkdir()
    code = "from mindspeed_swap.cli import main; main(['--version'])"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "mindspeed-swap" in done.stdout
