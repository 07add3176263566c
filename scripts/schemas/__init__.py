"""JSON schemas of the commands' `--json` output.

- `outputs.yaml`: the outputs, key by key, as far as no class of mm2 says it
- `outputs`: their schemas
- `fields`: schemas of dataclasses, described by their fields' comments
"""
