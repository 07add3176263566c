"""A stand-in for NxD: what mm2's adapter of whole models calls, with the behaviour that it relies on."""
