"""Hostile files, dying processes and strange machines, for `bench_torture.py`; each part keeps one promise.

- `hostile_world`: a small model with captures, plan, slices and dumps, whose files are damaged
- `mutations`: mutations of a JSON value, and of a file's bytes
- `hostile_json`: files of any shape give a typed error that names them
- `hostile_file`: a file with the command that reads it; `hostile_run_files`, `hostile_cache_files` and
  `hostile_model_files`: files beside captures, in caches, and beside weights, dumps and prompts
- `hostile_pickles`: no code of a pickle runs, and reading one is bounded
- `hostile_text`: no control characters reach a terminal or a report
- `unreadable_dumps`: what cannot be read of a dump is named, and nothing passes over it
- `deaths`: commands killed while they write, and run again
- `dying_ranks`: ranks that die or stand still, and a folder that goes away under them
- `power_loss`: commands whose power is cut, in a model of the disk
- `stops`: commands that signals stop
- `streams`: standard streams that are closed or full
- `transfers`: a hub that fails, lies and is shared
- `memory`: captures, folders and an index of great size
- `soak`: many sweeps in one process
- `commands`: commands of mm2 as processes; `forked_command`: one in a fork of a process that has imported torch
- `disk_model`: what a disk may hold after a power loss; `disk_trace`: what a command did to files, as strace tells it
- `tally`: checks of one promise, and those that broke it
"""
