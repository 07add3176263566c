"""GoldenInputs: the values that a run takes from a golden, checked before the run's first layer.

B batch, S sequence, H hidden, K kv heads, D head_dim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from minimax_tools.capture.digests import dtype_name
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import IncomparableError, UsageError, list_names
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import Mode, Run
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.provenance import ModelFingerprint
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.prompts import build_inputs
from neuron.builtin.layer import KeyValues

_NUM_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenInputs:
    """The values that a run takes from a golden."""

    golden: Capture
    run: Run

    @property
    def description(self) -> str:
        """The golden in words."""
        return f"golden {self.golden.description.run.name}"

    def verify(self, *, model: ModelFingerprint, dtype: torch.dtype) -> None:
        """Check that the golden is of this model and dtype, and holds all values that the run needs.

        Raises:
            IncomparableError: The golden is of another model or dtype, or lacks a layer or a site.
        """
        # Raises IncomparableError if the golden was changed after `mm2-gpu certify` certified it.
        self.golden.refuse_void_certificate()
        self._refuse_other_model(model)
        self._refuse_other_dtype(dtype_name(dtype))
        missing = [f"layer {layer}" for layer in self.run.span if layer not in self.golden.layers]
        missing += [
            f"{site} of layer {layer}"
            for layer, site in self.needed()
            if layer in self.golden.layers and self.golden.entry(layer, site) is None
        ]
        if missing:
            raise IncomparableError(
                f"the golden {self.golden.directory} lacks {list_names(missing, most=_NUM_NAMES_SHOWN)}",
                found=_word_layers_held(self.golden),
                next_step="Capture it with mm2-gpu extract-all --sites all, or choose layers that it holds.",
            )

    def needed(self) -> tuple[tuple[int, Site], ...]:
        """List every layer and site whose value the run takes from the golden."""
        if self.run.mode is Mode.ISOLATED:
            past_sites = (Site.V_PROJ, Site.K_ROPE) if self.run.num_decoded else ()
            sites = (Site.INPUT, *self._border_sites(), *past_sites)
            return tuple((layer, site) for layer in self.run.span for site in sites)
        if self.run.model_sites:
            # A run of the whole model begins with the tokens.
            return ()
        return ((self.run.span.start, Site.INPUT),)

    def digest(self) -> str:
        """Return the sha256 over the digests of all values needed: a run resumes only with the same golden."""
        return digest_sites(self.golden, self.needed())

    def layer_input(self, layer: int) -> torch.Tensor:
        """Read a layer's input [B,S,H] to the CPU.

        Raises:
            CaptureError: The golden does not hold it, or its file is damaged.
        """
        return self.golden.read(layer, Site.INPUT)

    def border(self, layer: int) -> dict[Site, torch.Tensor]:
        """Read the values at the border of the run's component, such as its input, to the CPU; {} for a whole layer."""
        return {site: self.golden.read(layer, site) for site in self._border_sites()}

    def past(self, layer: int) -> KeyValues | None:
        """Read rotated keys and values of all tokens, [B,K,S,D] each, to the CPU.

        None where no token is decoded, and in a chained run, which decodes from its own keys and values.
        """
        if not self.run.num_decoded or self.run.mode is not Mode.ISOLATED:
            return None
        keys = self.golden.read(layer, Site.K_ROPE)
        values = self.golden.read(layer, Site.V_PROJ).unflatten(-1, (keys.shape[1], keys.shape[3]))
        return keys, values.transpose(1, 2)

    def _refuse_other_model(self, model: ModelFingerprint) -> None:
        differences = self.golden.description.provenance.model.differences(model)
        if differences:
            raise IncomparableError(
                f"the golden {self.golden.directory} is of another model than this run",
                found="; ".join(differences),
                next_step="Give --model the checkpoint that the golden was captured from, or a copy of it.",
            )

    def _refuse_other_dtype(self, dtype: str) -> None:
        golden_dtype = self.golden.description.provenance.dtypes.get("weights")
        if golden_dtype != dtype:
            raise IncomparableError(
                f"the golden {self.golden.directory} computed in another dtype than this run",
                expected=str(golden_dtype),
                found=dtype,
                next_step=f"Run with --dtype {golden_dtype}, or capture a golden in {dtype}.",
            )

    def _border_sites(self) -> tuple[Site, ...]:
        """Return the sites at which a component's run takes golden values inside the layer; () for a whole layer."""
        return tuple(site for site in self.run.fed_sites if site is not Site.INPUT)


def digest_sites(golden: Capture, sites: Iterable[tuple[int, Site]], *, header: str = "") -> str:
    """Return the sha256 over the digests of a golden's values at (layer, site), after `header`, a text to include."""
    digest = hashlib.sha256(header.encode())
    for layer, site in sites:
        entry = golden.entry(layer, site)
        digest.update(f"{layer} {site} {entry.sha256 if entry else None}\n".encode())
    return digest.hexdigest()


def _word_layers_held(golden: Capture) -> str:
    layers = f"layers {golden.layers[0]} to {golden.layers[-1]}" if golden.layers else "no layer"
    return f"{layers}, captured with {len(golden.description.run.sites)} sites"


def read_inputs(request: InputRequest, folder: Path, spec: ModelSpec, golden: Capture | None) -> Inputs:
    """Read the golden's prompts, rows of token ids; without a golden, build those that `request` asks for.

    Raises:
        UsageError: A golden was given, and options that choose token rows too.
        CaptureError: The golden's inputs cannot be read.
    """
    if golden is None:
        # Only a golden gives expert tokens their states.
        return build_inputs(request, folder=folder, spec=spec).natural()
    # The seed alone may be given: it serves other random numbers too.
    if request != InputRequest(seed=request.seed):
        raise UsageError(
            "--golden gives the token rows: no other option may choose them",
            next_step="Leave out --prompt, --input-ids, --seq-len and so on, or capture a golden with them.",
        )
    return golden.read_inputs()
