"""Where a checkpoint is: a folder given as such, or a model id that is fetched from the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from minimax_tools.errors import CheckpointError

# What a checkpoint needs; a repository's pictures, .bin copies and remote code stay where they are.
_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(model: str) -> Path:
    """The folder of a checkpoint: `model` itself where it is a folder, else the hub's `owner/name`, fetched.

    Raises:
        CheckpointError: There is no such folder, or the hub did not give the model.
    """
    folder = Path(model).expanduser()
    # An empty text would be the working directory.
    if model and folder.is_dir():
        return folder
    if _HUB_ID.fullmatch(model):
        return _fetch(model)
    raise CheckpointError(
        f"no checkpoint at {model!r}",
        expected="a folder with config.json and safetensors shards, or a hub id such as MiniMaxAI/MiniMax-M2",
        found="a file" if folder.exists() else "no such folder",
        next_step="Make a small one with: mm2-split synthesize --output DIR.",
    )


def _fetch(model: str) -> Path:
    # Any failure of a foreign library, its import included, ends here as one message with a next step.
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, allow_patterns=list(_PATTERNS)))
    except Exception as error:
        raise CheckpointError(
            f"no folder {model!r} is here, and the hub's model of that id could not be fetched",
            found=f"{type(error).__name__}: {error}",
            next_step="Check the id, the network and your token (HF_ENDPOINT and HF_HUB_OFFLINE are "
            "honoured), or fetch it with `hf download` elsewhere and give --model the folder.",
        ) from error
