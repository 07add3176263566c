"""The process that runs a port, and its supervisor: only an exit code that mm2 itself chose is a verdict.

- `record`: the status of a process, in memory that another process can read even after a crash
- `status`: the running process's side: its activity, and at last its exit code; what a port's code changes of the
  process, kept apart from mm2's
- `supervisor`: runs a command in a child process and takes its exit code from the record; the end of a process, as
  text and as an error
"""
