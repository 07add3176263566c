"""Verify that each node loads its own slice of a model and nothing else: `mm2-split verify` with all sections.

Example: python scripts/verify_slice_loading.py --plan plan.json --slices model_shards
"""

from __future__ import annotations

import sys

from minimax_tools.commands.verify import verify_command

if __name__ == "__main__":
    verify_command(["--verbose", *sys.argv[1:]], prog_name="verify_slice_loading.py")
