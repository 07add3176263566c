"""Files of a Hugging Face hub's repository, as a checkpoint needs them.

access (which hub, and how) → faults (what went wrong, in words) → attempts (again, and when) → transfer (one file,
resumed and verified) → snapshot (one commit's files in the cache). `minimax_tools.hub.checkpoint_folder` is the door.
"""
