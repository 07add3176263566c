"""A golden model run with one layer's weights in memory, or with one slice of a plan.

- `streaming`: transformers' model without weights, filled layer by layer as it runs; a checkpoint reader that reads
  each tensor once
- `streaming_request`: the streaming that a user asked for
- `stream_choice`: the choice between loading whole and streaming
"""
