"""Verify that each node loads its own slice of a model and nothing else: `mm2-split verify` with all sections.

Without arguments it verifies the newest plan in this folder. `pip install` puts it on the path.

Example: python scripts/verify_slice_loading.py --plan plan.json --slices model_shards
"""

from __future__ import annotations

from minimax_tools.__main__ import verify_slice_loading

if __name__ == "__main__":
    verify_slice_loading()
