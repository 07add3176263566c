"""Results drawn for people and machines; what is drawn comes back as text or JSON, the commands print it.

- `terminal`: a comparison as text; its tables are in `layer_tables` with `metric_columns`,
  next-token distributions in `next_tokens`
- `data`: a comparison as JSON and CSV, and the three files of a report
- `bisection`: a bisection as text and JSON
- `captures`: what a capture holds, as text and JSON; measured by `contents`; `dumps` does so for another tool's
- `canvas`: lines, paragraphs and tables as a string
- `wording`: how places and figures are named
- `json_values`: values as JSON, without NaN and Infinity
- `artefact`: a report's file, whole or not there
"""
