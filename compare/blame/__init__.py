"""Blame: the sites at fault, and where in them the error lies.

- `blame`: the sites to blame in a layer, and layers with the same blame
- `operations`: two sites of one operation that are one cause
- `second_look`: results that the sites around a failing one correct
- `recompute`: a site computed from the port's own values; both sides' inputs of a site; sites judged on the port's
  own values of their inputs
- `location`: adds where the error lies to the results of blamed sites
- `regions`: rows, positions, experts, heads and channels that hold all wrong values, and lists of these; a site that
  is right but for constant factors
- `sentences`: sentences on where the error of a site lies; a site that holds its right values in another order
"""
