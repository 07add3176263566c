"""Origins: where every element of a loaded port comes from, and whether that can be right; `mm2-test weights`.

| file | holds |
|---|---|
| `sources` | the tensors of a layer, their elements numbered |
| `made_tensors` | a layer's tensors that are made, not read: what a conversion is fed |
| `places`, `place_part` | every tensor that a module holds; of a large one the part that is followed |
| `sample` | which experts are followed, as memory has room |
| `on_access` | tensors made whenever they are asked for |
| `origin` | for each element of a place the number of the element that landed there |
| `made_values`, `reading`, `origin_reader` | how that is found: a pass, a place, all of them |
| `sequences`, `piece`, `matrix`, `layout` | that in words |
| `finding` | one thing that is wrong with it, or looks so |
| `coverage`, `findings` | what lands nowhere or several times; that, and what is wrong in a place |
| `trial`, `exchanges` | the port run on made weights: what clears a suspect, or proves it |
| `kept_weights` | made weights that quantising keeps, for ports that do so on purpose |
| `loaded` | the port as it is loaded with the checkpoint's own layer |
| `smaller` | a model of the same proportions that is traced in moments |
| `port`, `shared_port` | the port itself, and its parts on all ranks that share it |
| `inspection`, `report` | all of it together, and as text and JSON |
"""
