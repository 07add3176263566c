"""A machine before a golden is made on it: what it has, what is wrong with it, and which options work.

- `golden_way`: the ways to make a golden on a machine, with their options and times
- `machine_check`: findings about this machine: driver, versions, shards, disk
"""
