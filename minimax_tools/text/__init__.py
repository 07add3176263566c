"""Text and token rows.

- `prompts`: the prompts of a command as token rows
- `tokenizer`: the checkpoint's tokenizer
- `end_tokens`: the token ids that end a generated text
- `chat`: the checkpoint's chat template
"""
