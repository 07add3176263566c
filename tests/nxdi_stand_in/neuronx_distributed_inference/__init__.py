"""A stand-in for NxDI: what mm2's adapter of whole models calls, with the behaviour that it relies on."""
