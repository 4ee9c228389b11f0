"""The pages: runs, one run, one step; Plotly figures, no build step, no inline script.

The path of a figure: `presenters/` reads the services of other nouns, `figures/` turns their answers into a Plotly
specification, `endpoints` sends it as JSON, `static/figures.js` draws it in the colours of the reader's theme.
"""
