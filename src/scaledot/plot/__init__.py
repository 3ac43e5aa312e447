"""Pictures of attention on Matplotlib axes: weights, heads, keys, masks, bars and curves.

Needs the ``plot`` extra, which is imported by the first call, not with this module. Each function
draws on ``ax``, or on a figure of its own where there is none, and returns the axes. Figures are
made without ``pyplot``: nothing is registered globally, no window opens, no display is needed.
"""

from scaledot.plot._axes import BLUE, GREEN, GREY, ORANGE, RED, SERIES, Axes, axes
from scaledot.plot._files import ENDINGS, check_target, save
from scaledot.plot._flow import data_flow
from scaledot.plot._heads import entropy, head_map, saturation
from scaledot.plot._keys import distances, received
from scaledot.plot._matrices import head_grid, mask, weights
from scaledot.plot._series import bars, curves, softmax_bars, variance
from scaledot.plot._visible import tiles, visible

__all__ = [
    "BLUE",
    "ENDINGS",
    "GREEN",
    "GREY",
    "ORANGE",
    "RED",
    "SERIES",
    "Axes",
    "axes",
    "bars",
    "check_target",
    "curves",
    "data_flow",
    "distances",
    "entropy",
    "head_grid",
    "head_map",
    "mask",
    "received",
    "saturation",
    "save",
    "softmax_bars",
    "tiles",
    "variance",
    "visible",
    "weights",
]
