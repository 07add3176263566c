"""The port under test.

- `target`: the protocol of a target: found by name, built, loaded; translation of errors raised by a port's code
- `targets`: all kinds of targets, and the search by name; the layers of mm2, `builtin` and `reference`; a port's own
  class or function; `sources`: the file or module that it is imported from
- `nxdi`: layers on neuronx-distributed-inference (NxDI); `nxdi_layer`: such a layer behind the protocol
- `nxdi_config`: NxDI's config of a model
- `nxdi_application`: the port's own, with NxDI's cast and NxD's sharding; `nxdi_layout`: mm2's table
- `traced`: layers that were compiled into files; `tracing`: the compilation
- `exposure`: the sites that a port shows, a layer or a whole one, on one rank or several
- `returned`: the output, keys and values that a port returned; `model_returned`: the results of a whole one
- `model_target`: a whole port, found, built, loaded; the sizes of its batch
- `vllm_neuron_model`: whole ports for the vLLM Neuron plugin, the folder that they load, and their residual stream;
  `packed_request`: the tokens of their passes, the ranks' parts of them, and their paged cache
- `vllm_neuron_stream`: points of such models at which their stream can be replaced
- `nxdi_model`: whole ports on NxDI; `nxdi_settings`: how their applications are built, and what they record or
  replace; `nxdi_loaded`: loaded and called
"""
