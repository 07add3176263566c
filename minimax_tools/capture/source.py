"""CaptureSource: a readable capture, whichever tool wrote it; its inspection, and the listing of a dump."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from minimax_tools.capture.manifest import Certificate, Description, Entry, HeldWeights, Manifest
from minimax_tools.capture.passes import CachePair, Generation, ModelPasses
from minimax_tools.capture.store import floor_file
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.model.families import family_of
from minimax_tools.model.family import Family
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import ModelSite, Site

_QUICK_ROWS = (
    "the golden's rows are those of --quick, two short ones from position 0: far positions, left padding and experts "
    "that no token chose are not tested; a golden without --quick tests them"
)
_NO_DIGESTS = "its layout has no digests; that its files are as they were written was not checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTensor:
    """A tensor of another tool's dump, in all layers, forward passes and ranks."""

    name: str  # its place as a user's map (`dumps.name_map`) writes it, with `{layer}` for the layer's number
    layers: tuple[int, ...]  # layers that hold it, ascending
    shapes: tuple[tuple[int, ...], ...]  # its shapes, each once
    dtypes: tuple[str, ...]  # its dtypes, each once
    steps: tuple[str, ...]  # labels of the passes that hold it
    ranks: tuple[int, ...]  # ranks that wrote it, ascending
    sites: tuple[str, ...]  # sites that it maps to


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpListing:
    """Contents of another tool's dump."""

    format: str  # name of its layout
    steps: tuple[str, ...]  # labels of its forward passes
    # Labels of the passes that are read; those of an inner tuple follow each other for the same prompts
    passes: tuple[tuple[str, ...], ...]
    joins_requests: bool  # whether these are joined by the requests that the dump tells, prompt by prompt
    num_ranks: int  # number of ranks that the port was divided among
    tensors: tuple[ListedTensor, ...]
    unmapped: tuple[str, ...]  # modules that map to no site, with `{layer}` for the layer's number


