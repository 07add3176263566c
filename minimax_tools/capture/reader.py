"""Capture: a capture directory of mm2, opened for reading.

Tensors are read one at a time, and checked against their digests (see `proof`). Of long rows the values of the last
tokens alone may be kept: they show windows, pages and chunks of attention as well as all tokens, and take little disk.
B rows, S columns, n last tokens of each row, D head_dim.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from minimax_tools.capture.further import further_file
from minimax_tools.capture.manifest import INPUTS_NAME, Description, Entry, Manifest
from minimax_tools.capture.mirror import CaptureMirror, address_of, capture_folder
from minimax_tools.capture.passes import (
    CHUNKS_FOLDER,
    GENERATION_NAME,
    PASSES_NAME,
    CachePair,
    Generation,
    LogitsForm,
    ModelPasses,
    cache_file,
)
from minimax_tools.capture.proof import OpenFiles, Proof, name_place
from minimax_tools.capture.source import CaptureSource
from minimax_tools.capture.store import MANIFEST_NAME, floor_file, layer_files, list_captures, twins_file
from minimax_tools.errors import CaptureError, IncomparableError, list_names
from minimax_tools.machine.files import read_ahead
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import Mode
from minimax_tools.model.sites import ModelSite, Site

# Sites that are stored of every token: a layer's input and output, and the keys and values that later tokens read.
_WHOLE_SITES = frozenset((Site.INPUT, Site.OUTPUT, Site.K_ROPE, Site.V_PROJ))
# Sites of which other tokens read every token, and that are not stored so.
MIXED_SITES = frozenset((Site.INPUT_NORM, Site.K_PROJ, Site.K_NORM))
# Tensors by site: of a layer, or of those outside the layers.
_BySite = Mapping[Site, torch.Tensor] | Mapping[ModelSite, torch.Tensor]


class KeptTokens:
    """The last tokens of each row of `inputs`: cut out of tensors, and put back."""

    def __init__(self, inputs: Inputs) -> None:
        is_kept = inputs.is_kept
        self._shape = inputs.batch_shape
        self._count = inputs.last_tokens
        self._rows = torch.arange(inputs.batch_size)[:, None]
        self._columns = is_kept.nonzero()[:, 1].unflatten(0, (inputs.batch_size, self._count))  # [B,n]

    def cut_sites(self, tensors: _BySite) -> dict[Any, torch.Tensor]:
        """Return what is stored of each site: its last tokens, or every token."""
        twins = self.cut_twins(tensors)
        return {site: tensor if site in _WHOLE_SITES else twins[site] for site, tensor in tensors.items()}

    def cut_twins(self, twins: _BySite) -> dict[Any, torch.Tensor]:
        """Return the last tokens of float32 twins by site."""
        return {site: self._cut(twin, has_heads_dim=site.has_heads_dim) for site, twin in twins.items()}

    def cut_floor(self, statistics: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the last tokens of a noise floor's statistics by name; averages over tokens stay."""
        return {name: self._cut(statistic) for name, statistic in statistics.items()}

    def put_back(self, tensor: torch.Tensor, *, has_heads_dim: bool = False) -> torch.Tensor:
        """Return last tokens, [B,n,…] or [B,heads,n,D], at their places among all; zeros elsewhere.

        Any other tensor stays as it is.
        """
        by_token = _tokens_first(tensor, has_heads_dim=has_heads_dim)
        if by_token is None or by_token.shape[:2] != (self._shape[0], self._count):
            return tensor
        # Zeros take no memory until they are written to.
        whole = by_token.new_zeros((*self._shape, *by_token.shape[2:]))
        whole[self._rows, self._columns] = by_token
        return whole.transpose(1, 2) if has_heads_dim else whole

    def whole_shape(self, shape: tuple[int, ...], *, has_heads_dim: bool) -> tuple[int, ...]:
        """Return the shape of a stored tensor once it is put back."""
        dim = 2 if has_heads_dim else 1
        return (*shape[:dim], self._shape[1], *shape[dim + 1 :])

    def _cut(self, tensor: torch.Tensor, *, has_heads_dim: bool = False) -> torch.Tensor:
        """Return the last tokens of [B,S,…] or [B,heads,S,D]; a tensor of another shape is left for the judge."""
        by_token = _tokens_first(tensor, has_heads_dim=has_heads_dim)
        if by_token is None or by_token.shape[:2] != self._shape:
            return tensor
        kept = by_token[self._rows, self._columns]
        return kept.transpose(1, 2) if has_heads_dim else kept


