"""Hidden states in few coordinates: what every probe here is fitted in.

Ridge, L2-penalised logistic regression, differences of means and their whitened form only ask for
inner products, so they don't change if features are rotated. With n contexts and d features, the
n × n inner products (or, if d is smaller, the d × d ones) are decomposed once per split, and all
penalties, labels and permutations share that. Centring and one scale per cell keep this property;
scaling feature by feature wouldn't.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigh

CONSTANT = 1e-12  # a variance below this share of the mean square is rounding
RANK = 1e-12  # likewise a direction's share of the largest


@dataclass(frozen=True)
class Cell:
    """Hidden states of all contexts at one layer and position, made ready for splits.

    Attributes:
        features: ``[contexts, d]`` float64 less their overall mean.
        gram: ``[contexts, contexts]`` their inner products; None where d is the smaller.
        size: mean square of the features as given.
    """

    features: np.ndarray
    gram: np.ndarray | None
    size: float

    @classmethod
    def of(cls, features: np.ndarray) -> "Cell":
        """From ``[contexts, d]`` hidden states."""
        given = np.asarray(features, dtype=np.float64)
        size = float(np.einsum("nd,nd->", given, given) / max(given.size, 1))
        # Without the common part, which may be far larger, products lose no digits to it.
        centred = given - given.mean(0)
        gram = centred @ centred.T if centred.shape[1] > len(centred) else None
        return cls(centred, gram, size)


@dataclass(frozen=True)
class Rotated:
    """Training and test contexts of one split in the training contexts' principal axes.

    Attributes:
        train: ``[train, m]``, centred within runs, mean squared norm 1; columns are orthogonal.
        test: ``[test, m]``, by the same centres, scale and axes.
        squares: ``[m]`` squared norms of the columns of ``train``, falling.
        cell: what was rotated.
        rows: the training rows.
        runs: ``[contexts]`` run of each context.
        scale: one number that features are multiplied by.
    """

    train: np.ndarray
    test: np.ndarray
    squares: np.ndarray
    cell: Cell
    rows: np.ndarray
    runs: np.ndarray
    scale: float
    _vectors: np.ndarray

    @property
    def width(self) -> int:
        return self.cell.features.shape[1]

    def weights(self, rotated: np.ndarray) -> np.ndarray:
        """``[d]`` weights on features for ``[m]`` weights on coordinates."""
        if self.cell.gram is None:
            return self._vectors @ rotated * self.scale
        centred = self.cell.features[self.rows] - self.centres()[self.runs[self.rows]]
        by_context = self._vectors @ (rotated / np.sqrt(self.squares))
        return centred.T @ by_context * self.scale**2

    def centres(self) -> np.ndarray:
        """``[runs, d]`` training mean of each run; of all runs where a run has no training row."""
        return _averages(self.rows, self.runs, len(self.runs)) @ self.cell.features


def rotate(cell: Cell, train: np.ndarray, test: np.ndarray, runs: np.ndarray) -> Rotated:
    """Principal axes of the training contexts, and everyone's coordinates in them.

    Args:
        cell: hidden states.
        train: rows to learn centres, scale and axes from.
        test: rows to express in them.
        runs: ``[contexts]`` run of each context, numbered from 0; each is centred by itself.

    Returns:
        Coordinates; with no column where the training contexts don't differ.
    """
    averages = _averages(train, runs, len(cell.features))
    if cell.gram is None:
        centres = averages @ cell.features
        fitted = cell.features[train] - centres[runs[train]]
        other = cell.features[test] - centres[runs[test]]
        products = fitted.T @ fitted
    else:
        by_run = averages @ cell.gram
        between = by_run @ averages.T
        of_train, of_test = runs[train], runs[test]
        cross = by_run[:, train]

        def centred(rows: np.ndarray, of_rows: np.ndarray) -> np.ndarray:
            block = cell.gram[np.ix_(rows, train)] - cross[of_rows]
            return block - by_run[of_train][:, rows].T + between[np.ix_(of_rows, of_train)]

        products, other = centred(train, of_train), centred(test, of_test)
        products = (products + products.T) / 2
    total = float(np.trace(products)) / len(train)
    if total <= CONSTANT * cell.size * cell.features.shape[1]:
        none = np.empty((len(train), 0))
        vectors = np.empty((len(products), 0))
        empty = np.empty((len(test), 0))
        return Rotated(none, empty, np.empty(0), cell, train, runs, 1.0, vectors)
    scale = 1 / np.sqrt(total)
    values, vectors = eigh(products, driver="evd")
    kept = values > RANK * values[-1]
    values, vectors = values[kept][::-1], vectors[:, kept][:, ::-1]
    squares = values * scale**2
    if cell.gram is None:
        coordinates, others = fitted @ vectors * scale, other @ vectors * scale
    else:
        coordinates = vectors * np.sqrt(squares)
        others = other @ (vectors / np.sqrt(values)) * scale
    return Rotated(coordinates, others, squares, cell, train, runs, scale, vectors)


def _averages(train: np.ndarray, runs: np.ndarray, contexts: int) -> np.ndarray:
    """``[runs, contexts]`` that takes the training mean of each run.

    A run without a training row gets the mean of all: the best guess for one never seen.
    """
    number = int(runs.max()) + 1
    takes = np.zeros((number, contexts))
    takes[runs[train], train] = 1
    takes[takes.sum(1) == 0] = takes.sum(0)
    return takes / takes.sum(1, keepdims=True)
