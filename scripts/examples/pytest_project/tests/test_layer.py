"""Tests of the port: `pytest --mm2-golden DIR`. Each runs once for every layer of the golden."""

from __future__ import annotations

from my_port.layer import DecoderLayer

import mm2


def test_layer(mm2_layer):
    """Judge every site that the layer shows."""
    port = mm2_layer.load(DecoderLayer)
    with mm2.record(port) as run:
        port(*mm2_layer.inputs)
    mm2.compare(mm2_layer, run).require()


def test_experts_alone(mm2_layer):
    """Judge the experts on the golden's own post_norm."""
    experts = mm2_layer.load(DecoderLayer).experts
    mm2.assert_site(experts(mm2_layer.read("post_norm")), mm2_layer, "moe_delta")
