"""Write the JSON schemas of the commands' `--json` output into docs/schema.

python scripts/write_schemas.py          # after a change of an output
python scripts/write_schemas.py --check  # exits with 1 if a file is out of date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parent))

from schemas.outputs import build_schemas

FOLDER = Path(__file__).parents[1] / "docs" / "schema"


def schema_files() -> dict[Path, str]:
    """Return the text of every schema by its path."""
    return {
        FOLDER / f"{name}.schema.json": json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
        for name, schema in build_schemas().items()
    }


def outdated() -> Iterator[Path]:
    """Yield the files that are missing, are no longer written, or say otherwise than the outputs."""
    files = schema_files()
    yield from (path for path, text in files.items() if not path.is_file() or path.read_text("utf-8") != text)
    yield from sorted(set(FOLDER.glob("*.json")) - files.keys())


@click.command()
@click.option(
    "--check", "only_checks", is_flag=True, help="Write nothing; name the files that are out of date."
)
def main(only_checks: bool) -> None:
    """Write the JSON schemas of the commands' output into docs/schema."""
    changed = list(outdated())
    if not only_checks:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for path, text in schema_files().items():
            path.write_text(text, encoding="utf-8")
    for path in changed:
        click.echo(f"{'out of date' if only_checks else 'written'}: {path.name}")
    sys.exit(1 if only_checks and changed else 0)


if __name__ == "__main__":
    main()
