"""Scores of classes and of values on a scale, times 100 as in papers."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from minilm_cache.errors import needs
from minilm_cache.evaluate.kind import Scores
from minilm_cache.evaluate.tasks import Metric

with needs("evaluate", "eval"):
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef


def text_scores(
    metrics: Sequence[Metric], predictions: npt.NDArray[np.float64], labels: npt.NDArray[np.float64]
) -> Scores:
    """Return the scores of a set.

    A correlation, also Matthews', with predictions or labels that are all the same counts as 0.

    Args:
        metrics: metrics to compute.
        predictions: predicted classes or values on a scale, `(examples,)`.
        labels: true classes or values, `(examples,)`.
    """
    return {metric: 100 * _score(metric, predictions, labels) for metric in metrics}


def _score(metric: Metric, predictions: npt.NDArray[np.float64], labels: npt.NDArray[np.float64]) -> float:
    match metric:
        case "accuracy":
            return float(accuracy_score(labels, predictions))
        case "f1":
            return float(f1_score(labels, predictions, zero_division=0))
        case _ if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
            return 0.0
        case "matthews":
            return float(matthews_corrcoef(labels, predictions))
        case "pearson" | "spearman":
            return float((pearsonr if metric == "pearson" else spearmanr)(labels, predictions)[0])
