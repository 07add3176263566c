"""ModelBatch: the batch of a whole port's run, for ports whose caches and compiled graphs have fixed sizes."""

from __future__ import annotations

from dataclasses import dataclass

from minimax_tools.model.inputs import Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBatch:
    """The sizes of a run's batch, known before the port is built."""

    num_prompts: int
    num_tokens: int  # most columns of the port's cache, decoded and generated tokens included
    num_prefilled: int  # tokens of the shortest prompt in the prefill
    first_position: int  # smallest position of a real token
    replaces_stream: bool = False  # whether passes will replace the stream (see `REPLACE_STREAM`)

    @classmethod
    def of(cls, inputs: Inputs, *, num_decoded: int, max_new_tokens: int) -> ModelBatch:
        """Describe the batch of a run that decodes the last tokens of each prompt, and then generates."""
        # A repetition in another shape has a column more than there are passes.
        return cls(
            num_prompts=inputs.batch_size,
            num_tokens=inputs.sequence_length + max(max_new_tokens, 1 + num_decoded),
            num_prefilled=min(inputs.lengths) - num_decoded,
            first_position=int(inputs.position_ids[inputs.attention_mask.bool()].min()),
        )
