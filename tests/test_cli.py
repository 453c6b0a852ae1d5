"""The console entry: what --version says, and that it costs no import of torch."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_swap import __version__, cli


def test_version_names_what_a_bug_report_needs(capsys, monkeypatch):
    monkeypatch.setenv("MINDSPEED_SWAP_DEVICE", "sim")
    assert cli.main(["--version"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    lines = {name: value.strip() for name, value in lines.items()}
    assert lines["mindspeed-swap"] == __version__ and lines["MINDSPEED_SWAP_DEVICE"] == "sim"
    assert lines["torch"][0].isdigit()
    for name in ("python", "megatron-core", "torch_npu", "transformer-engine", "apex (multi_tensor kernels)"):
        assert lines[name]
    assert (Path(lines["ready configs"]) / "swap_config/case1_default.yaml").is_file()


def test_module_and_no_torch():
    code = (
        "import sys, runpy; sys.argv = ['mindspeed-swap', '--version']\n"
        "try: runpy.run_module('mindspeed_swap', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "assert not {'torch', 'megatron', 'torch_npu', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_no_command_shows_help(capsys):
    assert cli.main([]) == 2
    assert "--version" in capsys.readouterr().out


def test_unknown_argument_is_an_error(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--nonsense"])
    assert end.value.code == 2 and "--nonsense" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    """``mindspeed-swap ops DIR | head``: no traceback."""
    code = (
        "import mindspeed_swap.cli as cli\n"
        "cli._ops = lambda args: print('x' * 10_000_000) or 0\n"
        "raise SystemExit(cli.main(['ops', 'anything']))"
    )
    command = f'"{sys.executable}" -c "$CODE" | head -c 5'
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], env=os.environ | {"CODE": code},
                          capture_output=True, text=True, cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0 and done.stdout == "xxxxx" and not done.stderr
