"""Results: values of comparisons and bisections.

- `results`: a comparison, its sites and its blame
- `probes`: the runs of a bisection
"""
