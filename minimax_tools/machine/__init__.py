"""The machine under mm2: memory, cores, files, folders, standard output.

- `memory`: what the process may hold, and a record of what it held (`MemoryBudget`, `MemoryTracker`)
- `memory_usage`: readings of the process's memory, and their wording
- `cgroup`: memory limits of a container
- `size`: sizes in bytes, read from and written as text
- `core_pool`: one thread for each core
- `compiled`: loops that numba compiles
- `whole_file`: files that are written whole or not at all
- `new_folder`: folders that are written whole or not at all
- `folder_lock`: the lock of a capture directory
- `yaml_file`: a YAML file that a user wrote
- `native_output`: standard output kept free of what libraries print
"""
