"""What every host needs of a MiniMax-M2, its checkpoints and its captures; the command `mm2-split` (`cli`).

The words:

- `spec`: what config.json says; `sites`: the named points of a layer; `span`: a run of layers
- `layouts`: how the pieces that ranks hold of a site make up the whole
- `run`: which layers are run how, and what is kept; `prompts` and `inputs`: the token rows it is fed;
  `default_rows`: those that nobody names
- `tokenizer` and `chat`: text to token ids, by the checkpoint's own files
- `provenance`: what made a capture; `results`: what a comparison found
- `metrics`: what tensors measure; `floor`: what BF16 alone cost the golden; `structure`: averages that systematic
  mistakes survive and noise does not
- `memory`: what this process holds, held at most and may hold; `memory_usage`: one reading of it; `cgroup`:
  what a container allows; `size`: bytes read and worded; `progress`: a run over layers, watched
- `core_pool`: threads, one on each core; `compiled`: loops made machine code
- `errors`: every error and its exit code

The folders:

- `checkpoint`: checkpoints found, read, regrouped and made
- `synthetic`: checkpoints that have learnt from text, and changes that keep what a model computes
- `hub`: a hub's files, fetched and verified
- `reference`: the decoder layer in plain PyTorch, and transformers' own
- `ranks`: processes of one run: who they are, how they talk, which of them failed
- `split`: any causal language model as bottom, trunk and top
- `pickles`: files of torch.save, read without calling anything in them
- `capture`: capture directories written and read, mm2's and others'

For the commands of all packages: `options` (declared once) and `console` (exit codes, progress on stderr).
"""
