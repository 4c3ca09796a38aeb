"""CKA and SVCCA against their definitions, computed another way."""

import numpy as np
import pytest

from minilm_cache.report.similarity import linear_cka, svcca


def hsic(left: np.ndarray, right: np.ndarray) -> float:
    """Return the Hilbert-Schmidt independence criterion by its definition, on Gram matrices."""
    centre = np.eye(len(left)) - 1 / len(left)
    return float(np.trace(left @ left.T @ centre @ right @ right.T @ centre))


@pytest.fixture
def features() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    first = generator.normal(size=(200, 12)) @ np.diag(np.linspace(0.1, 3, 12)) + 5
    return [first, first[:, :7] + generator.normal(size=(200, 7)), generator.normal(size=(200, 30))]


def test_linear_cka_is_normalised_hsic(features: list[np.ndarray]) -> None:
    found = linear_cka(features, features)
    for row, left in enumerate(features):
        for column, right in enumerate(features):
            expected = hsic(left, right) / np.sqrt(hsic(left, left) * hsic(right, right))
            assert found[row, column] == pytest.approx(expected, rel=1e-9)


def test_similarity_does_not_see_rotation_and_scale(features: list[np.ndarray]) -> None:
    rotation, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(12, 12)))
    turned = [3 * features[0] @ rotation - 1]
    assert linear_cka(features[:1], turned)[0, 0] == pytest.approx(1)
    assert svcca(features[:1], turned)[0, 0] == pytest.approx(1)


def test_svcca_is_the_mean_correlation_of_canonical_variates(features: list[np.ndarray]) -> None:
    """Canonical correlations are the square roots of the eigenvalues of Sxx^-1 Sxy Syy^-1 Syx."""
    left, right = features[0], features[1]
    kept = []
    for side in (left, right):
        values, vectors = np.linalg.eigh(np.cov(side.T))
        order = np.argsort(values)[::-1]
        share = np.cumsum(values[order]) / values.sum()
        kept.append((side - side.mean(0)) @ vectors[:, order[: int(np.searchsorted(share, 0.99)) + 1]])
    x, y = kept
    product = np.linalg.solve(x.T @ x, x.T @ y) @ np.linalg.solve(y.T @ y, y.T @ x)
    values = np.sort(np.linalg.eigvals(product).real)[::-1][: min(x.shape[1], y.shape[1])]
    assert svcca([left], [right])[0, 0] == pytest.approx(float(np.sqrt(values.clip(0)).mean()), rel=1e-9)


def test_unrelated_states_are_far_apart(features: list[np.ndarray]) -> None:
    assert linear_cka(features[:1], features[2:])[0, 0] < 0.2
    assert svcca(features[:1], features[2:])[0, 0] < 0.5
