"""Captures: mm2's own directories of activations, written, read and checked.

What reads or writes raises CaptureError if a file is missing or damaged, or the disk is full.

- `recorder`: hooks that keep the tensors at a module's sites; several calls of a site in one forward, joined
- `further`: a port's tensors that are no sites, kept on request
- `taps`: places of sites in a module tree
- `writer`: a capture directory being written, layer by layer; its files as the run left them, looked for at the run's
  end; files that another machine wrote, waited for
- `resumption`: a killed run's capture, resumed or removed; manifests of ranks that write one directory together; the
  folder of a run that replaces no other finished run
- `store`: folders of captures, and the captures in them, newest first
- `manifest`: the JSON file that lists a capture, with the sha256 of its tensors and files; what a port holds of a
  layer's weights; the checks that a golden went through
- `passes`: calls, cache and chosen tokens of a whole port's run; the tokens generated after each prompt
- `read_record`: the tensors that a node read of a checkpoint
- `source`: the interface of a readable capture, whichever tool wrote it; the tensors of another tool's dump, listed;
  a whole capture checked against its digests
- `mirror`: a capture at a remote address as a folder of the cache, its files fetched when they are read
- `reader`: a capture directory opened for reading; the values of each row's last tokens alone, for long rows
- `proof`: tensors checked against their digests; checks run once, or beside the reading; the files read last, kept
  open
- `run_commands`: commands about a run of a port; commands that come next for a capture
"""
