"""Capture: a capture directory of mm2, opened for reading.

Tensors are read one at a time, and checked against their digests (see `proof`) before they are returned.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from minimax_tools.capture.generation import GENERATION_NAME, Generation
from minimax_tools.capture.manifest import INPUTS_NAME, Description, Entry, Manifest
from minimax_tools.capture.proof import Proof, file_state
from minimax_tools.capture.source import CaptureSource
from minimax_tools.capture.store import GOLDEN_SIDE
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import Mode
from minimax_tools.model.sites import ModelSite, Site

# A layer has three files (sites, twins, floor), the model outside its layers too, and the inputs one.
_MOST_OPEN = 8
# Copying a tensor of this size takes less time than mapping its file again.
_SMALL_BYTES = 2**20


class Capture(CaptureSource):
    """A capture directory of mm2, opened for reading."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.is_complete = manifest.is_complete
        self.certificate = manifest.certificate
        self.observed_dtypes = manifest.observed_dtypes
        self.digest_note = _word_missing_digests(manifest)
        self._manifest = manifest
        self._entries = {(entry.layer, entry.site): entry for entry in manifest.entries}
        self._proof = Proof(directory, manifest)
        self._files = _OpenFiles(directory)

    @classmethod
    def open(cls, directory: Path) -> Capture:
        """Open a capture directory.

        Raises:
            CaptureError: There is no capture, or it is damaged.
        """
        return cls(directory, Manifest.read(directory))

    @property
    def manifest(self) -> Manifest:
        """The capture's manifest."""
        return self._manifest

    @property
    def known_description(self) -> Description:
        """The run that made the capture."""
        return self.description

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers stored whole, ascending."""
        return self._manifest.complete_layers

    @property
    def has_floor(self) -> bool:
        """True if the noise floor was measured."""
        return self.description.noise_floor != "off"

    @property
    def has_void_certificate(self) -> bool:
        """True if the certificate belongs to other tensors than the manifest lists."""
        return self.certificate is not None and not self._proof.is_certified

    def refuse_void_certificate(self) -> None:
        """Raise if the manifest was changed after the capture was certified."""
        if self.has_void_certificate:
            raise IncomparableError(
                f"{self._proof.owner} was changed after it was certified: its certificate speaks of other tensors than "
                "its manifest lists",
                next_step=f"{self._proof.next_step} If you changed it on purpose: mm2-gpu certify --golden "
                f"{self.directory}.",
            )

    def proving_beside(self) -> AbstractContextManager[None]:
        """Check digests on a thread while a block runs; the block ends when all that was read in it is checked."""
        return self._proof.beside()

    def sites(self, layer: int) -> tuple[Site, ...]:
        """Return the sites stored for a layer, in execution order."""
        return tuple(site for site in Site if self.entry(layer, site) is not None)

    def model_sites(self) -> tuple[ModelSite, ...]:
        """Return the sites stored outside the layers."""
        return tuple(site for site in ModelSite if (None, str(site)) in self._entries)

    def not_exposed(self, layer: int) -> tuple[Site, ...]:
        """Return the sites that the run wanted and the port does not expose."""
        return self.manifest.not_exposed.get(layer, ())

    def entry(self, layer: int | None, site: Site | ModelSite) -> Entry | None:
        """Return the entry that holds a site; the input of a chained layer may be the output of the layer before."""
        found = self._entries.get((layer, str(site)))
        if found is not None or layer is None or site is not Site.INPUT:
            return found
        is_chained = self.description.run.mode is Mode.CHAINED
        return self._entries.get((layer - 1, str(Site.OUTPUT))) if is_chained else None

    def read(self, layer: int, site: Site) -> torch.Tensor:
        """Read a site's tensor to the CPU, in its stored dtype."""
        entry = self.entry(layer, site)
        if entry is None:
            raise CaptureError(
                f"{self.directory} holds no {site} of layer {layer}",
                next_step="Capture it with --sites all, or compare fewer layers.",
            )
        return self.read_entry(entry)

    def read_model(self, site: ModelSite) -> torch.Tensor:
        """Read the tensor of a site outside the layers."""
        entry = self.entry(None, site)
        if entry is None:
            raise CaptureError(
                f"{self.directory} holds no {site}", next_step="Only whole-model runs capture it."
            )
        return self.read_entry(entry)

    def read_twin(self, layer: int, site: Site) -> torch.Tensor | None:
        """Read the float32 twin of a site; None if the floor was not kept whole."""
        place = f"the float32 twin of {site} of layer {layer}"
        entry = None if site is Site.INPUT else self.entry(layer, site)
        return self._read_twin(f"layer_{layer}.fp32.safetensors", site, entry, place=place)

    def read_model_twin(self, site: ModelSite) -> torch.Tensor | None:
        """Read the float32 twin of a site outside the layers; None if there is none."""
        entry = self.entry(None, site)
        return self._read_twin("model.fp32.safetensors", site, entry, place=f"the float32 twin of {site}")

    def read_floor(self, layer: int, name: str) -> torch.Tensor | None:
        """Read a statistic of a layer's floor; None if the floor was not measured."""
        if not self.has_floor:
            return None
        file = f"layer_{layer}.floor.safetensors"
        return self._read_optional(file, name, place=f"the floor's {name} of layer {layer}")

    def read_model_floor(self, name: str) -> torch.Tensor | None:
        """Read a statistic of the floor outside the layers; None if the floor was not measured."""
        if not self.has_floor:
            return None
        return self._read_optional("model.floor.safetensors", name, place=f"the floor's {name}")

    def read_inputs(self) -> Inputs:
        """Read the token rows of the run, and check their digest."""
        inputs = Inputs(
            input_ids=self._read_input("input_ids"),
            attention_mask=self._read_input("attention_mask"),
            position_ids=self._read_input("position_ids"),
            source=self.description.input_source,
        )
        found, expected = inputs.digest(), self.description.inputs_digest
        if found != expected:
            raise self._proof.refuse(
                f"was damaged or changed after it was written: {INPUTS_NAME} does not match its manifest",
                expected=f"ids, mask and positions of sha256 {expected[:16]}…",
                found=f"sha256 {found[:16]}…",
            )
        return inputs

    def read_input_ids(self) -> torch.Tensor:
        """Read the token ids, int64 [B,S]."""
        return self.read_inputs().input_ids

    def read_attention_mask(self) -> torch.Tensor:
        """Read the mask, int64 [B,S], 1 on real tokens."""
        return self.read_inputs().attention_mask

    def read_hidden_states(self) -> torch.Tensor | None:
        """Read the hidden states [B,S,H] given to the first layer; None if they were made of the tokens."""
        return self._read_optional(INPUTS_NAME, "hidden_states", place="hidden_states")

    def read_generation(self) -> Generation | None:
        """Read the tokens generated after the prompts; None if there are none."""
        path = self.directory / GENERATION_NAME
        self._proof.check_text(GENERATION_NAME, path.read_bytes() if path.exists() else None)
        return Generation.read(self.directory)

    def read_entry(self, entry: Entry) -> torch.Tensor:
        """Read the tensor of an entry of the manifest."""
        tensor = self._fetch(entry.file, entry.site)
        if tensor is None:
            raise self._absent(entry.file, entry.site)
        self._proof.check_entry(entry, tensor)
        return tensor

    def _read_twin(
        self, file: str, site: Site | ModelSite, entry: Entry | None, *, place: str
    ) -> torch.Tensor | None:
        if self.description.noise_floor != "full":
            return None
        twin = self._read_optional(file, str(site), place=place)
        if twin is None and entry is not None and site is not ModelSite.EMBEDDING:
            # An older manifest does not list twins, yet a whole floor has one for every entry.
            raise self._absent(file, str(site), layer=entry.layer)
        if twin is not None:
            self._proof.check_twin(
                site,
                twin,
                place=place,
                file=file,
                golden=entry,
                read_golden=lambda: (
                    None if entry is None else self.read_entry(entry),
                    self.read_attention_mask(),
                ),
            )
        return twin

    def _read_input(self, name: str) -> torch.Tensor:
        tensor = self._read_optional(INPUTS_NAME, name, place=name)
        if tensor is None:
            raise self._absent(INPUTS_NAME, name)
        return tensor

    def _read_optional(self, file: str, name: str, *, place: str) -> torch.Tensor | None:
        """Read a tensor that has no entry; None if its file does not hold it, and need not."""
        tensor = self._fetch(file, name)
        if tensor is None:
            self._proof.check_absent(file, name, place=place)
        else:
            self._proof.check_tensor(file, name, tensor, place=place)
        return tensor

    def _absent(self, file: str, name: str, *, layer: int | None = None) -> CaptureError:
        where = "" if layer is None else f" of layer {layer}"
        return self._proof.refuse(f"is damaged: {file} holds no tensor {name!r}{where}")

    def _fetch(self, file: str, name: str) -> torch.Tensor | None:
        try:
            return self._files.read(file, name)
        except (OSError, SafetensorError) as error:
            raise self._proof.refuse(f"is damaged: {file} cannot be read", found=str(error)) from error


