"""The machine under mm2: memory, cores, files, folders, standard output.

- `memory`: a budget for the process's memory, and what is still available (`MemoryBudget`); memory limits of a
  container; readings of the process's memory
- `memory_tracker`: a record of the process's memory and its peaks (`MemoryTracker`)
- `size`: sizes in bytes, read from and written as text
- `compiled`: loops that numba compiles; their machine code in files, proved before it is used; one thread for each
  core
- `importing`: imports of libraries without collections of garbage
- `finding`: findings about a machine, and their levels
- `files`: files that are written whole or not at all; what stays after a power loss; files and folders that a
  living process has locked; hidden folders that hold what is being written; folders that are written whole or not at
  all; the lock of a capture directory; the sha256 of a file; files read into the page cache before they are needed;
  names of files that a hostile file gives
- `json_file`: JSON that somebody else wrote, bounded
- `yaml_file`: YAML that a user wrote, bounded
- `native_output`: standard output kept free of what libraries print
- `progress`: progress of a run over layers
- `stops`: Ctrl-C, SIGTERM and SIGHUP; the command line as it was given
- `streams`: standard output and standard error; tables as plain text
"""
