"""Mistake: an entry of the catalogue. Hypothesis: one or two mistakes with chosen parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from compare.catalogue.candidates import Parameters, is_list, once
from compare.catalogue.clues import Clues
from compare.catalogue.repairs import Repair
from compare.catalogue.words import Place, Words, words_of
from minimax_tools.model.graph import LayerGraph, ModelGraph
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.evaluation import Change, LayerInputs, node_inputs

# From the inputs to the parameter sets worth a try on them; an empty tuple if the mistake cannot show on them.
Candidates = Callable[[LayerInputs], tuple[Parameters, ...]]
# From what a port's values say to the parameter sets that they speak for.
Finder = Callable[[Clues], tuple[Parameters, ...]]


def find_nothing(_: Clues) -> tuple[Parameters, ...]:
    """Return no parameters: the candidates are all that is tried."""
    return ()


def _no_detail(_: ModelSpec, __: Parameters) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A known mistake within a layer, or of its decoded tokens.

    `build` makes the change of the layer from the parameters, by name. `is_rounding` says that the port rounds values
    which already hold BF16 noise: the error then depends on their last bits, and can be predicted only in part.
    """

    name: str
    place: Place = Place.LAYER
    # A further sentence behind `what`, which is true of some parameters in some models alone; "" for none.
    detail: Callable[[ModelSpec, Parameters], str] = _no_detail
    build: Callable[..., Change]
    candidates: Candidates = once
    find: Finder = find_nothing  # further candidates, of too many to list, by the port's values
    # The same, if it takes long: asked where nothing else explains the port.
    find_at_last: Finder = find_nothing
    fitted: str | None = None  # parameter that is searched between the candidates, on a logarithmic scale
    is_whole: bool = False  # whether the fitted parameter is a whole number
    is_constant: bool = False  # whether the fitted parameter is one number of a model, the same in all layers
    is_rounding: bool = False
    # Whether it says no more than that a value is off by a factor: that is true where a factor explains the port.
    is_factor: bool = False
    is_named: bool = True  # False for a description of the port's values that is no known mistake
    # Whether the change takes values of all tokens from the right layer, where no other mistake has changed them.
    reads_right_layer: bool = False
    repair: Repair | None = None  # change of the layer's tensors that undoes it; None if none does
    takes_weight_for_gain: bool = False  # whether the repair is right only where a norm's gain is its weight
    reorders: tuple[Site, ...] = ()  # sites that the repair reorders, though what follows is right

    @property
    def words(self) -> Words:
        """The mistake in words; a description that is no known mistake has none."""
        return words_of(self.name, self.place)

    @property
    def finds_more(self) -> bool:
        """True if the port's values may give parameters that are not listed."""
        return self.find is not find_nothing or self.find_at_last is not find_nothing

    def has_repair(self, graph: ModelGraph) -> bool:
        """Decide whether the repair undoes the mistake in a model of a graph."""
        return self.repair is not None and not (self.takes_weight_for_gain and graph.has_gain_of_one_plus)

    def fits(self, graph: ModelGraph) -> bool:
        """Decide whether it is a mistake in a model of a graph: else it may be what the model computes."""
        return self.words.fits(graph)

    def describe(self, spec: ModelSpec, parameters: Parameters) -> str:
        """Return what a port of a model does that makes this mistake with these parameters."""
        return spec.family.retell(f"{self.words.what} {self.detail(spec, parameters)}".rstrip())

    def hypotheses(self, inputs: LayerInputs) -> tuple[Hypothesis, ...]:
        """Return a hypothesis for each of the mistake's candidates."""
        if not self.fits(inputs.spec.graph):
            return ()
        return self._of_layer(inputs.graph, self.candidates(inputs))

    def found_hypotheses(self, clues: Clues, *, at_last: bool = False) -> tuple[Hypothesis, ...]:
        """Return a hypothesis for each parameter set that the port's values speak for."""
        find = self.find_at_last if at_last else self.find
        return self._of_layer(clues.base.graph, find(clues))

    def _of_layer(self, graph: LayerGraph, found: Iterable[Parameters]) -> tuple[Hypothesis, ...]:
        """Return the hypotheses of these parameters that are ones of a layer."""
        hypotheses = map(self.with_parameters, found)
        # A dense layer has no router, and not all layers norm their queries.
        nodes = node_inputs(graph).keys()
        return tuple(hypothesis for hypothesis in hypotheses if hypothesis.change.nodes <= nodes)

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
    def has_list(self) -> bool:
        """True if a parameter is a list of numbers of the port."""
        return any(is_list(value) for parameters in self.parameters for value in parameters.values())

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
