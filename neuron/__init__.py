"""The port under test, run on a Trainium or a stand-in for one: the command `mm2-test`.

From the lowest floor up:

- `process`: the process that runs a port, and its supervisor
- `devices`: backends, ranks, and weights on their way to a device
- `builtin`: mm2's own decoder layer for a device
- `ports`: a port, found, built, loaded, and its sites
- `runs`: a run, from hidden states to the capture
- `model_runs`: a run of a whole port, from token ids to logits
- `replacement`: the golden's stream in place of a whole port's own, and the search for its last wrong layer
- `prompt_runs`: runs of many prompts through a whole port, and the way from the worst to its layer
- `weight_trace`: where every element of a port's weights comes from, and whether that is right
- `check`: findings about a machine's devices, settings, memory and time
- `options`: options that several commands share, ranks among them; the port that they name, as options again
- `commands`: commands with a file of their own
- `cli`: the other commands of `mm2-test`
- `__main__`: the entry point
"""
