"""Parts that all commands share.

- `options`: options that mean the same in every command; dtypes that options name; the place of a run's capture;
  shell completion of captures
- `remote_paths`: the options' type that takes remote addresses beside folders
- `console`: exit codes, errors, JSON and log messages; a choice among names whose error suggests near ones; warnings
  and log messages of a port and its libraries; options that take paths of this machine alone; values of options that
  are found when the command runs; work for a command's end
- `group`: groups of commands, each loaded when it is called; a command begun as a process
- `help_groups`: the groups in which a command's help shows its options
- `project_defaults`: a project's defaults, in `mm2.toml`
"""
