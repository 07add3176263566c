"""Results: values of comparisons and bisections.

- `regions`: the tokens or channels that hold the wrong values of a site
- `results`: a comparison, its sites and its blame
- `model_findings`: what is wrong in a whole port's run
- `prompt_results`: prompts ranked by their next-token distributions
- `choices`: experts and next tokens that a port chooses otherwise
- `followed`: what came of following the worst prompt to a layer
- `probes`: the runs of a bisection
- `replacements`: runs of a whole port with the golden's stream in place of its own
"""
