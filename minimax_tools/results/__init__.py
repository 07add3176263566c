"""Results: values of comparisons and bisections.

- `results`: a comparison, its sites and its blame
- `model_findings`: what is wrong in a whole port's run
- `choices`: experts and next tokens that a port chooses otherwise
- `probes`: the runs of a bisection
"""
