"""The report page: one HTML file that needs no network, with a comparison's verdict, figures and evidence.

- `evidence`: a report: a comparison, and what both captures show beside its figures: errors of single sites, routing,
  logits; a diagnosis in words
- `heat_map`: every site's figures, layer by layer
- `origins`: the provenance of both sides, row by row
- `html`: the page as a file, with its charts and the words that it explains, as in docs/sites.md
- `assets/`: template, specifications of the charts, style sheet, script, and a link to docs/sites.md
"""
