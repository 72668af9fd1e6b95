#!/usr/bin/env bash
# scikit-learn: PCA() of many rows in single precision takes the mean for variance.
#
# Guess: PCA centres its rows, so that adding one number to all of them changes nothing but mean_; and svd_solver="auto"
#   picks among ways that agree. The documentation says of covariance_eigh "on centered data".
# Versions: scikit-learn 1.9.1, numpy 2.4.6, Python 3.11.
# Behaviour: since 1.5 "auto" is covariance_eigh for up to 1,000 features and ten times as many rows. It takes
#   X^T X - n mean mean^T, in the dtype of X, and does not centre first. In float32 what is left of the difference is
#   rounding where the mean is some hundred times the deviation: intensities of 12 or 16 bits, hPa, metres above a datum.
#   Components, explained_variance_ and its ratio are wrong, without a warning. With fewer rows "auto" is "full", which
#   is right: the fault comes with more data.
# Output seen (20 features of deviations 3 to 0.3; cosines with the directions of float64, "full"; rounding differs by CPU):
#   2000 rows, mean    0, float32, auto is covariance_eigh: largest variance 9.35 (true 9.35), cosines 1 1 1 1 1
#   2000 rows, mean 1000, float32, auto is covariance_eigh: largest variance 21.39 (true 9.35), cosines 0.17 0.11 0.37 0.24 0
#   2000 rows, mean 3000, float32, auto is covariance_eigh: largest variance 104.53 (true 9.35), cosines 0.09 0.48 0.05 0.26 0.5
#   180 rows (auto is full), float64, or svd_solver="full", mean 3000: right
# Exit status: 1 if any of that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet "scikit-learn==1.9.1" "numpy==2.4.6"
cat >"$folder/run.py" <<'PYTHON'
import sys
import warnings

import numpy as np
import sklearn
from sklearn.decomposition import PCA

warnings.simplefilter("error")
deviations = np.geomspace(3, 0.3, 20)


def compare(rows, mean, dtype=np.float32, solver="auto"):
    """Return which way was taken, the largest variance, the true one, and the cosines of five components."""
    x = (np.random.default_rng(0).normal(size=(rows, 20)) * deviations).astype(np.float32) + np.float32(mean)
    fitted, true = PCA(5, svd_solver=solver).fit(x.astype(dtype)), PCA(5, svd_solver="full").fit(x.astype(np.float64))
    cosines = np.abs((fitted.components_ * true.components_).sum(1))
    print(
        f"{sklearn.__version__} {rows:5} rows, mean {mean:4}, {np.dtype(dtype)}, {solver} is {fitted._fit_svd_solver}: "
        f"largest variance {fitted.explained_variance_[0]:.2f} (true {true.explained_variance_[0]:.2f}), "
        f"cosines {cosines.round(2)}"
    )
    return fitted._fit_svd_solver, fitted.explained_variance_[0] / true.explained_variance_[0], cosines.min()


_, farther = compare(2000, 1000), compare(2000, 3000)
right = [compare(2000, 0), compare(180, 3000), compare(2000, 3000, np.float64), compare(2000, 3000, solver="full")]
wrong = farther[0] == "covariance_eigh" and farther[1] > 2 and farther[2] < 0.9
sys.exit(not (wrong and right[1][0] == "full" and all(abs(ratio - 1) < 0.01 and least > 0.99 for _, ratio, least in right)))
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
