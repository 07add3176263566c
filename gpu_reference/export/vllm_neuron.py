"""Files that vLLM Neuron's accuracy debugger reads: its Hugging Face captures and caches, written from two goldens.

Its tools load the model whole in float32 and in BF16 to make these files. Each prompt has a folder of its own:

    prompt_analysis/prompt_0/
      tensor_compare/hf_fp32, hf_bf16/
        dp0/prefill_s12_0/                    the prompt of 12 tokens; decode_b13_0: the prompt and one decoded token
          model.layers.0.mlp/rank0.pt         the module's first output [1,S,F]
          prefill_s12_0_meta.json             requests, and the position of each token
      kv_analysis/fp32_kv.pt, hf_kv.pt        keys and values [1,K,S,D] in float32, by layer; hf_kv is of BF16

`TensorComparePlugin` makes hf_fp32 and hf_bf16 only where they are missing. A decoding pass holds the whole sequence so
far, and its last token is compared. Prompt and decoded tokens are one row of the goldens.

B prompts, S tokens, F channels, K kv heads, D head_dim.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from gpu_reference.export.golden_pair import GoldenPair
from gpu_reference.export.site_modules import SiteModules
from minimax_tools.capture.manifest import Entry
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import UsageError
from minimax_tools.machine.files import new_folder
from minimax_tools.model.sites import Site

_FLOAT32_BYTES = 4
# Its plugin numbers the requests of each run from 0, and runs each prompt by itself.
_REQUEST = "0"
_CACHED_SITES = (Site.K_ROPE, Site.V_PROJ)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePass:
    """A forward pass of one prompt."""

    num_tokens: int  # tokens from the first on
    is_prefill: bool  # whether it is the prompt's; else it ends with a decoded token

    def __str__(self) -> str:
        return f"prefill_s{self.num_tokens}_0" if self.is_prefill else f"decode_b{self.num_tokens}_0"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceExport:
    """Contents of a folder written by `export_reference`."""

    directory: Path
    passes: tuple[tuple[ReferencePass, ...], ...]  # passes of each prompt
    layers: tuple[int, ...]  # layers with modules
    modules: tuple[str, ...]  # paths of the modules in each pass
    cached_layers: tuple[int, ...]  # layers in the files of keys and values; () without such files


def export_reference(
    pair: GoldenPair, output: Path, *, modules: SiteModules, num_decoded: int
) -> ReferenceExport:
    """Write the goldens as reference captures; one site is in memory at a time, and one prompt's cache.

    Args:
        pair: The goldens.
        output: A folder that is absent or empty: the debugger's `output_dir`.
        modules: The modules of the sites.
        num_decoded: Number of tokens at the end of each row that were decoded one by one; 0 for none.

    Raises:
        UsageError: `output` is not empty, or a row does not fit a serving engine or `num_decoded`.
        CaptureError: A golden is damaged.
        CheckpointError: The disk is too small, or the folder cannot be written.
    """
    _refuse_unservable_rows(pair, num_decoded)
    passes = tuple(_passes_of(length, num_decoded) for length in pair.inputs.lengths)
    cached_layers = _cached_layers(pair.golden)
    # As if all were float32.
    size_bytes = 2 * _FLOAT32_BYTES * _count_values(pair, modules, passes, cached_layers)
    with new_folder(output, size_bytes=size_bytes, remedy="Free disk, or export fewer prompts.") as folder:
        for capture, captures, cache in (
            (pair.float32_golden, "hf_fp32", "fp32_kv.pt"),
            (pair.golden, "hf_bf16", "hf_kv.pt"),
        ):
            writer = _Writer(
                folder=folder, capture=capture, is_real=pair.inputs.attention_mask.bool(), passes=passes
            )
            for entry, module in _modules_of(capture, modules):
                writer.write_module(entry, captures=captures, module=module)
            writer.write_metadata(captures)
            if cached_layers:
                writer.write_caches(cache, cached_layers)
    written = _modules_of(pair.golden, modules)
    return ReferenceExport(
        directory=output,
        passes=passes,
        layers=tuple(sorted({entry.layer for entry, _ in written if entry.layer is not None})),
        modules=tuple(module for _, module in written),
        cached_layers=cached_layers,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Writer:
    """The files of one golden."""

    folder: Path
    capture: Capture
    is_real: torch.Tensor  # bool [B,S], True on tokens that are no padding
    passes: tuple[tuple[ReferencePass, ...], ...]  # passes of each prompt

    def write_module(self, entry: Entry, *, captures: str, module: str) -> None:
        """Write a module's value [B,S,F] in every pass of every prompt."""
        values = self.capture.read_entry(entry)
        for prompt, pass_, folder in self._pass_folders(captures):
            tokens = values[prompt, self.is_real[prompt]][: pass_.num_tokens]
            (folder / module).mkdir(parents=True)
            # Cloned, or the whole row's memory would be saved.
            torch.save(tokens[None].clone(), folder / module / "rank0.pt")

    def write_metadata(self, captures: str) -> None:
        """Write each pass's requests and positions."""
        for _, pass_, folder in self._pass_folders(captures):
            meta = {"req_ids": [_REQUEST], "positions": list(range(pass_.num_tokens)), "dp_rank": 0}
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{pass_}_meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")

    def write_caches(self, file: str, layers: tuple[int, ...]) -> None:
        """Write the keys and values of each prompt."""
        for prompt in range(len(self.passes)):
            caches = {f"layers.{layer}.self_attn": self._read_cache(layer, prompt) for layer in layers}
            folder = self._prompt_folder(prompt) / "kv_analysis"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(caches, folder / file)

    def _read_cache(self, layer: int, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a prompt's keys and values in a layer, float32 [1,K,S,D]."""
        keys, values = (self.capture.read(layer, site) for site in _CACHED_SITES)
        is_real = self.is_real[prompt]
        own_keys = keys[prompt][:, is_real]
        own_values = values[prompt, is_real].unflatten(-1, (len(own_keys), -1)).transpose(0, 1)
        return own_keys[None].float().contiguous(), own_values[None].float().contiguous()

    def _pass_folders(self, captures: str) -> Iterator[tuple[int, ReferencePass, Path]]:
        """Yield the prompt, the pass and the folder of every pass."""
        for prompt, passes in enumerate(self.passes):
            for pass_ in passes:
                yield (
                    prompt,
                    pass_,
                    self._prompt_folder(prompt) / "tensor_compare" / captures / "dp0" / str(pass_),
                )

    def _prompt_folder(self, prompt: int) -> Path:
        return self.folder / "prompt_analysis" / f"prompt_{prompt}"


def _passes_of(num_tokens: int, num_decoded: int) -> tuple[ReferencePass, ...]:
    """Return the passes of a row: its prompt, then one for each decoded token."""
    lengths = range(num_tokens - num_decoded, num_tokens + 1)
    return tuple(
        ReferencePass(num_tokens=length, is_prefill=number == 0) for number, length in enumerate(lengths)
    )


def _refuse_unservable_rows(pair: GoldenPair, num_decoded: int) -> None:
    for row, positions in enumerate(pair.inputs.row_positions()):
        if positions[0] != 0:
            raise UsageError(
                f"row {row} of {pair.golden.directory} begins at position {positions[0]}",
                expected="rows that begin at position 0, as an engine's prompts do",
                next_step="Make both goldens with --prompts-file or --input-ids.",
            )
        if len(positions) <= num_decoded:
            raise UsageError(
                f"--decode {num_decoded} leaves no prompt of row {row}",
                found=f"{len(positions)} tokens",
                next_step="Decode fewer tokens.",
            )


def _modules_of(capture: Capture, modules: SiteModules) -> list[tuple[Entry, str]]:
    """Return the tensors of a golden that are modules' first outputs, and the modules."""
    found = ((entry, modules.find(entry.site, entry.layer)) for entry in capture.manifest.entries)
    return [(entry, module) for entry, module in found if module is not None]


def _cached_layers(golden: Capture) -> tuple[int, ...]:
    """Return the layers of which keys and values are held, ascending."""
    return tuple(layer for layer in golden.layers if set(_CACHED_SITES) <= set(golden.sites(layer)))


def _count_values(
    pair: GoldenPair,
    modules: SiteModules,
    passes: tuple[tuple[ReferencePass, ...], ...],
    cached_layers: tuple[int, ...],
) -> int:
    """Count the values that will be written of one golden."""
    num_places = prod(pair.inputs.batch_shape)  # padding included
    num_written = sum(pass_.num_tokens for of_prompt in passes for pass_ in of_prompt)
    caches = [pair.golden.entry(layer, site) for layer in cached_layers for site in _CACHED_SITES]
    num_channels = sum(prod(entry.shape) for entry, _ in _modules_of(pair.golden, modules)) // num_places
    num_cached = sum(prod(entry.shape) for entry in caches if entry is not None) // num_places
    return num_channels * num_written + num_cached * pair.inputs.num_tokens
