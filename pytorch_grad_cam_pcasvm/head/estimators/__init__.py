"""What each of scikit-learn's estimators is as stages of a head: rows of the table, registered with ``stage_for``."""

from pytorch_grad_cam_pcasvm.head.estimators import ensembles, likeness, predictors, transformers
from pytorch_grad_cam_pcasvm.head.table import Row

# Of estimators that hold others: :mod:`.convert` registers these, with the function that converts what they hold.
NESTED: dict[type, Row] = ensembles.NESTED | transformers.NESTED

__all__ = ["NESTED", "ensembles", "likeness", "predictors", "transformers"]
