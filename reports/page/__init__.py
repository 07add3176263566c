"""The report page: one HTML file that needs no network, with a comparison's verdict, figures and evidence.

- `evidence`: what both captures show beside the figures: errors of single sites, routing, logits; a diagnosis in words
- `heat_map`: every site's figures, layer by layer
- `origins`: the provenance of both sides, row by row
- `page`: the page's content, and its plan from a comparison
- `charts`: the data and titles of its charts
- `glossary`: the words that the page explains, as in docs/glossary.md
- `html`: the page as a file
- `assets/`: template, specifications of the charts, style sheet and script
"""
