"""Results: values of comparisons and bisections.

- `results`: a comparison, its sites and its blame; experts and next tokens that a port chooses otherwise; what is
  wrong in a whole port's run; the tokens or channels that hold the wrong values of a site
- `prompt_results`: prompts ranked by their next-token distributions; what came of following the worst prompt to a
  layer
- `probes`: the runs of a bisection; runs of a whole port with the golden's stream in place of its own
"""
