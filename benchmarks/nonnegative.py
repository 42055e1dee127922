"""Least squares without negative constants, which says what the data cannot tell apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

TELLS_APART = 0.01
"""How much of a column, as a share of its length, no combination of the columns before explains."""


def fit_nonnegative(
    names: Sequence[str],
    terms: Sequence[Mapping[str, float]],
    targets: Sequence[float],
    weights: Sequence[float],
) -> tuple[dict[str, float], list[str]]:
    """Find constants of 0 or more with ``sum(constant * term) = target`` as nearly as possible.

    Args:
        names: Of the constants; where two cannot be told apart, the first one stands for both.
        terms: Of each equation, by these names.
        targets: Of each equation.
        weights: Of each equation: its error is multiplied by it.

    Returns:
        The constants that the equations have, and the names of those left out, since they cannot
        be told from those named before.
    """
    columns = np.array([[given.get(name, 0.0) for name in names] for given in terms])
    columns = columns.reshape(len(terms), len(names)) * np.array(weights)[:, None]
    lengths = np.linalg.norm(columns, axis=0)
    kept: list[int] = []
    for place in (int(place) for place in np.flatnonzero(lengths)):
        column = columns[:, place] / lengths[place]
        others = columns[:, kept] / lengths[kept]
        explained = others @ np.linalg.lstsq(others, column)[0] if kept else 0.0
        if np.linalg.norm(column - explained) > TELLS_APART:
            kept.append(place)
    scaled = columns[:, kept] / lengths[kept]
    values = solve_nonnegative(scaled, np.array(targets) * np.array(weights)) / lengths[kept]
    told = {names[place]: float(value) for place, value in zip(kept, values, strict=True)}
    return told, [name for i, name in enumerate(names) if lengths[i] and name not in told]


def solve_nonnegative(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23."""
    count = columns.shape[1]
    solution, is_free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        slope = np.where(is_free, 0.0, columns.T @ (target - columns @ solution))
        if is_free.all() or slope.max() <= 1e-12 * max(1.0, float(np.linalg.norm(target))):
            break
        is_free[slope.argmax()] = True
        while is_free.any():
            trial = np.zeros(count)
            trial[is_free] = np.linalg.lstsq(columns[:, is_free], target)[0]
            if trial[is_free].min() > 0:
                solution = trial
                break
            negative = is_free & (trial <= 0)
            share = (solution[negative] / (solution[negative] - trial[negative])).min()
            solution = np.where(is_free, solution + share * (trial - solution), 0.0)
            is_free &= solution > 1e-15
            solution[~is_free] = 0.0
    return solution
