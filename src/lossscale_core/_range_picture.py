"""The picture of a range report: a histogram of exponents for each module, as SVG, PNG or part of a page."""

import html
import io
import math
import textwrap
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

_OVERFLOW, _SUBNORMAL, _FLUSH = 16, -14, -25
"""The exponents of float16: overflow begins at the first, subnormal below the second, flush to zero below the third."""

_WIDE, _NARROW = 720, 320
"""Widths in pixels: the narrow picture fits a screen of 360 pixels."""
_MARGIN, _ROW, _BAR, _LINE, _LETTER = 20, 48, 22, 16, 0.6
"""Sizes in pixels, and the width of a letter as a part of its height."""
_COLOURS = {
    **{"paper": "#ffffff", "text": "#000000", "edge": "#000000", "window": "#e8efe8", "subnormal": "#f7f0d8"},
    **{"fits": "#767676", "overflow": "#d55e00", "flush": "#0072b2"},
}
_DARK = {
    **{"paper": "#16181c", "text": "#e6e6e6", "edge": "#e6e6e6", "window": "#23322a", "subnormal": "#3a3420"},
    **{"fits": "#a6a6a6", "overflow": "#ff8c3a", "flush": "#58b0e8"},
}
_HATCHES = {"overflow": ("M0,0 L4,4 M0,4 L4,0", "xxxxx"), "flush": ("M0,4 L4,0", "/////")}
"""The hatches, visible also in black and white: the path of an SVG pattern, and the name in matplotlib."""
_LEGEND = {
    **{"fits": "fits", "overflow": "overflows", "flush": "flushes to zero"},
    **{"window": "normal numbers of float16", "subnormal": "subnormal: loses digits"},
}
_X_TITLE = "exponent e of magnitudes from 2**e to 2**(e+1)"
_Y_TITLE = "height: number of elements (square root, relative to the module's highest bar)"


class Row(NamedTuple):
    """The elements of one module, at the scale of the picture."""

    module: str
    exponents: dict[int, int]
    nonfinite: int


class Histograms(NamedTuple):
    """The content of a picture: a title, the modules from top to bottom, and the text without modules."""

    title: str
    rows: list[Row]
    note: str = ""


class _Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    kind: str


class _Text(NamedTuple):
    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"] = "start"
    size: int = 11


class _Drawing(NamedTuple):
    title: str
    width: int
    height: int
    shapes: list[_Box | _Text]


def svg_picture(histograms: Histograms) -> str:
    """Return the picture as a file in SVG."""
    return f"{_svg(_draw(histograms, _WIDE))}\n"


