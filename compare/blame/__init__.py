"""Blame: the sites at fault, and where in them the error lies.

- `blame`: first failures of a layer, and layers with the same blame
- `recomputed_judge`: sites behind a failing one, judged alone
- `recompute`: a site computed from the port's own values
- `site_inputs`: both sides' inputs of a site
- `location`: sentences on where the error of a blamed site lies
- `regions`: rows, positions, experts, heads and channels that share an error
"""
