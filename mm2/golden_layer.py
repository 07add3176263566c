"""GoldenLayers: a golden capture with its checkpoint, layer by layer, for a port's own code and tests.

B batch, S sequence, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from compare.sides.golden_weights import CheckpointWeights, GoldenWeights, find_weights
from minimax_tools.capture.mirror import address_of
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.layer_tensors import CheckpointTensors
from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site, parse_site
from minimax_tools.model.span import word_layers
from neuron.devices.weights import WeightLoader
from neuron.ports.hub_names import hub_named
from neuron.ports.target import target_config
from neuron.ports.targets import PortTarget


class GoldenLayers:
    """A golden capture, opened; a context manager, which closes the checkpoint's files.

    Args:
        capture: The golden.
        weights: The checkpoint that it was made from; None if it is not on this machine.
    """

    def __init__(self, capture: Capture, *, weights: CheckpointWeights | None) -> None:
        self.capture = capture
        self.checkpoint = weights
        self.inputs: Inputs = capture.read_inputs()
        self._files = ExitStack()
        self._opened: dict[int, GoldenWeights] = {}

    def __enter__(self) -> GoldenLayers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the checkpoint's files; weights are opened again when they are read."""
        self._opened.clear()
        self._files.close()

    @property
    def directory(self) -> Path:
        """Folder of the golden on this machine."""
        return self.capture.directory

    @property
    def place(self) -> str:
        """The golden as the user named it: its folder, or its address."""
        return address_of(self.directory)

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that the golden holds, ascending."""
        return self.capture.layers

    def layer(self, number: int) -> GoldenLayer:
        """Return a layer of the golden.

        Raises:
            UsageError: The golden does not hold it.
        """
        if number not in self.layers:
            raise UsageError(
                f"the golden {self.place} holds no layer {number}",
                expected=word_layers(self.layers) or "a golden that holds a layer",
                next_step="Choose one of these, or capture more layers: mm2-gpu extract-all.",
            )
        return GoldenLayer(self, number)

    def open_weights(self, number: int) -> GoldenWeights:
        """Open a layer's weights, which are read from the checkpoint at each access.

        Raises:
            CheckpointError: The checkpoint is not on this machine, or cannot be read.
            IncomparableError: It is not the golden's.
        """
        if self.checkpoint is None:
            source = self.capture.description.provenance.model_source
            raise CheckpointError(
                f"the weights of the golden {self.place} are not on this machine",
                expected=f"{source}, or a copy of it",
                next_step="Name the checkpoint: open_golden(DIR, model=DIR), or pytest --mm2-model DIR.",
            )
        if number not in self._opened:
            opened = self.checkpoint.open_layer(number, self.capture)
            self._opened[number] = self._files.enter_context(opened)
        return self._opened[number]

    def __repr__(self) -> str:
        weights = "no weights" if self.checkpoint is None else f"weights of {self.checkpoint.model}"
        return f"GoldenLayers({self.place}, {word_layers(self.layers)}, {weights})"


class GoldenLayer:
    """A layer of a golden: what it was given, what it holds, and what it computed.

    All tensors come on the CPU, in the dtypes that the golden computed in. `number` is the layer's.
    """

    def __init__(self, golden: GoldenLayers, number: int) -> None:
        self.golden = golden
        self.number = number

    @property
    def input(self) -> torch.Tensor:
        """The layer's input, hidden states [B,S,H]."""
        return self.read(Site.INPUT)

    @property
    def attention_mask(self) -> torch.Tensor:
        """1 on real tokens and 0 on padding, int64 [B,S]; only real tokens are judged."""
        return self.golden.inputs.attention_mask

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions of the tokens, int64 [B,S]."""
        return self.golden.inputs.position_ids

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Arguments of a port's forward: hidden states [B,S,H], attention mask [B,S] and position ids [B,S]."""
        return self.input, self.attention_mask, self.position_ids

    @property
    def sites(self) -> tuple[Site, ...]:
        """Sites that the golden holds of the layer, in execution order."""
        return self.golden.capture.sites(self.number)

    def read(self, site: str) -> torch.Tensor:
        """Read the golden's value of a site, such as `post_norm`.

        Raises:
            UsageError: No site has the name.
            CaptureError: The golden does not hold it, or its file is damaged.
        """
        return self.golden.capture.read(self.number, parse_site(site))

    @property
    def weights(self) -> CheckpointTensors:
        """The layer's weights by the hub's names, such as `self_attn.q_proj.weight`; FP8 is dequantised.

        A mapping that reads a tensor at each access, and can be changed like a dict: each access to this property gives
        a new one. It raises as `GoldenLayers.open_weights` does.
        """
        opened = self._weights
        return hub_named(opened.tensors, opened.spec.family.stored_names).copy()

    @property
    def config(self) -> SimpleNamespace:
        """A new copy of config.json as attributes, as a port's class gets it. Raises as `weights` does."""
        return target_config(self._weights.spec)

    def load(self, factory: Callable[..., object], *, device: str | torch.device = "cpu") -> nn.Module:
        """Build a port's layer and fill it with the checkpoint's weights, as `mm2-test --target` does.

        Args:
            factory: A class or function, called as `factory(config, layer_idx)`. Its `convert_state_dict`, or the
                module's, is used if there is one.
            device: Device that the module is moved to.

        Raises:
            TargetError: The port could not be built, or its names or shapes do not fit: all are listed.
            CheckpointError: The weights are not on this machine, or cannot be read.
        """
        name = f"{factory.__module__}:{getattr(factory, '__qualname__', repr(factory))}"
        # A digest tells whether a capture may be resumed: nothing is written here.
        target = PortTarget(name=name, factory=factory, source_digest="")
        spec, tensors = self._weights.spec, self._weights.tensors.copy()
        module = target.build(spec, self.number, dtype=tensors.dtype)
        with ReadingPool(torch.get_num_threads()) as pool:
            loader = WeightLoader(torch.device(device), wait=lambda: None, pool=pool)
            target.load(module, tensors, spec, loader=loader)
        return module

    @property
    def _weights(self) -> GoldenWeights:
        return self.golden.open_weights(self.number)

    def __repr__(self) -> str:
        return f"GoldenLayer({self.number} of {self.golden.place})"


def open_golden(directory: str | Path, *, model: str | Path | None = None) -> GoldenLayers:
    """Open a golden capture that `mm2-gpu` made.

    Args:
        directory: Folder of the golden, or its address, such as `s3://bucket/folder`.
        model: Folder or hub id of its checkpoint. Default: the one that it was made from, if it is on this machine.

    Raises:
        CaptureError: There is no capture, or it is damaged.
        IncomparableError: The golden was changed after it was certified.
        CheckpointError: `model` holds no model that mm2 computes.
    """
    capture = Capture.open(directory)
    capture.refuse_void_certificate()
    if model is None:
        return GoldenLayers(capture, weights=find_weights(None, capture, capture))
    weights = CheckpointWeights(model=str(model))
    weights.read_spec()
    return GoldenLayers(capture, weights=weights)
