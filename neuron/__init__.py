"""The port under test, run on a Trainium or its stand-in; the command `mm2-test` (`cli`, `options`, `commands`).

From the lowest up:

- `devices`: what computes, its ranks, and how weights get there
- `builtin`: mm2's own decoder layer for a device
- `ports`: the port, found in its sources, built, loaded, and the sites it shows
- `origins`: where every element of a port's weights comes from, and whether that can be right
- `runs`: a run from its hidden states to the capture
- `check`: what changes numbers on this machine, and whether a layer fits
- `process`: the process that runs the port, watched by another one that knows an end from a verdict
- `launch`, `rank_options`: the ranks of a run, started as processes of the command itself
"""