def _word_missing_digests(manifest: Manifest) -> str:
    """Name what an older mm2 stored without digests; empty if everything has one."""
    if manifest.digests is not None:
        return ""
    is_golden = manifest.description.side == GOLDEN_SIDE
    has_floor = manifest.description.noise_floor != "off"
    parts = "twins and floors" if is_golden and has_floor else "inputs and generated tokens"
    return f"digests of {parts}: none, made by an older mm2"


class _OpenFiles:
    """The last safetensors files read from a directory, each kept open until the file is replaced."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._opened: OrderedDict[str, tuple[tuple[int, ...], Any, frozenset[str]]] = OrderedDict()

    def read(self, file: str, name: str) -> torch.Tensor | None:
        """Read a tensor; None if the file holds none of that name.

        Raises:
            OSError: There is no such file, or it cannot be read.
            SafetensorError: It is damaged.
        """
        path = self._directory / file
        state = file_state(path)
        kept = self._opened.pop(file, None)
        if kept is None or kept[0] != state:
            tensors: Any = safe_open(path, framework="pt")
            kept = state, tensors, frozenset(tensors.keys())
        self._opened[file] = kept
        if len(self._opened) > _MOST_OPEN:
            self._opened.popitem(last=False)
        _, opened, names = kept
        if name not in names:
            return None
        tensor: torch.Tensor = opened.get_tensor(name)
        if tensor.nbytes <= _SMALL_BYTES:
            return tensor.clone()
        # Two reads from one mapping share memory, which a caller may change.
        anew: Any = safe_open(path, framework="pt")
        return cast("torch.Tensor", anew.get_tensor(name))
