from __future__ import annotations

from pathlib import Path

import pytest

from compare.limits.limits import FLOORLESS_FIGURES, NOISE_FIGURES, Limit
from compare.limits.limits_file import calibrated_limits, read_limits
from compare.limits.tolerances import CALIBRATION
from minimax_tools.errors import UsageError
from minimax_tools.model.sites import Site


@pytest.fixture
def limits_file(tmp_path: Path) -> Path:
    return tmp_path / "limits.yaml"


class TestCalibration:
    def test_every_figure_of_every_site_has_a_limit(self) -> None:
        limits = calibrated_limits()
        for site in Site:
            assert all(limits.isolated.find(site, figure) for figure in NOISE_FIGURES)
            assert all(limits.floorless(site, figure) for figure in FLOORLESS_FIGURES)
            for is_chained in (False, True):
                table = limits.of_ratios(is_chained=is_chained, is_estimated=True)
                assert table.find(site, "whole") is not None

    def test_copy_of_it_judges_the_same(self, limits_file: Path) -> None:
        limits_file.write_text(CALIBRATION.read_text(encoding="utf-8"), encoding="utf-8")
        ours, copied = calibrated_limits(), read_limits(limits_file)
        assert copied.backends == ours.backends
        for site in Site:
            assert copied.isolated.find(site, "whole") == ours.isolated.find(site, "whole")


class TestOwnFile:
    def test_named_limits_hold_and_the_others_stay(self, limits_file: Path) -> None:
        limits_file.write_text("isolated:\n  moe_delta: {whole: 1.7, token_worst: {usual: 1, spread: 0.3}}\n")
        limits, ours = read_limits(limits_file), calibrated_limits()
        assert limits.isolated.find("moe_delta", "whole") == Limit(usual=1.7)
        assert limits.isolated.find("moe_delta", "token_worst") == Limit(usual=1.0, spread=0.3)
        assert limits.isolated.find("moe_delta", "ordinary") == ours.isolated.find("moe_delta", "ordinary")
        assert limits.isolated.find("attn_delta", "whole") == ours.isolated.find("attn_delta", "whole")
        assert limits.chained == ours.chained

    def test_limit_for_all_holds_for_sites_that_had_their_own(self, limits_file: Path) -> None:
        limits_file.write_text("isolated:\n  all: {whole: 9}\n  output: {whole: 3}\n")
        limits = read_limits(limits_file)
        assert limits.isolated.find("moe_delta", "whole") == Limit(usual=9.0)
        assert limits.isolated.find("output", "whole") == Limit(usual=3.0)

    def test_own_limits_hold_everywhere_unless_they_name_backends(self, limits_file: Path) -> None:
        limits_file.write_text("isolated: {all: {whole: 2}}")
        assert read_limits(limits_file).is_measured_on("neuron-xla")
        limits_file.write_text("backends: [neuron-xla]\nisolated: {all: {whole: 2}}")
        limits = read_limits(limits_file)
        assert limits.is_measured_on("neuron-xla")
        assert not limits.is_measured_on("cpu")

    def test_level_alone_can_be_changed(self, limits_file: Path) -> None:
        limits_file.write_text("level: 1e-2")
        limits = read_limits(limits_file)
        assert (limits.level, limits.isolated) == (0.01, calibrated_limits().isolated)
        assert limits.backends == calibrated_limits().backends

    @pytest.mark.parametrize(
        ("text", "where", "found"),
        [
            ("isolated:\n  moe: {whole: 2}", "line 2, isolated.moe", "'moe'"),
            ("isolated:\n  all:\n    hole: 2", "line 3, isolated.all.hole", "'hole'"),
            ("level: 0.1\nisolted: {}", "line 2, isolted", "'isolted'"),
            ("isolated:\n  all: {whole: two}", "line 2, isolated.all.whole", "'two'"),
            ('isolated:\n  all: {whole: "2"}', "line 2, isolated.all.whole", "'2'"),
            ("isolated:\n  all: {whole: -1}", "line 2, isolated.all.whole", "'-1'"),
            ("isolated:\n  all: {whole: {spread: 1}}", "line 2, isolated.all.whole", "spread"),
            ("isolated:\n  all: {whole: {usual: 1, spread: -1}}", "line 2, isolated.all.whole", "-1"),
            ("isolated:\n  all: {whole: 1, whole: 2}", "line 2, isolated.all.whole", "again"),
            ("isolated: 3", "line 1, isolated", "'3'"),
            ("chained:\n  all: {token_gain: 3}", "line 2, chained.all.token_gain", "'token_gain'"),
            ("level: 1", "line 1, level", "'1'"),
            ("backends: cpu", "line 1, backends", "'cpu'"),
            ("backends: [[cpu]]", "line 1, backends", "a list"),
            ("backends: {cpu: 1}", "line 1, backends", "a mapping"),
            ("level: {cpu: 1}", "line 1, level", "a mapping"),
            ("slack: 0", "line 1, slack", "'0'"),
            ("float32: .inf", "line 1, float32", "'.inf'"),
            ("slack: inf", "line 1, slack", "'inf'"),
            ("other_graphs: 0", "line 1, other_graphs", "'0'"),
            ("[1, 2]", "line 1, the file", "a list"),
        ],
    )
    def test_mistake_has_line_and_key(self, text: str, where: str, found: str, limits_file: Path) -> None:
        limits_file.write_text(text)
        with pytest.raises(UsageError, match="expected") as caught:
            read_limits(limits_file)
        for words in (where, found, "--criteria-template"):
            assert words in str(caught.value)

    def test_file_that_is_none_or_is_not_there_is_refused(self, limits_file: Path) -> None:
        with pytest.raises(UsageError, match="cannot be read"):
            read_limits(limits_file)
        for text in ("", "isolated: {", "a: b: c"):
            limits_file.write_text(text)
            with pytest.raises(UsageError, match=str(limits_file)):
                read_limits(limits_file)


