"""Two captures side by side: noise floor, routing, blame; the command `mm2-compare`."""
