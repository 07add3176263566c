"""The port under test.

- `target`: the protocol of a port, a layer or a whole one: found by name, built, loaded; translation of its errors
- `targets`: all kinds of targets, and the search by name; the layers of mm2, `builtin` and `reference`; a port's own
  class or function; `sources`: the file or module that it is imported from
- `hub_names`: the tensors that a port takes, by the names of its family's checkpoints
- `nxdi`: layers on neuronx-distributed-inference (NxDI), behind the protocol
- `nxdi_config`: NxDI's configs of a layer and of an application
- `nxdi_application`: the port's own, with NxDI's cast and NxD's sharding; `nxdi_layout`: mm2's table
- `traced`: layers that were compiled into files; `tracing`: the compilation
- `exposure`: the sites that a port shows, a layer or a whole one, on one rank or several
- `returned`: what a port returned, a layer or a whole one
- `vllm_neuron_model`: whole ports for the vLLM Neuron plugin, the folder that they load, and their residual stream;
  `packed_request`: the tokens of their passes, the ranks' parts of them, and their paged cache
- `vllm_neuron_stream`: points of such models at which their stream can be replaced
- `nxdi_model`: whole ports on NxDI; `nxdi_stream`: their stream, replaced by NxDI's tensor replacement
- `cpu_mode`: modes in which the CPU stands for the device, and the classes that a port chooses by them
"""
