"""Writes a rank's files into ``--swap-report-dir``, each as a whole. A full disk is said and never stops training."""
from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.core.step import ExecutedStep
from mindspeed_swap.files import replace_file
from mindspeed_swap.log import Once, say
from mindspeed_swap.report.chrome import chrome_trace
from mindspeed_swap.report.reader import SUMMARY_VERSION, TRACE_FILE
from mindspeed_swap.report.summary import summarize
from mindspeed_swap.smart_swap.search import SmartSwap

_RUN_ID_KEY = "mindspeed_swap/run_id"


class ReportWriter:
    def __init__(self, directory: str, rank: int, layout: Mapping[str, Any]) -> None:
        self._folder = Path(directory) / f"rank{rank}"
        self._rank = rank
        self._layout = layout
        self._run_id = agreed_run_id()
        self._written: ExecutedStep | None = None  # what trace.json shows
        self._say_once = Once()

    def write_summary(
        self, search: SmartSwap | None, pool: HostPool, device: str, virtual_optimizer: Mapping[str, Any] | None = None
    ) -> None:
        summary = {
            "version": SUMMARY_VERSION,
            "run_id": self._run_id,
            "rank": self._rank,
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
            **summarize(search, pool, device, self._layout, virtual_optimizer),
        }
        self._write("summary.json", json.dumps(summary, indent=1, default=str) + "\n")
        for note in summary["step"]["notes"] if summary["step"] else ():
            self._say_once(note)

    def write_trace(self, step: ExecutedStep | None) -> None:
        if step is not None and step is not self._written:
            self._written = step
            self._write("trace.json", json.dumps(chrome_trace(step, self._rank, self._run_id)))
            self._write(TRACE_FILE, step.trace.to_json())  # for ``mindspeed-swap what-if``

    def _write(self, name: str, text: str) -> None:
        try:
            replace_file(self._folder / name, text)
        except OSError as error:
            self._say_once(f"report not written, training goes on: {error}")


def agreed_run_id() -> str:
    """The same on every rank of this run, and on no other. Whoever comes first to the process group's store decides, so
    no rank waits for another."""
    proposal = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return proposal
    try:
        store = distributed.distributed_c10d._get_default_store()
        return store.compare_set(_RUN_ID_KEY, "", proposal).decode()
    except (RuntimeError, AttributeError) as error:  # not every kind of store can do it
        say(f"report: the ranks' files cannot be told to be of one run: {error}")
        return "unknown"
