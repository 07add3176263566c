"""Hostile files, names and pickles given to mm2, for `bench_torture.py`; each part keeps one promise.

- `hostile_world`: a small model with captures, plan, slices and dumps, whose files are damaged
- `mutations`: mutations of a JSON value, and of a file's bytes
- `hostile_json`: files of any shape give a typed error that names them
- `hostile_pickles`: no code of a pickle runs, and reading one is bounded
- `hostile_text`: no control characters reach a terminal or a report
- `unreadable_dumps`: what cannot be read of a dump is named, and nothing passes over it
- `tally`: checks of one promise, and those that broke it
"""