def png_picture(histograms: Histograms) -> bytes:
    """Return the picture as a file in PNG, with two pixels for each unit of the SVG."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError("a .png needs matplotlib; pip install 'lossscale[plot]', or pass .svg or .html") from error
    drawing = _draw(histograms, _WIDE)
    figure = Figure(figsize=(drawing.width / 100, drawing.height / 100), dpi=200)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.set_axis_off()
    aligned: dict[str, Literal["left", "center", "right"]] = {"start": "left", "middle": "center", "end": "right"}
    for shape in drawing.shapes:
        if isinstance(shape, _Text):
            axes.text(shape.x, shape.y, shape.text, ha=aligned[shape.anchor], fontsize=0.72 * shape.size)
        else:
            hatch = _HATCHES[shape.kind][1] if shape.kind in _HATCHES else None
            box = Rectangle((shape.x, shape.y), shape.width, shape.height, hatch=hatch, linewidth=0.0)
            box.set(facecolor=_COLOURS[shape.kind], edgecolor="white")
            axes.add_patch(box)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def html_page(text: str, histograms: Histograms) -> str:
    """Return a self-contained HTML page with the lines of the text and a picture for wide and for narrow screens."""
    *sentences, advice = (html.escape(line) for line in text.splitlines())
    pictures = (
        f'<div class="{name}">{_svg(_draw(histograms._replace(note=""), width), f"{name}-")}</div>'
        for name, width in (("wide", _WIDE), ("narrow", _NARROW))
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>Range report</title><style>\n{_style()}\n</style></head>",
            "<body><h1>Range report</h1>",
            *(f"<p>{sentence}</p>" for sentence in sentences),
            f"<p><strong>{advice}</strong></p>",
            *([f"<p><em>{html.escape(histograms.note)}</em></p>"] if histograms.note else []),
            *(pictures if histograms.rows else []),
            "</body></html>\n",
        ]
    )


def _style() -> str:
    light, dark = ("; ".join(f"--{kind}: {value}" for kind, value in each.items()) for each in (_COLOURS, _DARK))
    return "\n".join(
        [
            f":root {{ {light} }}",
            f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}",
            "body { font: 16px/1.5 sans-serif; max-width: 720px; margin: 0 auto; padding: 16px; }",
            "body { background: var(--paper); color: var(--text); overflow-wrap: anywhere; }",
            "svg { max-width: 100%; height: auto; }",
            *(f".{kind} {{ fill: var(--{kind}); }}" for kind in _COLOURS),
            ".narrow { display: none; }",
            "@media (max-width: 751px) { .wide { display: none; } .narrow { display: block; } }",
        ]
    )


def _draw(histograms: Histograms, width: int) -> _Drawing:
    """Return the shapes of the picture from back to front, one below the other."""
    shapes: list[_Box | _Text] = []
    top = 8.0
    for line in _wrapped(histograms.title, width, size=14):
        top += 20
        shapes.append(_Text(_MARGIN, top, line, size=14))
    for line in _wrapped(histograms.note, width):
        top += _LINE
        shapes.append(_Text(_MARGIN, top, line))
    if histograms.rows:
        for part in (_legend(width), _notes(_Y_TITLE, width), _chart(histograms.rows, width), _notes(_X_TITLE, width)):
            height, below = part
            shapes += [each._replace(y=each.y + top) for each in below]
            top += height
    height = math.ceil(top) + 12
    return _Drawing(histograms.title, width, height, [_Box(0, 0, width, height, "paper"), *shapes])


def _legend(width: int) -> tuple[float, list[_Box | _Text]]:
    """Return the height and the shapes of the legend; its entries take as many lines as they need."""
    shapes: list[_Box | _Text] = []
    x, y = float(_MARGIN), 20.0
    for kind, text in _LEGEND.items():
        length = 18 + _LETTER * 11 * len(text)
        if x > _MARGIN and x + length > width - _MARGIN:
            x, y = float(_MARGIN), y + _LINE
        shapes += [_Box(x, y - 10, 12, 12, kind), _Text(x + 18, y, text)]
        x += length + 14
    return y + 6, shapes


def _notes(text: str, width: int) -> tuple[float, list[_Box | _Text]]:
    lines = _wrapped(text, width)
    return _LINE * len(lines) + 4.0, [_Text(_MARGIN, _LINE * (n + 1), line) for n, line in enumerate(lines)]


def _chart(rows: list[Row], width: int) -> tuple[float, list[_Box | _Text]]:
    """Return the height and the shapes of the modules' names and histograms, and of the axis below them."""
    occurring = [exponent for row in rows for exponent in row.exponents]
    first, last = min([_FLUSH - 3, *occurring]), max([_OVERFLOW + 3, *occurring])
    step, bottom = (width - 2 * _MARGIN) / (last + 1 - first), 4.0 + _ROW * len(rows)

    def x_of(exponent: float) -> float:
        return _MARGIN + (exponent - first) * step

    shapes: list[_Box | _Text] = []
    for index, row in enumerate(rows):
        shapes += _names(row, _ROW * index, width)
        shapes += _bars(row, _ROW * (index + 1) + 4.0, x_of)
    shapes.append(_Box(_MARGIN, bottom, width - 2 * _MARGIN, 1, "edge"))
    # As close as labels of seven letters can be.
    spacing = next(each for each in (8, 16, 32, 64, 128, 256, 512) if each * step >= 7 * _LETTER * 11 or each == 512)
    for exponent in range(math.ceil(first / spacing) * spacing, last + 2, spacing):
        shapes.append(_Box(x_of(exponent) - 0.5, bottom, 1, 5, "edge"))
        shapes.append(_Text(x_of(exponent), bottom + 18, f"2**{exponent}", "middle"))
    return bottom + 22, shapes


