"""Parts that all commands share.

- `options`: options that mean the same in every command, and their values; folders that may be addresses
- `console`: exit codes, errors, JSON and log messages
- `group`: groups of commands, each loaded when it is called; a command begun as a process
- `help_groups`: the groups in which a command's help shows its options
- `project_defaults`: a project's defaults, in `mm2.toml`
"""
