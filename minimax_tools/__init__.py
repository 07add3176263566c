"""The ground floor: everything that each host needs of a MiniMax-M2, its checkpoints and its captures.

- `model/`: what a MiniMax-M2 is: sizes, sites, weight names, runs, inputs
- `checkpoint/`: a checkpoint read, dequantised, regrouped, told apart
- `hub/`: files of a hub's model or dataset, fetched and verified
- `remote/`: folders at remote addresses, and the cache of what was fetched from them
- `synthetic/`: checkpoints made of random numbers
- `reference/`: the decoder layer: plain, in float32 by stages, and in variants
- `golden_logits/`: exact next-token logits of whole rows with their noise, kept from run to run
- `capture/`: capture directories of mm2's own, written and read
- `dumps/`: captures of other tools, and the opening of either kind
- `metrics/`: figures of a pair of tensors and of one, and the noise floor's statistics
- `results/`: values of comparisons and bisections
- `partition/`: a plan: which node holds which layers
- `slices/`: the slices of a plan: cut, fetched and verified
- `split/`: any causal language model as bottom, trunk and top
- `text/`: prompts, tokenizer, chat template, end tokens
- `ranks/`: processes of one run: identity, messages, and which of them failed
- `machine/`: memory, cores, compiled loops, whole files and folders
- `command_line/`: options, console output and progress of all commands
- `commands/`, `cli`: the command `mm2-split`
- `errors`: every error, with its exit code; ascending numbers as ranges
- `printable`: text made fit for a terminal
- `json_codec`: values as JSON and back, by their type hints
- `torch_file`: `.bin`, `.pt` and `.pth` files, mapped, and nothing in them called
- `stored_dtype`: the dtype of a stored tensor, without torch
- `text_enum`: enums whose text is their value
- `provenance`: the maker of a capture: model, software, machine and options
"""