def refuse_last_tokens(count: int, *, directory: Path | str) -> None:
    """Refuse a capture that keeps the last `count` tokens of each row, unless that is 0 for all.

    Raises:
        IncomparableError: It does.
    """
    if count:
        raise IncomparableError(
            f"{directory} keeps the last {count} tokens of each row alone",
            expected="a golden of every token, for whole ports, prompts and exports",
            next_step="Make one without --last-tokens; on this one run layers alone, as mm2-test sweep does.",
        )


def _tokens_first(tensor: torch.Tensor, *, has_heads_dim: bool) -> torch.Tensor | None:
    """Return a tensor as [B,tokens,…]; None if it has too few dims."""
    if tensor.ndim < 2 + has_heads_dim:
        return None
    return tensor.transpose(1, 2) if has_heads_dim else tensor


class Capture(CaptureSource):
    """A capture directory of mm2, opened for reading; `CaptureSource` describes its methods."""

    digest_note = ""  # everything stored has a digest

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.is_complete = manifest.is_complete
        self.certificate = manifest.certificate
        self.observed_dtypes = manifest.observed_dtypes
        self.held_weights = manifest.held_weights
        # A whole port may show some of its layers, or none.
        self.may_omit_inputs = PASSES_NAME in manifest.text_digests
        self._manifest = manifest
        self._entries = {(entry.layer, entry.site): entry for entry in manifest.entries}
        mirror = CaptureMirror.find(directory, manifest)
        self._files = OpenFiles(directory, hold=None if mirror is None else mirror.hold)
        self._proof = Proof(directory, manifest, self._files)
        self._golden: CaptureSource | None = None  # None unless it is read beside one

    @classmethod
    def open(cls, directory: Path | str) -> Capture:
        """Open a capture directory, or by a text such as `s3://bucket/golden` the capture at a remote address."""
        folder = capture_folder(directory)
        if not (folder / MANIFEST_NAME).exists():
            _refuse_parent(folder)
        return cls(folder, Manifest.read(folder))

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def known_description(self) -> Description:
        return self.description

    @property
    def description(self) -> Description:
        made = self._manifest.description
        return replace(made, expert_tokens=None) if self.is_natural else made

    def of_whole_ports(self) -> Capture:
        """Return the capture as whole ports are judged by it: of every token, as a model computes it from tokens alone.

        Raises:
            IncomparableError: It holds the last tokens of each row alone.
        """
        refuse_last_tokens(self.description.last_tokens, directory=self.directory)
        return self.natural()

    def natural(self) -> Capture:
        if self.description.expert_tokens is None:
            return self
        view = copy.copy(self)
        view.is_natural = True
        return view

    @property
    def layers(self) -> tuple[int, ...]:
        return self._manifest.complete_layers

    @property
    def has_floor(self) -> bool:
        """True if the noise floor was measured."""
        return self.description.noise_floor != "off"

    @property
    def has_void_certificate(self) -> bool:
        return self.certificate is not None and not self._proof.is_certified

    def refuse_void_certificate(self) -> None:
        if self.has_void_certificate:
            raise IncomparableError(
                f"{self._proof.owner} was changed after it was certified: its certificate speaks of other tensors than "
                "its manifest lists",
                next_step=f"{self._proof.next_step} If you changed it on purpose: mm2-gpu certify --golden "
                f"{address_of(self.directory)}.",
            )

    def read_ahead(self, layer: int) -> None:
        read_ahead(layer_files(self.directory, layer))

    def beside(self, golden: CaptureSource) -> Capture:
        view = copy.copy(self)
        view._golden = golden
        return view

    def proving_beside(self) -> AbstractContextManager[None]:
        return self._proof.beside()

    def sites(self, layer: int) -> tuple[Site, ...]:
        return tuple(site for site in Site if self.entry(layer, site) is not None)

    def model_sites(self) -> tuple[ModelSite, ...]:
        return tuple(site for site in ModelSite if (None, str(site)) in self._entries)

    def not_exposed(self, layer: int) -> tuple[Site, ...]:
        return self.manifest.not_exposed.get(layer, ())

    def unreached_experts(self, layer: int) -> tuple[int, ...] | None:
        stored = self._manifest.unreached_experts.get(layer)
        if not self.is_natural or stored is None:
            return stored
        # Stored is what the expert tokens leave.
        choice, logits = (self.entry(layer, site) for site in (Site.ROUTER_EXPERTS, Site.ROUTER_LOGITS))
        if choice is None or logits is None:
            return None
        return self.read_inputs().unreached_experts(self.read_entry(choice), num_experts=logits.shape[-1])

    def num_calls(self, layer: int) -> Mapping[Site, int]:
        return self.manifest.num_calls.get(layer, {})

    def further(self, layer: int) -> tuple[str, ...]:
        return self._manifest.names_in(further_file(layer))

    def read_further(self, layer: int, name: str) -> torch.Tensor:
        place = f"the further output {name} of layer {layer}"
        tensor = self._read_optional(further_file(layer), name, place=place)
        if tensor is None:
            raise CaptureError(
                f"{self.directory} does not hold {place}",
                expected=", ".join(self.further(layer)) or None,
                next_step="Run the port again with --also NAME=PLACE.",
            )
        return tensor

    def entry(self, layer: int | None, site: Site | ModelSite) -> Entry | None:
        entry = self._entries.get((layer, str(site)))
        if entry is not None or layer is None or site is not Site.INPUT:
            return entry
        # A chained run stores the output of the layer before, not the equal input.
        is_chained = self.description.run.mode is Mode.CHAINED
        return self._entries.get((layer - 1, str(Site.OUTPUT))) if is_chained else None

    def read(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor:
        entry = self.entry(layer, site)
        if entry is None:
            raise CaptureError(
                f"{self.directory} holds no {name_place(site, layer)}",
                next_step="Only whole-model runs capture it."
                if layer is None
                else "Capture it with --sites all, or compare fewer layers.",
            )
        tensor, golden = self.read_entry(entry), self._golden
        if golden is None or layer is None or not site.has_heads_dim or site not in golden.sites(layer):
            return tensor
        return _nearer_heads(tensor, lambda: golden.read(layer, site))

    def read_twin(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor | None:
        if self.description.noise_floor != "full":
            return None
        place, file = f"the float32 twin of {name_place(site, layer)}", twins_file(layer)
        twin = self._read_optional(file, str(site), place=place)
        # A layer's input needs no twin: the float32 twin is given the golden's.
        entry = None if site is Site.INPUT else self.entry(layer, site)
        if twin is None and entry is not None and site is not ModelSite.EMBEDDING:
            # A floor kept whole has a twin for every entry, listed or not. Only the embedding has none: the float32
            # twin is given the golden's.
            raise self._absent(file, str(site), layer=entry.layer)
        if twin is None:
            return None

        # The golden's tensor and the mask, read only if the twin is not finite everywhere.
        def read_golden() -> tuple[torch.Tensor | None, torch.Tensor]:
            return None if entry is None else self.read_entry(entry), self.read_attention_mask()

        twin = self._put_back(twin, has_heads_dim=site.has_heads_dim)
        shape = None if entry is None else self._shape(entry, site)
        self._proof.check_twin(site, twin, place=place, file=file, shape=shape, read_golden=read_golden)
        return twin

    def read_floor(self, layer: int | None, name: str) -> torch.Tensor | None:
        if not self.has_floor:
            return None
        place = name_place(f"the floor's {name}", layer)
        statistic = self._read_optional(floor_file(layer), name, place=place)
        return None if statistic is None else self._put_back(statistic)

    def read_inputs(self) -> Inputs:
        inputs = Inputs(
            input_ids=self._read_input("input_ids"),
            attention_mask=self._read_input("attention_mask"),
            position_ids=self._read_input("position_ids"),
            source=self.description.input_source,
            is_quick=self.description.is_quick,
            expert_tokens=self._manifest.description.expert_tokens,
            last_tokens=self.description.last_tokens,
        )
        found, expected = inputs.digest(), self.description.inputs_digest
        if found != expected:
            raise self._proof.refuse(
                f"was damaged or changed after it was written: {INPUTS_NAME} does not match its manifest",
                expected=f"ids, mask and positions of sha256 {expected[:16]}…",
                found=f"sha256 {found[:16]}…",
            )
        return inputs.natural() if self.is_natural else inputs

    def read_input_ids(self) -> torch.Tensor:
        return self.read_inputs().input_ids

    def read_attention_mask(self) -> torch.Tensor:
        return self.read_inputs().attention_mask

    def read_kept_mask(self) -> torch.Tensor:
        return self.read_inputs().is_kept

    def read_hidden_states(self) -> torch.Tensor | None:
        return self._read_optional(INPUTS_NAME, "hidden_states", place="hidden_states")

    def read_generation(self) -> Generation | None:
        self._proof.check_text(GENERATION_NAME)
        return Generation.read(self.directory)

    def read_passes(self) -> ModelPasses | None:
        return self._passes

    def read_chunks(self) -> Capture | None:
        folder = self.directory / CHUNKS_FOLDER
        return Capture.open(folder) if (folder / MANIFEST_NAME).exists() else None

    def read_cache(self, layer: int) -> CachePair | None:
        if self._passes is None or layer not in self._passes.cached_layers:
            return None
        keys, values = (
            self._read_optional(cache_file(layer), name, place=f"the cached {name} of layer {layer}")
            for name in ("keys", "values")
        )
        return None if keys is None or values is None else (keys, values)

    def held_tokens(self, site: ModelSite) -> torch.Tensor | None:
        if site is not ModelSite.LOGITS or not self._has_last_logits:
            return None
        assert self._passes is not None, "only a whole port returns logits of last tokens"
        return self._passes.ends_pass(self.read_attention_mask())

    @cached_property
    def _passes(self) -> ModelPasses | None:
        """The passes of a whole port's run; kept, because every layer's judgement asks for them."""
        self._proof.check_text(PASSES_NAME)
        return ModelPasses.read(self.directory)

    @property
    def _has_last_logits(self) -> bool:
        return self._passes is not None and self._passes.logits is LogitsForm.LAST

    def read_entry(self, entry: Entry) -> torch.Tensor:
        tensor = self._load(entry.file, entry.site)
        if tensor is None:
            raise self._absent(entry.file, entry.site)
        self._proof.check_entry(entry, tensor)
        site = ModelSite(entry.site) if entry.layer is None else Site(entry.site)
        return self._put_back(tensor, has_heads_dim=site.has_heads_dim)

    def _put_back(self, tensor: torch.Tensor, *, has_heads_dim: bool = False) -> torch.Tensor:
        return self._kept.put_back(tensor, has_heads_dim=has_heads_dim) if self.keeps_last_tokens else tensor

    @cached_property
    def _kept(self) -> KeptTokens:
        return KeptTokens(self.read_inputs())

    def _shape(self, entry: Entry, site: Site | ModelSite) -> tuple[int, ...]:
        """Return the shape of an entry's tensor as it is read."""
        is_cut = self.keeps_last_tokens
        return (
            self._kept.whole_shape(entry.shape, has_heads_dim=site.has_heads_dim) if is_cut else entry.shape
        )

    def _read_input(self, name: str) -> torch.Tensor:
        tensor = self._read_optional(INPUTS_NAME, name, place=name)
        if tensor is None:
            raise self._absent(INPUTS_NAME, name)
        return tensor

    def _read_optional(self, file: str, name: str, *, place: str) -> torch.Tensor | None:
        """Read a tensor that has no entry, and check it by its digest; None if neither file nor manifest has it.

        `place` is its name in messages.
        """
        tensor = self._load(file, name)
        self._proof.check_tensor(file, name, tensor, place=place)
        return tensor

    def _absent(self, file: str, name: str, *, layer: int | None = None) -> CaptureError:
        of_layer = "" if layer is None else f" of layer {layer}"
        return self._proof.refuse(f"is damaged: {file} holds no tensor {name!r}{of_layer}")

    def _load(self, file: str, name: str) -> torch.Tensor | None:
        try:
            return self._files.read(file, name)
        except (OSError, SafetensorError) as error:
            raise self._proof.refuse(f"is damaged: {file} cannot be read", found=str(error)) from error


def _nearer_heads(tensor: torch.Tensor, read_golden: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return a tensor with as many heads as tokens as [B,heads,S,D]: the reading that is nearer to the golden's."""
    if tensor.ndim != 4 or tensor.shape[1] != tensor.shape[2]:
        return tensor
    golden, exchanged = read_golden(), tensor.transpose(1, 2)
    if golden.shape != tensor.shape:
        return tensor
    distances = [
        float((reading.double() - golden.double()).nan_to_num().norm()) for reading in (tensor, exchanged)
    ]
    return exchanged.contiguous() if distances[1] < distances[0] else tensor


def _refuse_parent(folder: Path) -> None:
    """Raise if a folder that is no capture holds captures below it, and name them, newest first."""
    below = [str(capture) for capture in list_captures(folder, *folder.glob("*"))]
    if below:
        raise CaptureError(
            f"no capture at {folder}",
            expected=MANIFEST_NAME,
            found=f"captures below it: {list_names(below, most=3)}",
            next_step="Name one of them.",
        )
