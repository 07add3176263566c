"""Probes of goldens by `mm2-gpu`, and of the streamed forward pass alone.

A probe is a function that `loading/probe.py` calls in a process of its own; it returns numbers and digests by name.
Some imports are for no name (F401): the libraries make them while they run, where they would count in time and memory.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

# First, as in the command: it sets how torch's threads wait, which torch reads when it is loaded.
import gpu_reference

# isort: split
import accelerate.hooks  # noqa: F401
import numba.np.ufunc  # noqa: F401
import numpy.ctypeslib  # noqa: F401
import rich.live
import rich.progress  # noqa: F401
import torch
import transformers.integrations.moe
import transformers.masking_utils  # noqa: F401
from cpu_golden import request_golden
from transformers import MiniMaxM2ForCausalLM  # noqa: F401
from transformers.utils import logging as transformers_logging

import gpu_reference.commands.golden_run
import gpu_reference.golden.golden
import minimax_tools.reference.rounding
import minimax_tools.reference.twin  # noqa: F401
from gpu_reference.cli import main as mm2_gpu
from gpu_reference.golden.golden import open_golden
from gpu_reference.streaming.streaming import OnceReader, Streaming
from loading.reads import digest_of, open_inputs
from minimax_tools.checkpoint.fp8 import dequantise
from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.weight_names import GATE, layer_of

transformers_logging.disable_progress_bar()
# numba imports most of itself when the first compiled loop is called.
dequantise(torch.zeros(1, 1).to(torch.float8_e4m3fn), torch.ones(1, 1), dtype=torch.bfloat16)


class WatchedReader(CheckpointReader):
    """A reader that is kept in `opened`, so that its count of bytes outlives the command that opened it."""

    opened: list[CheckpointReader] = []  # noqa: RUF012  # one process, one command

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        WatchedReader.opened.append(self)


class WatchedOnceReader(WatchedReader, OnceReader):
    """The reader of a streamed model, kept in `opened` too."""


class IdleReader(WatchedOnceReader):
    """The reader of a streamed model that reads no matrices from the third layer on, but copies others from memory.

    These are of the first two layers, one of each shape. So the numbers stay those of a model: with what lies in a
    buffer they would become NaN, and all tokens would go to the same few experts.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._of_shape: dict[tuple[tuple[int, ...], str], torch.Tensor] = {}

    def _fill(self, entry: TensorEntry, out: torch.Tensor) -> None:
        layer = layer_of(entry.name)
        is_matrix = len(entry.shape) == 2 and entry.name.endswith(".weight") and not entry.name.endswith(GATE)
        if layer is None or not is_matrix:
            super()._fill(entry, out)
            return
        key = (tuple(entry.shape), str(entry.dtype))
        if layer < 2 or key not in self._of_shape:
            super()._fill(entry, out)
            if key not in self._of_shape:
                self._of_shape[key] = out.view(-1).view(torch.uint8).clone()
        else:
            out.view(-1).view(torch.uint8).copy_(self._of_shape[key])


def run_command(words: list[str], *, idle: bool = False) -> dict[str, float]:
    """Run `mm2-gpu` with these words in this process; `idle` leaves out most of its reading."""
    # The command opens its reader itself: so the classes of readers are replaced where it looks them up.
    names = vars(gpu_reference.golden.golden)
    names |= {"CheckpointReader": WatchedReader, "OnceReader": IdleReader if idle else WatchedOnceReader}
    code = mm2_gpu(words, standalone_mode=False)
    if code:
        raise SystemExit(code)
    if not WatchedReader.opened:
        raise SystemExit("the command opened no WatchedReader")
    return {"bytes_read": sum(reader.num_bytes_read for reader in WatchedReader.opened)}


def forward_streamed(model: str, seq_lens: list[int]) -> dict[str, Any]:
    """Compute the logits by streaming, without capture and noise floor."""
    folder = Path(model)
    _, inputs = open_inputs(folder, seq_lens)
    streaming = Streaming(device=torch.device("cpu"))
    request = request_golden(folder, inputs, noise_floor="off", streaming=streaming)
    began_s = time.perf_counter()
    with open_golden(request) as golden:
        logits = golden.forward()
        seconds = time.perf_counter() - began_s
    return {"whole_s": seconds, "logits": digest_of(logits)}
