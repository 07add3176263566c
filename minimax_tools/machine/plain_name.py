"""Names of files that a damaged or hostile file gives: a plain one leads nowhere else, and every file system has it."""

from __future__ import annotations

# As Linux's; of bytes, not of characters.
_MAX_BYTES = 255


def is_plain_name(name: str) -> bool:
    """Decide whether a text is the name of a file in a folder: no path, no control character, at most 255 bytes."""
    return (
        name not in ("", ".", "..")
        and "/" not in name
        and name.isprintable()
        and len(name.encode(errors="surrogatepass")) <= _MAX_BYTES
    )