class CaptureSource(ABC):
    """A capture opened for reading; layouts that do not record something keep the answer given here.

    The sites outside the layers (`ModelSite`) have the layer None. All methods that read raise CaptureError if a file
    is missing or damaged, or does not hold what must be there.

    B prompts, S their padded length, H hidden.
    """

    directory: Path  # its folder
    is_complete: bool = True  # False if the run has not come to its end
    certificate: Certificate | None = None  # checks that the golden passed; None if it was not certified
    # Dtypes of the router's gate and correction bias as the port loaded them, by name.
    observed_dtypes: Mapping[str, str] = MappingProxyType({})
    # What the port holds of layers' weights, as far as they were compared when they were loaded.
    held_weights: Mapping[int, HeldWeights] = MappingProxyType({})
    notes: tuple[str, ...] = ()  # sentences on how the files were read, for the reader of a comparison
    digest_note: str = _NO_DIGESTS  # what was read without a digest to check it; empty if everything has one
    # Whether `laid_out_as` found the token ids equal to those of a comparison's other side.
    has_checked_tokens: bool = False
    # Whether `laid_out_as` can give its prompts another padding, and leave out prompts that the other side lacks.
    takes_other_layouts: bool = False
    # Whether a layer may be held without what computes its input (the layer before), as in dumps of chosen modules. A
    # failure there may be inherited, so the judge leaves it undecided.
    may_omit_inputs: bool = False
    is_natural: bool = False  # whether expert tokens count as padding (see `natural`)

    @property
    @abstractmethod
    def layers(self) -> tuple[int, ...]:
        """Layers that the capture holds, ascending."""

    @abstractmethod
    def sites(self, layer: int) -> tuple[Site, ...]:
        """Return the sites held of a layer, in execution order.

        The input counts too if only the output of the layer before is held, and is the same.
        """

    def model_sites(self) -> tuple[ModelSite, ...]:
        """Return the sites held outside the layers."""
        return ()

    @abstractmethod
    def read(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor:
        """Read a site's tensor to the CPU, in its stored dtype."""

    @abstractmethod
    def read_attention_mask(self) -> torch.Tensor | None:
        """Read the mask, int64 [B,S], 1 on real tokens; None if the layout does not keep it: all are real then."""

    def read_kept_mask(self) -> torch.Tensor | None:
        """Read which tokens' values are kept, bool [B,S]; None if the layout does not tell real tokens.

        These alone are judged. The values of other tokens are read as zeros where they are not stored.
        """
        mask = self.read_attention_mask()
        return None if mask is None else mask.bool()

    def read_ahead(self, layer: int) -> None:
        """Have the system read a layer that is needed soon, if it can; returns at once."""
        return

    def natural(self) -> CaptureSource:
        """Return this capture with its expert tokens as padding (see `ExpertTokens`), or itself if it has none."""
        return self

    @property
    def known_description(self) -> Description | None:
        """The run that made the capture; None if the layout does not say."""
        return None

    @property
    def family(self) -> Family:
        """The model's family; MiniMax-M2's if the layout does not say."""
        return family_of(self._model_config)

    @property
    def graph(self) -> ModelGraph:
        """The graph of the model's layers."""
        return self.family.read_graph(self._model_config)

    @property
    def _model_config(self) -> Mapping[str, Any]:
        description = self.known_description
        return {} if description is None else description.provenance.model_config

    @property
    def keeps_last_tokens(self) -> bool:
        """True if the values of each row's last tokens alone are stored (see `kept_tokens`)."""
        description = self.known_description
        return description is not None and description.last_tokens > 0

    @property
    def row_notes(self) -> tuple[str, ...]:
        """Sentences on rows that show less than mm2's own, for every verdict on this golden."""
        description = self.known_description
        if description is None:
            return ()
        kept = f"only the last {description.last_tokens} tokens of each row were compared: --last-tokens"
        return (
            *((_QUICK_ROWS,) if description.is_quick else ()),
            *((kept,) if description.last_tokens else ()),
        )

    @property
    def description(self) -> Description:
        """The run that made the capture."""
        return self.manifest.description

    @property
    def manifest(self) -> Manifest:
        """The manifest of a capture that mm2 wrote.

        Raises:
            IncomparableError: Another tool wrote it.
        """
        raise self._undescribed()

    @property
    def has_void_certificate(self) -> bool:
        """True if the capture was changed after it was certified."""
        return False

    def refuse_void_certificate(self) -> None:
        """Raise if the capture was changed after it was certified."""
        return

    def proving_beside(self) -> AbstractContextManager[None]:
        """Check digests on a thread during a `with` block, which ends when all that was read in it is checked."""
        return nullcontext()

    def listing(self) -> DumpListing | None:
        """List the tensors of another tool's dump; None for a capture whose tensors are named by their sites."""
        return None

    def laid_out_as(self, other: CaptureSource) -> CaptureSource:
        """Return this capture with its prompts padded as in `other`; one that keeps its own padding returns itself."""
        return self

    def beside(self, golden: CaptureSource) -> CaptureSource:
        """Return this capture read beside its golden, which tells heads from tokens where shapes do not.

        Another tool's dump returns itself: its map names the order of dims.
        """
        return self

    def not_exposed(self, layer: int) -> tuple[Site, ...]:
        """Return the sites that the run wanted and the port does not expose."""
        return ()

    def unreached_experts(self, layer: int) -> tuple[int, ...] | None:
        """Return the experts of a golden's layer that no token chose; None if it does not tell."""
        return None

    def num_calls(self, layer: int) -> Mapping[Site, int]:
        """Return how often the port computed those of them that it computed several times."""
        return {}

    def further(self, layer: int) -> tuple[str, ...]:
        """Return the names of a layer's further outputs, which are stored and never judged."""
        return ()

    def read_further(self, layer: int, name: str) -> torch.Tensor:
        """Read a further output of a layer."""
        raise CaptureError(f"{self.directory} holds no further output {name} of layer {layer}")

    def entry(self, layer: int | None, site: Site | ModelSite) -> Entry | None:
        """Return the manifest's entry of a site; None if there is none."""
        return None

    def held_tokens(self, site: ModelSite) -> torch.Tensor | None:
        """Return the tokens for which a site outside the layers is held, bool [B,S]; None for all real tokens."""
        return None

    def read_inputs(self) -> Inputs:
        """Read the batch: token ids, mask and positions.

        Raises:
            IncomparableError: The layout does not keep them.
        """
        raise self._undescribed()

    def read_hidden_states(self) -> torch.Tensor | None:
        """Read the hidden states [B,S,H] given to the first layer; None if they were made of the tokens."""
        return None

    def read_entry(self, entry: Entry) -> torch.Tensor:
        """Read the tensor of an entry of the manifest.

        Raises:
            IncomparableError: The layout has no manifest.
        """
        raise self._undescribed()

    def read_input_ids(self) -> torch.Tensor | None:
        """Read the token ids, int64 [B,S]; None if the capture does not hold them."""
        return None

    def read_generation(self) -> Generation | None:
        """Read the tokens generated after the prompts; None if there are none."""
        return None

    def read_passes(self) -> ModelPasses | None:
        """Read what a whole port's run shows beside its sites; None for other runs."""
        return None

    def read_chunks(self) -> CaptureSource | None:
        """Open the capture of a whole port's run in chunks, beside that of its prefill and steps; None without one."""
        return None

    def read_cache(self, layer: int) -> CachePair | None:
        """Read the keys and values in a whole port's cache, [B,K,S,D] each; None if they were not stored."""
        return None

    def read_twin(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor | None:
        """Read the float32 twin of a site; None if the noise floor was not kept whole."""
        return None

    def read_floor(self, layer: int | None, name: str) -> torch.Tensor | None:
        """Read one statistic of the noise floor of a layer, or outside them; None if the floor was not measured."""
        return None

    def _undescribed(self) -> IncomparableError:
        return IncomparableError(
            f"{self.directory} does not say which model and tokens it is of",
            expected="a golden of mm2's own",
            next_step="Capture one: mm2-gpu extract-all --model DIR.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureInspection:
    """Results of reading all of a capture."""

    num_tensors: int  # number of tensors that match their digests
    faults: tuple[str, ...]  # a sentence for each fault found, with file and place


def inspect_capture(capture: CaptureSource, *, with_inputs: bool = True) -> CaptureInspection:
    """Read every tensor of a capture with a manifest, one in memory at a time, and check its digest.

    `with_inputs` reads the token rows, hidden states, generated tokens and passes too.
    """
    num_tensors = 0
    # A set that keeps its order: a damaged file fails in the same words for all its tensors.
    faults: dict[str, None] = {}
    for read, num_read in _reads(capture, with_inputs=with_inputs):
        try:
            if read() is not None:
                num_tensors += num_read
        except CaptureError as error:
            faults[error.what if error.found is None else f"{error.what}: found {error.found}"] = None
    return CaptureInspection(num_tensors=num_tensors, faults=tuple(faults))


def _reads(capture: CaptureSource, *, with_inputs: bool) -> Iterator[tuple[Callable[[], Any], int]]:
    """Yield calls that each read a part of the capture, or None if it has none, with the part's number of tensors."""
    if with_inputs:
        yield capture.read_inputs, 3  # ids, mask and positions
        yield capture.read_hidden_states, 1
        yield capture.read_generation, 0  # JSON
        yield capture.read_passes, 0  # JSON
    for entry in capture.manifest.entries:
        yield partial(capture.read_entry, entry), 1
    groups = (*capture.layers, *((None,) if capture.model_sites() else ()))
    for layer in groups:
        for site in ModelSite if layer is None else Site:
            yield partial(capture.read_twin, layer, site), 1
        for name in capture.manifest.names_in(floor_file(layer)):
            yield partial(capture.read_floor, layer, name), 1
    for layer in capture.layers:
        for name in capture.further(layer):
            yield partial(capture.read_further, layer, name), 1
        yield partial(capture.read_cache, layer), 2  # keys and values
