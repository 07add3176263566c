"""The process that runs a port: its end is no verdict unless mm2 itself says so.

- `record`: what a process is doing, in memory that another one reads after its death
- `status`: the process's own side: says what it does, and its exit code as the last thing of all
- `ending`: how a process ended, in words
- `supervisor`: runs a command in a child, and judges how that one ends
"""
