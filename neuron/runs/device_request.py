"""DeviceRequest: a device run before it starts; GoldenInputs: the values that it takes from a golden, checked before.

B batch, S sequence, H hidden, K kv heads, D head_dim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from minimax_tools.capture.further import FurtherPlace
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import IncomparableError, UsageError, list_names
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import Mode, Run
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.provenance import ModelFingerprint
from minimax_tools.stored_dtype import dtype_name
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.prompts import build_inputs
from neuron.builtin.layer import KeyValues
from neuron.runs.layer_run import LayerRequest, LayerRun
from neuron.runs.port_setup import PortSetup

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
        """Check that the golden is of this model and dtype, and holds all values that the run needs."""
        refuse_other_model(self.golden, model)
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
        """Read a layer's input [B,S,H] to the CPU."""
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


def refuse_other_model(golden: Capture, model: ModelFingerprint) -> None:
    """Refuse a golden of another model than a run's, and one that was changed after `mm2-gpu certify` certified it."""
    golden.refuse_void_certificate()
    differences = golden.description.provenance.model.differences(model)
    if differences:
        raise IncomparableError(
            f"the golden {golden.directory} is of another model than this run",
            found="; ".join(differences),
            next_step="Give --model the checkpoint that the golden was captured from, or a copy of it.",
        )


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
    """Read the golden's prompts, rows of token ids; without a golden, build those that `request` asks for."""
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


_GIVE_GOLDEN = "Give --golden DIR; mm2-gpu extract-all makes one."


# Puts right values at the border of a request, given a function that runs the layer.
StageFeed = Callable[[LayerRequest, Callable[[LayerRequest], LayerRun]], LayerRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequest(PortSetup):
    """A device run before it starts.

    Raises:
        UsageError: The options contradict each other, or the run needs a golden.
    """

    folder: Path  # the checkpoint
    run: Run  # the layers, the sites to record, and the way each layer gets its input
    golden: Capture | None = None  # source of the layers' inputs; None for tokens or random numbers
    random_input: bool = False  # whether the first layer's input is random
    seed: int = 0  # seed of the random input
    checks_capture: bool = False  # whether to run each layer again with nothing recorded, and compare
    profiles: bool = False  # whether to measure time and memory of every layer
    replaced: tuple[Site, ...] = ()  # sites at which right values replace the port's own, by `stage_feed`
    stage_feed: StageFeed | None = None
    max_new_tokens: int = 0  # most tokens to generate after each row, in a run of the whole model; 0 for none
    further: tuple[FurtherPlace, ...] = ()  # further outputs of the port to store beside its sites

    def __post_init__(self) -> None:
        if self.further and self.run.num_decoded:
            raise UsageError(
                "--also and --decode were both given: --also works with one pass per layer, and --decode runs several",
                next_step="Leave one of them out.",
            )
        if self.run.num_decoded >= max(self.inputs.lengths):
            raise UsageError(
                f"of {max(self.inputs.lengths)} tokens {self.run.num_decoded} cannot be decoded",
                expected="at least one token before the first that is decoded",
                next_step="Give --decode fewer tokens.",
            )
        if self.random_input and self.golden is not None:
            raise UsageError(
                "--random-input and --golden were both given: a golden cannot judge a run on random numbers",
                next_step="Use one of them.",
            )
        if self.random_input and self.run.model_sites:
            raise UsageError(
                "--random-input leaves no embedding for a whole-model run to capture",
                next_step="Use --seq-len for random tokens, or mm2-test multi-layer --random-input.",
            )
        if self.golden is None and self.run.mode is Mode.ISOLATED and len(self.run.span) > 1:
            raise UsageError("a sweep gives every layer the golden's own input", next_step=_GIVE_GOLDEN)
        if self.golden is None and self.run.component is not None:
            raise UsageError("a component needs the golden's values at its border", next_step=_GIVE_GOLDEN)

    @property
    def lead_in(self) -> range:
        """The layers before the span, which compute its input from the tokens; empty if the input is given."""
        is_given = self.golden is not None or self.random_input
        return range(0 if is_given else self.run.span.start)

    @property
    def num_layers(self) -> int:
        """The number of layers to run, the lead-in included."""
        return len(self.lead_in) + len(self.run.span)
