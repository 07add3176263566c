"""A golden: transformers' model run once, and captured layer by layer with its noise floor.

- `golden`: the request, the opened model, and the capture
- `recording`: the sites, copied to the CPU as the model computes them; states of expert tokens
- `noise_floor`: the float32 twin of a layer, and the error of BF16 against it
- `golden_writer`: the layers written to a capture; forward passes in which some layers stand aside
- `generation`: the tokens that the model generates; `sampling`: the choice of the next one
"""
