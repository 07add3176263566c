"""The judgement: a device run against a golden, from their captures alone; the command `mm2-compare` (`cli`).

- `comparer`: every layer-site pair of a run, a verdict and the blame
- `pairing`: whether two captures may be judged at all, and which pairs that gives
- `judge`: the sites of one layer, by the `criteria`, in units of the `noise` that BF16 costs
- `routing`: expert sets, and which flips the noise explains
- `blame`: where the first fault lies
- `options`: the options of every command that judges
"""
