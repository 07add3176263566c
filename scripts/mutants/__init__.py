"""Small faults planted one by one, for `run_mutants.py`: do the tests notice them?

- `mutant`: the faults of a file
- `rooms`: the files in question, and their tests
- `changes`: the lines that differ from another branch
- `coverage_map`: the tests that run a line
- `graft`: a fault put into the running process
- `trial`: the tests of each fault, in a process of its own
- `excuses`: faults that no test can notice, with the reason of each
"""
