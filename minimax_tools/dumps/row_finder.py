"""Row finder: tells a dump's real tokens from padding, by the user's map, the dump itself or the other side's batch.

B prompts, S their padded length, S' their padded length in the dump, H hidden.
"""

from __future__ import annotations

import torch

from minimax_tools.capture.source import CaptureSource
from minimax_tools.dumps.assembly import DumpAssembly, TokenKind
from minimax_tools.dumps.name_map import ATTENTION_MASK, INPUT_IDS, NameMap
from minimax_tools.dumps.schedule import Padding, Schedule, TokenRows, word_lengths
from minimax_tools.dumps.tensor_file import list_tensors, read_tensor
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.model.sites import ModelSite

# Share of a token's channels that are equal if the embedding is the same token's.
_LEAST_EQUAL = 0.99


def find_rows(
    assembly: DumpAssembly, names: NameMap, *, other: CaptureSource | None, mask: torch.Tensor | None
) -> TokenRows | None:
    """Find the rows of a dump that are real tokens, as map, dump or the other side tells; None if nothing does.

    `mask` is the other side's, bool [B,S]. A schedule tells, for a dump that records its requests, the rows of each
    request in each pass.

    Raises:
        IncomparableError: The prompts are of other lengths than the other side's.
    """
    other_lengths = () if mask is None else _lengths(mask)
    schedule = assembly.found.schedule
    if schedule is not None:
        requests = names.requests
        if not requests and other is not None and mask is not None:
            requests = _find_requests(assembly, schedule, other, mask)
        lengths = names.lengths or other_lengths
        lengths = lengths or tuple(schedule.length(name) for name in requests or schedule.requests)
        _refuse_other_lengths(assembly, lengths, other_lengths)
        requests = schedule.choose(lengths, named=requests, directory=assembly.found.dump.directory)
        return schedule.rows(requests, lengths)
    dump_mask = _read_mask(assembly, names)
    lengths = names.lengths or other_lengths
    if dump_mask is not None:
        # The mask is the first pass's. Every pass behind it decodes one row of each prompt.
        num_decoded = len(assembly.found.passes[0]) - 1
        lengths = tuple(length + num_decoded for length in _lengths(dump_mask))
    _refuse_other_lengths(assembly, lengths, other_lengths)
    if not lengths:
        return None
    groups = assembly.found.passes
    if len(groups) not in (1, len(lengths)):
        raise CaptureError(
            f"{assembly.found.dump.directory}: which prompts the passes are of cannot be told",
            expected=f"{len(lengths)} passes, one for each prompt, or one for all",
            found=f"{len(groups)}",
            next_step="Name them as steps in a map: an inner list for passes that follow each other.",
        )
    of_groups = (sum(lengths),) if len(groups) == 1 else lengths
    # A mask file tells the rows of all prompts, also where each has passes of its own.
    masks = () if dump_mask is None else (dump_mask,) if len(groups) == 1 else dump_mask.split(1)
    padding = Padding(
        side=names.padding,
        is_packed=_find_packing(assembly, names, num_prompts=len(lengths)),
        masks={group[0]: mask for group, mask in zip(groups, masks, strict=False)},
    )
    counts = tuple(
        assembly.found.count_rows(group, num_tokens)
        for group, num_tokens in zip(groups, of_groups, strict=True)
    )
    return TokenRows.divide(lengths, counts, padding)


def _refuse_other_lengths(
    assembly: DumpAssembly, lengths: tuple[int, ...], other_lengths: tuple[int, ...]
) -> None:
    if other_lengths and lengths != other_lengths:
        raise IncomparableError(
            f"{assembly.found.dump.directory} is of other prompts than the capture on the other side",
            expected=f"prompts of {word_lengths(other_lengths)} tokens",
            found=word_lengths(lengths),
            next_step="Correct lengths in the map, or run both sides on the same prompts.",
        )


def _tell_requests(schedule: Schedule, lengths: tuple[int, ...]) -> bool:
    """Decide whether lengths alone tell the requests: there are no others, and each has a length of its own."""
    held = [schedule.length(request) for request in schedule.requests]
    return len(set(held)) == len(held) and not schedule.broken and sorted(held) == sorted(lengths)


