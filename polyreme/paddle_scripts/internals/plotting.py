"""paddle.utils.plot of 1.x: curves of numbers by step."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from polyreme.recipes.pictures import matplotlib_part


class PlotData:
    """Steps and values of a curve."""

    step: list[float]
    value: list[float]

    def __init__(self) -> None:
        self.reset()

    def append(self, step: float, value: float) -> None:
        """One more point."""
        self.step.append(step)
        self.value.append(value)

    def reset(self) -> None:
        """No points."""
        self.step, self.value = [], []


class Ploter:
    """Curves by their titles, drawn with matplotlib; never where the environment says DISABLE_PLOT=True."""

    def __init__(self, *args: str) -> None:
        self.__args__ = args
        self.__plot_data__ = {title: PlotData() for title in args}
        self.__disable_plot__ = os.environ.get("DISABLE_PLOT")

    def __plot_is_disabled__(self) -> bool:
        return self.__disable_plot__ == "True"

    def append(self, title: str, step: float, value: Any) -> None:
        """One more point of this title's curve. Raises KeyError for a title that was not given."""
        self.__plot_data__[title].append(step, float(np.asarray(value).item()))

    def plot(self, path: str | None = None) -> None:
        """Draw all curves that have points, into the file at path, or in a notebook or window.

        Raises ConfigError where matplotlib is not installed.
        """
        if self.__plot_is_disabled__():
            return
        pyplot = matplotlib_part("pyplot", "Ploter.plot")
        titles = [title for title in self.__args__ if self.__plot_data__[title].step]
        for title in titles:
            pyplot.plot(self.__plot_data__[title].step, self.__plot_data__[title].value)
        pyplot.legend(titles, loc="upper left")
        if path is None:
            pyplot.show()
        else:
            pyplot.savefig(path)
        pyplot.gcf().clear()

    def reset(self) -> None:
        """No points in any curve."""
        for data in self.__plot_data__.values():
            data.reset()
