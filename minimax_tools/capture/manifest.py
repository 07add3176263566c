"""Manifest: the JSON file that makes a capture directory self-contained.

It holds no date, and no path but those that the user gave: of the model, of the port, and within environment variables.
So the same command in the same environment writes the same bytes. Parts of it are the certificate of a golden, and what
a port holds of each layer's weights; a *kind* of weight is the same for all experts: `q_proj`, `w1`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.errors import CaptureError, Mm2Error, list_names, shorten
from minimax_tools.json_codec import decode, decode_fields, encode, encode_fields, omit_default
from minimax_tools.machine.files import digest_file, is_plain_name
from minimax_tools.machine.json_file import read_own_json
from minimax_tools.metrics.tensor_statistics import TensorStatistics, measure_tensor
from minimax_tools.model.inputs import ExpertTokens
from minimax_tools.model.run import Run
from minimax_tools.model.sites import Site, parse_site
from minimax_tools.provenance import CONFIGS, Provenance
from minimax_tools.stored_dtype import dtype_name
from minimax_tools.text_enum import TextEnum

INPUTS_NAME = "inputs.safetensors"
SCHEMA_VERSION = 3
_MAX_NAMED = 5
# Fields of a manifest that hold a value for each layer, as far as there is something to note.
OF_LAYER = ("not_exposed", "unreached_experts", "num_calls", "held_weights")
# Fields of a manifest beside description, entries and tensor digests, in the order of its file, and keys that are other
# names.
_FIELDS = (
    *("not_exposed", "unreached_experts", "num_calls", "observed_dtypes", "held_weights"),
    *("complete_layers", "is_complete", "certificate", "text_digests"),
)
_RENAMED = {"is_complete": "complete"}
# Fields that most captures do not have: absent, not empty.
_OPTIONAL = ("unreached_experts", "num_calls", "held_weights", "certificate")


class WeightMistake(TextEnum):
    """A kind of fault in the port's weights. A source element is an element of the checkpoint's layer."""

    MISSING = "missing"  # source elements land nowhere
    DUPLICATED = "duplicated"  # source elements land several times
    SWAPPED = "swapped"  # one weight lies where another belongs: w1 where w3 does
    TRANSPOSED = (
        "transposed"  # rows and columns are exchanged: a transposition is missing or too many, or a reshape
    )
    ORDER = "order"  # rows, columns or experts lie in another order
    SCALED = "scaled"  # multiplied, or a number added
    COMPUTED = "computed"  # computed from several source elements
    DTYPE = "dtype"  # rounded
    # Seen in the values that lie in the port once the checkpoint's layer is loaded:
    ZERO = "zero"  # zero everywhere
    VALUES = "values"  # other numbers than the checkpoint's


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFault:
    """Weights that a port holds otherwise than it should, or than the others of their kind."""

    mistake: WeightMistake
    kinds: tuple[str, ...]
    experts: tuple[int, ...]  # numbers of the experts concerned; () for weights of no expert
    text: str  # what lies there, or how
    is_certain: bool = False  # whether no port can mean it: zeros, NaN. What others mean, their output tells
    is_exception: bool = False  # whether most weights of the kind are held as they should be


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeights:
    """Weights of one layer in a port, over all ranks."""

    compared: tuple[str, ...]  # kinds of which the port holds every number of the checkpoint
    not_compared: tuple[str, ...] = ()  # kinds that it holds in other numbers, or where mm2 does not look
    reason: str = ""  # why those were not compared; empty without any
    faults: tuple[WeightFault, ...] = ()
    is_divided: bool = False  # whether some kind is held by several ranks together, and by none alone


class Outcome(TextEnum):
    """Result of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check of a golden."""

    name: str  # such as `rotary_width`
    outcome: Outcome
    found: str  # the finding in words, or the reason why the check could not be made
    # The worst value measured; None if the check measures nothing, or the value is not finite
    figure: float | None = None
    limit: float | None = None  # the largest value that passes; None if the check measures nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The checks of a golden."""

    checks: tuple[Check, ...]  # every check, including those that could not be made
    content: str  # `Manifest.content_digest` of the capture that was checked
    versions: Mapping[str, str] = field(default_factory=dict)  # of the libraries that checked, by library

    @property
    def has_passed(self) -> bool:
        """True if no check failed; some may not have been made."""
        return not self.failed

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return self._with_outcome(Outcome.FAILED)

    @property
    def not_checked(self) -> tuple[Check, ...]:
        """The checks that could not be made."""
        return self._with_outcome(Outcome.NOT_CHECKED)

    def __str__(self) -> str:
        num_passed = len(self._with_outcome(Outcome.PASSED))
        parts = [f"{num_passed} of {len(self.checks)} checks passed"]
        for label, checks in (("failed", self.failed), ("not checked", self.not_checked)):
            if checks:
                parts.append(f"{label}: {', '.join(check.name for check in checks)}")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as a manifest holds it."""
        return {"passed": self.has_passed, **encode_fields(self)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Certificate:
        """Return the certificate that a manifest holds."""
        return decode_fields(cls, record)

    def _with_outcome(self, outcome: Outcome) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.outcome is outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDigest:
    """Dtype, shape and sha256 of a stored tensor; the hash is over its bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} of sha256 {self.sha256[:16]}…"


