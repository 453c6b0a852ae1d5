"""Packaging. Building needs no compiler: the C++ parts are shipped as sources and built at first use."""
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
# Read, not imported: importing the package must not be needed to build it.
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "mindspeed_swap/version.py").read_text(), re.MULTILINE)[1]

setup(
    name="mindspeed-swap",
    version=VERSION,
    description="A memory hierarchy for Megatron training: out of memory becomes training",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    python_requires=">=3.10",
    # `include`, because the root has folders with Python files (patches, tests, scripts) whose names must not land in
    # site-packages. `patches` and `configs` are installed inside our package.
    packages=[
        *find_packages(include=["mindspeed_swap", "mindspeed_swap.*"]),
        "mindspeed_swap.patches",
        "mindspeed_swap.configs",
    ],
    package_dir={"mindspeed_swap.patches": "patches", "mindspeed_swap.configs": "configs"},
    package_data={
        "mindspeed_swap": ["py.typed", "csrc/*.cpp", "csrc/*.h", "csrc/smart_swap/*", "report/*.css"],
        "mindspeed_swap.configs": ["*.py", "swap_config/*.yaml"],
    },
    install_requires=[
        "torch>=2.6",  # Megatron's own bound
        "ninja",  # torch builds C++ sources with it; a small wheel, no compiler
        "pyyaml>=6",  # --swap-config
    ],
    extras_require={
        # 0.17 is the first whose wheel has megatron.training; psutil is what its checkpoint writer imports.
        "megatron": ["megatron-core>=0.17,<0.20; python_version>='3.12'", "psutil"],
        "npu": ["torch_npu"],
        "report": ["matplotlib"],
        "test": ["pytest", "pytest-cov", "pytest-xdist", "hypothesis", "scipy", "ruff", "mypy"],
    },
    entry_points={"console_scripts": ["mindspeed-swap = mindspeed_swap.cli:main"]},
    classifiers=["Programming Language :: Python :: 3", "Operating System :: POSIX :: Linux"],
)
