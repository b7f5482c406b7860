"""The frame of the report: style sheet, script and the small pieces of HTML. Nothing is fetched from anywhere."""

from __future__ import annotations

import html
import json

STYLE = """
:root{color-scheme:light dark;--page:#f6f6f3;--card:#fff;--ink:#17181a;--soft:#595c62;--faint:#83868c;--rule:#e3e3de;
--grid:#ecece8;--accent:#2866d1;--good:#14783f;--bad:#b3261e;--code:#f3f3ef;
--c1:#2866d1;--c2:#d9730d;--c3:#12876b;--c4:#9a4fc4;--c5:#b8890b;--c6:#c43f68}
@media (prefers-color-scheme:dark){
:root{--page:#131416;--card:#1b1d20;--ink:#eceded;--soft:#aeb1b7;--faint:#868a91;
--rule:#2c2f34;--grid:#272a2e;--accent:#7ba9f7;--good:#5fc58c;--bad:#f2867e;--code:#141618;
--c1:#6b9ff5;--c2:#ef9546;--c3:#3fbf9b;--c4:#bf86e0;--c5:#d8ac3c;--c6:#e8799a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
-webkit-font-smoothing:antialiased}
main{max-width:1240px;margin:0 auto;padding:48px 28px 80px}
header p{margin:0;color:var(--soft)}
.eyebrow{font-size:12px;letter-spacing:.09em;text-transform:uppercase;color:var(--faint)}
h1{margin:4px 0 8px;font-size:34px;line-height:1.15;font-weight:650;letter-spacing:-.02em;overflow-wrap:anywhere}
h2{margin:48px 0 14px;font-size:19px;font-weight:620;letter-spacing:-.01em}
h3{margin:0;font-size:14px;font-weight:600}
.status{display:inline-block;margin-right:10px;padding:1px 10px;border-radius:99px;border:1px solid currentColor;
font-size:13px}
.done{color:var(--good)}.short{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:1px;margin-top:28px;overflow:hidden;
background:var(--rule);border:1px solid var(--rule);border-radius:12px}
.tile{padding:16px 18px;background:var(--card)}
.tile b{display:block;font-size:25px;line-height:1.3;font-weight:620;letter-spacing:-.015em;
font-variant-numeric:tabular-nums}
.tile span{font-size:13px;color:var(--soft)}.tile i{font-style:normal;font-size:13px;color:var(--faint);display:block}
.tile .up{color:var(--good)}.tile .down{color:var(--bad)}
.charts{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px}
.card{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:16px 18px 10px;min-width:0}
.wide{grid-column:1/-1}
.card header{display:flex;flex-wrap:wrap;gap:2px 16px;align-items:baseline;margin-bottom:6px}
.card header .legend{margin-left:auto;display:flex;flex-wrap:wrap;gap:2px 14px;font-size:13px;color:var(--soft)}
.legend b{font-weight:600;color:var(--ink);font-variant-numeric:tabular-nums}
.swatch{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px;background:var(--c)}
.note{margin:2px 0 4px;font-size:12.5px;color:var(--faint)}
.nothing{color:var(--faint);padding:40px 0;text-align:center}
svg{display:block;width:100%;height:auto;touch-action:pan-y}
.s1{--c:var(--c1)}.s2{--c:var(--c2)}.s3{--c:var(--c3)}.s4{--c:var(--c4)}.s5{--c:var(--c5)}.s6{--c:var(--c6)}
.grid{stroke:var(--grid)}.tick{font-size:11px;fill:var(--faint);font-variant-numeric:tabular-nums}
.line{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.band{fill:var(--c);opacity:.16}.area{fill:var(--c);opacity:.82;stroke:var(--card);stroke-width:1}
.dot{fill:var(--c);stroke:var(--card);stroke-width:1.5}
.pointer{visibility:hidden}.pointer line{stroke:var(--faint);stroke-dasharray:3 3}.pointed .pointer{visibility:visible}
#tip{position:fixed;z-index:9;display:none;pointer-events:none;max-width:280px;padding:8px 11px;border-radius:8px;
font-size:13px;background:var(--card);border:1px solid var(--rule);box-shadow:0 6px 24px rgb(0 0 0/.18)}
#tip strong{display:block;font-weight:600;margin-bottom:2px}
#tip div{display:flex;gap:14px;justify-content:space-between;font-variant-numeric:tabular-nums}
table{width:100%;border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums}
th{font-weight:500;color:var(--faint);text-align:left}
td,th{padding:5px 10px 5px 0;border-bottom:1px solid var(--grid)}td.n,th.n{text-align:right}
.bar{height:10px;border-radius:3px;background:var(--c);min-width:2px}
td.bars{width:55%}
details{background:var(--card);border:1px solid var(--rule);border-radius:12px;margin-bottom:10px}
summary{cursor:pointer;padding:11px 18px;font-weight:550}
summary span{color:var(--soft);font-weight:400;margin-left:10px;font-size:13.5px}
details>div{padding:0 18px 16px}
pre{margin:0;padding:14px 16px;overflow-x:auto;border-radius:8px;background:var(--code);
font:12.5px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.pair{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:20px}
.episode h3{padding-bottom:6px;border-bottom:2px solid var(--c)}
.episode h3+p{margin:6px 0 10px;font-size:13px;color:var(--soft);overflow-wrap:anywhere}
.message{margin-bottom:10px}.message b{font-size:12px;font-weight:600;color:var(--faint)}
.message pre{white-space:pre-wrap;overflow-wrap:anywhere;padding:9px 12px}
.cut{font-size:13px;color:var(--faint);margin:0 0 10px}
@media (max-width:820px){main{padding:28px 14px 60px}h1{font-size:27px}
.charts,.pair{grid-template-columns:minmax(0,1fr)}}
@media print{body{background:#fff}.card,details{break-inside:avoid}}
"""

