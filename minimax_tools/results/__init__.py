"""Results: values of comparisons and bisections.

- `results`: a comparison, its sites and its blame
- `choices`: experts and next tokens that a port chooses otherwise
- `probes`: the runs of a bisection
"""
