"""InputRequest: the input options of a command, as given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minimax_tools.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRequest:
    """Input options of a command as given; `prompts.build_inputs` reads the files that they name.

    Raises:
        UsageError: Options contradict each other, or one has no effect.
    """

    prompts: tuple[str, ...] = ()
    prompts_file: Path | None = None
    chat: bool = False  # whether the checkpoint's chat template is put around each prompt
    input_ids: tuple[str, ...] = ()  # `1,2,3`, a row; or the path of a JSON file of rows
    seq_lens: tuple[int, ...] = ()  # lengths of random rows
    quick: bool = False  # whether to take a few short rows in place of the default rows
    batch_size: int = 1  # number of random rows of each length, default rows included
    padding_side: str | None = None  # None: right, but one of the default rows is padded on the left
    # Rows are padded to the smallest of these that fits; empty: to the longest row.
    pad_to: tuple[int, ...] = ()
    max_length: int | None = None  # number of tokens that a row is cut to
    start_positions: tuple[int, ...] = ()  # position of each row's first token, or one for all; empty: 0
    seed: int = 0
    last_tokens: int = 0  # number of tokens at each row's end whose values are kept; 0 for all

    def __post_init__(self) -> None:
        if sum((self.has_text, bool(self.input_ids), bool(self.seq_lens), self.quick)) > 1:
            raise UsageError(
                "the inputs come from several sources",
                expected="one of --prompt/--prompts-file, --input-ids, --seq-len, --quick",
            )
        if self.batch_size > 1 and (self.has_text or self.input_ids):
            raise UsageError(
                "--batch-size multiplies random rows only", next_step="Repeat --prompt or --input-ids."
            )
        if self.chat and not self.has_text:
            raise UsageError(
                "--chat has no effect without text", next_step="Give --prompt or --prompts-file."
            )
        if self.start_positions and not self.names_rows:
            raise UsageError(
                "--start-positions has no rows to place: the rows of mm2 have positions of their own",
                next_step="Give --prompt, --input-ids or --seq-len too.",
            )

        if self.last_tokens and not self.names_rows:
            raise UsageError(
                "--last-tokens is for long rows, and none is named",
                next_step="Give --seq-len 4200, --prompt or --input-ids too.",
            )

    @property
    def names_rows(self) -> bool:
        """True if options name the rows, so that the default rows are not used."""
        return self.has_text or bool(self.input_ids) or bool(self.seq_lens)

    @property
    def has_text(self) -> bool:
        """True if the rows come from text."""
        return bool(self.prompts) or self.prompts_file is not None
