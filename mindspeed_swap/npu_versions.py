"""What NPU support needs, what of it is there, and the one message that says both. Loads no torch."""
from __future__ import annotations

import os
from pathlib import Path

from mindspeed_swap.errors import SettingError
from mindspeed_swap.version import installed

NEEDED = "Ascend driver 25.0.RC1, CANN 8.1.RC1 and torch_npu (PTA) of the second quarter of 2025, or newer"
DRIVER = Path("/usr/local/Ascend/driver")


def unusable(what: str, why: object) -> SettingError:
    reason = (str(why).strip() or repr(why)).splitlines()[0]
    return SettingError(f"{what} ({reason}). NPU support needs {NEEDED}; found: {found_versions()}")


def found_versions() -> str:
    """Of torch, torch_npu, CANN and the driver, as far as they can be told."""
    toolkit = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    if toolkit is None:
        cann = "no CANN (ASCEND_HOME_PATH is not set: source its set_env.sh)"
    else:
        cann = f"CANN {_version_in(Path(toolkit), 'version.cfg') or 'of unknown version'} in {toolkit}"
    driver = _version_in(DRIVER, "version.info")
    packages = [f"{name} {found}" if (found := installed(name)) else f"no {name}" for name in ("torch", "torch_npu")]
    return ", ".join([*packages, cann, f"driver {driver}" if driver else "no driver"])


def _version_in(folder: Path, name: str) -> str | None:
    """From ``Version=25.0.rc1`` or ``toolkit_installed_version=[8.1.RC1:...]``."""
    try:
        lines = (folder / name).read_text().splitlines()
    except OSError:
        return None
    values = [line.split("=", 1)[1].strip("[] ").split(":")[0] for line in lines if "version=" in line.lower()]
    return values[0] if values else None


def import_torch() -> None:
    """Where torch_npu is installed torch loads it by itself, and without CANN ``import torch`` fails; so it does here,
    but says what is needed. Raises SettingError."""
    try:
        import torch  # noqa: F401
    except (RuntimeError, ImportError) as error:
        cause = error.__cause__ or error
        if "torch_npu" not in str(error):
            raise
        raise unusable("torch_npu cannot be loaded", cause) from error
