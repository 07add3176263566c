"""CacheCapture: keys and values out of vLLM Neuron's paged cache, read as the sites k_rope and v_proj.

    prompt_analysis/prompt_0/kv_analysis/vllm_kv.pt    {"layers.0.self_attn": (keys, values), …}

Keys (rotated) and values are [1,K,S,D]. The file tells neither tokens nor model. It has the prompt and the tokens that
were fed behind it; what follows the golden's row is not read. The modules' dump of the same run, in
`tensor_compare/neuron` beside them, shows what each layer was fed, so the keys and values can be judged.
B prompts, S tokens, K kv heads, D head_dim.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from minimax_tools.capture.proof import name_place
from minimax_tools.capture.source import CaptureSource
from minimax_tools.dumps.assembly import batch_mask
from minimax_tools.dumps.piece import find_layer
from minimax_tools.dumps.tensor_file import load_restricted
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.stored_dtype import dtype_name
from minimax_tools.torch_file import is_plain, without_gradient

CACHE_FILE = "vllm_kv.pt"
LAYOUT = f"prompt_0/kv_analysis/{CACHE_FILE}"
# Folders above the file, from a report's, down to the file's own.
_PLACES = (
    f"prompt_analysis/prompt_*/kv_analysis/{CACHE_FILE}",
    f"prompt_*/kv_analysis/{CACHE_FILE}",
    f"kv_analysis/{CACHE_FILE}",
    CACHE_FILE,
)
_PROMPT = re.compile(r"prompt_(\d+)")
_LAYER = re.compile(r"(.*\.)?layers\.\d+\.self_attn(\..+)?")
# Site of each half of a layer's pair.
_HALVES: dict[Site | ModelSite, int] = {Site.K_ROPE: 0, Site.V_PROJ: 1}
_AGAIN = "Run its KV-cache analysis again, on all prompts."
_SAME_PROMPTS = "Make the golden with the same prompts, in the same order."
# Keys and values of each layer, [1,K,S,D].
_Cache = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
# Folder of the dump below the folder with the caches.
MODULES_FOLDER = Path("tensor_compare", "neuron")


class CacheCapture(CaptureSource):
    """The caches of one or several prompts, opened for reading; `CaptureSource` describes its methods.

    All caches are in memory: a quarter of a megabyte for a token of MiniMax-M2.

    Args:
        directory: The folder that was named.
        caches: The cache of each prompt, by the path of its file.
        mask: bool [B,S] of the batch to lay tensors out as; None to pad the prompts on the right.
    """

    may_omit_inputs = True

    def __init__(
        self, directory: Path, caches: Mapping[Path, _Cache], *, mask: torch.Tensor | None = None
    ) -> None:
        self.directory = directory
        self._by_path = caches
        self._caches = tuple(caches.values())
        self._mask = batch_mask(tuple(map(_num_tokens, self._caches))) if mask is None else mask

    @classmethod
    def open(cls, directory: Path) -> CacheCapture:
        """Open a folder of this layout."""
        caches = {path: _read_cache(path) for path in _find_files(directory)}
        if not caches:
            raise CaptureError(
                f"no caches at {directory}",
                expected=LAYOUT,
                next_step="Name the folder that holds the prompts' folders.",
            )
        first_path, first = next(iter(caches.items()))
        for path, cache in caches.items():
            if _head_shapes(cache) != _head_shapes(first):
                raise CaptureError(
                    f"{path} is of other layers or heads than {first_path}",
                    expected=_name_heads(first),
                    found=_name_heads(cache),
                    next_step=_AGAIN,
                )
        return cls(directory, caches)

    def laid_out_as(self, other: CaptureSource) -> CacheCapture:
        mask = other.read_attention_mask()
        if mask is None:
            return self
        lengths = [int(row.sum()) for row in mask]
        if len(lengths) != len(self._caches):
            raise IncomparableError(
                f"{self.directory} is of other prompts than {other.directory}",
                expected=f"the caches of {len(lengths)} prompts",
                found=str(len(self._caches)),
                next_step=_SAME_PROMPTS,
            )
        for length, (path, cache) in zip(lengths, self._by_path.items(), strict=True):
            if _num_tokens(cache) < length:
                raise IncomparableError(
                    f"{path} holds fewer tokens than the prompt of {other.directory} has",
                    expected=f"{length} or more",
                    found=str(_num_tokens(cache)),
                    next_step=_SAME_PROMPTS,
                )
        return CacheCapture(self.directory, self._by_path, mask=mask.bool())

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted(self._caches[0]))

    def sites(self, layer: int) -> tuple[Site, ...]:
        return (Site.V_PROJ, Site.K_ROPE) if layer in self._caches[0] else ()

    def not_exposed(self, layer: int) -> tuple[Site, ...]:
        held = self.sites(layer)
        return tuple(site for site in Site if site not in held)

    def read(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor:
        """Read k_rope [B,K,S,D] or v_proj [B,S,K·D]; zeros on padding."""
        if layer is None or site not in self.sites(layer):
            raise CaptureError(f"{self.directory} holds no {name_place(site, layer)}", expected=LAYOUT)
        # Tokens first: [S,K,D] of each prompt.
        prompts = [cache[layer][_HALVES[site]][0].transpose(0, 1) for cache in self._caches]
        batch = prompts[0].new_zeros((*self._mask.shape, *prompts[0].shape[1:]))
        for row, (tokens, is_real) in enumerate(zip(prompts, self._mask, strict=True)):
            batch[row, is_real] = tokens[: int(is_real.sum())]
        return batch.transpose(1, 2) if site.has_heads_dim else batch.flatten(-2)

    def read_attention_mask(self) -> torch.Tensor:
        return self._mask.to(torch.int64)


def holds_caches(directory: Path) -> bool:
    """Decide whether a folder holds caches, or the prompts' folders with them."""
    return bool(_find_files(directory))


