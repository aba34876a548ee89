"""Pictures of charts as a visitor sees them, and the contrast of their pixels."""

from __future__ import annotations

import io

from PIL import Image

from support.browsing import Page
from support.contrast import contrast

CHART = "[data-testid=stVegaLiteChart]"


def keyed(key: str) -> str:
    """Selector of the chart with a key."""
    return f'[class*="{key}"] {CHART}'


def in_card(title: str) -> str:
    """Selector of a chart that `Page.chart_of` has marked."""
    return f'[data-card="{title}"] {CHART}'


def picture(page: Page, selector: str) -> Image.Image:
    chart = page.one(selector)
    page.script("arguments[0].scrollIntoView({block: 'center'})", chart)
    page.settle()
    return Image.open(io.BytesIO(chart.screenshot_as_png)).convert("RGB")


def text_contrast(words: Image.Image) -> float:
    """The highest contrast of a pixel of the words with their most frequent colour, the background."""
    counted = sorted(words.getcolors(1 << 20) or ())
    back = color(counted[-1][1])  # type: ignore[arg-type]
    return max(contrast(back, color(pixel)) for _, pixel in counted)  # type: ignore[arg-type]


def color(pixel: tuple[int, ...]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*pixel)
