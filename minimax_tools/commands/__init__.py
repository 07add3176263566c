"""The commands of `mm2-split`, one a file; `minimax_tools.cli` puts them together."""
