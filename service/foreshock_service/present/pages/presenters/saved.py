"""The page of a run as one file, to send to others: styles, scripts and plots are inside, links are absolute."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from foreshock.clock import now_us
from foreshock_service.present.pages import rendering
from foreshock_service.present.pages.presenters import alerts, figures
from foreshock_service.present.pages.presenters.run import probes_part, run_page, semantics_part
from foreshock_service.present.pages.presenters.viewing import Viewing

_SCRIPTS = ("theme.js", rendering.PLOTLY, "page.js")
# Text of a run cannot contain them: its quotation marks are escaped.
_LINK = re.compile(r' (href|data-steps)="(?=/)')


def saved_run(viewing: Viewing, run_id: str, origin: str) -> str:
    """Return the HTML of a run's page that needs no other file. Raises RunNotFound or RunDeleted.

    `origin`: the service's address, such as http://host:8765, that the links lead to. The scalars' chooser is left out,
    since a file would need every scalar.
    """
    page = run_page(viewing, run_id)
    texts = {name: rendering.assets()[name].decode() for name in ("foreshock.css", *_SCRIPTS)}
    scripts = [_hash_of(texts[name]) for name in _SCRIPTS]
    policy = (
        f"default-src 'none'; script-src {' '.join(scripts)}; "
        f"style-src-elem {_hash_of(texts['foreshock.css'])} {rendering.PLOTLY_STYLES}; "
        "style-src-attr 'unsafe-inline'; img-src data: blob:; form-action 'none'; base-uri 'none'"
    )
    parts = _parts(viewing, run_id, page, origin)
    text = _rendered(
        "saved.html",
        page
        | {
            "policy": policy,
            "style": Markup(texts["foreshock.css"]),
            "theme": Markup(texts["theme.js"]),
            "plotly": Markup(texts[rendering.PLOTLY]),
            "script": Markup(texts["page.js"]),
            # JSON that cannot end the script element which holds it.
            "parts": Markup(json.dumps(parts, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")),
            "saved_at": now_us(),
            "origin": origin,
        },
    )
    # The scripts have no such attribute.
    return _absolute(text, origin)


def _parts(viewing: Viewing, run_id: str, page: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return what the page would request, by address: JSON of figures and axes, HTML of the others."""
    whole = figures.Asked()
    folder = f"/pages/runs/{run_id}"
    return {
        **{plot.address: figures.run_figure(viewing, run_id, plot.id, whole).to_json() for plot in page["figures"]},
        f"{folder}/axes.json": alerts.axes_of_run(viewing, run_id),
        f"{folder}/semantics": _absolute(_rendered("semantics.html", semantics_part(viewing, run_id)), origin),
        f"{folder}/probes": _absolute(_rendered("probes.html", probes_part(viewing, run_id)), origin),
    }


def _rendered(template: str, page: object) -> str:
    return rendering.templates().get_template(template).render(page=page, visitor=rendering.Visitor())


def _absolute(text: str, origin: str) -> str:
    return _LINK.sub(lambda found: f' {found[1]}="{origin}', text)


def _hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
