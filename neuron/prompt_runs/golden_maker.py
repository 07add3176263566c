"""Golden logits of prompts: those that the store lacks are computed, some prompts at a time, each kept when done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.progress import LayerProgress
from minimax_tools.golden_logits.golden_logits import KINDS
from minimax_tools.golden_logits.logits_run import compute_golden_logits
from minimax_tools.golden_logits.logits_store import LogitsStore
from minimax_tools.golden_logits.stream_start import Row
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.rounded_model import RoundedModel

# Values of hidden states in memory at a time, of all copies and prompts: 4 GB in float32. The weights of all layers are
# read once for so many.
_MOST_STATES = 2**30


def make_golden_logits(
    store: LogitsStore, rows: Sequence[Row], *, reader: CheckpointReader, spec: ModelSpec
) -> int:
    """Compute and keep the golden logits of the rows that the store lacks. Return the number of those that it had.

    Raises:
        CheckpointError: A weight cannot be read.
        CaptureError: The logits cannot be written.
    """
    distinct = list(dict.fromkeys(rows))
    missing = [row for row in distinct if not store.has(row)]
    groups = list(_group(missing, spec))
    for number, group in enumerate(groups, start=1):
        label = "Golden logits" + (f" {number}/{len(groups)}" if len(groups) > 1 else "")
        num_layers = spec.num_hidden_layers - (0 if store.start is None else store.start.layer)
        with LayerProgress(num_layers, label=label) as progress:
            model = RoundedModel(spec=spec, reader=reader, kinds=KINDS, progress=progress)
            for golden in compute_golden_logits(model, group, start=store.start):
                store.write(golden)
    return len(distinct) - len(missing)


def _group(rows: Sequence[Row], spec: ModelSpec) -> Iterator[list[Row]]:
    """Yield rows in groups whose hidden states fit into memory."""
    most_tokens = max(_MOST_STATES // (len(KINDS) * spec.hidden_size), 1)
    group: list[Row] = []
    num_tokens = 0
    for row in rows:
        if group and num_tokens + len(row) > most_tokens:
            yield group
            group, num_tokens = [], 0
        group.append(row)
        num_tokens += len(row)
    if group:
        yield group
