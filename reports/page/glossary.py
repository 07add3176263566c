"""Glossary: the words that the page explains where they stand, with the sentences of docs/glossary.md.

A test holds both to the same words (`tests/reports/page/test_glossary.py`): an installed mm2 has no docs/.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

GLOSSARY: Mapping[str, str] = MappingProxyType(
    {
        "site": "a named point: 18 in a layer, such as q_proj; outside them embedding, final_norm, logits",
        "golden": "the trusted capture: transformers' own model on trusted hardware",
        "port": "the implementation under test",
        "whole port": "the port as one model, from token ids to logits (mm2-test model)",
        "pass": "one call of a whole port: the prefill, or one decoding step",
        "run": "a capture of the port, to be judged against the golden",
        "reference, target": "golden and run in JSON keys, in Python names and in mm2's own code",
        "isolated run": "a run in which each layer's input is the golden's",
        "chained run": "a run in which each layer's input is the output of the layer before",
        "noise floor": "the error that BF16 alone costs the golden at a site: ‖golden − float32 twin‖, measured",
        "ρ": "rho: ‖port − float32 twin‖ ∕ noise floor; 1 is as good as the golden",
        "float32 twin": "the golden's layer in float32, from the same BF16 input, with the golden's experts",
        "massive channel": "a channel whose RMS is over 20 times the median channel's; counted apart",
        "row": "one sequence of the batch: a prompt with its padding; a real token is one that is not padding",
        "column": "one index along the padded length of the batch",
        "variant": "the golden's layer computed once more, rounded as another correct implementation may round",
        "flip": "a token for which the port chose other experts than the golden",
        "replay": "the golden computed with the port's own choice of experts; judges a port past a flip",
        "blame": "the layers and sites where an error begins: it fails there, and what it is computed from is right",
        "verdict": "pass, warn, fail or incomparable",
        "shard": "one file of a checkpoint",
        "slice": "the part of a model that one node or rank holds",
        "probe": "one run of a search, in mm2-test bisect",
        "dump": "a capture written by another tool",
        "further output": "a tensor of a port that is no site, stored because --also asks for it, and never judged",
        "stream": "the hidden states that pass from layer to layer; mm2-test replacement puts the golden's in a port",
    }
)
