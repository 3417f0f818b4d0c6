"""Small building blocks of the report page. Everything is escaped unless it is `Html`, which only this package makes."""

import html
import re
from collections.abc import Iterable, Sequence


class Html(str):
    """Text that is HTML already and must not be escaped again."""

    __slots__ = ()


Cell = Html | str | int | float | None
MAX_ROWS = 200


def counted(number: int, noun: str) -> str:
    """`1 step`, `1,200 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def escape(value: object) -> Html:
    """Any value as HTML text; `Html` stays as it is, None becomes a dash."""
    if isinstance(value, Html):
        return value
    return Html("–" if value is None else html.escape(str(value), quote=True))


def element(tag: str, *content: object, css: str = "", **attributes: str) -> Html:
    """`<tag class=css ...>content</tag>`, contents escaped."""
    named = {"class": css, **{name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}}
    shown = "".join(f' {name}="{escape(value)}"' for name, value in named.items() if value)
    return Html(f"<{tag}{shown}>{join(content)}</{tag}>")


def join(parts: Iterable[object]) -> Html:
    """Parts one after another, each escaped."""
    return Html("".join(escape(part) for part in parts))


def chip(text: str, tone: str) -> Html:
    """A word with a tone (good, warn, bad, plain). The word carries the meaning, the colour only repeats it."""
    return element("span", text, css=f"chip {tone}")


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[Cell]], *, empty: str) -> Html:
    """A table with a caption, numbers to the right; the last MAX_ROWS rows where there are more, with a note saying so."""
    if not rows:
        return element("p", empty, css="quiet") if empty else Html("")
    shown = rows[-MAX_ROWS:]
    numeric = {place for row in shown for place, value in enumerate(row) if isinstance(value, int | float)}
    head = element("tr", *(element("th", name, css="number" if place in numeric else "", scope="col") for place, name in enumerate(header)))
    body = join(element("tr", *(_cell(value, numeric=place in numeric) for place, value in enumerate(row))) for row in shown)
    left_out = len(rows) - len(shown)
    note = element("p", f"{counted(left_out, 'earlier row')} can be found in the journal.", css="quiet") if left_out else Html("")
    parts = element("table", element("caption", caption), element("thead", head), element("tbody", body))
    return join((element("div", parts, css="scroll", tabindex="0", role="region", aria_label=caption), note))


def _cell(value: Cell, *, numeric: bool) -> Html:
    text = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
    return element("td", text, css="number" if numeric else "")


def section(title: str, *content: object, note: str = "") -> Html:
    """A titled part of the page, which `contents` leads to."""
    name = title.lower().replace(" ", "-")
    body = (element("h2", title, id=name), element("p", note, css="quiet") if note else "", *content)
    return element("section", *body, aria_labelledby=name)


def contents(sections: Iterable[Html]) -> Html:
    """Links to the sections, empty ones left out."""
    found = (re.match(r'<section[^>]*><h2 id="([^"]+)">([^<]+)</h2>', text) for text in sections)
    links = [element("a", Html(match[2]), href=f"#{match[1]}") for match in found if match]
    return element("nav", *links, aria_label="Parts of this page")


def details(summary: str, *content: object) -> Html:
    """A part that is folded away until asked for."""
    return element("details", element("summary", summary), *content)
