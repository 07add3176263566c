"""Slices of a checkpoint along a plan: cut out, fetched and verified.

- `source`: a checkpoint to divide, as far as it is known: headers, an index file, or config.json alone
- `stored_weights`: a checkpoint's tensors on this machine, all of them or those of one slice
- `folder`: a slice before it is written, with the tensors of each of its files; its folder, written and opened
- `description`: slice.json, the content of a slice, with the sha256 of its tensors; usual names of its files
- `torch_values`: tensors of `.bin` files, and `.pth` files, which need torch
- `slice_plans`: plans that slices are cut by: of stages, or of tensor names (`ModelSplitter`)
- `download`: the files of a checkpoint that a slice needs, and fetching them
- `verify`: the check of a plan, and of the files, slices and runs made by it
- `verdicts`: the claims of a verification, each with its contradictions; the tensors of a node, planned or found
- `verification_text`: a verification in words
"""
