"""The frame of the report: style sheet, scripts and the small pieces of HTML. Nothing is fetched from anywhere.

The curves are drawn by uPlot (uplot/, MIT licence), which the page carries whole, with its licence.
"""

from __future__ import annotations

import html
import json
from importlib import resources

_FILES = resources.files("rlflow.telemetry.report")


def page(title: str, body: str, data: dict[str, object]) -> str:
    """The whole document; `body` is HTML, `data` is what the script reads."""
    style, script, licence, uplot_style, uplot = (
        (_FILES / name).read_text(encoding="utf-8")
        for name in ("report.css", "report.js", "uplot/LICENSE", "uplot/uPlot.min.css", "uplot/uPlot.iife.min.js")
    )
    # "<" would let a string of the data end the script element.
    content = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    code = f"/* {licence}*/\n{uplot}\n{script}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)} - rlflow</title><style>{uplot_style}\n{style}</style></head>\n"
        f'<body><main>{body}</main><div id="tip"></div>\n'
        f'<script type="application/json" id="data">{content}</script><script>{code}</script></body></html>\n'
    )


def tile(label: str, value: str, detail: str = "", kind: str = "") -> str:
    """One figure; `label`, `value` and `detail` are text."""
    under = f'<i class="{kind}">{html.escape(detail)}</i>' if detail else ""
    return f'<div class="tile"><span>{html.escape(label)}</span><b>{html.escape(value)}</b>{under}</div>'


def folded(summary: str, aside: str, content: str, *, is_open: bool = False) -> str:
    """A part that opens on a click; `summary` and `aside` are text, `content` is HTML."""
    more = f"<span>{html.escape(aside)}</span>" if aside else ""
    return (
        f"<details{' open' if is_open else ''}><summary>{html.escape(summary)}{more}</summary>"
        f"<div>{content}</div></details>"
    )