def _find_requests(
    assembly: DumpAssembly, schedule: Schedule, other: CaptureSource, mask: torch.Tensor
) -> tuple[str, ...]:
    """Find each prompt's request by its token ids, else by their embeddings; none if neither tells all of them.

    None are looked for if lengths alone tell the requests. A prompt that was run more often than it is wanted is not
    told.
    """
    if _tell_requests(schedule, _lengths(mask)):
        return ()
    has_embedding = ModelSite.EMBEDDING in other.model_sites()
    for key, kind, values, are_same in (
        (INPUT_IDS, TokenKind.NUMBER, other.read_input_ids(), torch.equal),
        (
            ModelSite.EMBEDDING,
            TokenKind.CHANNELS,
            other.read(None, ModelSite.EMBEDDING) if has_embedding else None,
            _are_same_embeddings,
        ),
    ):
        site = assembly.found.sites.get((None, key))
        steps = set(schedule.rows(schedule.requests).steps)
        if values is None or site is None or not steps <= site.terms[0].steps:
            continue
        held = {}
        for request in schedule.requests:
            rows = schedule.rows((request,))
            held[request] = assembly.read_tokens(site, rows, kind=kind, what=str(key))
        chosen: list[str] = []
        prompts = [row[is_real] for row, is_real in zip(values, mask, strict=True)]
        for prompt in prompts:
            fitting = [
                request
                for request, tokens in held.items()
                if len(tokens) >= len(prompt) and are_same(tokens[: len(prompt)].to(prompt.dtype), prompt)
            ]
            num_equal = sum(torch.equal(prompt, one) for one in prompts)
            if len(fitting) == num_equal:
                # Of two equal prompts, each has a request of its own.
                chosen.append(next(request for request in fitting if request not in chosen))
        if len(chosen) == len(prompts):
            return tuple(chosen)
    return ()


def _are_same_embeddings(held: torch.Tensor, prompt: torch.Tensor) -> bool:
    """Decide whether embeddings [n,H'] are those of a prompt [n,H]; H' may be padded."""
    channels = min(held.shape[-1], prompt.shape[-1])
    is_equal = held[..., :channels] == prompt[..., :channels]
    return bool((is_equal.double().mean(dim=-1) >= _LEAST_EQUAL).all())


def _find_packing(assembly: DumpAssembly, names: NameMap, *, num_prompts: int) -> bool | None:
    """Decide whether the prompts' tokens lie one after another; None if a tensor's own shape must tell."""
    if names.is_packed is not None:
        return names.is_packed
    if assembly.found.dump.is_packed is not None:
        return assembly.found.dump.is_packed
    shapes = {
        piece.shape
        for site in assembly.found.sites.values()
        for term in site.terms
        for piece in term.pieces.values()
    }
    is_padded = num_prompts > 1 and any(len(shape) == 3 and shape[0] == num_prompts for shape in shapes)
    return False if is_padded else None


def _read_mask(assembly: DumpAssembly, names: NameMap) -> torch.Tensor | None:
    """Read the mask of the dump's padded rows, bool [B,S'], from the map's file or the dump; None without one."""
    path = names.attention_mask
    if path is not None:
        tensors = list_tensors(path)
        mask = read_tensor(path, tensors[0].keys) if len(tensors) == 1 else torch.empty(0)
        if not _tells_real_rows(mask):
            raise CaptureError(
                f"the attention mask {path} does not tell real tokens from padding",
                expected="one tensor [B,S] of 0 and 1, a real token in every row",
                found=f"{list(mask.shape)} of {mask.dtype}",
                next_step="Give lengths and padding in the map instead.",
            )
        return mask.bool()
    found = assembly.found
    site = found.sites.get((None, ATTENTION_MASK))
    # Lengths in the map go before. Of several groups of passes, each has a mask of its own: none is read.
    if site is None or names.lengths or len(found.passes) > 1:
        return None
    mask = assembly.read_pass(site, found.passes[0][0], what=ATTENTION_MASK)
    # A model may be called with a mask of another kind, such as [B,1,S,S], which does not tell the rows.
    return mask.bool() if _tells_real_rows(mask) else None


def _lengths(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(length) for length in mask.sum(dim=1))


def _tells_real_rows(mask: torch.Tensor) -> bool:
    """Decide whether a tensor is [B,S'] of 0 and 1, with a real token in every row."""
    is_binary = mask.ndim == 2 and bool(((mask == 0) | (mask == 1)).all())
    return is_binary and bool(mask.any(dim=1).all())
