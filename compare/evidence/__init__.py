"""Evidence of a judged run for its report: what the captures show beside the figures.

- `collection`: everything that a report shows, and which sites it looks at
- `site_errors`: errors of one site by size, token and channel
- `expert_choices`: load of the experts on both sides, and the margins of flips
- `divergence`: next-token distributions by position
- `mistakes`: a diagnosis as the report shows it
"""
