"""ForeignCapture: another tool's dump, read as a capture: mapped to sites, put together and cut to its real tokens.

B prompts, S their padded length, T real tokens, F channels.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from minimax_tools.capture.manifest import Description
from minimax_tools.capture.source import WithoutFloor
from minimax_tools.dumps.assembly import DumpAssembly, Shape
from minimax_tools.dumps.finder import find_sites
from minimax_tools.dumps.findings import Findings, Found, Key
from minimax_tools.dumps.formats import FORMATS, Format, find_format, read_dump
from minimax_tools.dumps.last_tokens import find_last_tokens, held_rows, read_last_tokens
from minimax_tools.dumps.name_map import NameMap
from minimax_tools.dumps.piece import Dump
from minimax_tools.dumps.rows import TokenRows, batch_mask, lay_out
from minimax_tools.dumps.schedule import Schedule
from minimax_tools.dumps.tensor_file import list_tensors, read_tensor
from minimax_tools.dumps.usual_names import ATTENTION_MASK, INPUT_IDS
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.model.sites import ModelSite, Site

_BEHIND_LAYERS = (ModelSite.FINAL_NORM, ModelSite.LOGITS)
_FORMAT_NAMES = ", ".join(FORMATS)


class ForeignCapture(WithoutFloor):
    """A dump opened for reading; one site is in memory at a time.

    Args:
        dump: What the directory holds.
        names: What is known of it beside its files.
        mask: bool [B,S]: the batch that its tensors are laid out as; None to lay them out as the dump's own lengths
            say, and where there are none, to leave them as they are.
        input_ids: int64 [B,S]: the batch's tokens, by which a prompt's request is known; None where they are not.
    """

    def __init__(
        self,
        dump: Dump,
        names: NameMap,
        *,
        mask: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
    ) -> None:
        self.dump = dump
        self.names = names
        self.findings: Findings = find_sites(dump, names)
        self._assembly = DumpAssembly(dump=dump, findings=self.findings)
        self._rows = self._find_rows(mask, input_ids)
        own = batch_mask(self._rows.lengths) if self._rows is not None else None
        self._mask = own if mask is None else mask
        self._last_tokens = {
            site: find_last_tokens(self.findings.sites[None, site], self.findings, self._rows)
            for site in _BEHIND_LAYERS
            if self._rows is not None and self._is_partial(site)
        }
        # Whether the dump's own token ids were found to be those of the other side.
        self.has_checked_tokens = False

    @classmethod
    def open(cls, directory: Path, names: NameMap, *, format_: Format | None = None) -> ForeignCapture:
        """Open a dump.

        Args:
            directory: The folder.
            names: What is known of it.
            format_: Its layout; None where the files tell.

        Raises:
            CaptureError: It is of no known layout, a file is damaged, or the map does not fit it.
        """
        chosen = format_ or find_format(directory)
        if chosen is None:
            raise CaptureError(
                f"the tool that wrote {directory} is not known",
                expected=f"a layout of one of {_FORMAT_NAMES}",
                next_step="Name the folder that holds the files themselves.",
            )
        return cls(read_dump(directory, chosen), names)

    def aligned(self, mask: torch.Tensor, input_ids: torch.Tensor | None) -> ForeignCapture:
        """This capture, laid out as the batch of the other side.

        Args:
            mask: [B,S], 1 on real tokens.
            input_ids: int64 [B,S], for the dump's own to be held against; None where they are not known.

        Raises:
            IncomparableError: The prompts are of other lengths or tokens.
            CaptureError: A file is damaged.
        """
        aligned = ForeignCapture(self.dump, self.names, mask=mask.bool(), input_ids=input_ids)
        aligned._refuse_other_tokens(input_ids)
        return aligned

    @property
    def directory(self) -> Path:
        """Where the dump lies."""
        return self.dump.directory

    @property
    def known_description(self) -> Description | None:
        """None: such a dump does not say what made it."""
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of a comparison must know of how the dump was read."""
        partial = [
            f"{site}: held of {len(tokens)} tokens to sample from alone, which are judged"
            if tokens
            else f"{site}: held of some tokens alone, nothing tells which, and not judged"
            for site, tokens in self._last_tokens.items()
        ]
        return (*self.findings.notes, *partial)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of which a site was found, ascending."""
        return tuple(sorted({layer for layer, _ in self.findings.sites if layer is not None}))

    def sites(self, layer: int) -> tuple[Site, ...]:
        """The layer's sites, in execution order; an input may be the output of the layer before."""
        return tuple(site for site in Site if self._found(layer, site) is not None)

    def model_sites(self) -> tuple[ModelSite, ...]:
        """Sites found outside the layers, without those held of nobody knows which tokens."""
        held = (site for site in ModelSite if (None, site) in self.findings.sites)
        return tuple(site for site in held if self._last_tokens.get(site) != ())

    def held_rows(self, site: ModelSite) -> torch.Tensor | None:
        """Return the places [B,S] at which a site outside the layers is held, as bool; None for all real tokens."""
        tokens = self._last_tokens.get(site)
        return None if tokens is None or self._mask is None else held_rows(tokens, self._mask)

    def not_exposed(self, layer: int) -> tuple[Site, ...]:
        """Sites that the dump does not hold."""
        held = self.sites(layer)
        return tuple(site for site in Site if site not in held)

    def read(self, layer: int, site: Site) -> torch.Tensor:
        """A site's tensor on the CPU, in its stored dtype; zeros on padding.

        Raises:
            CaptureError: The dump does not hold it, a file is damaged, or the pieces do not fit together.
        """
        found = self._found(layer, site)
        if found is None:
            raise CaptureError(
                f"{self.directory} holds no {site} of layer {layer}",
                next_step="mm2-test show DIR lists what it holds; a map (--map) says where sites lie.",
            )
        return self._read(found, what=f"{site} of layer {layer}", has_heads_dim=site.has_heads_dim)

    def read_model(self, site: ModelSite) -> torch.Tensor:
        """The tensor of a site outside the layers; zeros on padding, and where `held_rows` says that it is not held.

        Raises:
            CaptureError: As for `read`.
        """
        found = self.findings.sites.get((None, site))
        if found is None:
            raise CaptureError(f"{self.directory} holds no {site}", next_step="Capture the whole model.")
        tokens = self._last_tokens.get(site)
        if tokens and self._mask is not None:
            return read_last_tokens(found, tokens, assembly=self._assembly, mask=self._mask, what=str(site))
        return self._read(found, what=str(site), has_heads_dim=False)

    def read_attention_mask(self) -> torch.Tensor | None:
        """int64 [B,S] of the batch that the tensors are laid out as; None where they are left as they are."""
        return None if self._mask is None else self._mask.to(torch.int64)

    def read_input_ids(self) -> torch.Tensor | None:
        """int64 [B,S], the token ids that the dump holds; None where it holds none, or does not tell real rows.

        Raises:
            CaptureError: A file is damaged, or nothing tells which rows are real.
        """
        found = self.findings.sites.get((None, INPUT_IDS))
        steps = {step for group in self.findings.passes for step in group}
        if found is None or self._rows is None or self._mask is None or not steps <= found.terms[0].steps:
            return None
        tokens = self._assembly.tokens(found, self._rows, shape=Shape.NUMBER, what=INPUT_IDS)
        return lay_out(tokens[:, None], self._mask)[..., 0].to(torch.int64)

    def _found(self, layer: int, site: Site) -> Found | None:
        found = self.findings.sites.get((layer, site))
        if found is not None or site is not Site.INPUT:
            return found
        before: Key = (None, ModelSite.EMBEDDING) if layer == 0 else (layer - 1, Site.OUTPUT)
        return self.findings.sites.get(before)

    def _read(self, found: Found, *, what: str, has_heads_dim: bool) -> torch.Tensor:
        if self._rows is None or self._mask is None:
            steps = self.findings.passes[0]
            return self._assembly.whole(found, steps[0], what=what)
        shape = Shape.HEADS if has_heads_dim else Shape.CHANNELS
        tokens = self._assembly.tokens(found, self._rows, shape=shape, what=what)
        if not has_heads_dim:
            return lay_out(tokens, self._mask)
        heads = tokens.shape[1:]
        batch: torch.Tensor = lay_out(tokens.flatten(1), self._mask).unflatten(-1, heads)
        return batch.transpose(1, 2)

    def _find_rows(self, mask: torch.Tensor | None, input_ids: torch.Tensor | None) -> TokenRows | None:
        """Which rows are real: as the map says, else as the dump does, else as the other side's batch has it."""
        if self.findings.schedule is not None:
            return self._find_scheduled(self.findings.schedule, mask, input_ids)
        own_mask = self._read_mask()
        if own_mask is not None:
            # Every pass behind the first decodes one row of each prompt.
            num_decoded = len(self.findings.passes[0]) - 1
            lengths = tuple(int(length) + num_decoded for length in own_mask.sum(dim=1))
        elif self.names.lengths:
            lengths = self.names.lengths
        elif mask is not None:
            lengths = tuple(int(length) for length in mask.sum(dim=1))
        else:
            return None
        self._refuse_other_lengths(lengths, mask)
        is_packed = self._is_packed(len(lengths))
        return TokenRows(lengths=lengths, padding=self.names.padding, is_packed=is_packed, mask=own_mask)

    def _find_scheduled(
        self, schedule: Schedule, mask: torch.Tensor | None, input_ids: torch.Tensor | None
    ) -> TokenRows:
        """Where the tokens of the prompts' requests lie in the passes."""
        named = self.names.requests
        if mask is not None and input_ids is not None and not named:
            named = self._find_requests(
                schedule, [row[real] for row, real in zip(input_ids, mask, strict=True)]
            )
        lengths = self.names.lengths
        if not lengths and mask is not None:
            lengths = tuple(int(length) for length in mask.sum(dim=1))
        elif not lengths:
            lengths = tuple(schedule.length(request) for request in named or schedule.requests)
        self._refuse_other_lengths(lengths, mask)
        requests = schedule.choose(lengths, named=named, directory=self.directory)
        return self._scheduled_rows(schedule, requests, lengths)

    def _scheduled_rows(
        self, schedule: Schedule, requests: tuple[str, ...], lengths: tuple[int, ...]
    ) -> TokenRows:
        stretches = tuple(
            tuple(stretch.up_to(length) for stretch in schedule.stretches[request] if stretch.start < length)
            for request, length in zip(requests, lengths, strict=True)
        )
        return TokenRows(lengths=lengths, padding=self.names.padding, is_packed=True, stretches=stretches)

    def _find_requests(self, schedule: Schedule, prompts: list[torch.Tensor]) -> tuple[str, ...]:
        """The request that has each prompt's tokens, in the prompts' order; none where the dump's do not tell."""
        found = self.findings.sites.get((None, INPUT_IDS))
        if found is None or not set(self.findings.passes[0]) <= found.terms[0].steps:
            return ()
        left = {}
        for request in schedule.requests:
            rows = self._scheduled_rows(schedule, (request,), (schedule.length(request),))
            left[request] = self._assembly.tokens(found, rows, shape=Shape.NUMBER, what=INPUT_IDS)
        chosen = []
        for prompt in prompts:
            own = next((name for name, ids in left.items() if _begins_with(ids, prompt)), None)
            if own is None:
                return ()
            del left[own]
            chosen.append(own)
        return tuple(chosen)

    def _refuse_other_lengths(self, lengths: tuple[int, ...], mask: torch.Tensor | None) -> None:
        if mask is not None and lengths != tuple(int(length) for length in mask.sum(dim=1)):
            raise IncomparableError(
                f"{self.directory} is of other prompts than the capture on the other side",
                expected=f"prompts of {_listed(mask.sum(dim=1).tolist())} tokens",
                found=_listed(lengths),
                next_step="Correct lengths in the map, or run both sides on the same prompts.",
            )

    def _is_partial(self, site: ModelSite) -> bool:
        """Whether it was computed for the tokens to sample from alone."""
        found = self.findings.sites.get((None, site))
        if found is None or self._rows is None:
            return False
        used = {step for group in self.findings.passes for step in group}
        if self._rows.stretches:
            used = {stretch.step for stretches in self._rows.stretches for stretch in stretches}
        pieces = [found.terms[0].of_pass(step) for step in used]
        num_rows = sum(math.prod(next(iter(of_pass.values())).shape[:-1]) for of_pass in pieces if of_pass)
        return num_rows < self._rows.num_tokens

    def _is_packed(self, num_prompts: int) -> bool | None:
        """Whether the prompts' tokens lie one after another, as the map, the tool or another tensor's shape says."""
        if self.names.is_packed is not None or self.dump.is_packed is not None:
            return self.dump.is_packed if self.names.is_packed is None else self.names.is_packed
        shapes = {
            piece.shape
            for found in self.findings.sites.values()
            for term in found.terms
            for piece in term.pieces.values()
        }
        is_padded = num_prompts > 1 and any(len(shape) == 3 and shape[0] == num_prompts for shape in shapes)
        return False if is_padded else None

    def _read_mask(self) -> torch.Tensor | None:
        """bool [B,S'] of the dump's own padded rows, where the map names its file or the dump holds it."""
        path = self.names.attention_mask
        if path is not None:
            tensors = list_tensors(path)
            mask = read_tensor(path, tensors[0].keys) if len(tensors) == 1 else torch.empty(0)
            if not _tells_real_rows(mask):
                raise CaptureError(
                    f"the attention mask {path} does not tell real rows from padding",
                    expected="one tensor [B,S] of 0 and 1, a real token in every row",
                    found=f"{list(mask.shape)} of {mask.dtype}",
                    next_step="Give lengths and padding in the map instead.",
                )
            return mask.bool()
        found = self.findings.sites.get((None, ATTENTION_MASK))
        if found is None or self.names.lengths or len(self.findings.passes) > 1:
            return None
        mask = self._assembly.whole(found, self.findings.passes[0][0], what=ATTENTION_MASK)
        # A model may be called with a mask of another kind, which says nothing of rows.
        return mask.bool() if _tells_real_rows(mask) else None

    def _refuse_other_tokens(self, input_ids: torch.Tensor | None) -> None:
        own = None if input_ids is None else self.read_input_ids()
        if own is None or input_ids is None or self._mask is None:
            return
        differing = (own != input_ids) & self._mask
        if bool(differing.any()):
            row, position = differing.nonzero()[0].tolist()
            raise IncomparableError(
                f"the captures have different inputs: input_ids differ, first at row {row}, position {position}",
                expected=f"{int(input_ids[row, position])}, as on the other side",
                found=f"{int(own[row, position])} in {self.directory}",
                next_step="Run both sides on the same prompts; if they are, check lengths, padding and steps in a map.",
            )
        self.has_checked_tokens = True


def _tells_real_rows(mask: torch.Tensor) -> bool:
    is_binary = mask.ndim == 2 and bool(((mask == 0) | (mask == 1)).all())
    return is_binary and bool(mask.any(dim=1).all())


def _begins_with(tokens: torch.Tensor, prompt: torch.Tensor) -> bool:
    return len(tokens) >= len(prompt) and torch.equal(tokens[: len(prompt)].to(prompt.dtype), prompt)


def _listed(lengths: object) -> str:
    assert isinstance(lengths, (tuple, list))
    return ", ".join(str(length) for length in lengths)
