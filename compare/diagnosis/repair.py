"""WeightRepair: a change of a layer's tensors, before a port converts them, that undoes a mistake; and its lines.

The lines that a report prints are the source of the function that was run. So they were executed as they are read.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

import torch

from minimax_tools.model.sites import Site

# A layer's tensors by the hub's relative names, as `convert_state_dict` gets them.
Tensors = MutableMapping[str, torch.Tensor]
_INDENT = " " * 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightRepair:
    """A change of a layer's tensors that makes a port with a mistake right.

    `edit(tensors, config, **parameters)` changes the tensors in place. Its body may use nothing but these names and
    torch: it is printed to be pasted. The tensors at the `reorders` sites have another order of channels afterwards,
    though what follows is right; they are not judged then.
    """

    edit: Callable[..., None]
    reorders: tuple[Site, ...] = ()

    def takes(self, parameters: Mapping[str, object]) -> bool:
        """Decide whether it undoes the mistake with these parameters: one of some experts alone has more."""
        return parameters.keys() <= inspect.signature(self.edit).parameters.keys()

    def lines(self, parameters: Mapping[str, object]) -> tuple[str, ...]:
        """Return the lines for the beginning of `convert_state_dict`: the parameters, and the body of `edit`."""
        source = textwrap.dedent(inspect.getsource(self.edit)).splitlines()
        function = ast.parse("\n".join(source)).body[0]
        assert isinstance(function, ast.FunctionDef), "a repair is a function"
        after_docstring = function.body[1]
        body = textwrap.dedent("\n".join(source[after_docstring.lineno - 1 : function.end_lineno]))
        return (*(f"{name} = {value!r}" for name, value in parameters.items()), *body.splitlines())


def lines_for_layers(
    lines: tuple[str, ...], layers: tuple[int, ...], *, num_layers: int, has_conversion: bool = True
) -> tuple[str, ...]:
    """Return the lines as they are pasted into a port.

    Unless all of the model's `num_layers` layers need them, they get a condition. A port without `convert_state_dict`
    gets a whole one.
    """
    if len(layers) < num_layers:
        condition = f"layer_idx == {layers[0]}" if len(layers) == 1 else f"layer_idx in {layers}"
        lines = (f"if {condition}:", *(_INDENT + line for line in lines))
    if has_conversion:
        return lines
    head = "def convert_state_dict(self, tensors, config, layer_idx):"
    return (head, *(_INDENT + line for line in lines), f"{_INDENT}return tensors")
