"""Files that vLLM Neuron's accuracy debugger reads: its Hugging Face captures and caches, written from two goldens.

Its tools load the model whole in float32 and in BF16 to make these files. Each prompt has a folder of its own:

    prompt_analysis/prompt_0/
      tensor_compare/hf_fp32, hf_bf16/
        dp0/prefill_s12_0/                    the prompt of 12 tokens; decode_b13_0: the prompt and one decoded token
          model.layers.0.mlp/rank0.pt         the module's first output [1,S,F]
          prefill_s12_0_meta.json             requests, and the position of each token
      kv_analysis/fp32_kv.pt, hf_kv.pt        keys and values [1,K,S,D] in float32, by layer; hf_kv is of BF16

A decoding pass holds the whole sequence so far, and its last token is compared. The tool divides the port's distance
from float32 by BF16's. A port is a chained run, so both goldens must be: float32 twins, each computed from the BF16
golden's input of its layer, will not do.

B prompts, S tokens, F channels, K kv heads, D head_dim.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch

from gpu_reference.certification.trust import refuse_no_golden, refuse_uncertified
from minimax_tools.capture.manifest import Entry
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import IncomparableError, UsageError, list_names
from minimax_tools.machine.files import new_folder
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.stored_dtype import dtype_name

_MAX_NAMED = 4
_AGAIN = "Make both with the same options but --dtype: mm2-gpu extract-all --model DIR …, once with --dtype float32."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenPair:
    """Two goldens that belong together; made by `open_golden_pair`."""

    golden: Capture  # in BF16
    float32_golden: Capture  # of the same model, tokens, layers and sites
    inputs: Inputs  # tokens of both


def open_golden_pair(golden: Path, float32_golden: Path, *, allows_uncertified: bool = False) -> GoldenPair:
    """Open two goldens, and prove from their manifests that they belong together.

    Args:
        golden: Directory of the BF16 golden.
        float32_golden: Directory of the float32 golden.
        allows_uncertified: Whether goldens without a certificate are taken.

    Raises:
        IncomparableError: A golden is not certified, failed a check, or was changed after it was certified; or the two
            are of different models, tokens, layers or sites.
        UsageError: A golden was computed in the wrong dtype.
    """
    pair = Capture.open(golden).of_whole_ports(), Capture.open(float32_golden).of_whole_ports()
    for capture, dtype in zip(pair, (torch.bfloat16, torch.float32), strict=True):
        refuse_no_golden(capture)
        _refuse_dtype(capture, dtype_name(dtype))
        refuse_uncertified(capture, allows_uncertified=allows_uncertified)
    _refuse_strangers(*pair)
    return GoldenPair(golden=pair[0], float32_golden=pair[1], inputs=pair[0].read_inputs())


def _refuse_dtype(capture: Capture, expected: str) -> None:
    found = capture.description.provenance.dtypes.get("weights")
    if found != expected:
        option = "--float32-golden" if expected == "float32" else "--golden"
        raise UsageError(
            f"{option} {capture.directory} was not computed in {expected}",
            expected=expected,
            found=str(found),
            next_step=_AGAIN,
        )


def _refuse_strangers(golden: Capture, float32_golden: Capture) -> None:
    one, other = golden.description, float32_golden.description
    faults = one.provenance.model.differences(other.provenance.model)
    if one.inputs_digest != other.inputs_digest:
        faults.append(f"tokens: {one.input_source} against {other.input_source}")
    held, others_held = (
        {(e.layer, e.site) for e in side.manifest.entries} for side in (golden, float32_golden)
    )
    unpaired = sorted(held ^ others_held, key=str)
    if unpaired:
        names = [site if layer is None else f"{site} of layer {layer}" for layer, site in unpaired]
        faults.append(f"one side alone holds {list_names(names, most=_MAX_NAMED)}")
    if faults:
        raise IncomparableError(
            f"{golden.directory} and {float32_golden.directory} do not belong together",
            found="; ".join(faults),
            next_step=_AGAIN,
        )


_LAYER = "{layer}"

# Sites that no module returns as its first output are not here: residuals, inputs, rotated heads, chosen experts.
_TRANSFORMERS_MODULES: Mapping[Site | ModelSite, str] = MappingProxyType(
    {
        Site.INPUT_NORM: "model.layers.{layer}.input_layernorm",
        Site.Q_PROJ: "model.layers.{layer}.self_attn.q_proj",
        Site.K_PROJ: "model.layers.{layer}.self_attn.k_proj",
        Site.V_PROJ: "model.layers.{layer}.self_attn.v_proj",
        Site.Q_NORM: "model.layers.{layer}.self_attn.q_norm",
        Site.K_NORM: "model.layers.{layer}.self_attn.k_norm",
        Site.ATTN_DELTA: "model.layers.{layer}.self_attn",
        Site.POST_NORM: "model.layers.{layer}.post_attention_layernorm",
        Site.ROUTER_LOGITS: "model.layers.{layer}.mlp.gate",
        Site.MOE_DELTA: "model.layers.{layer}.mlp",
        Site.OUTPUT: "model.layers.{layer}",
        ModelSite.EMBEDDING: "model.embed_tokens",
        ModelSite.FINAL_NORM: "model.norm",
        ModelSite.LOGITS: "lm_head",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteModules:
    """The module of each site that is a module's first output."""

    # Paths of modules, with `{layer}` for the number of the layer
    paths: Mapping[Site | ModelSite, str] = field(default_factory=lambda: _TRANSFORMERS_MODULES)

    @classmethod
    def parse(cls, texts: Iterable[str]) -> SiteModules:
        """Read texts like `moe_delta=model.layers.{layer}.block_sparse_moe`; other sites keep their usual modules.

        Raises:
            UsageError: A text names no such site, or a module that cannot be that site's; or two sites have one module.
        """
        paths = dict(_TRANSFORMERS_MODULES)
        for text in texts:
            name, _, path = (part.strip() for part in text.partition("="))
            site = next((site for site in paths if site == name), None)
            if site is None:
                raise UsageError(
                    f"--module {text}: {name!r} is not the first output of a module",
                    expected="SITE=MODULE with one of " + ", ".join(paths),
                )
            if not _is_path_of(site, path):
                raise UsageError(
                    f"--module {text} names no module of {site}",
                    expected=f"{site}={_TRANSFORMERS_MODULES[site]}, or another module of that kind",
                )
            paths[site] = path
        _refuse_one_path_for_two(paths)
        return cls(paths=paths)

    def find(self, site: str, layer: int | None) -> str | None:
        """Return the module of the site of this name, such as `model.layers.7.mlp`; None if no module returns it.

        `layer` is None outside the layers.
        """
        return next(
            (path.replace(_LAYER, str(layer)) for own, path in self.paths.items() if own == site), None
        )


