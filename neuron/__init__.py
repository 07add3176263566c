"""The port under test, run on a Trainium or its stand-in; the command `mm2-test` (`cli`, `options`).

- `backend`: what computes; `runtime`: a backend opened with its device; `distributed`: its process group
- `machine`: which NeuronCores there are; `check`: what changes numbers here, and whether a layer fits
- `targets`: the port, found in its `sources`, built, and loaded with its `weights`
- `footprint`: what a run takes of the host's memory, and the limits it is held to
- `exposure`: which sites it shows
- `layer` and `moe`: mm2's own decoder layer for a device
- `runner`: a run from its hidden states to the capture, with `golden_feed` for what a golden gives,
  `executor` for layers and `head` for the rest
"""
