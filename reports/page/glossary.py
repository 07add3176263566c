"""Glossary: the words and sites that the page explains where they stand, with the sentences of docs/sites.md.

A test holds both to the same words (`tests/reports/page/test_glossary.py`): an installed mm2 has no docs/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from markupsafe import Markup, escape

GLOSSARY: Mapping[str, str] = MappingProxyType(
    {
        "site": "a named point: 18 in a layer, such as q_proj; outside them embedding, final_norm, logits",
        "golden": "the trusted capture: transformers' own model on trusted hardware",
        "port": "the implementation under test",
        "whole port": "the port as one model, from token ids to logits (mm2-test model)",
        "pass": "one call of a whole port: the prefill, one decoding step, or one chunk",
        "chunk": "a pass of several tokens, behind what earlier passes have cached",
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

SITE_MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "input": "the hidden states that enter the layer",
        "input_norm": "input after the layer's first RMSNorm",
        "q_proj": "queries: input_norm times the weight of q_proj",
        "k_proj": "keys: input_norm times the weight of k_proj",
        "v_proj": "values: input_norm times the weight of v_proj",
        "q_norm": "q_proj after its RMSNorm, one mean over all heads of a token",
        "k_norm": "k_proj after its RMSNorm, one mean over all heads of a token",
        "q_rope": "q_norm in heads, after the rotary embedding",
        "k_rope": "k_norm in heads, after the rotary embedding",
        "attn_context": "what attention sums up for each token: the input of o_proj",
        "attn_delta": "the output of o_proj, which attention adds to the residual stream",
        "attn_residual": "input + attn_delta",
        "post_norm": "attn_residual after the layer's second RMSNorm, which router and experts read",
        "router_logits": "the router's logits, one per expert",
        "router_experts": "the numbers of the experts chosen for each token: a set, in any order",
        "router_weights": "the weights of the chosen experts, which add up to 1",
        "moe_delta": "the weighted sum of the chosen experts' outputs, before it is added",
        "output": "attn_residual + moe_delta: the input of the next layer",
        "embedding": "the rows of the embedding at the token ids",
        "final_norm": "the output of the last layer after the final RMSNorm",
        "logits": "the scores of every next token in the vocabulary",
    }
)
# A name before a dot is a weight's, such as `q_proj.weight`.
_NAMES = re.compile(rf"(?<![\w.])({'|'.join(SITE_MEANINGS)})(?!\w|\.\w)")


def explain_place(text: str) -> Markup:
    """Return a place as HTML, each site in it with its meaning."""
    return Markup("").join(
        _explain(part) if part in SITE_MEANINGS else escape(part) for part in _NAMES.split(text)
    )


def explain_sentence(text: str) -> Markup:
    """Return a sentence as HTML, each site with its meaning; `output` and the like may be plain words there."""
    return Markup("").join(
        _explain(part) if "_" in part and part in SITE_MEANINGS else escape(part)
        for part in _NAMES.split(text)
    )


def _explain(site: str) -> Markup:
    tip = f"{site}: {SITE_MEANINGS[site]}"
    return Markup('<abbr class="site-name" data-tip="{}">{}</abbr>').format(tip, site)
