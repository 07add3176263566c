"""Next-token distributions of prompts: the port's against the golden's, token by token.

- `prompt_judge`: from a prompt's logits to its result, and the limits that right ports keep; the usual noise of
  golden logits, pooled over prompts
- `logits_verdict`: the logits of all rows of a run, in one value
"""
