"""Files that others read while they are replaced."""
from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import uuid
from pathlib import Path

from mindspeed_swap.errors import SettingError


def replace_file(path: Path, text: str) -> None:
    """Write it as a whole or not at all, its folder included. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")  # another job may write the same file
    try:
        partial.write_text(text)
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)  # half a file would only fill the disk


def check_directory(flag: str, directory: str | Path) -> None:
    """Raises SettingError if nothing can be written there: better at the start than after hours."""
    try:
        os.makedirs(directory, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # full now, perhaps not later; said when something is to be written
        raise SettingError(
            f"{flag} {directory}: cannot be written to ({error.strerror}); give a folder that can be, or leave "
            "the flag out"
        ) from None


def check_file(flag: str, path: Path) -> None:
    """Likewise for a file that is to be written."""
    if path.is_dir():
        raise SettingError(f"{flag} {path}: is a folder; give a file")
    check_directory(flag, path.parent)
