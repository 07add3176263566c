"""The report page: one HTML file that needs no network, with a comparison's verdict, figures and evidence.

- `evidence`: what both captures show beside the figures: errors of single sites, routing, logits; a diagnosis as the
  page shows it; sites that were not compared, and why
- `heat_map`: every site's figures, layer by layer
- `origins`: the provenance of both sides, row by row
- `page`: the page's content, and its plan from a comparison
- `charts`: its charts of all layers, for Vega-Lite; parts of all these charts
- `site_charts`: its charts of one site
- `choice_charts`: its charts of experts and next tokens
- `glossary`: the words that the page explains, as in docs/glossary.md
- `html`: the page as a file
- `assets/`: template, style sheet and script
"""
