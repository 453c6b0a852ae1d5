"""Apart from ``__init__``, which is not run where a checkout of that name lies beside the script: Python then takes the
checkout's folder for a namespace package. All modules of an editable install are found nevertheless."""

__version__ = "0.1.0"
