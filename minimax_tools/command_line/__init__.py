"""Parts that all commands share.

- `options`: options that mean the same in every command
- `console`: exit codes, errors, JSON and log messages
- `progress`: progress of a run over layers
"""
