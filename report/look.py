"""What the pictures share: opaque cards of one look, which read on a light and on a dark page, their marks, and their PNG."""

import functools
import io
import warnings

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, which the colour-blind tell apart; the marks differ too.
BLUE, ORANGE, GREEN, SKY, YELLOW = "#0072b2", "#d55e00", "#009e73", "#56b4e9", "#e69f00"
INK, MUTED, FAINT, GRID, CARD = "#1f2328", "#59636e", "#8c959f", "#e7eaee", "#ffffff"
LOOK = {
    "font.family": "sans-serif", "font.size": 9.5, "text.color": INK, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.edgecolor": "#c3c9d0", "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y",
    "grid.color": GRID, "axes.axisbelow": True, "axes.facecolor": "none", "xtick.labelsize": 9, "ytick.labelsize": 9, "legend.fontsize": 9,
    "axes.formatter.useoffset": False, "text.parse_math": False, "legend.frameon": False, "legend.labelcolor": MUTED,
}  # fmt: skip
WIDTH, DPI = 8.0, 200  # inches and dots an inch: drawn 1,600 pixels wide, to be seen at 800


def drawn(draw):
    """Draw with this file's look, whatever the user's matplotlib is set to."""

    @functools.wraps(draw)
    def with_look(*args):
        with matplotlib.rc_context(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # a description in a script that no font here has
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(LOOK)
            return draw(*args)

    return with_look


def card(height, title, subtitle, panels=1, left=0.65):
    """(figure, its panels one above the other) with a headline; height and left in inches."""
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="none")
    shape = dict(boxstyle="round,pad=0,rounding_size=0.09", fc=CARD, ec="none", zorder=-1)
    figure.add_artist(FancyBboxPatch((0, 0), WIDTH, height, transform=figure.dpi_scale_trans, **shape))
    figure.text(0.2 / WIDTH, 1 - 0.2 / height, title, fontsize=13, fontweight="bold", va="top")
    figure.text(0.2 / WIDTH, 1 - 0.48 / height, subtitle, fontsize=9.5, color=MUTED, va="top")
    top, bottom, gap = 1.0, 0.55, 0.35
    room = (height - top - bottom + gap) / panels
    width = 1 - (left + 0.25) / WIDTH
    places = [(left / WIDTH, (bottom + i * room) / height, width, (room - gap) / height) for i in reversed(range(panels))]
    return figure, [figure.add_axes(place) for place in places]


def above(axes, words):
    """A vertical axis' name, where it is read without turning one's head."""
    axes.set_title(words, loc="left", fontsize=9, color=MUTED, pad=6)


def empty(axes, words):
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=MUTED, fontsize=11)
    axes.set_axis_off()


def whole_numbers(axis, most=9):
    axis.set_major_locator(MaxNLocator(most, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


def rings(axes, x, y, size=18, color=FAINT, **more):
    axes.scatter(x, y, size, **dict(facecolors="none", edgecolors=color, linewidths=0.9) | more)


def dots(axes, x, y, size=24, **more):
    axes.scatter(x, y, size, **dict(color=BLUE, edgecolors=CARD, linewidths=0.6, zorder=5) | more)


@drawn
def png(figure):
    """The figure as the bytes of a PNG."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=DPI, facecolor="none", metadata={"Software": None})
    return data.getvalue()


def show(figure, words):
    """The figure for a notebook, as wide as it is meant to be; words for who can't see it."""
    from IPython.display import Image

    return Image(png(figure), width=int(100 * WIDTH), alt=words)
