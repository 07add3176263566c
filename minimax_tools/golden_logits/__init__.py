"""The golden's next-token logits of whole rows, computed by mm2's own reference, and kept for later runs.

- `golden_logits`: those of the exact model, and of right models that round; next-token logits of a row, at the
  likeliest tokens and in sum at the others; the golden's stream at the input of a layer, where they may begin
- `logits_store`: golden logits in a folder, under the model's fingerprint
- `golden_rows`: golden logits of rows, read from the store or computed, with one layer of weights in memory
"""
