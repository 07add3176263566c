"""mm2 in a port's own code and tests: `import mm2`.

    golden = mm2.open_golden("mm2-captures/gpu_reference/full_model")
    layer = golden.layer(5)                    # the golden's input, weights and values of layer 5
    port = layer.load(DecoderLayer)            # built and filled as mm2-test does it
    with mm2.record(port) as run:
        port(*layer.inputs)
    mm2.compare(layer, run).require()          # raises where the port differs

All public names stand here; other modules of mm2 may change. Names are imported when they are first used, so that
pytest does not wait for torch in projects that do not use mm2.

- `golden_layer`: a golden for tests, and its layers
- `recording`: the sites of a module, recorded while it runs; `recorded_capture`: the recording as a capture
- `comparison`: two sides compared, one site asserted, and the verdict; `port_diagnosis`: the mistake named
- `pytest_plugin`: fixtures and options for pytest
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minimax_tools.errors import IncomparableError, Mm2Error, UsageError
    from minimax_tools.model.sites import Site
    from minimax_tools.results.results import SiteResult, Verdict
    from mm2.comparison import PortComparison, PortDiffersError, PortWarning, assert_site, compare
    from mm2.golden_layer import GoldenLayer, GoldenLayers, open_golden
    from mm2.port_diagnosis import PortDiagnosis, diagnose
    from mm2.recording import Recording, record

__all__ = [
    "GoldenLayer",
    "GoldenLayers",
    "IncomparableError",
    "Mm2Error",
    "PortComparison",
    "PortDiagnosis",
    "PortDiffersError",
    "PortWarning",
    "Recording",
    "Site",
    "SiteResult",
    "UsageError",
    "Verdict",
    "assert_site",
    "compare",
    "diagnose",
    "open_golden",
    "record",
]

_HOMES = {
    "mm2.comparison": ("PortComparison", "PortDiffersError", "PortWarning", "assert_site", "compare"),
    "mm2.golden_layer": ("GoldenLayer", "GoldenLayers", "open_golden"),
    "mm2.port_diagnosis": ("PortDiagnosis", "diagnose"),
    "mm2.recording": ("Recording", "record"),
    "minimax_tools.errors": ("IncomparableError", "Mm2Error", "UsageError"),
    "minimax_tools.model.sites": ("Site",),
    "minimax_tools.results.results": ("SiteResult", "Verdict"),
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'mm2' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
