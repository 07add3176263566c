"""Text and token rows.

- `prompts`: the prompts of a command as token rows
- `tokenizer`: the checkpoint's tokenizer, and the ids that end a generated text
- `chat`: the checkpoint's chat template
"""
