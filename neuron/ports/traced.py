"""Traced targets: a layer that `mm2-test trace` compiled into a file, its sites among its outputs.

A compiled program has no submodules. It returns its sites beside its output, and `TracedLayer` passes each through a
submodule of the site's name, so that it is recorded like any port's.
B batch, S sequence, H hidden.
"""

from __future__ import annotations

import glob
import hashlib
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minimax_tools.checkpoint.fingerprint import fingerprint_model
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.errors import CaptureError, TargetError, UsageError
from minimax_tools.json_codec import decode, decode_fields, encode_fields
from minimax_tools.machine.json_file import parse_json
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.provenance import ModelFingerprint
from minimax_tools.stored_dtype import dtype_name
from neuron.devices.backend import Backend
from neuron.devices.ranks import Ranks
from neuron.devices.weights import Weight, WeightLoader
from neuron.ports.target import Target

PREFIX = "traced:"
# File in the archive that describes the program; it is read before the program is loaded.
DESCRIPTION = "mm2.json"
# The compilers.
EXPORT, NEURON = "torch.export", "torch_neuronx.trace"
_LAYER = "{layer}"
_FORMAT = 1
_MAKE_ANEW = "Make it anew with mm2-test trace."
# Warning of torch 2.9 about its own reading of read-only bytes.
_READ_ONLY_WARNING = "The given buffer is not writable"

Program = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedProgram:
    """The description in a traced file."""

    program: str  # compiler: `torch.export` or `torch_neuronx.trace`
    port: str  # the --target that was traced
    port_digest: str  # sha256 of the port's source
    layer: int  # the layer whose weights are inside
    sites: tuple[Site, ...]  # sites returned after the layer's output, in order
    shape: tuple[int, int, int]  # shape [B,S,H] of the hidden states
    dtype: torch.dtype  # dtype of hidden states and weights
    model: ModelFingerprint  # fingerprint of the checkpoint that the weights come from
    versions: Mapping[str, str]  # library versions during compilation

    @classmethod
    def read(cls, path: Path) -> TracedProgram:
        """Read the description in a file, and nothing else."""
        if not path.is_file():
            raise TargetError(
                f"traced file {path} does not exist",
                next_step="Give --target traced:FILE with what mm2-test trace --output wrote.",
            )
        try:
            with zipfile.ZipFile(path) as archive:
                # Exactly one, else this raises ValueError.
                [name] = [name for name in archive.namelist() if name.endswith(f"/extra/{DESCRIPTION}")]
                return decode(cls, parse_json(archive.read(name)))
        except (OSError, zipfile.BadZipFile, CaptureError, KeyError, TypeError, ValueError) as error:
            raise TargetError(
                f"{path} is no file of mm2-test trace",
                expected=f"an archive with a {DESCRIPTION} of format {_FORMAT}",
                found=f"{type(error).__name__}: {error}",
                next_step=_MAKE_ANEW,
            ) from error

    def __post_init__(self) -> None:
        if self.program not in (EXPORT, NEURON):
            raise ValueError(f"program {self.program!r}")

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TracedProgram:
        """Return the program that a file describes."""
        if record["format"] != _FORMAT:
            raise ValueError(f"format {record['format']}")
        return decode_fields(cls, record)

    def to_json(self) -> dict[str, Any]:
        """Return the description as the file holds it."""
        return {"format": _FORMAT, **encode_fields(self)}

    @property
    def device_type(self) -> str:
        """Device type of a run's tensors."""
        return "cpu" if self.program == EXPORT else "xla"


