"""Captures: mm2's own directories of activations, written, read and checked.

- `recorder`: hooks that keep the tensors at a module's sites
- `calls`: several calls of a site in one forward, joined
- `further`: a port's tensors that are no sites, kept on request
- `taps`: places of sites in a module tree
- `writer`: a capture directory being written, layer by layer
- `written_files`: its files as the run left them, looked for at the run's end
- `kept_runs`: the folder of a run that replaces no other finished run
- `resumption`: a killed run's capture, resumed or removed
- `parts`: manifests of ranks that write one directory together
- `shared_files`: files that another machine wrote, waited for
- `store`: folders of captures, and the captures in them, newest first
- `manifest`: the JSON file that lists a capture
- `digests`: sha256 of tensors and files, and their lists in a manifest
- `certificate`: the checks that a golden went through
- `generation`: the tokens generated after each prompt
- `passes`: calls, cache and chosen tokens of a whole port's run
- `read_record`: the tensors that a node read of a checkpoint
- `source`: the interface of a readable capture, whichever tool wrote it
- `listing`: the tensors of another tool's dump, listed
- `address_records`: which address a folder of the cache stands for
- `mirror`: a capture at a remote address, its files fetched when they are read
- `remote_output`: a run that is put at a remote address once it is whole
- `reader`: a capture directory opened for reading
- `open_files`: the files read last, kept open
- `proof`: tensors checked against their digests
- `check_runner`: checks run once, or beside the reading
- `inspection`: a whole capture checked against its digests
"""
