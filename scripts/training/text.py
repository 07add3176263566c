"""Text to train on: named corpora that every machine with Python has, and files of the user, as rows of token ids.

Repeated paragraphs are kept once. The text is cut at line ends into passages of about 4 kB. Every twentieth passage is
held out: the model is evaluated on it, but never trained.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import tokenizers
import torch

from minimax_tools.errors import UsageError
from minimax_tools.synthetic.toy_tokenizer import find_token_ids

# Least size of a passage; the last one may be shorter.
_PASSAGE_BYTES = 4096
# One of so many passages is held out.
_HELD_OUT_EVERY = 20
# One passage to train on, and one to hold out.
_LEAST_PASSAGES = 2
_LICENCE_NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Passages to train on, and passages held out."""

    name: str
    training: tuple[str, ...]
    held_out: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Digest of the training passages: named corpora differ with the Python version and the installed packages."""
        digest = hashlib.sha256()
        for passage in self.training:
            digest.update(passage.encode() + b"\0")
        return digest.hexdigest()

    @property
    def training_bytes(self) -> int:
        """Bytes of the training passages, in UTF-8."""
        return sum(len(passage.encode()) for passage in self.training)


def read_corpus(texts: tuple[str, ...]) -> Corpus:
    """Read the corpora or files `texts`, one after another, as one corpus.

    Args:
        texts: Names in `CORPORA`, or paths of UTF-8 files.

    Raises:
        UsageError: A name is neither, a file cannot be read, or there is too little text.
    """
    documents = [document for text in texts for document in _documents(text)]
    passages = list(_cut_passages("\n\n".join(_distinct_paragraphs(documents))))
    if len(passages) < _LEAST_PASSAGES:
        raise UsageError(
            f"--text {' '.join(texts)} holds too little text",
            expected=f"more than {_PASSAGE_BYTES} bytes: a part of it is held out",
            found=f"{sum(len(passage.encode()) for passage in passages)} bytes",
        )
    # A text of fewer than 20 passages holds out its last one.
    held_out = set(range(_HELD_OUT_EVERY - 1, len(passages), _HELD_OUT_EVERY)) or {len(passages) - 1}
    return Corpus(
        name="+".join(texts),
        training=tuple(passage for index, passage in enumerate(passages) if index not in held_out),
        held_out=tuple(passages[index] for index in sorted(held_out)),
    )


def _documents(text: str) -> Iterator[str]:
    """Yield the documents of the named corpus `text`, or else the file of that path."""
    if text in CORPORA:
        yield from CORPORA[text]()
        return
    try:
        yield Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--text {text} cannot be read",
            expected=f"a UTF-8 file, or one of {', '.join(CORPORA)}",
            found=str(error),
        ) from error


def _distinct_paragraphs(documents: list[str]) -> Iterator[str]:
    """Yield the paragraphs of the documents, each once."""
    yielded: set[str] = set()
    for document in documents:
        for paragraph in document.split("\n\n"):
            # Paragraphs that differ in white space only are one.
            words = " ".join(paragraph.split())
            if words and words not in yielded:
                yielded.add(words)
                yield paragraph.strip("\n")


def _cut_passages(text: str) -> Iterator[str]:
    """Yield passages of whole lines; each has at least `_PASSAGE_BYTES`, but the last may have fewer."""
    lines: list[str] = []
    size_bytes = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size_bytes += len(line.encode())
        if size_bytes >= _PASSAGE_BYTES:
            yield "".join(lines)
            lines, size_bytes = [], 0
    if lines:
        yield "".join(lines)


def _standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _sources(*packages: str) -> Iterator[str]:
    """Yield the sources of packages of the standard library, sorted by name."""
    for package in packages:
        for path in sorted((_standard_library() / package).glob("*.py")):
            yield path.read_text(encoding="utf-8")


def _prose() -> Iterator[str]:
    """Yield Python's manual as `help()` shows it, then the docstrings of the standard library's modules."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]
    for path in sorted(_standard_library().glob("*.py")):
        yield "\n\n".join(_docstrings(path)) + "\n"


def _docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of several lines in a Python file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        # Docstrings of one line are left out: most repeat the function's name.
        if text and "\n" in text:
            yield text


def _licences() -> Iterator[str]:
    """Yield the licences of Python and of all installed distributions, each text once."""
    yielded: set[str] = set()
    paths = [_standard_library() / "LICENSE.txt"]
    for distribution in importlib.metadata.distributions():
        names = [file for file in distribution.files or () if file.name.upper().startswith(_LICENCE_NAMES)]
        paths += [Path(str(distribution.locate_file(name))) for name in names]
    # The same order wherever Python is installed.
    for path in sorted(paths, key=lambda path: path.parts[-3:]):
        text = path.read_bytes().decode("utf-8", errors="replace") if path.is_file() else ""
        if text and text not in yielded:
            yielded.add(text)
            yield text


CORPORA: Mapping[str, Callable[[], Iterator[str]]] = MappingProxyType(
    {
        "prose": _prose,
        "python-asyncio-and-email": lambda: _sources("asyncio", "email"),
        "python-standard-library": lambda: _sources("."),  # the modules that are no packages
        "character-tables": lambda: _sources("encodings"),
        "licences": _licences,
    }
)


class TokenStream:
    """Passages as one row of token ids, with the end token after each passage."""

    def __init__(self, passages: tuple[str, ...], *, tokenizer: tokenizers.Tokenizer) -> None:
        end = find_token_ids(tokenizer).eos_token_id
        encoded = tokenizer.encode_batch(list(passages), add_special_tokens=False)
        self.ids = torch.tensor([id_ for row in encoded for id_ in (*row.ids, end)], dtype=torch.int64)
        self.num_bytes = sum(len(passage.encode()) for passage in passages)

    def draw_rows(self, *, num_rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Draw rows of ids [num_rows, length] that begin anywhere in the text.

        Raises:
            UsageError: The text is shorter than a row.
        """
        self._refuse_short(length)
        starts = torch.randint(len(self.ids) - length + 1, (num_rows, 1), generator=generator)
        return self.ids[starts + torch.arange(length)]

    def cut_rows(self, *, length: int, most: int) -> torch.Tensor:
        """Return the first rows of the text without overlap, at most `most`: [rows, length].

        Raises:
            UsageError: The text is shorter than a row.
        """
        self._refuse_short(length)
        num_rows = min(most, len(self.ids) // length)
        return self.ids[: num_rows * length].view(num_rows, length)

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes of text per token."""
        return self.num_bytes / len(self.ids)

    def _refuse_short(self, length: int) -> None:
        if len(self.ids) < length:
            raise UsageError(
                "there is too little text for a row",
                expected=f"at least {length} tokens, the length of a row",
                found=f"{len(self.ids)} tokens",
                next_step="Give more --text.",
            )
