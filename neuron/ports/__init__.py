"""The port under test.

- `target`: the protocol of a target: found by name, built, loaded
- `targets`: all kinds of targets, and the search by name
- `port_target`: a port's own class or function; `sources`: the file or module that it is imported from
- `mm2_targets`: the layers of mm2, `builtin` and `reference`
- `nxdi`: layers on neuronx-distributed-inference (NxDI); `nxdi_layer`: such a layer behind the protocol
- `nxdi_config`: NxDI's config of a model
- `nxdi_conversion`: conversions of a layer's weights, by whom they are
- `nxdi_application`: the port's own, with NxDI's cast and NxD's sharding; `nxdi_layout`: mm2's table
- `nxdi_sites`: the sites that a layer on NxDI shows
- `traced`: layers that were compiled into files; `tracing`: the compilation
- `exposure`: the sites that a port shows, on one rank or several
- `recorded_layer`: a layer that returns its sites, so that a compiler keeps them
- `returned`: the output, keys and values that a port returned
- `model_target`: a whole port, found, built, loaded; `model_exposure`: its sites; `model_returned`: its results
- `vllm_neuron_model`: whole ports for the vLLM Neuron plugin; `packed_request`: the tokens of their passes;
  `divided_tokens`: the ranks' parts of them;
  `block_cache`: their paged cache; `plain_checkpoint`: the folder that they load, without FP8; `residual_stream`:
  layers that pass it on as two summands
- `vllm_neuron_stream`: points of such models at which their stream can be replaced
- `model_batch`: the sizes of a whole port's batch; `model_classes`: classes of its submodules, here and elsewhere
- `nxdi_model`: whole ports on NxDI; `nxdi_settings`: how their applications are built; `nxdi_loaded`: loaded and called
- `nxdi_capture`: NxDI's tensor capture of a pass, read as sites
- `nxdi_points`: modules at which NxDI's tensor replacement can replace the stream; `nxdi_replacement`: its files and
  arguments
- `port_errors`: translation of errors raised by a port's code
"""