# Digests of the tensors of some files, by file and by tensor.
FileDigests = Mapping[str, Mapping[str, TensorDigest]]


def describe_tensor(tensor: torch.Tensor) -> TensorDigest:
    """Describe a CPU tensor by dtype, shape and sha256."""
    return TensorDigest(
        dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), sha256=digest_tensor(tensor)
    )


def digest_tensor(tensor: torch.Tensor) -> str:
    """Return the sha256 over a CPU tensor's bytes in row-major order."""
    # numpy has no bfloat16, so the bytes are hashed as uint8.
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().data).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A stored tensor of a site, as its manifest lists it."""

    layer: int | None  # the layer; None for a site outside the layers
    site: str  # name of the site
    file: str  # name of the safetensors file, which holds the tensor under the site's name
    shape: tuple[int, ...]
    dtype: str  # name of the dtype, such as `bfloat16`
    sha256: str  # digest of the tensor's bytes in row-major order
    statistics: TensorStatistics

    def __post_init__(self) -> None:
        _require_plain_name(self.file)

    @classmethod
    def of(cls, layer: int | None, site: str, *, file: str, tensor: torch.Tensor) -> Entry:
        """Build the entry of a CPU tensor that is stored in `file`."""
        digest = describe_tensor(tensor)
        return cls(
            layer=layer,
            site=site,
            file=file,
            shape=digest.shape,
            dtype=digest.dtype,
            sha256=digest.sha256,
            statistics=measure_tensor(tensor),
        )

    @property
    def digest(self) -> TensorDigest:
        """The tensor's dtype, shape and sha256."""
        return TensorDigest(dtype=self.dtype, shape=self.shape, sha256=self.sha256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Description of a capture, fixed before its first tensor is written."""

    side: str  # `gpu_reference` for a golden, `neuron` for a device run
    run: Run  # layers, mode and sites
    provenance: Provenance  # model, software and device that compute it
    inputs_digest: str  # digest of ids, mask and positions
    input_source: str  # source of the first layer's input, in words
    noise_floor: str = "off"  # `full` with float32 twins, `stats` with their distances alone, or `off`
    floor_variants: tuple[str, ...] = ()  # other right ways to compute a layer, which widen the noise floor
    is_quick: bool = False  # whether the rows are the short ones of --quick
    expert_tokens: ExpertTokens | None = None  # tokens whose states are set at each layer's input
    # Number of tokens at each row's end whose values are stored (see `kept_tokens`); 0 for all
    last_tokens: int = 0
    # Of a run, the rows of each call of a layer; a row's last call counts. Empty: one call of all rows
    calls: tuple[tuple[int, ...], ...] = ()

    def differences(self, other: Description) -> list[str]:
        """Return dotted names of values that differ, such as `options.attn_implementation`.

        A capture may be resumed if none differs. The configs are kept for the reader and do not count.
        """
        names = _differences(encode(self), encode(other))
        return [name for name in names if name.partition(".")[0] not in CONFIGS]


# Most captures have none of these.
omit_default(Description, "floor_variants", "is_quick", "expert_tokens", "last_tokens", "calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of a capture directory."""

    description: Description  # the run
    entries: tuple[Entry, ...] = ()  # sites stored so far
    # Of the tensors without an entry (inputs, float32 twins, noise floors and others), by file and name
    digests: FileDigests = field(default_factory=dict)
    text_digests: Mapping[str, str] = field(default_factory=dict)  # sha256 of each JSON file, by its name
    # Sites by layer that the run wanted and the port does not expose
    not_exposed: Mapping[int, tuple[Site, ...]] = field(default_factory=dict)
    # Of a golden, the experts by layer that no token chose; no entry if nobody looked
    unreached_experts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    # How often the port computed those of them that it computed several times, by layer
    num_calls: Mapping[int, Mapping[Site, int]] = field(default_factory=dict)
    # Dtypes of the router's gate and correction bias as the port loaded them
    observed_dtypes: Mapping[str, str] = field(default_factory=dict)
    # What the port holds of each layer's weights, as far as they were compared when they were loaded
    held_weights: Mapping[int, HeldWeights] = field(default_factory=dict)
    complete_layers: tuple[int, ...] = ()  # layers stored whole, ascending
    is_complete: bool = False  # whether the run came to its end
    certificate: Certificate | None = None  # checks of a golden, added by `mm2-gpu certify`

    def __post_init__(self) -> None:
        for name in (*self.digests, *self.text_digests):
            _require_plain_name(name)

    def names_in(self, file: str) -> tuple[str, ...]:
        """Return the names of a file's tensors that have no entries, sorted; () if the manifest lists none."""
        return tuple(self.digests.get(file, ()))

    def file_names(self) -> tuple[str, ...]:
        """Return the names of the capture's files, sorted, the manifest's own too."""
        entry_files = (entry.file for entry in self.entries)
        return tuple(sorted({MANIFEST_NAME, *entry_files, *self.digests, *self.text_digests}))

    def find_damage(self, name: str, path: Path) -> str | None:
        """Describe the first difference of a capture's file, at `path`, from what is listed; None if there is none."""
        if name in self.text_digests:
            found_hash, expected_hash = digest_file(path), self.text_digests[name]
            is_same = found_hash == expected_hash
            return None if is_same else f"sha256 {found_hash[:16]}… for {expected_hash[:16]}…"
        expected = {entry.site: entry.digest for entry in self.entries if entry.file == name}
        expected |= self.digests.get(name, {})
        try:
            with safe_open(path, framework="pt") as tensors:
                if differing := sorted(expected.keys() ^ set(tensors.keys())):
                    return f"other tensors: {list_names(differing, most=_MAX_NAMED)}"
                for tensor_name, digest in expected.items():
                    found = describe_tensor(tensors.get_tensor(tensor_name))
                    if found != digest:
                        return f"{tensor_name}: {found} for {digest}"
        except (OSError, SafetensorError) as error:
            return str(error)
        return None

    @property
    def is_certified(self) -> bool:
        """True if there is a certificate, and it belongs to the tensors listed here."""
        return self.certificate is not None and self.certificate.content == self.content_digest()

    def content_digest(self) -> str:
        """Return a sha256 over the digests of everything stored, and the description.

        A certificate belongs to this hash.
        """
        digest = hashlib.sha256()
        for entry in self.entries:
            digest.update(_entry_text(entry).encode())
        for text in (*self._file_texts(), _as_text(dict(self.text_digests))):
            digest.update(text.encode())
        digest.update(json.dumps(encode(self.description), sort_keys=True).encode())
        return digest.hexdigest()

    def with_layer(
        self,
        layer: int | None,
        entries: tuple[Entry, ...],
        *,
        digests: FileDigests = MappingProxyType({}),
        observed_dtypes: Mapping[str, str] = MappingProxyType({}),
        **of_layer: Any,
    ) -> Manifest:
        """Add a whole layer, or put the sites outside the layers in place of those that are listed.

        Args:
            layer: Its number; None for the sites outside the layers.
            entries: Its sites.
            digests: Those of its twins, floors and other tensors.
            observed_dtypes: Dtypes that the port loaded.
            of_layer: Values for the fields of `OF_LAYER`, by name; None, or empty, where there is nothing to note.
        """
        noted: dict[str, Any] = {
            name: {**getattr(self, name), layer: value}
            for name, value in of_layer.items()
            # That no expert was left out is worth a note.
            if value or (name == "unreached_experts" and value is not None)
        }
        others = (entry for entry in self.entries if entry.layer != layer)
        added = () if layer is None else (layer,)
        return self.with_digests(
            digests,
            entries=_sorted((*others, *entries)),
            observed_dtypes={**self.observed_dtypes, **observed_dtypes},
            complete_layers=tuple(sorted((*self.complete_layers, *added))),
            **noted,
        )

    def with_digests(self, digests: FileDigests, **changes: Any) -> Manifest:
        """Add or replace the digests of some tensor files, and other fields by name."""
        files = sorted({**self.digests, **digests}.items())
        ordered = {file: dict(sorted(tensors.items())) for file, tensors in files}
        return replace(self, digests=ordered, **changes)

    def with_text(self, name: str, sha256: str) -> Manifest:
        """Add or replace the digest of a JSON file."""
        return replace(self, text_digests=dict(sorted({**self.text_digests, name: sha256}.items())))

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON values."""
        return {**self._frame(), "digests": encode(self.digests), "entries": encode(self.entries)}

    def as_text(self) -> str:
        """Return the file's text, one line for each entry and each file with digests."""
        frame = [f" {json.dumps(name)}: {_as_text(value)}" for name, value in self._frame().items()]
        files = ",\n".join(f"  {text}" for text in self._file_texts())
        entries = ",\n".join(f"  {_entry_text(entry)}" for entry in self.entries)
        parts = (*frame, f' "digests": {{\n{files}\n }}', f' "entries": [\n{entries}\n ]')
        return "{\n" + ",\n".join(parts) + "\n}\n"

    def _frame(self) -> dict[str, Any]:
        """Return the JSON values of everything but the entries and the digests of tensors."""
        frame = {"schema_version": SCHEMA_VERSION, **encode(self.description)}
        for name in _FIELDS:
            value = getattr(self, name)
            if value or name not in _OPTIONAL:
                frame[_RENAMED.get(name, name)] = encode(value)
        return frame

    def _file_texts(self) -> list[str]:
        """Format the digests of each tensor file."""
        return [f"{_as_text(file)}: {_as_text(encode(tensors))}" for file, tensors in self.digests.items()]

    @classmethod
    def read(cls, directory: Path | str, *, name: str = MANIFEST_NAME) -> Manifest:
        """Read the manifest of a capture directory, or one of a rank beside it.

        Raises:
            CaptureError: The directory holds no manifest, or one that this version cannot read.
        """
        path = Path(directory) / name
        try:
            record = read_own_json(path)
        except FileNotFoundError:
            raise CaptureError(
                f"no capture at {directory}",
                expected=MANIFEST_NAME,
                next_step="Make one: mm2-gpu extract-all --model DIR (golden), mm2-test sweep (run).",
            ) from None
        except (OSError, ValueError) as error:
            raise _damaged(path, str(error)) from error
        if not _is_manifest(record):
            raise _damaged(path, "JSON that is no manifest of mm2's")
        version = record["schema_version"]
        if type(version) is not int or version != SCHEMA_VERSION:
            raise CaptureError(
                f"{path} has another schema",
                expected=f"version {SCHEMA_VERSION}",
                found=shorten(repr(version)),
                next_step="Read it with the mm2 that wrote it, or run the capture again.",
            )
        try:
            return decode(cls, record)
        except (AttributeError, KeyError, TypeError, ValueError, Mm2Error) as error:
            raise _damaged(path, f"{type(error).__name__}: {error}") from error

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Manifest:
        """Return the manifest that `to_json` gave."""
        for name in {"digests", *_FIELDS} - set(_OPTIONAL):
            if _RENAMED.get(name, name) not in record:
                raise KeyError(_RENAMED.get(name, name))
        # Of a file that anybody may have written, in any order.
        manifest = decode_fields(cls, {**record, "description": record}, **_RENAMED)
        return manifest.with_digests({})

    @staticmethod
    def is_in(directory: Path) -> bool:
        """Decide whether a directory holds a capture of mm2, with a manifest that is whole or damaged."""
        try:
            return _is_manifest(read_own_json(directory / MANIFEST_NAME))
        except FileNotFoundError:
            return False
        except ValueError:
            # Damaged JSON may be another tool's; only mm2 writes the inputs beside it.
            return (directory / INPUTS_NAME).exists()


def _require_plain_name(name: str) -> None:
    """Raise ValueError unless a file lies in the capture's own folder: a manifest may come from anywhere."""
    if not is_plain_name(name) or name.startswith(".") or "\\" in name:
        raise ValueError(f"{shorten(name)!r} is no file of a capture's folder")


def _as_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _entry_text(entry: Entry) -> str:
    return _as_text(encode(entry))


def _is_manifest(record: Any) -> bool:
    return isinstance(record, dict) and {"schema_version", "side", "entries"} <= record.keys()


def _damaged(path: Path, found: str) -> CaptureError:
    return CaptureError(f"{path} is damaged", found=found, next_step="Run the capture again.")


def _sorted(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Sort entries by layer, those outside the layers last, and by the sites' order of execution."""

    def key(entry: Entry) -> tuple[bool, int, int, str]:
        if entry.layer is None:
            # Sites outside the layers go by name.
            return True, 0, 0, entry.site
        return False, entry.layer, _order_of(entry.site), entry.site

    return tuple(sorted(entries, key=key))


@cache
def _order_of(site: str) -> int:
    return parse_site(site).order


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return dotted names of the values that differ; `provenance.` is left out of them."""
    names = []
    for name in sorted({*first, *second}):
        first_value, second_value = first.get(name), second.get(name)
        if isinstance(first_value, Mapping) and isinstance(second_value, Mapping):
            prefix = "" if name == "provenance" else f"{name}."
            names += [prefix + inner for inner in _differences(first_value, second_value)]
        # Compared as text: one side was read from JSON, which has lists in place of tuples.
        elif _as_sorted_text(first_value) != _as_sorted_text(second_value):
            names.append(name)
    return names


def _as_sorted_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
