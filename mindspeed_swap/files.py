"""Files that others read while they are replaced."""
from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


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
