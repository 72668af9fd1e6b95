"""Classifiers that take numbers in place of labels: their fit on words, and the names of their classes."""

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.pipeline import make_pipeline

from pytorch_grad_cam_pcasvm.head import Head


class LabelEncoded(ClassifierMixin, BaseEstimator):
    """A classifier that is fitted on 0, 1, 2, ... in place of labels, in their order.

    Args:
        classifier: what it fits.
    """

    def __init__(self, classifier: Any) -> None:
        self.classifier = classifier

    def fit(self, features: Any, labels: Any) -> "LabelEncoded":
        """Fit a clone of the classifier."""
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        self.classifier_ = clone(self.classifier).fit(features, numbers)
        return self

    def predict(self, features: Any) -> np.ndarray:
        """Return the labels of its predictions."""
        return self.classes_[np.asarray(self.classifier_.predict(features)).reshape(-1).astype(int)]


def fit_with_labels_encoded(pipeline: Any, features: Any, labels: Any) -> Any:
    """Return a pipeline fitted on words, its classifier on numbers in their place if it takes no words.

    Raises:
        TypeError: the classifier takes the features neither way.
        ValueError: the same, in its own words.
    """
    *before, classifier = (step for _, step in pipeline.steps)
    try:
        return pipeline.fit(features, labels)
    except (ValueError, TypeError) as error:
        try:
            return make_pipeline(*before, LabelEncoded(classifier)).fit(features, labels)
        except Exception:
            raise error from None


def name_head(pipeline: Any) -> Any:
    """Return the head of a fitted pipeline, whose classes have the names that stand for numbers."""
    *before, classifier = (step for _, step in pipeline.steps)
    if not isinstance(classifier, LabelEncoded):
        return Head.of(pipeline)
    head = Head.of([*before, classifier.classifier_])
    head.name_classes(classifier.classes_)
    return head
