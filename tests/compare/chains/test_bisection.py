"""The search over layers, against ports of which it is known where they are wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from compare.chains.stream_search import find_all, find_exhaustively, find_first, find_until_proof
from minimax_tools.json_codec import decode, encode
from minimax_tools.model.span import Span
from minimax_tools.results.probes import BisectionFinding, Chain, Probe


class Port:
    """A port whose layers `wrong` are wrong alone, and whose chains that hold one of `drifting` whole are."""

    def __init__(
        self,
        wrong: set[int],
        *,
        chain_length: int = 2,
        drifting: tuple[Span, ...] = (),
        drift: float = 9.0,
        blind: bool = False,
    ) -> None:
        self.wrong = wrong
        self.chain_length = chain_length
        self.drifting = drifting
        self.drift = drift
        self.blind = blind
        self.probes: list[Probe] = []

    def run(self, span: Span) -> Probe:
        chains: list[Chain] = []
        for part in self._parts(span):
            chains.append(self._judge(part))
            if not chains[-1].is_right:
                break
        self.probes.append(Probe(span=span, chains=tuple(chains)))
        return self.probes[-1]

    def _parts(self, span: Span) -> Iterator[Span]:
        for start in range(span.start, span.stop, self.chain_length):
            yield Span(start, min(start + self.chain_length, span.stop))

    def _judge(self, span: Span) -> Chain:
        is_wrong = any(layer in span for layer in self.wrong) and not (self.blind and len(span) > 1)
        is_drifting = any(part.start in span and part.last in span for part in self.drifting)
        excess = 9.0 if is_wrong else self.drift if is_drifting else 0.5
        return Chain(span=span, is_right=excess <= 1.0, excess=excess, visible=0.01)


def layers_of(findings: list[BisectionFinding]) -> list[int]:
    return [finding.chain.span.start for finding in findings]


@pytest.mark.parametrize("chain_length", [1, 2, 3, 8, 62])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 7, 8, 61, 62, 64])
def test_first_wrong_layer_is_found_wherever_it_is_in_at_most_so_many_runs(
    num_layers: int, chain_length: int
) -> None:
    most = math.ceil(math.log2(num_layers)) + 1
    for layer in range(num_layers):
        port = Port({layer}, chain_length=chain_length)
        finding = find_first(Span(0, num_layers), port.run)
        assert finding is not None
        assert finding.chain.span == Span.single(layer)
        assert finding.is_culprit
        assert len(port.probes) <= most


def test_clean_range_is_covered_by_chains_that_were_judged() -> None:
    port = Port(set())
    assert find_first(Span(5, 67), port.run) is None
    assert len(port.probes) == 7
    covered = [layer for probe in port.probes for chain in probe.chains for layer in chain.span]
    assert covered == list(range(5, 67))


def test_both_sides_of_the_cut_were_run() -> None:
    port = Port({37}, chain_length=4)
    finding = find_first(Span(0, 62), port.run)
    assert finding is not None
    right = {
        layer for probe in port.probes for chain in probe.chains if chain.is_right for layer in chain.span
    }
    assert set(range(37)) <= right
    assert port.probes[-1].chains[-1] == finding.chain
    assert port.probes[-1].chains[-1].span == Span.single(37)


def test_random_culprits_are_all_found_in_order() -> None:
    chance = random.Random(0)
    for _ in range(400):
        num_layers = chance.randint(1, 70)
        wrong = set(chance.sample(range(num_layers), chance.randint(0, min(5, num_layers))))
        port = Port(wrong, chain_length=chance.randint(1, 8))
        assert layers_of(list(find_all(Span(0, num_layers), port.run))) == sorted(wrong)
        first = find_first(Span(0, num_layers), port.run)
        assert (first.chain.span.start if first else None) == (min(wrong) if wrong else None)


def test_every_layer_runs_alone_when_asked_for() -> None:
    port = Port({3, 4, 11})
    assert layers_of(list(find_exhaustively(Span(2, 12), port.run))) == [3, 4, 11]
    assert [probe.span for probe in port.probes] == [Span.single(layer) for layer in range(2, 12)]


def test_chain_that_is_wrong_of_layers_that_are_right_is_no_culprit() -> None:
    port = Port(set(), chain_length=4, drifting=(Span(4, 6),))
    finding = find_first(Span(0, 8), port.run)
    assert finding is not None
    assert not finding.is_culprit
    assert {4, 5} <= set(finding.chain.span)
    singles = {probe.span.start for probe in port.probes if len(probe.span) == 1}
    assert singles, "it was tried alone"


def test_search_goes_on_behind_a_drift() -> None:
    port = Port({13}, chain_length=2, drifting=(Span(4, 6),))
    findings = list(find_all(Span(0, 16), port.run))
    assert [finding.is_culprit for finding in findings] == [False, True]
    assert findings[1].chain.span == Span.single(13)


def test_search_for_a_proof_goes_on_behind_a_faint_drift() -> None:
    port = Port({40, 50}, drifting=(Span(2, 4),), drift=1.1)
    findings = list(find_until_proof(Span(0, 62), port.run))
    assert [finding.chain.span for finding in findings] == [Span(2, 4), Span.single(40)]
    assert [finding.is_proof for finding in findings] == [False, True]


def test_search_for_a_proof_that_meets_none_covers_every_layer() -> None:
    port = Port(set(), drifting=(Span(2, 4), Span(30, 32)), drift=1.1)
    findings = list(find_until_proof(Span(0, 62), port.run))
    assert [finding.chain.span for finding in findings] == [Span(2, 4), Span(30, 32)]
    ran = {layer for probe in port.probes for chain in probe.chains for layer in chain.span}
    assert ran == set(range(62))


@pytest.mark.parametrize("wrong", [{2, 40}, {40}])
def test_search_for_a_proof_ends_at_a_culprit_and_at_a_loud_drift(wrong: set[int]) -> None:
    port = Port(wrong, drifting=(Span(4, 6),), drift=2.1)
    findings = list(find_until_proof(Span(0, 62), port.run))
    assert [finding.chain.span for finding in findings] == [Span.single(2) if 2 in wrong else Span(4, 6)]


def test_mistake_that_chains_cannot_see_is_found_exhaustively_alone() -> None:
    port = Port({5}, blind=True)
    assert find_first(Span(0, 16), port.run) is None
    assert layers_of(list(find_exhaustively(Span(0, 16), port.run))) == [5]


def test_probe_refuses_chains_that_do_not_add_up() -> None:
    right = Chain(span=Span(0, 2), is_right=True, excess=0.5, visible=0.01)
    wrong = Chain(span=Span(2, 4), is_right=False, excess=5.0, visible=0.01)
    assert Probe(span=Span(0, 8), chains=(right, wrong)).first_wrong is wrong
    with pytest.raises(ValueError, match="do not cover"):
        Probe(span=Span(0, 8), chains=(right,))
    with pytest.raises(ValueError, match="do not follow"):
        Probe(span=Span(0, 8), chains=(wrong,))
    with pytest.raises(ValueError, match="went on behind"):
        Probe(
            span=Span(0, 6),
            chains=(right, wrong, Chain(span=Span(4, 6), is_right=True, excess=0.1, visible=0.1)),
        )


def test_probe_comes_back_from_its_json() -> None:
    wrong = Chain(span=Span(2, 4), is_right=False, excess=math.inf, visible=0.01, reason="3 NaN")
    right = Chain(span=Span(0, 2), is_right=True, excess=0.1 + 0.2, visible=0.01)
    probe = Probe(span=Span(0, 8), chains=(right, wrong))
    assert decode(Probe, encode(probe)) == probe
