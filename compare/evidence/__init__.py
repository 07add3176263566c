"""Evidence of a judged run for its report: what the captures show beside the figures.

- `collection`: everything that a report shows, and which sites it looks at; next-token distributions by position;
  load of the experts on both sides, and the margins of flips; errors of one site by size, token and channel
"""
