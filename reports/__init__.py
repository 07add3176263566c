"""Reports: results as text, a page, and data; the commands print and write them.

- `terminal`: a comparison as text
- `model_findings`: what is wrong in a whole port's run, as text
- `layer_tables`: its tables of layers and sites; its table of a chained run's error
- `data`: a comparison as JSON and CSV; values as JSON, without NaN and Infinity
- `folder`: the files of a report; a comparison as JUnit XML
- `page/`: a comparison as one HTML page
- `markdown`: a comparison as a comment on a pull request
- `bisection`: a bisection as text and JSON
- `replacements`: a search by replaced streams as text and JSON
- `prompts`: a ranking of prompts as text and JSON
- `captures`: the contents of a capture as text and JSON; the sites in a capture, with statistics
- `dumps`: the tensors of another tool's dump, and a map to fill in
- `canvas`: lines, paragraphs and tables as a string
- `wording`: places and figures in words; what is to blame, in words; the shortest true description of an order
"""
