"""Draw the lessons' figures in one look: one palette, one frame, one way to save.

Their content is recorded from real runs. A colour means the same in every lesson; colour-blind
readers can distinguish all colours.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidist.errors import ConfigError
from minidist.files import whole
from minidist.observe.plots import GRID as GRID
from minidist.observe.plots import INK as INK
from minidist.observe.plots import MEMORY as MEMORY
from minidist.observe.plots import PAPER as PAPER
from minidist.observe.plots import RANKS as RANKS
from minidist.observe.plots import SOFT as SOFT
from minidist.observe.plots import save_picture

if TYPE_CHECKING:  # matplotlib takes longer to load than a lesson to run: only what draws loads it
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

CHINESE_FONTS = (
    *("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei"),
    *("PingFang SC", "Hiragino Sans GB", "Microsoft YaHei", "SimHei"),
)
"""Fonts with Chinese letters, the best first."""

_CHINESE: ContextVar[Callable[[str], str] | None] = ContextVar("chinese", default=None)

PHASES = {
    "forward": "#7fb0de",
    "backward": "#2f5d9b",
    "all_reduce": "#e08e3c",
    "wait": "#f3d3a8",
    "optimizer": "#5b9a68",
    "reduce_scatter": "#3b6fb6",
    "all_gather": "#e08e3c",
}


def new_figure(width: float, height: float, title: str, subtitle: str = "") -> "Figure":
    """Return an empty figure, `width` × `height` inches, with its title at the top left."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=PAPER)
    FigureCanvasAgg(figure)
    figure.text(
        0.35 / width, 1 - 0.28 / height, title, fontsize=15, fontweight="bold", color=INK, va="top"
    )
    if subtitle:
        figure.text(0.35 / width, 1 - 0.66 / height, subtitle, fontsize=10.5, color=SOFT, va="top")
    return figure


def quiet(ax: Any, *, grid: str = "") -> Any:
    """Draw axes without a box; a light grid along `grid` ("x", "y" or none)."""
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color("#9aa5b1")
    ax.tick_params(colors=SOFT, labelsize=10, length=3)
    ax.set_axisbelow(True)
    if grid:
        ax.grid(axis=grid, color=GRID, linewidth=0.9)
    return ax


def bare(ax: Any) -> Any:
    """Draw axes without box and ticks."""
    ax.set_axis_off()
    return ax


def patch(color: str) -> "Patch":
    """Return a square of one colour, for a legend."""
    from matplotlib.patches import Patch

    return Patch(facecolor=color, edgecolor="none")


def step_number(ax: Any, x: float, y: float, number: int, color: str = INK, **options: Any) -> None:
    """Write the number of a step of the notes in a circle, so that no reader takes it for a
    bucket's or a microbatch's."""
    ax.text(
        x,
        y,
        chr(ord("①") + number - 1),
        fontsize=11,
        va="center_baseline",
        color=color,
        zorder=4,
        **options,
    )


def caption(ax: Any, text: str) -> None:
    """Write the title of one panel, left above its axes."""
    ax.set_title(text, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=10)


def save(figure: "Figure", folder: Path | str, name: str = "figure.png") -> Path:
    """Write the picture without date or version, so that equal pictures are equal files; within
    `also_in_chinese` a second one, figure.zh.png, with Chinese words.

    Returns: its path.
    Raises:  ConfigError if it cannot be written.
    """
    path = Path(folder) / name
    with _written(path) as draft:
        save_picture(figure, draft, dpi=150, facecolor=PAPER)
    if (say := _CHINESE.get()) is not None:
        for words in speak_chinese(figure, say):
            print(f"{path.name}: no Chinese for {words!r}")
        with _written(path.with_suffix(".zh.png")) as draft:
            save_picture(figure, draft, dpi=150, facecolor=PAPER)
    return path


# ------------------------------------------------------------------------------- words in Chinese


@contextmanager
def also_in_chinese(say: Callable[[str], str] | None) -> Iterator[None]:
    """Let `save` write each picture in Chinese too, where a font has the letters.

    Args:    say: returns the Chinese of a text; None: English only.
    """
    token = _CHINESE.set(say if say and chinese_font() else None)
    try:
        yield
    finally:
        _CHINESE.reset(token)


def chinese_font() -> str:
    """Return the name of a font with Chinese letters, or "" if this machine has none."""
    from matplotlib.font_manager import fontManager

    there = {font.name for font in fontManager.ttflist}
    return next((name for name in CHINESE_FONTS if name in there), "")


def speak_chinese(figure: "Figure", say: Callable[[str], str]) -> list[str]:
    """Put the words of a figure that has been drawn into Chinese. Returns: the words that have
    none."""
    from matplotlib.text import Text
    from matplotlib.ticker import FixedFormatter, FuncFormatter

    left = list[str]()

    def told(text: str) -> str:
        chinese = say(text)
        if chinese == text and re.search("[a-z]{3}", text.replace("rank", "")):
            left.append(text)
        return chinese

    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_formatter(), FixedFormatter | FuncFormatter):
                words = [told(label.get_text()) for label in axis.get_ticklabels()]
                begin, end = axis.get_view_interval()
                axis.set_ticks(axis.get_ticklocs(), words)
                axis.set_view_interval(begin, end, ignore=True)  # ticks outside widen it
    ticks = {id(text) for axes in figure.axes for text in _tick_texts(axes)}
    for text in figure.findobj(Text):
        text.set_fontfamily(["DejaVu Sans", chinese_font()])
        if id(text) not in ticks and text.get_text():
            text.set_text(told(text.get_text()))
            if re.search("[\u4e00-\u9fff]", text.get_text()):
                text.set_fontweight("normal")  # few such fonts have bold letters
    return [*dict.fromkeys(left)]


def _tick_texts(axes: Any) -> list[Any]:
    """Return the texts that the axes write themselves."""
    return [*axes.get_xticklabels(which="both"), *axes.get_yticklabels(which="both")]


def save_mermaid(diagram: str, folder: Path | str) -> None:
    """Write figure.mmd. Raises ConfigError if it cannot be written."""
    with _written(Path(folder) / "figure.mmd") as draft:
        draft.write_text(diagram, encoding="utf-8")


@contextmanager
def _written(path: Path) -> Iterator[Path]:
    """Yield the draft of a file (files.whole)."""
    try:
        with whole(path) as draft:
            yield draft
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; choose another place with --out DIR"
        ) from error
