"""Charts that can be zoomed into, drawn by plotly; it is imported when the first chart is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from mural.errors import ConfigError

BAR, HEAD, TOP, FOOT = 24, 46, 80, 50
"""Heights in pixels: of a bar, of a chart's title, of the legend with the first title, and of the axis below."""
PALETTE = ("#2f6db5", "#b4610d", "#1f7f6f", "#a13d78", "#6b5bb5", "#7d7a1e", "#b04545", "#3d7f9e")
"""Dark enough for white letters, and distinct from both white and black."""
GREY = "#808791"
"""As far from white as from black."""
GRID = "rgba(128,135,145,0.33)"


def plotly(module: str) -> Any:
    """A module of plotly, or an error that says how to install it."""
    try:
        return import_module(f"plotly.{module}")
    except ImportError as error:
        raise ConfigError("this page is drawn by the package plotly, which is missing: pip install plotly") from error


def stacked(titles: Sequence[str], heights: Sequence[int], unit: str, top: int = TOP) -> Any:
    """A figure without content yet: charts of these heights one below the other, all on one axis of that unit."""
    inside = sum(heights) + HEAD * (len(heights) - 1)
    made = plotly("subplots").make_subplots(
        rows=len(heights),
        shared_xaxes=True,
        subplot_titles=titles,
        row_heights=list(heights),
        vertical_spacing=HEAD / inside,
    )
    made.update_layout(
        template="none",
        height=inside + top + FOOT,
        margin={"t": top, "b": FOOT, "l": 10, "r": 10},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "inherit", "size": 13},
    )
    made.update_annotations(x=0, xanchor="left", font={"size": 14})
    made.update_xaxes(gridcolor=GRID, zerolinecolor=GREY)
    made.update_xaxes(row=len(heights), title_text=unit)
    made.update_yaxes(automargin=True, ticks="outside", tickcolor=GREY, linecolor=GREY, showline=True)
    return made


def figure(titles: Sequence[str], bars: Sequence[int], unit: str, barmode: str) -> Any:
    """A figure without bars yet: one chart below the other, each with room for that many, all on one axis of time."""
    heights = [BAR * max(count, 1) for count in bars]
    made = stacked(titles, heights, unit)
    inside = sum(heights) + HEAD * (len(bars) - 1)
    made.update_layout(
        barmode=barmode,
        bargap=0.15,
        legend={"orientation": "h", "y": 1 + (TOP - 48) / inside, "yanchor": "bottom", "traceorder": "normal"},
    )
    made.update_yaxes(autorange="reversed", showgrid=False, fixedrange=True, dividercolor=GREY)
    return made


def named(name: str, row: int) -> dict[str, Any]:
    """How bars of one name look in the chart of a row: a click on the name hides them in all charts."""
    look: dict[str, Any] = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
    look |= {"orientation": "h", "hoverinfo": "text", "marker_line": {"width": 1, "color": "rgba(255,255,255,0.6)"}}
    return {**look, "name": name, "legendgroup": name, "showlegend": row == 1, "row": row, "col": 1}


def html(figure: Any) -> str:
    """The figure as a part of a page that has `script`."""
    # Without the bar of buttons: one of them would send the data to a server.
    config = {"displayModeBar": False, "responsive": True, "plotlyServerURL": ""}
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, config=config)
    return f"{drawn}\n<p>Drag over a part to enlarge it; double-click to see all again.</p>"


def script() -> str:
    """What a page with figures needs once."""
    return plotly("offline").get_plotlyjs()
