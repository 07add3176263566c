"""NameMap: a user's YAML about another tool's dump: places of sites, real tokens, ranks and passes.

format: msprobe                 # else found from the files
ranks: 2                        # else as many as wrote into the dump
steps: ["0"]                    # passes to read, by label; [["0", "0.1"]] reads a prefill and a decoded token behind it
requests: ["0", "1"]            # the prompts' requests, in their order, if the dump names requests
lengths: [48, 33]               # real tokens of each prompt; else those of the capture on the other side
padding: right                  # the side on which rows are padded
rows: padded                    # or packed: the tokens of all prompts one after another
attention_mask: mask.pt         # instead of lengths and padding: [B,S] of 0 and 1, beside the map
usual_names: true               # whether sites that the map does not name are looked for under the usual names
sites:
  q_proj: "layers.{layer}.self_attn.qkv_proj[0:768]@shard(-1)"     # a cut of each rank's tensor, joined over ranks
  k_proj: "layers.{layer}.self_attn.qkv_proj[768:896]@shard(-1)"
  output: {sum: ["layers.{layer}:output[0]", "layers.{layer}:output[1]"]}
  q_rope: {from: "layers.{layer}.self_attn.rotary:output[0]", transpose: [0, 2, 1, 3]}
  logits: lm_head
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minimax_tools.dumps.formats import FORMATS
from minimax_tools.dumps.piece import SitePlace
from minimax_tools.errors import UsageError, shorten
from minimax_tools.machine.yaml_file import read_yaml
from minimax_tools.model.site_layouts import Replicated, Sharded, SiteLayout
from minimax_tools.model.sites import ModelSite, Site

# Places whose tensors are added up; most often one.
SumOfPlaces = tuple[SitePlace, ...]
INPUT_IDS, ATTENTION_MASK = "input_ids", "attention_mask"
# The input of the final norm: the last layer's output.
HEAD_INPUT = "head_input"
_LAYER = "layers.{layer}"
_MOES = ("block_sparse_moe", "mlp", "moe")  # names of the MoE block in different models
# Places of MiniMax-M2's sites under the module names of the hub, transformers and NxDI. Of a site's places, the first
# that a dump holds counts; one of them may be a sum of several. Facts that differ between models of a tool, such as the
# widths of a fused projection, need a user's map.
_NAMES: Mapping[Site | ModelSite | str, tuple[str, ...]] = {
    Site.INPUT: (f"{_LAYER}:input", f"{_LAYER}.input_layernorm:input"),
    Site.INPUT_NORM: (f"{_LAYER}.input_layernorm",),
    Site.Q_PROJ: (f"{_LAYER}.self_attn.q_proj", f"{_LAYER}.self_attn.qkv_proj.q_proj"),
    Site.K_PROJ: (f"{_LAYER}.self_attn.k_proj", f"{_LAYER}.self_attn.qkv_proj.k_proj"),
    Site.V_PROJ: (f"{_LAYER}.self_attn.v_proj", f"{_LAYER}.self_attn.qkv_proj.v_proj"),
    Site.Q_NORM: (f"{_LAYER}.self_attn.q_norm", f"{_LAYER}.self_attn.q_layernorm"),
    Site.K_NORM: (f"{_LAYER}.self_attn.k_norm", f"{_LAYER}.self_attn.k_layernorm"),
    # Rotated queries and keys have no usual place: no module returns them.
    Site.ATTN_CONTEXT: (f"{_LAYER}.self_attn.o_proj:input",),
    Site.ATTN_DELTA: (f"{_LAYER}.self_attn.o_proj", f"{_LAYER}.self_attn"),
    Site.ATTN_RESIDUAL: (f"{_LAYER}.post_attention_layernorm:input",),
    Site.POST_NORM: (f"{_LAYER}.post_attention_layernorm",),
    Site.ROUTER_LOGITS: tuple(
        f"{_LAYER}.{moe}.{name}"
        for moe in _MOES
        for name in ("gate", "router.linear_router", "router:output[0]")
    ),
    Site.ROUTER_EXPERTS: tuple(
        f"{_LAYER}.{moe}.{name}:output[2]" for moe in _MOES for name in ("gate", "router")
    ),
    # transformers' router returns the weights of the chosen experts; for NxDI's see `AFFINITIES`.
    Site.ROUTER_WEIGHTS: tuple(f"{_LAYER}.{moe}.gate:output[1]" for moe in _MOES),
    Site.MOE_DELTA: tuple(f"{_LAYER}.{moe}" for moe in _MOES),
    # A layer's output is also the input of the next layer.
    Site.OUTPUT: (f"{_LAYER}", "layers.{next}:input", "layers.{next}.input_layernorm:input"),
    ModelSite.EMBEDDING: ("model.embed_tokens", "embed_tokens"),
    ModelSite.FINAL_NORM: ("model.norm", "norm"),
    ModelSite.LOGITS: ("lm_head", ":output[logits]", ":output[next_token_logits]"),
    INPUT_IDS: (
        ":input[input_ids]",
        "model:input[input_ids]",
        "input_ids",
        "model.embed_tokens:input",
        "embed_tokens:input",
    ),
    ATTENTION_MASK: (":input[attention_mask]", "model:input[attention_mask]"),
    HEAD_INPUT: ("model.norm:input", "norm:input"),
}
# Serving engines compute these only for the tokens to sample from.
BEHIND_LAYERS = (ModelSite.FINAL_NORM, ModelSite.LOGITS)
# What a layer's module returns: its output, or one of two addends of it.
LAYER_ITSELF = SitePlace.read(_LAYER)
# In place of the above for models that fuse each residual add into the norm behind it, as vLLM's and SGLang's do. Their
# norms and layers take and return pairs: a value, and the residual that it is to be added to. A tuple is a sum.
_FUSED_PAIRS: Mapping[Site, tuple[tuple[str, ...], ...]] = {
    Site.INPUT: (),  # read as the output of the layer before
    Site.INPUT_NORM: ((f"{_LAYER}.input_layernorm:output[0]",),),
    Site.ATTN_RESIDUAL: ((f"{_LAYER}.post_attention_layernorm:output[1]",),),
    Site.POST_NORM: ((f"{_LAYER}.post_attention_layernorm:output[0]",),),
    # SGLang 0.5.23 passes the residual beside the modules: the norm behind the layer returns their sum.
    Site.OUTPUT: (
        (f"{_LAYER}:output[0]", f"{_LAYER}:output[1]"),
        ("layers.{next}.input_layernorm:output[1]",),
    ),
}
# Affinities of all experts and the chosen experts, from which `router_weights` are computed: what NxD's router returns.
AFFINITIES = tuple(
    (
        SitePlace.read(f"{_LAYER}.{moe}.router:output[1]"),
        SitePlace.read(f"{_LAYER}.{moe}.router:output[2]"),
    )
    for moe in _MOES
)
_NXDI_QUERIES = f"{_LAYER}.self_attn.qkv_proj:output[0]"
# Sites whose heads are divided among ranks along the last dim.
_SPLIT_HEADS = (Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ, Site.Q_NORM, Site.K_NORM, Site.ATTN_CONTEXT)
_ROW_KEYS = ("requests", "lengths", "padding", "rows", "attention_mask")
_KEYS = ("format", "ranks", "steps", *_ROW_KEYS, "usual_names", "sites")
# More tokens, or ranks, than any dump has.
_MAX_COUNT = (1 << 31) - 1
_SIDES = ("right", "left")
_ROWS = ("padded", "packed")
_LIST_OF_KEYS = "The keys are: " + ", ".join(_KEYS) + "."


def usual_places(
    format_name: str, *, has_fused_residuals: bool
) -> Mapping[Site | ModelSite | str, tuple[SumOfPlaces, ...]]:
    """Return the places of each site, the likeliest first; also of token ids, mask and `HEAD_INPUT`.

    With `has_fused_residuals` norms return the residual stream beside the normed value.
    """
    places: dict[Site | ModelSite | str, tuple[SumOfPlaces, ...]] = {
        site: tuple((SitePlace.read(name),) for name in names) for site, names in _NAMES.items()
    }
    if format_name == "nxdi":
        # Its fused projection returns queries, keys and values apart; the capture keeps the first.
        places[Site.Q_PROJ] += ((SitePlace.read(_NXDI_QUERIES),),)
    if has_fused_residuals:
        for site, names in _FUSED_PAIRS.items():
            places[site] = tuple(tuple(SitePlace.read(name) for name in terms) for terms in names)
    if format_name == "vllm-neuron":
        # It keeps the first of several outputs. `stream_proof` finds out whether that is a layer's whole output.
        places[Site.OUTPUT] = ()
        # Ranks may add up o_proj's outputs behind the module: what attention itself returns is the sum.
        places[Site.ATTN_DELTA] = tuple(reversed(places[Site.ATTN_DELTA]))
        for site in Site:
            # A tensor that the model's code gives to `capture_tensor` under the site's name.
            by_hand = (SitePlace.read(f"manual.{_LAYER}.{site}"),)
            places[site] = (*places.get(site, ()), by_hand)
    return places


def usual_layout(site: Site | ModelSite | str) -> SiteLayout:
    """Return the layout of a site without a declared one: heads are divided, all else is whole on each rank."""
    if site in _SPLIT_HEADS:
        return Sharded(dim=-1)
    return Sharded(dim=1) if site in (Site.Q_ROPE, Site.K_ROPE) else Replicated()


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedSite:
    """The place of a site as a user gave it."""

    terms: tuple[SitePlace, ...]  # places of tensors that are added up, most often one
    # Order of the dims that gives each term mm2's shape of the site; empty to leave it.
    transpose: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMap:
    """Facts about a dump that its files do not tell; by default none."""

    path: Path | None = None  # the map's file; None without one
    format: str | None = None  # name of the format; None if the files tell
    num_ranks: int | None = None  # ranks that the port was divided among; None if the dump tells
    steps: tuple[tuple[str, ...], ...] = ()  # passes to read; those of an inner tuple follow each other
    # Of the prompts, in the prompts' order; empty if their tokens or lengths tell.
    requests: tuple[str, ...] = ()
    # Real tokens of each prompt, in all passes together; empty if something else tells.
    lengths: tuple[int, ...] = ()
    padding: str = "right"  # side on which rows are padded, `right` or `left`
    is_packed: bool | None = None  # whether prompts lie one after another; None if the format tells
    attention_mask: Path | None = None  # file with [B,S] of 0 and 1
    has_usual_names: bool = True  # whether sites not named here are looked for under the usual names
    # The sites that the map names.
    sites: Mapping[Site | ModelSite | str, MappedSite] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> NameMap:
        """Read a map.

        Raises:
            UsageError: The file is no map; the message names the wrong key.
        """
        record = read_yaml(path)
        if not isinstance(record, Mapping):
            raise UsageError(f"{path} is no map", expected="keys and values", next_step=_LIST_OF_KEYS)
        unknown = [str(key) for key in record if key not in _KEYS]
        if unknown:
            found = ", ".join(unknown)
            raise UsageError(f"{path} has keys that no map has", found=found, next_step=_LIST_OF_KEYS)
        if record.get("attention_mask") is not None and record.get("lengths") is not None:
            raise UsageError(
                f"{path} gives lengths and attention_mask",
                next_step="One of them says which tokens are real.",
            )

        def take(key: str, is_valid: Callable[[Any], bool], *, expected: str, default: Any = None) -> Any:
            value = record.get(key)
            if value is None:
                return default
            if not is_valid(value):
                raise _wrong(path, key, value, expected)
            return value

        def choose(key: str, allowed: tuple[str, ...]) -> Any:
            return take(key, lambda value: value in allowed, expected=" or ".join(allowed))

        rows = choose("rows", _ROWS)
        steps = take(
            "steps",
            _are_steps,
            expected='a list of labels, such as [1], or [["0", "0.1"]] for passes that follow',
        )
        mask = take("attention_mask", lambda name: isinstance(name, str), expected="a file's name")
        sites = take("sites", lambda value: isinstance(value, Mapping), expected="sites and where they lie")
        lengths_form = "a list of whole numbers from 1, such as [48, 33]"
        return cls(
            path=path,
            format=choose("format", tuple(FORMATS)),
            num_ranks=take("ranks", _is_count, expected="a whole number from 1"),
            # `[0, 1]` in the file gives (("0",), ("1",)), and `[[0, 1]]` gives (("0", "1"),).
            steps=tuple(tuple(map(str, _as_list(group))) for group in steps or ()),
            requests=tuple(
                map(
                    str,
                    take("requests", _are_labels, expected='a list of names, such as ["0", "1"]', default=()),
                )
            ),
            lengths=tuple(take("lengths", _are_counts, expected=lengths_form, default=())),
            padding=choose("padding", _SIDES) or _SIDES[0],
            is_packed=None if rows is None else rows == "packed",
            attention_mask=None if mask is None else path.parent / mask,
            has_usual_names=take("usual_names", _is_switch, expected="true or false", default=True),
            sites={_read_site(path, name): _read_place(path, str(name), sites[name]) for name in sites or ()},
        )


def _read_site(path: Path, name: Any) -> Site | ModelSite | str:
    for kind in (Site, ModelSite):
        if name in [str(site) for site in kind]:
            return kind(name)
    if name == INPUT_IDS:
        return INPUT_IDS
    raise UsageError(
        f"{path}: {shorten(str(name))!r} is no site",
        expected="one of " + ", ".join((*map(str, Site), *map(str, ModelSite), INPUT_IDS)),
    )


def _read_place(path: Path, name: str, value: Any) -> MappedSite:
    """Return the place that a value gives: `PLACE`, `{from: PLACE}` or `{sum: [PLACE, …]}`."""
    wrong = _wrong(
        path,
        f"sites.{name}",
        value,
        "a place, or {from: PLACE} or {sum: [PLACE, …]}, these with or without transpose: [0, 2, 1, 3]",
    )
    terms: Any = value
    order: Any = []
    if isinstance(value, Mapping):
        if value.keys() - {"from", "sum", "transpose"} or ("from" in value) == ("sum" in value):
            raise wrong
        terms = value.get("from", value.get("sum"))
        order = [] if value.get("transpose") is None else value["transpose"]
    terms = _as_list(terms)
    are_texts = bool(terms) and all(isinstance(term, str) for term in terms)
    if not are_texts or not isinstance(order, list) or not _is_order_of_dims(order):
        raise wrong
    try:
        return MappedSite(terms=tuple(SitePlace.read(term) for term in terms), transpose=tuple(order))
    except UsageError as error:
        raise UsageError(f"{path}: sites.{name}: {error.what}", expected=error.expected) from error


def _wrong(path: Path, key: str, value: Any, expected: str) -> UsageError:
    return UsageError(f"{path}: {key} is wrong", expected=expected, found=shorten(repr(value)))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _are_labels(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) in (str, int) for value in values)


def _are_steps(groups: Any) -> bool:
    return isinstance(groups, list) and all(group and _are_labels(group) for group in map(_as_list, groups))


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_count, values))


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _is_order_of_dims(order: list[Any]) -> bool:
    """Decide whether each dim comes once; true is no dim, although it equals 1."""
    return all(type(dim) is int for dim in order) and sorted(order) == list(range(len(order)))


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MAX_COUNT