class TestGoldensWithVariants:
    """Limits of their own, unless a file names limits for all isolated layers."""

    def test_a_file_may_name_their_own(self, limits_file: Path) -> None:
        limits_file.write_text("isolated: {all: {whole: 7}}\nisolated_variants: {all: {whole: 5}}")
        limits = read_limits(limits_file)
        for is_widened, expected in ((False, 7.0), (True, 5.0)):
            table = limits.of_ratios(is_chained=False, is_estimated=False, is_widened=is_widened)
            assert table.find("output", "whole") == Limit(usual=expected)

    def test_own_limits_are_no_wider_than_those_of_others(self) -> None:
        limits = calibrated_limits()
        tables = [
            limits.of_ratios(is_chained=False, is_estimated=False, is_widened=is_widened)
            for is_widened in (False, True)
        ]
        for site in ("attn_context", "attn_delta", "moe_delta"):
            plain, varied = (table.find(site, "whole") for table in tables)
            assert plain is not None
            assert varied is not None
            assert varied.usual < 0.95 * plain.usual

    def test_what_a_file_names_for_isolated_layers_holds_for_them_too(self, limits_file: Path) -> None:
        limits_file.write_text("isolated: {attn_delta: {whole: 7}}")
        table = read_limits(limits_file).of_ratios(is_chained=False, is_estimated=False, is_widened=True)
        assert table.find("attn_delta", "whole") == Limit(usual=7.0)
        assert table.find("output", "whole") == calibrated_limits().isolated_variants.find("output", "whole")  # type: ignore[union-attr]


def test_own_slack_and_float32_limit_hold(limits_file: Path) -> None:
    limits_file.write_text("slack: 2.5\nfloat32: 1e-4\nmeasured: {made_by: me}")
    limits = read_limits(limits_file)
    assert (limits.slack, limits.float32, limits.level) == (2.5, 1e-4, calibrated_limits().level)


def test_limits_of_a_file_hold_for_all_graphs_as_they_are(limits_file: Path) -> None:
    for text, factor in (
        ("slack: 2.5", calibrated_limits().other_graphs),
        ("isolated: {all: {whole: 7}}", 1.0),
        ("isolated: {all: {whole: 7}}\nother_graphs: 2", 2.0),
    ):
        limits_file.write_text(text)
        assert read_limits(limits_file).other_graphs == factor
