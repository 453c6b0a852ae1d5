"""What a contributor meets: linters, workflow, public names, licence files, and a test for every case."""
import importlib
import re

import pytest
import yaml
from pages import ROOT, generator

from mindspeed_swap.version import __version__

CASES = range(1, 43)


def test_pre_commit_runs_the_linters_of_ci():
    lines = re.findall(r"^(\.venv/bin/python -m \w+.*?)(?: \|\|.*)?$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == lines and len(lines) == 2
    assert all(hook["language"] == "system" and hook["pass_filenames"] is False for hook in hooks)


def test_the_workflow_calls_ci_run_and_nothing_else():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step] == ["bash .ci/run"]


@pytest.mark.parametrize("number", CASES)
def test_every_case_has_a_test_of_its_name(number):
    found = [p for p in (ROOT / "tests").rglob("*.py") if f"test_case_{number:02}_" in p.read_text(encoding="utf-8")]
    assert found


@pytest.mark.parametrize("module", generator("docs_api").PUBLIC)
def test_public_modules_say_what_is_public(module):
    if module in generator("docs_api")._ONLY_IMPORTED:
        return
    found = importlib.import_module(module)
    assert found.__doc__ and all(hasattr(found, public) for public in found.__all__)


def test_files_of_a_project():
    for file in ("LICENSE", "NOTICE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "mindspeed_swap/py.typed"):
        assert (ROOT / file).is_file(), file
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## Unreleased" in changelog or f"## {__version__}" in changelog
    security = (ROOT / "SECURITY.md").read_text()
    told = ("--swap-policy-config", "is executed", "safe_load", "never pickle", "world-writable")
    assert [what for what in (*told, "MINDSPEED_SWAP_OOM_HOOK") if what not in security] == []
