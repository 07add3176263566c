"""mm2's own decoder layer for a device: `layer`, and its experts in `moe`."""
