"""The shell of every page: one HTML file with one style for light and dark, which may load nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

SHELL = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
$style
</style>
<script>
$script
</script>
</head>
<body>
$body
</body>
</html>
""")


def page(title: str, body: str, style: str = "", script: str = "") -> str:
    """The text of a page; `script` runs before the body is read."""
    return SHELL.substitute(title=escape(title), style=asset("shell.css") + style, script=script, body=body)


def document(title: str, *parts: str, script: str = "") -> str:
    """The text of a page that is read from top to bottom."""
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return page(title, f'<main class="document">\n{body}\n</main>', script=script)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as a part of a page."""
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def asset(name: str) -> str:
    """The text of a file of this folder."""
    return files("mural.report").joinpath(name).read_text(encoding="utf-8")
