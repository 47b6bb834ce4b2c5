"""`report.html`: scores, plots and the worst frames of an evaluation in one file that needs nothing else."""

import base64
import os
from collections import defaultdict
from html import escape
from pathlib import Path

import numpy as np

from data.benchmarks import Benchmark, Video
from data.images import read_rgb
from data.labels import read_label_png
from data.masks import overlay
from utils.metrics import Row

WORST_FRAMES = 12
PICTURE_WIDTH = 426
PLOT_WIDTH, PLOT_HEIGHT = 640, 120
COLORS = {"J": "#1f6fb4", "F": "#d1661c"}

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 980px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 0.7em 0; } td, th { padding: 0.25em 0.7em; text-align: right; }
th { cursor: pointer; border-bottom: 2px solid #888; } td:first-child, th:first-child { text-align: left; }
tr:nth-child(even) td { background: #f4f4f4; } figure { display: inline-block; margin: 0.4em 0.6em 0.4em 0; }
figcaption { font-size: 13px; color: #555; } img { display: block; max-width: 100%; } svg text { font-size: 11px; }
"""

_SORT = """
for (const head of document.querySelectorAll("table.sortable th")) head.onclick = () => {
  const body = head.closest("table").tBodies[0], column = head.cellIndex, up = head.dataset.up !== "true";
  head.dataset.up = up;
  const value = row => { const text = row.cells[column].textContent, number = parseFloat(text);
    return isNaN(number) || column === 0 ? text : number; };
  const rows = [...body.rows].sort((a, b) => { const x = value(a), y = value(b); return x < y ? -1 : x > y ? 1 : 0; });
  for (const row of up ? rows : rows.reverse()) body.append(row);
};
"""


def write_report(
    path: Path, scores: dict, rows: list[Row], benchmark: Benchmark, masks: Path, speed: dict | None = None
) -> None:
    """Writes the report of one evaluation.

    Args:
        scores: content of `scores.json`.
        rows: all rows of the metric, sorted.
        masks: folder of the predictions, `<masks>/<video>/<frame>.png`.
        speed: content of `speed.json`, when a model was run.
    """
    objects: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        objects[row.sequence, row.object].append(row)
    title = f"{benchmark.dataset} {benchmark.split or ''}".strip()
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{escape(title)}</h1><p>Preset {escape(scores['preset'])}, {len(objects)} objects in "
        f"{len({sequence for sequence, _ in objects})} videos. All scores are fractions of 1.</p>",
        _pairs({name: value for name, value in scores.items() if isinstance(value, (float, type(None)))}),
    ]
    if scores.get("weights"):
        parts += ["<h2>Weights</h2>", _pairs(scores["weights"])]
    if speed:
        parts += ["<h2>Speed</h2>", _pairs(speed)]
    parts += ["<h2>Objects</h2><p>A click on a heading sorts.</p>", _table(scores["per_object"], objects)]
    parts += ["<h2>Worst frames</h2><p>Prediction on the left, truth on the right.</p>"]
    parts += [_worst(row, benchmark, masks) for row in _worst_rows(objects)]
    parts += ["<h2>Over time</h2>"]
    parts += [_plot(sequence, i, found) for (sequence, i), found in objects.items()]
    parts += [f"<script>{_SORT}</script></html>"]
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    temporary.write_text("\n".join(parts), encoding="utf-8")
    os.replace(temporary, path)


def _show(value: object) -> str:
    if value is None:
        return "&ndash;"
    return f"{value:.4f}" if isinstance(value, float) else escape(str(value))


def _pairs(values: dict) -> str:
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{_show(value)}</td></tr>" for name, value in values.items())
    return f"<table>{cells}</table>"


def _table(per_object: dict[str, dict[str, float]], objects: dict[tuple[str, int], list[Row]]) -> str:
    names = list(next(iter(per_object.values())))
    head = "".join(f"<th>{escape(name)}</th>" for name in ["object", "frames", *names])
    body = "".join(
        f"<tr><td>{escape(sequence)}_{i}</td><td>{len(rows)}</td>"
        + "".join(f"<td>{_show(per_object[f'{sequence}_{i}'][name])}</td>" for name in names)
        + "</tr>"
        for (sequence, i), rows in objects.items()
    )
    return f"<table class=sortable><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _plot(sequence: str, i: int, rows: list[Row]) -> str:
    """J and F of one object over its frames."""
    step = PLOT_WIDTH / max(len(rows) - 1, 1)
    lines = []
    for name, values in (("J", [row.j for row in rows]), ("F", [row.f for row in rows])):
        points = " ".join(f"{n * step:.1f},{PLOT_HEIGHT * (1 - v):.1f}" for n, v in enumerate(values))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[name]}" stroke-width="1.5"/>')
        lines.append(f'<text x="{PLOT_WIDTH + 8}" y="{15 if name == "J" else 30}" fill="{COLORS[name]}">{name}</text>')
    grid = "".join(
        f'<line x1="0" x2="{PLOT_WIDTH}" y1="{PLOT_HEIGHT * (1 - v)}" y2="{PLOT_HEIGHT * (1 - v)}" stroke="#ddd"/>'
        f'<text x="-6" y="{PLOT_HEIGHT * (1 - v) + 4}" text-anchor="end" fill="#777">{v:g}</text>'
        for v in (0, 0.5, 1)
    )
    return (
        f"<figure><figcaption>{escape(sequence)}_{i}, frames {escape(rows[0].frame)} to {escape(rows[-1].frame)}"
        f'</figcaption><svg width="{PLOT_WIDTH + 70}" height="{PLOT_HEIGHT + 20}" '
        f'viewBox="-40 -10 {PLOT_WIDTH + 70} {PLOT_HEIGHT + 20}">{grid}{"".join(lines)}</svg></figure>'
    )


def _worst_rows(objects: dict[tuple[str, int], list[Row]]) -> list[Row]:
    """The worst frame of each object, worst first."""
    worst = [min(rows, key=lambda row: row.j + row.f) for rows in objects.values()]
    return sorted(worst, key=lambda row: row.j + row.f)[:WORST_FRAMES]


def _worst(row: Row, benchmark: Benchmark, masks: Path) -> str:
    video = next(video for video in benchmark.videos if video.name == row.sequence)
    file = f"{row.sequence}/{row.frame}.png"
    truth = read_label_png(benchmark.truth / file)
    predicted = read_label_png(masks / file)
    image = _frame(video, row.frame, truth.shape)
    pictures = "".join(
        f'<img alt="{name}" style="display:inline" src="data:image/jpeg;base64,{_jpeg(overlay(image, labels))}">'
        for name, labels in (("prediction", predicted), ("truth", truth))
    )
    caption = f"{escape(row.sequence)}_{row.object}, frame {escape(row.frame)}: J {row.j:.3f}, F {row.f:.3f}"
    return f"<figure><figcaption>{caption}</figcaption>{pictures}</figure>"


def _frame(video: Video, name: str, size: tuple[int, int]) -> np.ndarray:
    """The frame at the masks' size; grey where there are only masks."""
    import cv2

    path = next((path for path in video.frames if path.stem == name), None)
    if path is None or path in video.masks.values():
        return np.full((*size, 3), 128, np.uint8)
    return cv2.resize(read_rgb(path), size[::-1], interpolation=cv2.INTER_AREA)


def _jpeg(image: np.ndarray) -> str:
    import cv2

    height = round(image.shape[0] * PICTURE_WIDTH / image.shape[1])
    small = cv2.resize(image, (PICTURE_WIDTH, height), interpolation=cv2.INTER_AREA)
    _, data = cv2.imencode(".jpg", cv2.cvtColor(small, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 85])
    return base64.b64encode(data.tobytes()).decode()
