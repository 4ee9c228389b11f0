"""The pages: runs, one run, one step. Plotly draws the figures; there is no build step and no inline script.

The path of a figure: `presenters/` reads the services of other nouns, `figures/` turns their answers into a Plotly
specification, `endpoints` sends it as JSON, and `static/page.js` draws it in the colours of the reader's theme.
"""
