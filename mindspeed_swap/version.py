"""Apart from ``__init__``, which is not run where a checkout of that name lies beside the script: Python then takes the
checkout's folder for a namespace package. All modules of an editable install are found nevertheless."""
from __future__ import annotations

from importlib import metadata

__version__ = "0.1.0"


def installed(name: str) -> str | None:
    """Version of a distribution, which is not imported. None: it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
