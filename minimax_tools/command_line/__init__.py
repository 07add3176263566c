"""Parts that all commands share.

- `options`: options that mean the same in every command
- `remote_paths`: options that take remote addresses beside folders
- `table`: tables as plain text
- `console`: exit codes, errors, JSON and log messages
- `run_commands`: commands about a run of a port
- `capture_commands`: commands that come next for a capture
- `progress`: progress of a run over layers
"""