def _is_path_of(site: Site | ModelSite, path: str) -> bool:
    """Decide whether a path can be a site's module: it has a layer's number exactly if the site has a layer."""
    parts = path.replace(_LAYER, "0").split(".")
    is_path = all(part.isidentifier() or part.isdecimal() for part in parts)
    return is_path and path.count(_LAYER) == (1 if isinstance(site, Site) else 0)


def _refuse_one_path_for_two(paths: Mapping[Site | ModelSite, str]) -> None:
    owners: dict[str, Site | ModelSite] = {}
    for site, path in paths.items():
        first = owners.setdefault(path, site)
        if first is not site:
            raise UsageError(
                f"--module gives {first} and {site} one module",
                found=path,
                next_step="Name another module for one of them.",
            )


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
    return tuple(layer for layer in golden.layers if set(_CACHED_SITES) <= set(golden.sites(layer)))


def _count_values(
    pair: GoldenPair,
    modules: SiteModules,
    passes: tuple[tuple[ReferencePass, ...], ...],
    cached_layers: tuple[int, ...],
) -> int:
    num_places = prod(pair.inputs.batch_shape)  # padding included
    num_written = sum(pass_.num_tokens for of_prompt in passes for pass_ in of_prompt)
    caches = [pair.golden.entry(layer, site) for layer in cached_layers for site in _CACHED_SITES]
    num_channels = sum(prod(entry.shape) for entry, _ in _modules_of(pair.golden, modules)) // num_places
    num_cached = sum(prod(entry.shape) for entry in caches if entry is not None) // num_places
    return num_channels * num_written + num_cached * pair.inputs.num_tokens
