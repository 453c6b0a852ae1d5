"""What is built and installed: one top-level name, patches and configs inside it, sources and headers shipped."""
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("mindspeed_swap", "patches", "configs", "docs", "tests", "scripts")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
IMPORT = "import mindspeed_swap.patches as p; print(p.__file__)"


def _links_and_caches(folder, names):
    return [name for name in names if name == "__pycache__" or (Path(folder) / name).is_symlink()]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the checkout: building leaves folders behind."""
    if not (ROOT / "setup.py").is_file():
        pytest.skip("not a source checkout")
    copy = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=_links_and_caches)
    for file in ROOT.iterdir():
        if file.suffix in (".md", ".py", ".toml", ".txt", ".in") or file.name in ("LICENSE", "NOTICE"):
            shutil.copy(file, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return _built(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    """By the build backend itself: pip builds none, and the package `build` is not needed for it."""
    out = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(out)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    return next(out.glob("*.tar.gz"))


def _built(source, out):
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)]
    subprocess.run(command, cwd=source, check=True)
    return next(out.glob("*.whl"))


def _run(code, path, cwd, **extra):
    """A Python that finds ours there, and nowhere else: -S leaves site-packages and its editable installs out."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | extra
    code = f"import sys; sys.path.insert(0, {str(path)!r}); {code}"
    return subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=cwd, env=environment)


def test_only_our_name_lands_in_site_packages(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"mindspeed_swap"}


def test_everything_needed_is_in_it(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    kinds = (".py", ".cpp", ".h", ".css")
    inside = [p.relative_to(ROOT) for p in (ROOT / "mindspeed_swap").rglob("*") if p.suffix in kinds]
    beside = [p for folder in ("patches", "configs") for p in (ROOT / folder).rglob("*.*") if p.suffix != ".pyc"]
    assert {*map(str, inside), *(f"mindspeed_swap/{p.relative_to(ROOT)}" for p in beside)} <= names
    assert {
        "mindspeed_swap/patches/__init__.py", "mindspeed_swap/configs/swap_policy_fit.py", "mindspeed_swap/py.typed",
        "mindspeed_swap/configs/swap_config/case1_default.yaml", "mindspeed_swap/csrc/oom_guard.cpp",
        "mindspeed_swap/csrc/sim_copy_engine.h", "mindspeed_swap/csrc/smart_swap/NPUSwapManager.h",
    } <= names  # fmt: skip
    licenses = {Path(n).name for n in names if "/licenses/" in n}
    assert licenses == {"LICENSE", "NOTICE"}


def test_wheel_imports_patches_without_the_checkout(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    done = _run(IMPORT, tmp_path, tmp_path)
    assert done.stdout.strip() == str(tmp_path / "mindspeed_swap/patches/__init__.py"), done.stderr


def test_sdist_builds_the_same_wheel(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again = _built(next(tmp_path.glob("mindspeed*swap-*")), tmp_path / "wheel")
    files = [{n for n in zipfile.ZipFile(w).namelist() if ".dist-info/" not in n} for w in (again, wheel)]
    assert files[0] == files[1]


def test_editable_install_imports_patches(source, tmp_path):
    """``pip install -e .``, into a folder of its own instead of this environment."""
    site = tmp_path / "site"
    command = [*PIP, "install", "--no-deps", "--no-build-isolation", "--target", str(site), "-e", str(source)]
    subprocess.run(command, check=True)
    done = _run(f"import site; site.addsitedir({str(site)!r}); {IMPORT}", tmp_path, tmp_path)
    assert done.stdout.strip() == str(source / "patches/__init__.py"), done.stderr


def test_use_without_installing_says_so(source, tmp_path):
    """A checkout on PYTHONPATH: ``patches`` lies beside the package."""
    site = Path(pytest.importorskip("torch").__file__).parent.parent
    code = f"sys.path.append({str(site)!r}); import mindspeed_swap.megatron_adaptor"  # appended: no .pth file is read
    done = _run(code, source, tmp_path, PYTHONWARNINGS="ignore")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "SettingError: mindspeed_swap is on the path but not installed" in last and "pip install -e ." in last


def test_a_checkout_beside_the_script_does_not_hide_the_package(tmp_path):
    """``git clone`` next to the training script: Python finds the folder first, as a namespace package."""
    (tmp_path / "mindspeed_swap").mkdir()
    code = "from mindspeed_swap.cli import main; main(['--version'])"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "mindspeed-swap" in done.stdout
