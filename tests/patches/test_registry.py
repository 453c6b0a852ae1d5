"""Patches: installed, swept, removed; every target exists in every supported megatron-core wheel."""
from __future__ import annotations

import ast
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

from mindspeed_swap.errors import SettingError
from mindspeed_swap.patches import (
    arguments,
    linear,
    recompute,
    registry,
    schedules,
    training,
    transformer_layer,
)
from mindspeed_swap.patches.registry import Installed, resolve

ALL = [
    target
    for module in (arguments, training, schedules, transformer_layer, linear, recompute)
    for target, _ in module.PATCHES
]
# version -> Python of the wheel, and whether the wheel has megatron.training
WHEELS = {
    "0.12.1": ("3.11", False),
    "0.16.1": ("3.12", False),
    "0.17.1": ("3.12", True),
    "0.18.2": ("3.12", True),
    "0.19.2": ("3.12", True),
}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("megatron_like")
    exec(
        "def function(x):\n return x\n"
        "class Class:\n"
        " def method(self):\n  return 'method'\n"
        " @staticmethod\n def static(x):\n  return x\n"
        "class Child(Class):\n pass\n",
        module.__dict__,
    )
    monkeypatch.setitem(sys.modules, "megatron_like", module)
    return module


def _twice(original):
    return lambda *args: (original(*args), original(*args))


def test_a_function_is_patched_where_it_was_imported_earlier_and_put_back(library, monkeypatch):
    importer = types.ModuleType("megatron_importer")
    importer.alias = original = library.function
    monkeypatch.setitem(sys.modules, "megatron_importer", importer)
    patches = Installed()
    patches.install([("megatron_like.function", _twice)])
    assert library.function(1) == importer.alias(1) == (1, 1)
    patches.remove()
    assert library.function is original
    assert importer.alias is original


def test_methods_and_staticmethods_go_back_as_what_they_were(library):
    method, static = vars(library.Class)["method"], vars(library.Class)["static"]
    patches = Installed()
    patches.install([("megatron_like.Class.method", _twice), ("megatron_like.Class.static", _twice)])
    assert library.Class().method() == ("method", "method")
    assert library.Class.static(1) == library.Class().static(1) == (1, 1)
    patches.remove()
    assert vars(library.Class)["method"] is method
    assert vars(library.Class)["static"] is static


def test_a_method_the_class_inherits_is_not_left_behind(library):
    patches = Installed()
    patches.install([("megatron_like.Child.method", _twice)])
    assert library.Child().method() == ("method", "method")
    assert library.Class().method() == "method"
    patches.remove()
    assert "method" not in vars(library.Child)


def test_a_patch_on_top_of_ours_is_left_alone(library):
    patches = Installed()
    patches.install([("megatron_like.function", _twice)])
    on_top = library.function = lambda x: "theirs"
    patches.remove()
    assert library.function is on_top


@pytest.mark.parametrize("target", ["megatron.core.nothing.Class.method", "megatron.core.transformer.no_function"])
def test_a_missing_target_names_the_version_and_patches_nothing(target, library):
    original = library.function
    with pytest.raises(SettingError, match=rf"{target} does not exist in megatron-core [0-9.]+.*supports 0\.12\.1"):
        Installed().install([("megatron_like.function", _twice), (target, _twice)])
    assert library.function is original


@pytest.mark.parametrize("found", ["0.11.0", "0.20.0", "1.0"])
def test_a_version_outside_the_range_is_an_error(found, monkeypatch):
    monkeypatch.setattr(registry, "installed", lambda name: found)
    with pytest.raises(SettingError, match=f"megatron-core {found} is installed; mindspeed_swap supports"):
        registry.check_version()


@pytest.mark.parametrize("found", ["0.12.1", "0.16.1", "0.18.2", "0.19.2", "0.19.0rc1"])
def test_supported_versions(found, monkeypatch):
    monkeypatch.setattr(registry, "installed", lambda name: found)
    registry.check_version()


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for version, (python, _) in WHEELS.items():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", python, "-d", str(folder / version), f"megatron-core=={version}"]
        got = subprocess.run(command, capture_output=True, text=True)
        if got.returncode:
            pytest.skip(f"no package registry reached: {got.stderr.strip().splitlines()[-1]}")
        for wheel in (folder / version).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder / version)
    return folder


def _defined(root: Path, target: str) -> bool:
    """Read from the source: importing five Megatrons in one environment is not needed."""
    parts = target.split(".")
    split = next(n for n in range(len(parts) - 1, 0, -1) if (root / "/".join(parts[:n])).with_suffix(".py").exists())
    body = ast.parse((root / "/".join(parts[:split])).with_suffix(".py").read_text()).body
    for name in parts[split:]:
        found = [n for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == name]
        if not found:
            return False
        body = found[-1].body
    return True


@pytest.mark.parametrize("version", WHEELS)
def test_every_target_exists_in_every_supported_wheel(version, wheels):
    has_training = WHEELS[version][1]
    assert (wheels / version / "megatron/training").exists() == has_training
    targets = [t for t in ALL if has_training or not t.startswith("megatron.training.")]
    assert len(targets) >= 6
    assert [t for t in targets if not _defined(wheels / version, t)] == []


def test_the_check_of_wheels_can_fail(wheels):
    root = wheels / "0.19.2"
    assert not _defined(root, "megatron.core.pipeline_parallel.schedules.no_such_function")
    assert not _defined(root, "megatron.core.transformer.transformer_layer.TransformerLayer.no_such_method")


def test_resolve_finds_functions_and_methods():
    owner, name = resolve("json.decoder.JSONDecoder.decode")
    assert owner.__name__ == "JSONDecoder"
    assert name == "decode"
