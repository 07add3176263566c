"""Files of torch.save, read without torch's loader: nothing that a file names is imported or called.

- `reader`: tensors of `.bin` files, read one at a time
- `header`: the tensors of a `.bin` file by name, shape, dtype and place
- `torch_file`: saved values of both layouts of torch.save, with tensors or with their descriptions
- `rebuild`: the few names that become values
- `inert`: pickles whose other names become inert records
- `whole_module`: a module that was pickled whole, told by its class
- `stored`: a tensor described by its place in a file
"""
