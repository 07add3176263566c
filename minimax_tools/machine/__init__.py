"""The machine under mm2: memory, cores, files, folders, standard output.

- `memory`: a budget for the process's memory, and what is still available (`MemoryBudget`)
- `memory_tracker`: a record of the process's memory and its peaks (`MemoryTracker`)
- `memory_usage`: readings of the process's memory
- `cgroup`: memory limits of a container
- `size`: sizes in bytes, read from and written as text
- `core_pool`: one thread for each core
- `compiled`: loops that numba compiles
- `compiled_cache`: their machine code in files, proved before it is used
- `importing`: imports of libraries without collections of garbage
- `finding`: findings about a machine, and their levels
- `file_digest`: the sha256 of a file
- `plain_name`: names of files that a hostile file gives
- `whole_file`: files that are written whole or not at all
- `new_folder`: folders that are written whole or not at all
- `temporary`: hidden folders that hold what is being written
- `held_file`: files and folders that a living process has locked
- `read_ahead`: files read into the page cache before they are needed
- `durable`: what stays after a power loss
- `folder_lock`: the lock of a capture directory
- `json_file`: JSON that somebody else wrote, bounded
- `yaml_file`: YAML that a user wrote, bounded
- `native_output`: standard output kept free of what libraries print
"""
