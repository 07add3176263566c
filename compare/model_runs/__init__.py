"""A whole port's run, judged beyond the sites of its layers: passes, cache, order of layers, chosen tokens."""
