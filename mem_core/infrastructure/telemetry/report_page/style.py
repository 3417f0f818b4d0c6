"""The look of the report page: one style sheet, light and dark by the reader's setting, readable when printed."""

from typing import Final

BUCKET_COLOURS: Final[dict[str, str]] = {
    "productive": "#2f9e6b",
    "redone": "#d9822b",
    "start": "#5b7fd1",
    "op_build": "#3f5fa8",
    "data": "#6fa8c9",
    "save_stall": "#a877c9",
    "restore": "#c9a227",
    "restart": "#c4473a",
    "oom_recovery": "#d96a9b",
    "evaluation": "#4fb3a5",
    "planner_wait": "#8f8fd9",
    "validation_wait": "#b38867",
    "idle": "#9aa3ab",
    "between_attempts": "#d5d9dd",
}
OTHER_BUCKET_COLOUR: Final = "#777777"

CSS: Final = """
:root { color-scheme: light dark;
  --bg: #f6f7f8; --card: #ffffff; --fg: #1c2126; --muted: #5d6770; --line: #dfe3e6;
  --accent: #2563c9; --second: #b8620f; --bad: #c03428; --good: #1f7a4d; --warn: #8f5a00; }
@media screen and (prefers-color-scheme: dark) { :root {
  --bg: #121518; --card: #1a1e23; --fg: #e5e8eb; --muted: #9ba5ae; --line: #333a41;
  --accent: #74a9ff; --second: #f0a35c; --bad: #ff7b6e; --good: #5fcf97; --warn: #e9b44c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 38px 0 10px; letter-spacing: -0.005em; }
p { margin: 6px 0; }
.headline { font-size: 17px; max-width: 76ch; overflow-wrap: anywhere; }
.quiet { color: var(--muted); font-size: 13.5px; max-width: 90ch; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(164px, 1fr)); gap: 10px; margin: 20px 0 0; padding: 0; }
.cards > div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; min-width: 0; }
.cards dt { color: var(--muted); font-size: 12.5px; }
.cards dd { margin: 0; font-size: 19px; font-weight: 600; line-height: 1.3; overflow-wrap: anywhere; }
.cards dd small { display: block; font-size: 12.5px; font-weight: 400; color: var(--muted); }
.charts { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; }
.chart { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px 6px; min-width: 0; }
.chart.wide { grid-column: 1 / -1; }
.chart figcaption { font-weight: 600; font-size: 14px; margin-bottom: 2px; }
.chart figcaption small { font-weight: 400; color: var(--muted); margin-left: 4px; }
.chart svg { display: block; width: 100%; height: auto; }
.chart svg * { stroke-linejoin: round; stroke-linecap: butt; }
.at-narrow { display: none; }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 18px 0 0; font-size: 13.5px; }
a { color: var(--accent); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.scroll { overflow-x: auto; } .scroll + .scroll { margin-top: 16px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; background: var(--card); }
caption { text-align: left; color: var(--muted); font-size: 13px; padding: 0 0 6px; background: var(--bg); }
th, td { text-align: left; vertical-align: top; padding: 6px 10px; border-bottom: 1px solid var(--line);
  overflow-wrap: break-word; max-width: 460px; }
th { font-weight: 600; color: var(--muted); white-space: nowrap; }
.number { text-align: right; } td.number, .moment { white-space: nowrap; }
code, pre { font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
code { overflow-wrap: anywhere; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; overflow-x: auto; }
details { margin: 14px 0; } details > summary { margin-bottom: 8px; } summary { cursor: pointer; font-weight: 600; }
.chip { display: inline-block; padding: 0 8px; border-radius: 10px; font-size: 12.5px; font-weight: 600;
  border: 1px solid currentColor; white-space: nowrap; }
h1 .chip { font-size: 14px; vertical-align: 4px; margin-left: 6px; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); } .plain { color: var(--muted); }
.bar { display: flex; height: 30px; border-radius: 6px; overflow: hidden; border: 1px solid var(--line); margin: 8px 0 12px; }
.bar > span { min-width: 1px; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; }
footer { margin-top: 40px; color: var(--muted); font-size: 12.5px; }
@media screen and (max-width: 760px) { main { padding: 18px 12px 40px; } .charts { grid-template-columns: minmax(0, 1fr); }
  .at-wide { display: none; } .at-narrow { display: block; }
  h1 { font-size: 22px; } .cards { grid-template-columns: repeat(2, minmax(0, 1fr)); } th, td { padding: 6px 7px; } }
@media print { :root { --bg: #ffffff; } main { max-width: none; padding: 0; } nav { display: none; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { font-size: 10.5pt; } table { font-size: 8.5pt; } th, td { padding: 3px 6px; max-width: none; }
  .cards { grid-template-columns: repeat(4, 1fr); } .scroll { overflow: visible; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  h2, caption { break-after: avoid; } thead { display: table-header-group; } tr, figure, .cards > div, .bar { break-inside: avoid; } }
"""
