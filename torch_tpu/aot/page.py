"""A report as one self-contained HTML file: memory, roofline, cost by module, by plotly."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_tpu.aot import Compiled, Failure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
  color: #1f2430; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; }
td, th { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #e3e6ec;
  vertical-align: top; overflow-wrap: anywhere; }
th { color: #5a6375; font-weight: 600; } td.label { font-weight: 600; white-space: nowrap; }
.note { color: #5a6375; } .bad { color: #b3261e; font-weight: 600; }
"""
_COLOURS = {"MXU": "#3566c0", "HBM": "#d9822b", "ICI": "#7b4fa3"}


def write_page(
    path: str | Path, results: Sequence[Compiled | Failure], labels: Sequence[str]
) -> None:
    """Write the page. Raises ImportError, with what to install, without plotly."""
    Path(path).write_text(page(results, labels), encoding="utf-8")


def page(results: Sequence[Compiled | Failure], labels: Sequence[str]) -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ImportError(
            "the HTML report needs plotly: `pip install 'torch-tpu[report]'`"
        ) from None
    parts = [_section(r, label) for r, label in zip(results, labels, strict=True)]
    title = escape(results[0].name) if results else "nothing"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{title}: estimate</title><style>{_STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>"
        + "".join(parts)
        + "<p class='note'>Estimates: the TPU compiler's own cycle counts and published "
        "bandwidths. Nothing was run on a chip.</p></body></html>"
    )


def _section(result: Compiled | Failure, label: str) -> str:
    from torch_tpu.cli.estimate import _failure, summary

    heading = f"<h1>{escape(result.name)} on {escape(result.target.name)} {escape(label)}</h1>"
    if not hasattr(result, "cost"):
        return f"{heading}<p class='bad'>{escape(_failure(result))}</p>"
    rows = "".join(
        f"<tr><td class='label'>{escape(a)}</td><td>{escape(b)}</td></tr>"
        for a, b in summary(result)
    )
    advice = "".join(f"<li>{escape(line)}</li>" for line in result.advice())
    return (
        f"{heading}<table>{rows}</table>"
        + (f"<h2>Advice</h2><ul>{advice}</ul>" if advice else "")
        + f"<h2>HBM of one device</h2>{_figure(memory_figure(result))}"
        + f"<h2>Roofline</h2>{_figure(roofline_figure(result))}"
        + f"<h2>Time on the core by module</h2>{_figure(module_figure(result))}"
        + f"<h2>Most expensive instructions</h2>{_instructions(result)}"
    )


def _figure(figure: Any) -> str:
    from plotly.io import to_html

    return to_html(figure, include_plotlyjs=False, full_html=False, config={"displaylogo": False})


def _layout(figure: Any, height: int, **more: Any) -> Any:
    figure.update_layout(
        height=height,
        template="plotly_white",
        margin={"l": 60, "r": 20, "t": 30, "b": 50},
        font={"size": 13},
        **more,
    )
    return figure


def memory_figure(result: Compiled) -> Any:
    """One stacked bar against what a device has."""
    import plotly.graph_objects as go

    memory, gib = result.memory, 2**30
    parts = [(f"argument: {role}", n) for role, n in memory.by_role.items()]
    parts += [
        ("outputs not donated", max(0, memory.outputs - memory.aliased)),
        ("temporaries", memory.temporaries),
        ("program", memory.program),
    ]
    figure = go.Figure(
        [
            go.Bar(
                name=name,
                y=["HBM"],
                x=[n / gib],
                orientation="h",
                hovertemplate=f"{name}: %{{x:.3f}} GiB<extra></extra>",
            )
            for name, n in parts
            if n
        ]
    )
    figure.add_vline(
        x=memory.available / gib,
        line_dash="dash",
        annotation_text=f"available {memory.available / gib:.2f} GiB",
        annotation_position="top left",
    )
    legend = {"orientation": "h", "y": -0.45}
    return _layout(figure, 260, barmode="stack", xaxis_title="GiB", legend=legend)


def roofline_figure(result: Compiled) -> Any:
    """Matmul instructions under the chip's roof: FLOP/s over FLOPs per byte of HBM traffic."""
    import plotly.graph_objects as go

    chip = result.target.chip
    rows = [r for r in result.cost.rows if r.flops and r.seconds and r.bytes]
    figure = go.Figure()
    xs = [r.flops / r.bytes for r in rows]
    low = min([*xs, 1.0]) / 2
    high = max([*xs, chip.peak_bf16 / chip.hbm_bandwidth]) * 4
    ridge = chip.peak_bf16 / chip.hbm_bandwidth
    figure.add_scatter(
        x=[low, ridge, high],
        y=[low * chip.hbm_bandwidth / 1e12, chip.peak_bf16 / 1e12, chip.peak_bf16 / 1e12],
        mode="lines",
        name=f"{chip.title} peak",
        line={"color": "#5a6375"},
    )
    longest = max((r.seconds for r in rows), default=1.0)
    for bound in ("MXU", "HBM"):
        mine = [r for r in rows if r.bound == bound]
        figure.add_scatter(
            x=[r.flops / r.bytes for r in mine],
            y=[r.flops / r.seconds / 1e12 for r in mine],
            mode="markers",
            name=f"bound by {bound}",
            marker={
                "color": _COLOURS[bound],
                "size": [6 + 26 * (r.seconds / longest) ** 0.5 for r in mine],
                "opacity": 0.7,
            },
            text=[
                f"{escape(r.module or r.name)}<br>{escape(r.shape[:80])}<br>"
                f"{r.seconds * 1e6:.1f} µs"
                for r in mine
            ],
            hovertemplate="%{text}<br>%{y:.1f} TFLOP/s at %{x:.1f} FLOP/B<extra></extra>",
        )
    figure.update_xaxes(type="log", title="FLOP per byte of HBM traffic")
    figure.update_yaxes(type="log", title="TFLOP/s")
    return _layout(figure, 420, legend={"orientation": "h", "y": 1.08})


def module_figure(result: Compiled) -> Any:
    """Bars of the modules that take most of the core's time."""
    import plotly.graph_objects as go

    shares = list(result.cost.by_module().items())[:24]
    names = [name or "(no module: optimizer, loss, layout)" for name, _ in shares]
    figure = go.Figure(
        go.Bar(
            y=names[::-1],
            x=[s * 1e3 for _, s in shares][::-1],
            orientation="h",
            marker_color=_COLOURS["MXU"],
            hovertemplate="%{y}: %{x:.3f} ms<extra></extra>",
        )
    )
    figure.update_yaxes(automargin=True)
    return _layout(figure, 120 + 22 * len(shares), xaxis_title="ms")


def _instructions(result: Compiled) -> str:
    from torch_tpu.cli.estimate import duration

    head = "".join(
        f"<th>{h}</th>" for h in ("time", "kind", "bound", "times", "module", "line", "shape")
    )
    rows = []
    for r in result.most_expensive(25):
        where = f"{r.file}:{r.line}" if r.file else ""
        cells = (
            duration(r.seconds),
            r.kind,
            r.bound,
            r.count,
            r.module or r.op,
            where,
            r.shape[:90],
        )
        rows.append("<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in cells) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"
