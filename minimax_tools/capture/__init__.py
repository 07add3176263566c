"""Captures: the directories that carry activations, and all that is needed to judge them, from host to host.

- `recorder` keeps the tensors at a module's sites while it runs; `taps` say where the sites show
- `writer` writes a directory layer by layer; `manifest` is the JSON in it; `store` says where directories lie
- `digests` are those of inputs, twins and floors in the manifest; `proof` holds what is read against all digests,
  `inspection` does so with all of a capture
- `certificate` is what was checked of a golden, a part of its manifest
- `parts` are the manifests of ranks that write one directory together; `sharing` is how they see each other's files
- `lock` keeps two runs apart, `replacement` keeps files whole, `resumption` goes on where a run was killed
- `locate` opens any of them as a `source`, what a comparison asks of a capture: `reader` reads mm2's own
- `legacy` reads the `.pt` files of others: `legacy_layout` says what they hold, `legacy_files` fetches it,
  and `restricted` loads a pickle without calling anything in it
"""
