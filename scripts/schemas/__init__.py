"""JSON schemas of the commands' `--json` output, built from the values that the commands print.

- `parts`: schemas of text, numbers, lists and closed objects
- `values`: schemas of dataclasses, described by their fields' comments
- `judging`: outputs of the commands that judge a port
- `summary`: a comparison in its small form
- `weights`: outputs of `mm2-test weights`
- `captures`: outputs about captures, and of their checks
- `travel`: goldens published, the cache, machines and memory
- `splitting`: outputs of `mm2-split`
- `outputs`: all outputs by name, with the keys that each of them has
"""
