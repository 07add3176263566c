"""Text and token rows.

- `input_request`: the input options of a command
- `prompts`: the prompts of a command as token rows
- `answered_prompts`: prompts with their answers, as token ids
- `lm_eval_samples`: the requests and answers in a samples file of lm-evaluation-harness
- `tokenizer`: the checkpoint's tokenizer and chat template
"""