class TracedLayer(nn.Module):
    """A traced layer as a port's module; it has no parameters, because its weights are in the program."""

    def __init__(self, path: Path, traced: TracedProgram, program: Program) -> None:
        super().__init__()
        self.traced = traced
        self.shown = nn.ModuleDict({str(site): nn.Identity() for site in traced.sites})
        self.sites = {str(site): f"shown.{site}" for site in traced.sites}
        self._path = path
        # In a tuple, so that torch does not register its parameters here.
        self._program = (program,)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Compute the output [B,S,H] from states [B,S,H], mask [B,S] of 0/1 and positions [B,S]."""
        self._refuse_other_states(hidden_states)
        # A program of torch_neuronx takes its inputs on the host.
        inputs = (hidden_states.cpu(), attention_mask.cpu(), position_ids.cpu())
        output, *shown = self._program[0](*inputs)
        for site, tensor in zip(self.traced.sites, shown, strict=True):
            # A hook on the submodule may replace the value: `mm2-test component` feeds the golden's values so.
            if self.shown[str(site)](tensor) is not tensor:
                raise TargetError(
                    f"{self._path} cannot be fed at {site}: what it computes there is compiled",
                    next_step="Run the whole layer: mm2-test single-layer.",
                )
        return output

    def verify_model(self, model: ModelFingerprint) -> None:
        """Raise TargetError unless the weights in the file are those of a model."""
        differences = self.traced.model.differences(model)
        if differences:
            raise TargetError(
                f"{self._path} holds weights of another model than this run's",
                found="; ".join(differences),
                next_step="Give --model the checkpoint that was traced, or trace this one.",
            )

    def _refuse_other_states(self, hidden_states: torch.Tensor) -> None:
        traced = self.traced
        if tuple(hidden_states.shape) != traced.shape:
            raise TargetError(
                f"{self._path} was traced for other shapes",
                expected=f"hidden states {list(traced.shape)}",
                found=str(list(hidden_states.shape)),
                next_step="A compiled program has one shape: trace it with this run's --golden or --seq-len.",
            )
        if hidden_states.device.type != traced.device_type:
            backend = "cpu" if traced.device_type == "cpu" else "neuron-xla"
            raise TargetError(
                f"{self._path} was compiled by {traced.program} for another backend than this run's",
                expected=f"--backend {backend}",
                found=f"tensors on {hidden_states.device}",
                next_step=f"Run it with --backend {backend}, or trace it with this run's --backend.",
            )


@dataclass(frozen=True, kw_only=True)
class TracedTarget(Target):
    """Layers that `mm2-test trace` compiled, weights included."""

    forms = f"{PREFIX}FILE"
    reads_weights = False  # the weights are in the files

    pattern: str  # path of the file, or of one file per layer, such as `layer_{layer}.pt2`

    @classmethod
    def find(cls, name: str) -> TracedTarget | None:
        """Find the files behind `traced:`."""
        if not name.startswith(PREFIX):
            return None
        pattern = name.removeprefix(PREFIX)
        return cls(name=name, pattern=pattern, source_digest=_digest_files(pattern))

    def require_traceable(self, backend: Backend) -> None:
        """Raise UsageError: the layer is compiled already."""
        raise UsageError(
            f"{self.name} is traced already", next_step="Give the --target that it was traced from."
        )

    def make(self, config: Any, layer_idx: int) -> TracedLayer:
        """Load a layer's file."""
        path = Path(self.pattern.replace(_LAYER, str(layer_idx)))
        if config.ranks.are_several:
            raise TargetError(
                f"{path} is a whole layer, not one rank's part of it",
                expected="one rank",
                found=f"{config.ranks.degree} ranks",
                next_step="Leave out --tp-degree, or run the port itself on several ranks.",
            )
        traced = TracedProgram.read(path)
        if traced.layer != layer_idx:
            raise TargetError(
                f"{path} is of another layer than this run asks for",
                expected=f"layer {layer_idx}",
                found=f"layer {traced.layer}",
                next_step="Weights are in the file: trace each layer into one of its own, and name them as in "
                f"--target '{PREFIX}layer_{_LAYER}.pt2'.",
            )
        # Every target is built under the run's dtype.
        dtype = torch.get_default_dtype()
        if traced.dtype != dtype:
            raise TargetError(
                f"{path} was traced in another dtype than this run's",
                expected=dtype_name(traced.dtype),
                found=dtype_name(dtype),
                next_step=f"Run with --dtype {dtype_name(traced.dtype)}, or trace with --dtype {dtype_name(dtype)}.",
            )
        return TracedLayer(path, traced, load_program(path, traced))

    def load(
        self,
        module: nn.Module,
        tensors: LayerTensors,
        spec: ModelSpec,
        *,
        loader: WeightLoader,
        ranks: Ranks | None = None,
        prepared: dict[str, Weight] | None = None,
    ) -> None:
        """Raise TargetError unless the weights in the file are those of the checkpoint."""
        assert isinstance(module, TracedLayer), "make returns nothing else"
        layers = range(tensors.layer, tensors.layer + 1)
        module.verify_model(fingerprint_model(tensors.reader, spec, layers))


def load_program(path: Path, traced: TracedProgram) -> Program:
    """Load the program in a file: from the layer's three arguments on the host to its output and sites."""
    # Both loaders execute what is in the file: a target is code that the user chose to run.
    try:
        _verify_check_sums(path)
        if traced.program == NEURON:
            return _load_neuron_program(path)
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.filterwarnings("ignore", _READ_ONLY_WARNING)
            module = torch.export.load(file).module()
        return module
    except TargetError:
        raise
    except Exception as error:  # any error of a foreign archive
        raise TargetError(
            f"{path} cannot be loaded",
            expected=f"a program that {traced.program} wrote with torch {traced.versions.get('torch')}",
            found=f"{type(error).__name__}: {error}",
            next_step=f"{_MAKE_ANEW} A file need not load with another version of torch.",
        ) from error


def _digest_files(pattern: str) -> str:
    """Return the sha256 over names, sizes and check sums in all layers' files; weights are not read."""
    # Special characters around the layer number, such as brackets and stars, stand for themselves.
    glob_pattern = "[0-9]*".join(map(glob.escape, pattern.split(_LAYER)))
    paths = glob.glob(glob_pattern)  # noqa: PTH207 - a Path's glob takes no absolute pattern
    digest = hashlib.sha256()
    # Without any file, reading the pattern itself raises the error that names it.
    for path in map(Path, sorted(paths) or [pattern]):
        TracedProgram.read(path)
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                # The top folder bears the name that the file had when it was written.
                name = entry.filename.partition("/")[2]
                digest.update(f"{name} {entry.file_size} {entry.CRC}\n".encode())
    return digest.hexdigest()


def _verify_check_sums(path: Path) -> None:
    """Check every byte of the file: torch loads damaged weights silently."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise TargetError(
            f"{path} is damaged: {damaged.split('/', 1)[-1]}",
            expected="bytes of the check sum that the file gives for it",
            next_step="Copy it again from where it is whole, or make it anew with mm2-test trace.",
        )


def _load_neuron_program(path: Path) -> Program:
    try:
        import torch_neuronx  # noqa: F401 - registers the operation that runs a NEFF
    except Exception as error:  # the placeholder on PyPI raises other errors
        raise TargetError(
            f"{path} was compiled by torch_neuronx, which is not installed here",
            found=f"{type(error).__name__}: {error}",
            next_step="Run it in the Neuron SDK's virtual environment, on a Trn1, Inf2 or Trn2 instance.",
        ) from error
    program: Program = torch.jit.load(str(path))
    return program