def _find_files(directory: Path) -> tuple[Path, ...]:
    """Return the file of each prompt, in the prompts' order; () without one."""
    found = next((paths for place in _PLACES if (paths := list(directory.glob(place)))), [])
    return tuple(sorted(found, key=lambda path: _prompt_number(path.relative_to(directory))))


def _prompt_number(path: Path) -> int:
    match = next((match for part in path.parts if (match := _PROMPT.fullmatch(part))), None)
    return 0 if match is None else int(match[1])


def _read_cache(path: Path) -> _Cache:
    value = load_restricted(path)
    caches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, pair in value.items() if isinstance(value, Mapping) else ():
        if isinstance(name, str) and _LAYER.fullmatch(name):
            layer = find_layer(name)
            assert layer is not None, "the name has a layer's number"
            if layer in caches:
                raise CaptureError(
                    f"{path} holds two caches of layer {layer}",
                    found=f"{name}, and another before it",
                    next_step="Leave out the layers of other models, such as a draft model's.",
                )
            caches[layer] = _check_pair(pair, what=f"{name} in {path}")
    lengths = {keys.shape[2] for keys, _ in caches.values()}
    if len(lengths) != 1:
        raise CaptureError(
            f"{path} holds no cache",
            expected='{"layers.0.self_attn": (keys, values), …} of one length',
            found=f"{len(caches)} layers of {len(lengths)} lengths",
            next_step="Copy it again from the host that wrote it.",
        )
    return caches


def _num_tokens(cache: _Cache) -> int:
    """Return S, the number of tokens that a prompt's cache holds."""
    keys, _ = next(iter(cache.values()))
    return keys.shape[2]


def _head_shapes(cache: _Cache) -> dict[int, tuple[int, int]]:
    """Return K and D of each layer."""
    return {layer: (keys.shape[1], keys.shape[3]) for layer, (keys, _) in cache.items()}


def _name_heads(cache: _Cache) -> str:
    """Return how many layers a cache has, and their kinds of heads."""
    kinds = dict.fromkeys(_head_shapes(cache).values())
    return f"{len(cache)} layers of {' or '.join(f'{heads} heads of {width}' for heads, width in kinds)}"


def _check_pair(pair: Any, *, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's keys and values."""
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(map(_is_tensor, pair))
    shapes = [list(tensor.shape) for tensor in pair] if is_pair else []
    if not is_pair or shapes[0] != shapes[1] or len(shapes[0]) != 4 or shapes[0][0] != 1:
        raise CaptureError(
            f"{what} is no pair of keys and values",
            expected="two tensors [1,heads,tokens,head_dim]",
            found=", ".join(map(str, shapes)) or type(pair).__name__,
            next_step="Write one file for each prompt, as its KV-cache analysis does.",
        )
    # In memory of their own: the file may change now.
    keys, values = (without_gradient(tensor).clone() for tensor in pair)
    if not all(tensor.is_floating_point() and tensor.element_size() >= 2 for tensor in pair):
        raise CaptureError(
            f"{what} is quantised, and its scales are not in the file",
            expected="bfloat16, float16 or float32",
            found=dtype_name(keys.dtype),
            next_step="Run with an unquantised cache, or multiply by the scales first.",
        )
    return keys, values


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_plain(value)
