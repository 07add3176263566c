"""Parts that all commands share.

- `options`: options that mean the same in every command
- `capture_store`: the place of a run's capture
- `remote_paths`: options that take remote addresses beside folders
- `late_value`: values of options that are found when the command runs
- `named_dtype`: dtypes that options name
- `local_path`: options that take paths of this machine alone
- `table`: tables as plain text
- `entry`: a command begun as a process
- `work`: what a command does, imported when it runs
- `stops`: Ctrl-C, SIGTERM and SIGHUP
- `streams`: standard output and standard error
- `given_line`: the command line as it was given
- `console`: exit codes, errors, JSON and log messages
- `foreign_messages`: warnings and log messages of a port and its libraries
- `afterwards`: work for a command's end
- `group`: groups of commands, each loaded when it is called
- `help_groups`: the groups in which a command's help shows its options
- `completion`: shell completion of captures
- `near_names`: a choice among names whose error suggests near ones
- `project_defaults`: a project's defaults, in `mm2.toml`
- `run_commands`: commands about a run of a port
- `capture_commands`: commands that come next for a capture
- `progress`: progress of a run over layers
"""
