"""Files of torch.save, read without torch's loader: nothing that a file names is imported or called.

- `inert` carries out a pickle's opcodes; `rebuild` lists the few names that become values
- `stored` describes a storage and a tensor in it by their bytes in the file
- `torch_file` finds these in both layouts of torch.save, and reads a value with or without its tensors
"""
