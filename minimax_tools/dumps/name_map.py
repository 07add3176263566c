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
from minimax_tools.dumps.place import SitePlace
from minimax_tools.dumps.usual_names import INPUT_IDS
from minimax_tools.errors import UsageError, shorten
from minimax_tools.machine.yaml_file import read_yaml
from minimax_tools.model.sites import ModelSite, Site

_ROW_KEYS = ("requests", "lengths", "padding", "rows", "attention_mask")
_KEYS = ("format", "ranks", "steps", *_ROW_KEYS, "usual_names", "sites")
# More tokens, or ranks, than any dump has.
_MAX_COUNT = (1 << 31) - 1
_SIDES = ("right", "left")
_ROWS = ("padded", "packed")
_LIST_OF_KEYS = "The keys are: " + ", ".join(_KEYS) + "."


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
        reader = _Reader(path, record)
        if reader.has("attention_mask") and reader.has("lengths"):
            raise UsageError(
                f"{path} gives lengths and attention_mask",
                next_step="One of them says which tokens are real.",
            )
        return cls(
            path=path,
            format=reader.choice("format", tuple(FORMATS)),
            num_ranks=reader.value("ranks", _is_count, expected="a whole number from 1"),
            steps=reader.steps(),
            requests=reader.requests(),
            lengths=reader.lengths(),
            padding=reader.choice("padding", _SIDES) or _SIDES[0],
            is_packed=None if not reader.has("rows") else reader.choice("rows", _ROWS) == "packed",
            attention_mask=reader.file("attention_mask"),
            has_usual_names=reader.switch("usual_names", default=True),
            sites=reader.sites(),
        )


class _Reader:
    """The values of one map's file; errors name file and key."""

    def __init__(self, path: Path, record: Mapping[Any, Any]) -> None:
        self._path = path
        self._record = record

    def has(self, key: str) -> bool:
        return self._record.get(key) is not None

    def value(self, key: str, is_valid: Callable[[Any], bool], *, expected: str) -> Any:
        """Return a key's value; None if the file does not give it."""
        value = self._record.get(key)
        if value is not None and not is_valid(value):
            raise self._wrong(key, expected=expected)
        return value

    def choice(self, key: str, allowed: tuple[str, ...]) -> str | None:
        chosen: str | None = self.value(key, lambda value: value in allowed, expected=" or ".join(allowed))
        return chosen

    def items(self, key: str, are_valid: Callable[[list[Any]], bool], *, expected: str) -> list[Any]:
        """Return a key's list; empty if the file does not give it."""
        value = self._record.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not are_valid(value):
            raise self._wrong(key, expected=expected)
        return value

    def switch(self, key: str, *, default: bool) -> bool:
        value = self._record.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, expected="true or false")
        return value

    def steps(self) -> tuple[tuple[str, ...], ...]:
        """Return the passes; `[0, 1]` in the file gives (("0",), ("1",)), and `[[0, 1]]` gives (("0", "1"),)."""
        steps = self.items(
            "steps",
            lambda steps: all(group and _are_labels(group) for group in map(_as_list, steps)),
            expected='a list of labels, such as [1], or [["0", "0.1"]] for passes that follow',
        )
        return tuple(tuple(map(str, _as_list(group))) for group in steps)

    def requests(self) -> tuple[str, ...]:
        expected = 'a list of names, such as ["0", "1"]'
        return tuple(map(str, self.items("requests", _are_labels, expected=expected)))

    def lengths(self) -> tuple[int, ...]:
        expected = "a list of whole numbers from 1, such as [48, 33]"
        return tuple(self.items("lengths", lambda items: all(map(_is_count, items)), expected=expected))

    def file(self, key: str) -> Path | None:
        name = self.value(key, lambda name: isinstance(name, str), expected="a file's name")
        return None if name is None else self._path.parent / name

    def sites(self) -> dict[Site | ModelSite | str, MappedSite]:
        sites = self._record.get("sites")
        if sites is None:
            return {}
        if not isinstance(sites, Mapping):
            raise self._wrong("sites", expected="sites and where they lie")
        return {self._site(name): self._mapped_site(str(name), value) for name, value in sites.items()}

    def _site(self, name: Any) -> Site | ModelSite | str:
        for kind in (Site, ModelSite):
            if name in [str(site) for site in kind]:
                return kind(name)
        if name == INPUT_IDS:
            return INPUT_IDS
        raise UsageError(
            f"{self._path}: {shorten(str(name))!r} is no site",
            expected="one of " + ", ".join((*map(str, Site), *map(str, ModelSite), INPUT_IDS)),
        )

    def _mapped_site(self, name: str, value: Any) -> MappedSite:
        """Return the place that a value gives: `PLACE`, `{from: PLACE}` or `{sum: [PLACE, …]}`."""
        terms: Any = value
        transpose: tuple[int, ...] = ()
        if isinstance(value, Mapping):
            unknown = value.keys() - {"from", "sum", "transpose"}
            if unknown or ("from" in value) == ("sum" in value):
                raise self._wrong_site(name, value)
            terms = value.get("from", value.get("sum"))
            order = [] if value.get("transpose") is None else value["transpose"]
            if not isinstance(order, list) or not _is_order_of_dims(order):
                raise self._wrong_site(name, value)
            transpose = tuple(order)
        terms = _as_list(terms)
        if not terms or not all(isinstance(term, str) for term in terms):
            raise self._wrong_site(name, value)
        try:
            return MappedSite(terms=tuple(SitePlace.parse(term) for term in terms), transpose=transpose)
        except UsageError as error:
            raise UsageError(f"{self._path}: sites.{name}: {error.what}", expected=error.expected) from error

    def _wrong(self, key: str, *, expected: str) -> UsageError:
        return UsageError(
            f"{self._path}: {key} is wrong", expected=expected, found=shorten(repr(self._record[key]))
        )

    def _wrong_site(self, name: str, value: Any) -> UsageError:
        return UsageError(
            f"{self._path}: sites.{name} is wrong",
            expected="a place, or {from: PLACE} or {sum: [PLACE, …]}, these with or without transpose: [0, 2, 1, 3]",
            found=shorten(repr(value)),
        )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _are_labels(values: list[Any]) -> bool:
    return all(isinstance(value, (str, int)) and not isinstance(value, bool) for value in values)


def _is_order_of_dims(order: list[Any]) -> bool:
    """Decide whether each dim comes once; true is no dim, although it equals 1."""
    return all(type(dim) is int for dim in order) and sorted(order) == list(range(len(order)))


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MAX_COUNT
