"""The SVG picture of a range report: a histogram of exponents for each module."""

import html
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

_OVERFLOW, _SUBNORMAL, _FLUSH = 16, -14, -25
"""The exponents of float16: overflow begins at the first, subnormal below the second, flush to zero below the third."""

_LEFT, _RIGHT, _TOP, _ROW, _BAR, _STEP = 300, 150, 62, 26, 20, 13
_COLOURS = {
    **{"fits": "#767676", "overflow": "#d55e00", "flush": "#0072b2"},
    **{"window": "#e8efe8", "subnormal": "#f7f4e6", "edge": "#000000"},
}
_HATCHED = ("overflow", "flush")
_WORDS = {"overflow": "over", "flush": "flush"}


class Row(NamedTuple):
    """The gradients of one module at the scale of the picture."""

    module: str
    exponents: dict[int, int]
    nonfinite: int


def svg_picture(rows: list[Row], title: str) -> str:
    """Return the picture as an SVG element."""
    width, height, shapes = _layout(rows, title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif"><defs>{_hatches()}</defs>'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(shapes)}</svg>\n'
    )


def html_page(text: str, picture: str) -> str:
    """Return a self-contained HTML page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Range report</title></head>\n'
        f"<body><pre>{html.escape(text)}</pre>\n{picture}</body></html>\n"
    )


def _layout(rows: list[Row], title: str) -> tuple[int, int, list[str]]:
    """Return the width and height of the picture, and its shapes from back to front."""
    occurring = [exponent for row in rows for exponent in row.exponents]
    first, last = min([_FLUSH - 2, *occurring]), max([_OVERFLOW + 2, *occurring])

    def x_of(exponent: float) -> float:
        return _LEFT + (exponent - first) * _STEP

    width, bottom = int(x_of(last + 1)) + _RIGHT, _TOP + _ROW * len(rows)
    shapes = [
        _box(x_of(_FLUSH), _TOP, x_of(_SUBNORMAL) - x_of(_FLUSH), bottom - _TOP, "subnormal"),
        _box(x_of(_SUBNORMAL), _TOP, x_of(_OVERFLOW) - x_of(_SUBNORMAL), bottom - _TOP, "window"),
        *(_box(x_of(edge) - 0.5, _TOP - 4, 1, bottom - _TOP + 4, "edge") for edge in (_FLUSH, _SUBNORMAL, _OVERFLOW)),
        _text(16, 22, title, size=14),
        _text(x_of(_FLUSH) + 6, _TOP - 8, "← flushes to zero", "end"),
        _text((x_of(_SUBNORMAL) + x_of(_OVERFLOW)) / 2, _TOP - 8, "fits float16", "middle"),
        _text((x_of(_FLUSH) + x_of(_SUBNORMAL)) / 2, _TOP - 8, "loses digits", "middle"),
        _text(x_of(_OVERFLOW), _TOP - 8, "overflows →"),
    ]
    for index, row in enumerate(rows):
        shapes += _row_shapes(row, _TOP + _ROW * index, x_of, width)
    ticks = range(first - first % 8 + 8, last + 1, 8)
    shapes += [_text(x_of(exponent), bottom + 16, f"2**{exponent}", "middle") for exponent in ticks]
    return width, bottom + 30, shapes


def _row_shapes(row: Row, top: float, x_of: Callable[[float], float], width: int) -> Iterator[str]:
    """Yield the name, the bars and the percentages of one module; square roots keep small bars visible."""
    yield _text(_LEFT - 8, top + _BAR, _shortened(row.module), "end")
    counts = {"overflow": row.nonfinite, "flush": 0, "fits": 0}
    largest = max(row.exponents.values(), default=1)
    for exponent, count in sorted(row.exponents.items()):
        kind = _kind(exponent)
        counts[kind] += count
        # A single element among millions still gets a bar that can be seen.
        height = max(1.5, _BAR * math.sqrt(count / largest))
        yield _box(x_of(exponent) + 1, top + _ROW - 3 - height, _STEP - 2, height, kind)
    total = sum(counts.values())
    percentages = [f"{100 * counts[kind] / total:.2g} % {word}" for kind, word in _WORDS.items() if counts[kind]]
    if percentages:
        yield _text(width - _RIGHT + 4, top + _BAR, ", ".join(percentages))


def _kind(exponent: int) -> str:
    if exponent >= _OVERFLOW:
        return "overflow"
    return "flush" if exponent < _FLUSH else "fits"


def _shortened(name: str) -> str:
    return name if len(name) <= 44 else f"…{name[-43:]}"


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    fill = f"url(#{kind})" if kind in _HATCHED else _COLOURS[kind]
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11) -> str:
    """Return a line of text whose start, middle or end is at `x`, according to `anchor`."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _hatches() -> str:
    """Return a pattern for each kind that must be recognisable in a black-and-white print."""
    lines = {"overflow": "M0,0 L4,4 M0,4 L4,0", "flush": "M0,4 L4,0"}
    return "".join(
        f'<pattern id="{kind}" width="4" height="4" patternUnits="userSpaceOnUse">'
        f'<rect width="4" height="4" fill="{_COLOURS[kind]}"/><path d="{path}" stroke="white"/></pattern>'
        for kind, path in lines.items()
    )
