"""Links lead somewhere, flags and variables exist, both languages say the same, nothing of one machine is in it."""
import argparse
import gzip
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import ROOT, blocks, flags, name, pages, without_blocks

from mindspeed_swap.cli import _parser
from mindspeed_swap.patches.arguments import add_arguments
from mindspeed_swap.smart_swap.knobs import KNOBS

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_VARIABLE = re.compile(r"MINDSPEED_SWAP_[A-Z_]+")
MOST_PICTURE_BYTES = 150 << 10
MOST_TRACE_BYTES = 5 << 20
# Of tools that are not ours: pip, MindFormers' launcher, MindSpeed, git.
OTHERS = {"--config", "--run_mode", "--use_parallel", "--use", "--run"}
PAIRS = sorted(p for p in ROOT.glob("**/*.zh-CN.md") if p.parent in (ROOT, ROOT / "docs"))
each_page = pytest.mark.parametrize("path", pages(), ids=name)


@each_page
def test_links_lead_somewhere(path):
    broken = []
    for target in _LINK.findall(without_blocks(path.read_text(encoding="utf-8"))):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        found = (path.parent / file).resolve() if file else path
        if not found.exists() or anchor and anchor not in _anchors(found):
            broken.append(target)
    assert broken == []


def _anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", without_blocks(path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# ---- flags
def _ours() -> set[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    return set(parser._option_string_actions)


@cache
def _megatron() -> str:
    """Its sources as one text. Newer ones make flags from names of fields."""
    spec = find_spec("megatron")
    if spec is None:
        return ""
    files = [p for root in spec.submodule_search_locations or () for p in Path(root).rglob("*.py")]
    return "\n".join(p.read_text(encoding="utf-8", errors="replace") for p in files if "tests" not in p.parts)


@cache
def _scripts() -> set[str]:
    """Flags of our scripts and of our command line, and those that COMPAT knows."""
    files = [*ROOT.glob("scripts/**/*.py"), *ROOT.glob("scripts/**/*.sh"), ROOT / "tests/conftest.py"]
    files += [ROOT / "patches/compat.py", ROOT / "mindspeed_swap/cli.py"]
    return {flag for file in files for flag in re.findall(r"--[a-z][\w-]*", file.read_text(encoding="utf-8"))}


@each_page
def test_flags_exist(path):
    text = path.read_text(encoding="utf-8")
    unknown = flags(text) - _ours() - _scripts() - OTHERS
    if not _megatron():
        pytest.importorskip("megatron")
    unknown = {flag for flag in unknown if flag not in _megatron() and not _field(flag)}
    assert sorted(unknown) == []


def _field(flag: str) -> bool:
    return re.search(rf"\b{flag[2:].replace('-', '_')}\b", _megatron()) is not None


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_every_flag_variable_and_command_is_in_the_readmes(readme):
    text = (ROOT / readme).read_text(encoding="utf-8")
    assert sorted(_ours() - flags(text)) == []
    commands = next(a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    assert [command for command in commands if f"`mindspeed-swap {command}" not in text] == []
    assert sorted(_variables() - set(_VARIABLE.findall(text))) == []


def _variables() -> set[str]:
    """Those that the product reads."""
    files = [p for p in (ROOT / "mindspeed_swap").rglob("*.py") if p.name != "cli.py"]
    return set(re.findall(r"\"(MINDSPEED_SWAP_[A-Z_]+)\"", "\n".join(p.read_text(encoding="utf-8") for p in files)))


@each_page
def test_variables_and_commands_exist(path):
    text = path.read_text(encoding="utf-8")
    assert sorted(set(_VARIABLE.findall(text)) - _variables()) == []
    commands = next(a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    named = set(re.findall(r"mindspeed-swap ([a-z][a-z-]+)", text))
    prose = {"with", "report"} | set(commands)  # "`mindspeed-swap` with ..."
    assert sorted(named - prose) == []


# ---- both languages
@pytest.mark.parametrize("chinese", PAIRS, ids=name)
def test_both_languages_say_the_same(chinese):
    english = chinese.with_name(chinese.name.replace(".zh-CN", ""))
    texts = [p.read_text(encoding="utf-8") for p in (english, chinese)]
    headings = [[len(level) for level in re.findall(r"^(#+) ", without_blocks(text), re.MULTILINE)] for text in texts]
    assert headings[0] == headings[1]
    assert flags(texts[0]) == flags(texts[1])
    assert set(_VARIABLE.findall(texts[0])) == set(_VARIABLE.findall(texts[1]))
    pictures = [re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text) for text in texts]
    assert pictures[0] == pictures[1]
    fences = [re.findall(r"^```(\w+)$", text, re.MULTILINE) for text in texts]
    assert fences[0] == fences[1]
    assert chinese.name in texts[0] and english.name in texts[1]


def test_settings_in_the_documentation_exist():
    for page in ("docs/smart_swap.md", "docs/smart_swap.zh-CN.md"):
        (block, *_) = blocks(ROOT / page, "python")
        assert set(re.findall(r"self\.(\w+) =", block)) <= set(KNOBS)


# ---- nothing of one machine
@each_page
def test_nothing_of_one_machine(path):
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"(?<![\w.])/(?:tmp|root|home/(?!xxx)\w+|work|mnt|data\d*|Users)/\S*", text) == []
    assert max(map(len, text.splitlines())) < 1000
    assert not re.search(r"^(?:<{7}|={7}|>{7})(?: |$)", text, re.MULTILINE)  # of a merge


def test_pictures_and_traces_are_small_and_private():
    pictures = [*(ROOT / "docs/pictures").glob("*.png"), *(ROOT / "docs/pictures").glob("*.svg")]
    assert pictures and all(p.stat().st_size < MOST_PICTURE_BYTES for p in pictures)
    traces = list((ROOT / "docs/measured").glob("*.gz"))
    assert traces and sum(p.stat().st_size for p in traces) <= MOST_TRACE_BYTES
    for trace in traces:
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            text = file.read()
        assert text.lstrip().startswith("{") and not re.search(r"/(?:tmp|root|home|work)/", text), trace.name
    figures = (ROOT / "docs/measured/simulated.json").read_text(encoding="utf-8")
    assert not re.search(r"/(?:tmp|root|home|work)/", figures)
