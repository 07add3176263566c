"""Reports: results as text, a page, and data; the commands print and write them.

- `views`: what every report of a comparison says, before it is drawn
- `terminal`: a comparison as text; findings in a whole port's run
- `layer_tables`: its tables of layers and sites; its table of a chained run's error
- `data`: a comparison as JSON and CSV; values as JSON, without NaN and Infinity
- `folder`: the files of a report; a comparison as JUnit XML
- `page/`: a comparison as one HTML page
- `markdown`: a comparison as a comment on a pull request
- `bisection`: a bisection as text and JSON
- `replacements`: a search by replaced streams as text and JSON
- `prompts`: a ranking of prompts as text and JSON
- `captures`: the contents of a capture as text and JSON, with statistics
- `dumps`: the tensors of another tool's dump, and a map to fill in
- `canvas`: lines, paragraphs and tables as a string
- `wording`: places, figures and orders in words
"""
