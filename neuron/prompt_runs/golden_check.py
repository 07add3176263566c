"""Check of a given golden: its own logits must agree with the golden logits of its rows."""

from __future__ import annotations

import torch

from compare.prompts.prompt_judge import PortLogits
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import IncomparableError, list_faults
from minimax_tools.model.sites import ModelSite
from neuron.prompt_runs.prompt_run import PromptRun


def refuse_other_golden(golden: Capture, run: PromptRun) -> None:
    """Refuse a golden of another model, and one whose logits differ from mm2's reference beyond noise.

    Raises:
        IncomparableError: The golden must not be used with these golden logits.
        CaptureError: The golden cannot be read.
    """
    golden.refuse_void_certificate()
    differences = golden.description.provenance.model.differences(run.store.model)
    if differences:
        raise IncomparableError(
            f"the golden {golden.directory} is of another model",
            found=list_faults(differences),
            next_step="Give the checkpoint that the golden was made of.",
        )
    if ModelSite.LOGITS not in golden.model_sites():
        return
    inputs, logits = golden.read_inputs(), golden.read_model(ModelSite.LOGITS)
    results = []
    for number, prompt in enumerate(run.prompts):
        reference = run.store.read(prompt.row)
        tokens = torch.arange(len(prompt.row))
        values = logits[number][inputs.attention_mask[number].bool()]
        port = PortLogits(tokens=tokens, logits=reference.measure(values, tokens))
        results.append(run.judge(number, port))
    differing = [result.name for result in results if result.is_beyond]
    if differing:
        raise IncomparableError(
            f"the logits of the golden {golden.directory} are not those of mm2's reference",
            expected="a difference within noise",
            found=f"more in {', '.join(differing)}",
            next_step="Check the golden with mm2-gpu certify, or leave out --golden.",
        )
