"""Commands of the documentation are run as they stand; files that it shows are read; Python that it shows imports."""
import ast
import importlib
import os
import subprocess
import sys

import pytest
from pages import ROOT, blocks, name, pages

from mindspeed_swap.fine_grained.schema import read_swap_config

# What is run elsewhere, and where; here only that the script is there and has no syntax error.
ELSEWHERE = {
    "bash scripts/quickstart.sh": "by hand and in tests/scripts/test_quickstart.py, with a stand-in for training",
    "bash scripts/test.sh": "this is a test of it",
    "bash scripts/test.sh tests/core": "the same",
    "bash .ci/run": "the same",
    "pip install -e .": "tests/test_packaging.py",
}
SHELL_PAGES = [path for path in pages() if blocks(path, "bash")]


def commands(path):
    """One per line, without its comment."""
    for block in blocks(path, "bash"):
        for line in block.splitlines():
            if command := line.partition("#")[0].strip():
                yield command


@pytest.mark.parametrize("path", SHELL_PAGES, ids=name)
def test_commands_run(path, tmp_path):
    binaries = tmp_path / "bin"
    binaries.mkdir()
    program = binaries / "mindspeed-swap"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mindspeed_swap "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    found = list(commands(path))
    assert found
    for command in found:
        if command in ELSEWHERE:
            scripts = [word for word in command.split() if word.startswith(("scripts/", ".ci/")) and "/" in word]
            for script in scripts:
                subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
            continue
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_the_readmes_show_the_two_commands():
    for readme in ("README.md", "README.zh-CN.md"):
        assert list(commands(ROOT / readme))[:2] == ["bash scripts/quickstart.sh", "bash scripts/test.sh"]


@pytest.mark.parametrize("path", [path for path in pages() if blocks(path, "yaml")], ids=name)
def test_yaml_is_accepted(path, tmp_path):
    read = 0
    for block in blocks(path, "yaml"):
        if "swap_config:" in block:
            file = tmp_path / "config.yaml"
            file.write_text(block)
            read_swap_config(str(file), 4)
            read += 1
    assert read or path.name not in ("fine_grained.md", "fine_grained.zh-CN.md")


@pytest.mark.parametrize("path", [path for path in pages() if blocks(path, "python")], ids=name)
def test_python_parses_and_its_imports_are_there(path):
    for block in blocks(path, "python"):
        for node in ast.walk(ast.parse(block)):
            ours = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mindspeed_swap"
            if ours:
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("path", [path for path in pages() if blocks(path, "diff")], ids=name)
def test_diffs_add_our_import(path):
    added = [line[1:] for block in blocks(path, "diff") for line in block.splitlines() if line.startswith("+i")]
    assert added and {line.partition("#")[0].strip() for line in added} == {"import mindspeed_swap.megatron_adaptor"}
