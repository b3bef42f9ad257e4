"""Labels beside the points of a picture, where there is room for them."""

import itertools

import numpy as np

from .look import DPI, FAINT

RISES = (0, -12, 12, -24, 24, -38, 38, -54, 54, -72, 72, -95)  # pixels, of labels above and below their points


def place_labels(axes, texts, line, points):
    """Write (x, y, words) near their points, the first first, where they cover no other label, line or edge and few points; or not at all.

    line: corners (n, 2) of the line that stays free; points (n, 2).
    """
    axes.figure.draw_without_rendering()
    px, frame, place = DPI / 100, axes.get_window_extent(), axes.transData.transform
    line, points = along(place(line), 4 * px), place(points)
    boxes, leaders = [], []
    for x, y, words in texts:
        ruler = axes.text(x, y, words, fontsize=8.8)
        width, height = ruler.get_window_extent().size
        ruler.remove()
        point, options = place((x, y)), []
        for side, rise, push in itertools.product((-1, 1), RISES, (10, 22, 48)):
            start = point + (side * push * px, rise * px)  # where the text begins, on the left where it ends
            left, middle = start[0] - (width if side < 0 else 0), start[1]
            box = (left - 3 * px, middle - height / 2 - px, left + width + 3 * px, middle + height / 2 + px)
            leader = along(np.array([point, start]), 4 * px)[2:]
            inside = frame.x0 <= box[0] and box[2] <= frame.x1 and frame.y0 + 16 * px <= box[1] and box[3] <= frame.y1
            if not inside or covered(line, box) or covered(points, box) > 3:
                continue
            if any(overlap(box, other) or covered(leader, other) for other in boxes) or any(covered(other, box) for other in leaders):
                continue
            crossings = sum(covered(line, (*(p - 2 * px), *(p + 2 * px))) > 0 for p in leader[2:])
            options.append((3 * covered(points, box) + 4 * crossings + (abs(rise) + push) / 8, side, rise, push, box, leader))
        if options:
            _, side, rise, push, box, leader = min(options, key=lambda option: option[0])
            boxes.append(box)
            leaders.append(leader)
            arrow = dict(arrowstyle="-", color=FAINT, linewidth=0.7, shrinkA=0, shrinkB=3, relpos=(side < 0, 0.5))
            offset = dict(xytext=(0.72 * side * push, 0.72 * rise), textcoords="offset points")  # 100 px are 72 points
            align = dict(ha="right" if side < 0 else "left", va="center")
            axes.annotate(words, (x, y), fontsize=8.8, zorder=6, **offset, **align, arrowprops=arrow if abs(rise) + push > 22 else None)


def stairs(points):
    """The corners (n, 2) of the line that leads level, then up or down, from point to point."""
    x, y = points.T if len(points) else ([], [])
    return np.column_stack([np.repeat(x, 2)[1:], np.repeat(y, 2)[:-1]])


def along(corners, every):
    """Points on the line through `corners` (n, 2), at most `every` apart."""
    pieces = [np.linspace(a, b, int(np.hypot(*(b - a)) / every) + 2) for a, b in zip(corners, corners[1:])]
    return np.concatenate(pieces) if pieces else np.empty((0, 2))


def covered(points, box):
    """How many of the points (n, 2) lie in the box (left, bottom, right, top)."""
    return int(((points > box[:2]) & (points < box[2:])).all(axis=1).sum())


def overlap(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
