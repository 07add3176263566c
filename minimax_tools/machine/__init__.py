"""The machine under mm2: memory, cores, files, folders, standard output.

- `memory`: a budget for the process's memory, readings of it, and what a container still allows
- `memory_tracker`: a record of the process's memory and its peaks (`MemoryTracker`)
- `size`: sizes in bytes, read from and written as text
- `compiled`: loops that numba compiles; one thread for each core
- `importing`: imports of libraries without collections of garbage
- `finding`: findings about a machine, and their levels
- `files`: files and folders that are written whole or not at all; locks; digests; files read ahead
- `json_file`: JSON that somebody else wrote, bounded
- `yaml_file`: YAML that a user wrote, bounded
- `native_output`: standard output kept free of what libraries print
- `progress`: progress of a run over layers
- `stops`: Ctrl-C, SIGTERM and SIGHUP; the command line as it was given, and others as child processes
- `streams`: standard output and standard error; tables as plain text
"""