def _bars(row: Row, bottom: float, x_of: Callable[[float], float]) -> Iterator[_Box]:
    """Yield the range of float16 and a bar for each exponent; square roots keep small bars visible."""
    for kind, start, end in (("subnormal", _FLUSH, _SUBNORMAL), ("window", _SUBNORMAL, _OVERFLOW)):
        yield _Box(x_of(start), bottom - _BAR - 4, x_of(end) - x_of(start), _BAR + 4, kind)
    for exponent in (_FLUSH, _SUBNORMAL, _OVERFLOW):
        yield _Box(x_of(exponent) - 0.5, bottom - _BAR - 4, 1, _BAR + 4, "edge")
    largest, step = max(row.exponents.values(), default=1), x_of(1) - x_of(0)
    for exponent, count in sorted(row.exponents.items()):
        # A single element among millions still gets a bar that can be seen.
        height = max(1.5, _BAR * math.sqrt(count / largest))
        yield _Box(x_of(exponent) + 0.08 * step, bottom - height, 0.84 * step, height, _kind(exponent))


def _names(row: Row, top: float, width: int) -> Iterator[_Text]:
    """Yield the name of a module and the shares that do not fit."""
    counts = {"overflow": row.nonfinite, "flush": 0, "fits": 0}
    for exponent, count in row.exponents.items():
        counts[_kind(exponent)] += count
    total = sum(counts.values())
    words = {"overflow": "over or NaN" if row.nonfinite else "over", "flush": "flush"}
    shares = ", ".join(f"{_percent(counts[kind] / total)} {word}" for kind, word in words.items() if counts[kind])
    longest = int((width - 2 * _MARGIN) / (_LETTER * 11)) - len(shares) - 2
    name = row.module if len(row.module) <= longest else f"…{row.module[1 - longest :]}"
    yield _Text(_MARGIN, top + 21, name)
    if shares:
        yield _Text(width - _MARGIN, top + 21, shares, "end")


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:.2g} %" if percent < 99.5 else "100 %"


def _kind(exponent: int) -> str:
    if exponent >= _OVERFLOW:
        return "overflow"
    return "flush" if exponent < _FLUSH else "fits"


def _wrapped(text: str, width: int, *, size: int = 11) -> list[str]:
    return textwrap.wrap(text, int((width - 2 * _MARGIN) / (_LETTER * size)))


def _svg(drawing: _Drawing, prefix: str = "") -> str:
    """Return an SVG element; `prefix` makes the ids of its patterns unique in a page."""
    size = f'width="{drawing.width}" height="{drawing.height}" viewBox="0 0 {drawing.width} {drawing.height}"'
    label = html.escape(drawing.title)
    shapes = "".join(_text(each) if isinstance(each, _Text) else _box(each, prefix) for each in drawing.shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" role="img" aria-label="{label}">'
        f"<defs>{_patterns(prefix)}</defs>{shapes}</svg>"
    )


def _box(box: _Box, prefix: str) -> str:
    # The style of the page replaces a colour by that of the class, but not a pattern, which has its own colours.
    plain = f'class="{box.kind}" fill="{_COLOURS[box.kind]}"'
    fill = f'fill="url(#{prefix}{box.kind})"' if box.kind in _HATCHES else plain
    return f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" {fill}/>'


def _text(text: _Text) -> str:
    place = f'x="{text.x:g}" y="{text.y:g}" font-size="{text.size}" text-anchor="{text.anchor}"'
    return f'<text {place} class="text">{html.escape(text.text)}</text>'


def _patterns(prefix: str) -> str:
    return "".join(
        f'<pattern id="{prefix}{kind}" width="4" height="4" patternUnits="userSpaceOnUse">'
        f'<rect width="4" height="4" class="{kind}" fill="{_COLOURS[kind]}"/>'
        f'<path d="{path}" stroke="white"/></pattern>'
        for kind, (path, _) in _HATCHES.items()
    )
