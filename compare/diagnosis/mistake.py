"""Mistake: an entry of the catalogue, as a change of the layer; and Hypothesis: mistakes with chosen parameters.

WeightRepair: a change of a layer's tensors, before a port converts them, that undoes a mistake; and its lines.

The lines that a report prints are the source of the function that was run. So they were executed as they are read.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import torch

from compare.diagnosis.clues import Clues
from compare.diagnosis.evaluation import Change, LayerInputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec

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


# Inputs of a layer, or of a site outside the layers.
AnyInputs = TypeVar("AnyInputs")
Value = int | float | str
Parameters = Mapping[str, Value]
# From the inputs to the parameter sets worth a try on them; an empty tuple if the mistake cannot show on them.
Candidates = Callable[[LayerInputs], tuple[Parameters, ...]]
# From what a port's values say to the parameter sets that they speak for.
Finder = Callable[[Clues], tuple[Parameters, ...]]

_NO_PARAMETERS: Parameters = MappingProxyType({})
# Length of a parameter's text, beyond which it lists a number for each expert or token.
_LONGEST_TEXT = 40


def is_list(value: Value) -> bool:
    """Decide whether a parameter lists numbers of each expert or token: they differ from layer to layer."""
    return isinstance(value, str) and len(value) > _LONGEST_TEXT


def once(_: object) -> tuple[Parameters, ...]:
    """Return the one candidate of a mistake without parameters."""
    return (_NO_PARAMETERS,)


def once_if(may_show: Callable[[AnyInputs], bool]) -> Callable[[AnyInputs], tuple[Parameters, ...]]:
    """Build the candidates of a mistake without parameters: it is tried on inputs on which it may show."""
    return lambda inputs: (_NO_PARAMETERS,) if may_show(inputs) else ()


def each(
    name: str, values: Callable[[AnyInputs], Iterable[Value]]
) -> Callable[[AnyInputs], tuple[Parameters, ...]]:
    """Build the candidates of a mistake with one parameter: all `values` for the given inputs."""
    return lambda inputs: tuple(MappingProxyType({name: value}) for value in values(inputs))


def nothing_listed(_: object) -> tuple[Parameters, ...]:
    """Return no candidates: the port's values alone give the parameters."""
    return ()


def find_nothing(_: Clues) -> tuple[Parameters, ...]:
    """Return no parameters: the candidates are all that is tried."""
    return ()


def _no_detail(_: ModelSpec, __: Parameters) -> str:
    return ""


def values_of(name: str, *values: Value) -> Callable[[object], tuple[Parameters, ...]]:
    """Build candidates of one parameter, with the same values on all inputs."""
    return each(name, lambda _: values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A known porting mistake.

    `build` makes the change of the layer from the parameters, by name. `is_rounding` says that the port rounds values
    which already hold BF16 noise: the error then depends on their last bits, and can be predicted only in part.
    """

    name: str  # name in reports
    what: str  # sentence that says what the port does
    look_at: str  # place to look at in the port's code
    # A further sentence behind `what`, which is true of some parameters in some models alone; "" for none.
    detail: Callable[[ModelSpec, Parameters], str] = _no_detail
    build: Callable[..., Change]
    candidates: Candidates = once
    find: Finder = find_nothing  # further candidates, of too many to list, by the port's values
    find_at_last: Finder = (
        find_nothing  # the same, if it takes long: asked where nothing else explains the port
    )
    sources: tuple[str, ...] = ()  # public threads that report the mistake, as `repository#thread`
    fitted: str | None = None  # parameter that is searched between the candidates, on a logarithmic scale
    is_whole: bool = False  # whether the fitted parameter is a whole number
    is_constant: bool = False  # whether the fitted parameter is one number of a model, the same in all layers
    is_rounding: bool = False
    # Whether it says no more than that a value is off by a factor: that is true where a factor explains the port.
    is_factor: bool = False
    is_named: bool = True  # False for a description of the port's values that is no known mistake
    # Whether the change takes values of all tokens from the right layer, where no other mistake has changed them.
    reads_right_layer: bool = False
    repair: WeightRepair | None = None  # change of the layer's tensors that undoes it; None if none does

    @property
    def finds_more(self) -> bool:
        """True if the port's values may give parameters that are not listed."""
        return self.find is not find_nothing or self.find_at_last is not find_nothing

    def describe(self, spec: ModelSpec, parameters: Parameters) -> str:
        """Return what a port of a model does that makes this mistake with these parameters."""
        return f"{self.what} {self.detail(spec, parameters)}".rstrip()

    def hypotheses(self, inputs: LayerInputs) -> tuple[Hypothesis, ...]:
        """Return a hypothesis for each of the mistake's candidates."""
        return tuple(self.with_parameters(parameters) for parameters in self.candidates(inputs))

    def found_hypotheses(self, clues: Clues, *, at_last: bool = False) -> tuple[Hypothesis, ...]:
        """Return a hypothesis for each parameter set that the port's values speak for."""
        find = self.find_at_last if at_last else self.find
        return tuple(self.with_parameters(parameters) for parameters in find(clues))

    def with_parameters(self, parameters: Parameters, *, is_fitted: bool = False) -> Hypothesis:
        """Return the hypothesis that a port made this mistake with these parameters."""
        return Hypothesis(
            mistakes=(self,),
            parameters=(parameters,),
            change=self.build(**parameters),
            is_fitted=is_fitted or any(is_list(value) for value in parameters.values()),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hypothesis:
    """A mistake, or two that happened together, with their parameters."""

    mistakes: tuple[Mistake, ...]  # the mistakes; none for the right layer
    parameters: tuple[Parameters, ...]  # parameters of each mistake, in the same order
    change: Change  # change of the layer by all mistakes together
    is_fitted: bool = False  # whether a parameter was fitted to the port, and is none of the catalogue's

    @property
    def has_number(self) -> bool:
        """True if one of its parameters is a number that can be fitted, or lists of the port."""
        return self.is_fitted or any(mistake.fitted for mistake in self.mistakes)

    @property
    def is_factor(self) -> bool:
        """True if it says no more than that a value is off by a factor."""
        return all(mistake.is_factor for mistake in self.mistakes)

    @property
    def is_named(self) -> bool:
        """True if it is made of known mistakes."""
        return all(mistake.is_named for mistake in self.mistakes)

    @property
    def name(self) -> str:
        """Names of the mistakes, as `a + b`."""
        return " + ".join(mistake.name for mistake in self.mistakes)

    @property
    def sites(self) -> frozenset[Site]:
        """The sites at which the change first shows."""
        return self.change.sites

    @property
    def is_rounding(self) -> bool:
        """True for a single mistake that rounds values."""
        return len(self.mistakes) == 1 and self.mistakes[0].is_rounding

    @property
    def is_of_attention(self) -> bool:
        """True if the change begins before post_norm."""
        return min(site.order for site in self.sites) < Site.POST_NORM.order

    def and_also(self, other: Hypothesis) -> Hypothesis:
        """Join two hypotheses: both mistakes happened."""
        return Hypothesis(
            mistakes=(*self.mistakes, *other.mistakes),
            parameters=(*self.parameters, *other.parameters),
            change=self.change.and_also(other.change),
            is_fitted=self.is_fitted or other.is_fitted,
        )
