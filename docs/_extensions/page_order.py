"""Which pages there are and in which order: a page that lists others is their table of contents.

A list item or table row that begins with a link to a page is an entry of the sidebar, so that a page is put in its
place by the one line that says what it is for, which GitHub shows too.
"""

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent
ENTRY = re.compile(r"^(?:[-*] |\| |\d+\. )\[[^\]]+\]\(([\w/.-]+\.(?:md|ipynb))\)", re.MULTILINE)
OUTSIDE = re.compile(r"\[([^\]`\n]+)\]\(((?:\.\./)+(?!docs/|zh/|decisions/)\w[\w/.-]*\.md)\)")
LISTS = ("index", "tutorials", "guides", "reference", "explanation", "decisions/index", "zh/index")
"""The pages whose links are a table of contents."""


def entries(page: str, text: str) -> list[str]:
    """Names of the pages that a page lists, relative to docs/ and without their endings."""
    folder = (DOCS / page).parent
    listed = (folder.joinpath(link).resolve() for link in ENTRY.findall(text))
    return list(dict.fromkeys(str(p.relative_to(DOCS).with_suffix("")) for p in listed if p.is_relative_to(DOCS)))


def order(page: str = "index") -> list[str]:
    """All pages that can be reached from a page by lists, itself first."""
    found, waiting = [], [page]
    while waiting:
        page = waiting.pop()
        if page in found:
            continue
        found.append(page)
        path = DOCS / f"{page}.md"
        if page in LISTS and path.exists():
            waiting += reversed(entries(page, path.read_text(encoding="utf-8")))
    return found


def _add_contents(app, page, source):
    if page in LISTS and (listed := entries(page, source[0])):
        names = "\n".join(f"/{name}" for name in listed)
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"


def _offer_outside(app, page, source):
    """Markdown outside docs/ is no page; the file itself is offered."""
    if app.env.doc2path(page).suffix == ".md":
        source[0] = OUTSIDE.sub(r"{download}`\1 <\2>`", source[0])


def setup(app):
    app.connect("source-read", _add_contents)
    app.connect("source-read", _offer_outside)
    return {"parallel_read_safe": True}