SCRIPT = """
(() => {
  const page = JSON.parse(document.getElementById("data").textContent), tip = document.getElementById("tip");
  const drawings = [...document.querySelectorAll("svg[data-chart]")];
  const legends = [...document.querySelectorAll("[data-readout]")].map(node => ({node, last: node.textContent}));
  const nearest = share => {
    let best = 0;
    page.across.forEach((place, index) => {
      if (Math.abs(place - share) < Math.abs(page.across[best] - share)) best = index;
    });
    return best;
  };
  const mark = (drawing, index) => {
    const chart = page.charts[drawing.dataset.chart], pointer = drawing.querySelector(".pointer");
    const x = page.left + page.across[index] * (chart.width - page.left - page.right);
    pointer.querySelector("line").setAttribute("transform", `translate(${x} 0)`);
    pointer.querySelectorAll("circle").forEach((dot, rank) => {
      const y = chart.heights[rank][index];
      dot.style.display = y === null || y < 0 || y > page.height ? "none" : "";
      if (y !== null) { dot.setAttribute("cx", x); dot.setAttribute("cy", y); }
    });
  };
  const show = (event, drawing) => {
    const chart = page.charts[drawing.dataset.chart], box = drawing.getBoundingClientRect();
    const inside = (event.clientX - box.left) / box.width * chart.width;
    const index = nearest((inside - page.left) / (chart.width - page.left - page.right));
    document.body.classList.add("pointed");
    drawings.forEach(other => mark(other, index));
    legends.forEach(({node}) => {
      const [key, rank] = node.dataset.readout.split(":");
      node.textContent = page.charts[key].texts[rank][index];
    });
    fill(chart, index);
    const right = event.clientX + 18 + tip.offsetWidth > innerWidth;
    tip.style.left = `${Math.max(4, right ? event.clientX - tip.offsetWidth - 14 : event.clientX + 16)}px`;
    tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 12)}px`;
  };
  const fill = (chart, index) => {
    const head = document.createElement("strong");
    head.textContent = page.labels[index];
    const rows = chart.names.map((name, rank) => {
      const [row, left, swatch, value] = ["div", "span", "span", "b"].map(tag => document.createElement(tag));
      swatch.className = `swatch s${rank + 1}`;
      left.append(swatch, name);
      value.textContent = chart.texts[rank][index] + chart.unit;
      row.append(left, value);
      return row;
    });
    tip.replaceChildren(head, ...rows);
    tip.style.display = "block";
  };
  const hide = () => {
    document.body.classList.remove("pointed");
    tip.style.display = "none";
    legends.forEach(({node, last}) => { node.textContent = last; });
  };
  drawings.forEach(drawing => {
    drawing.addEventListener("pointermove", event => show(event, drawing));
    drawing.addEventListener("pointerdown", event => show(event, drawing));
    drawing.addEventListener("pointerleave", hide);
  });
})();
"""


def page(title: str, body: str, data: dict[str, object]) -> str:
    """The whole document; `body` is HTML, `data` is what the script reads."""
    # "<" would let a string of the data end the script element.
    content = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)} - rlflow</title><style>{STYLE}</style></head>\n"
        f'<body><main>{body}</main><div id="tip"></div>\n'
        f'<script type="application/json" id="data">{content}</script><script>{SCRIPT}</script></body></html>\n'
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
