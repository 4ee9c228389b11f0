"""The pages that people look at: runs, one run, one step; Plotly figures, no build step, no inline script.

The way of a picture: `gather` asks the other rooms' services, `figures/` turns what they answer into a Plotly
specification, `endpoints` sends it as JSON, `static/figures.js` draws it in the colours of the reader's theme.
"""

from __future__ import annotations
