"""What each of scikit-learn's estimators is as stages of a head; importing this registers them with ``stage_for``."""

from pytorch_grad_cam_pcasvm.head.estimators import ensembles, likeness, predictors, transformers

__all__ = ["ensembles", "likeness", "predictors", "transformers"]
