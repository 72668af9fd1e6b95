"""The command that fits a head."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.cli.folders import accuracy, classes_in, tell_bad, tell_empty, two_classes
from pytorch_grad_cam_pcasvm.cli.networks import backbone_of, pool, source

_PICTURE = 64  # pixels, of the picture of a support vector
_IMBALANCED = 0.8  # the share of the largest class from which accuracy says little


def fit(options: Any) -> None:
    """Fit scaler, PCA and SVM on a folder of images."""
    import numpy as np
    from sklearn.base import clone
    from sklearn.decomposition import PCA
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    from pytorch_grad_cam_pcasvm.data import Images

    if options.components < 1:
        raise ValueError("--components must be positive")
    if options.out.suffix != ".safetensors":
        raise ValueError(f"--out must end in .safetensors, got {options.out}")
    if not options.out.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {options.out.parent}")
    names = two_classes(options.images, classes_in(options.images, ("train", "training")))
    backbone, transform = backbone_of(options)
    images = Images(options.images, transform, thumbnails=0)
    features, numbers, rows, bad = _features(options, backbone, images)
    if len(set(numbers.tolist())) < 2:
        raise ValueError(f"only images of {names[numbers[0]]!r} can be read, but an SVM needs two classes")
    if options.components > min(features.shape):
        raise ValueError(
            f"{len(features)} images with {features.shape[1]} features have fewer components: add images, or lower "
            "--components"
        )
    labels = np.array(names)[numbers]
    svm = SVC(kernel=options.kernel, class_weight=options.class_weight)
    head = make_pipeline(StandardScaler(), PCA(options.components, random_state=0), svm)
    fitted = package.Head.of(head.fit(features, labels))
    if not options.no_pictures:
        fitted.examples = _examples(options, transform, rows, svm.support_.tolist())
    fitted.save(options.out)
    counts = Counter(labels.tolist())
    shares = ", ".join(f"{name} {count} ({count / len(labels):.0%})" for name, count in counts.items())
    print(f"{len(counts)} classes: {shares}")
    tell_empty(options.images, names)
    tell_bad(bad)
    folds = StratifiedKFold(min(5, *counts.values())) if min(counts.values()) > 1 else None
    if folds is None:
        print("no cross-validation: it needs two images of each class")
    elif min(len(rest) for rest, _ in folds.split(features, labels)) < options.components:
        print(f"no cross-validation: it trains on fewer than {options.components} images; lower --components")
    else:
        guessed = cross_val_predict(clone(head), features, labels, cv=folds)
        print(f"{folds.n_splits}-fold cross-validation: {accuracy(labels.tolist(), labels == guessed)}")
    training = head.score(features, labels)
    print(f"{training:.0%} correct on the images it was fitted on: training accuracy, not a test score")
    ((largest, count),) = counts.most_common(1)
    if count > _IMBALANCED * len(labels) and options.class_weight is None:
        print(
            f"hint: calling every image {largest!r} would be {count / len(labels):.0%} correct, too. Look at the "
            "balanced accuracy, and try --class-weight balanced"
        )
    kept = f"names and small pictures of {len(fitted.examples)} support vectors (leave out with --no-pictures)"
    print(f"wrote {options.out}: {options.components} components" + (f", {kept}" if fitted.examples else ""))


def _examples(options: Any, transform: Any, rows: Sequence[int], support: Sequence[int]) -> dict[int, Any]:
    """Return the names and small pictures of the support vectors, by their position in the training set."""
    from pytorch_grad_cam_pcasvm.data import Images
    from pytorch_grad_cam_pcasvm.head.storage import Example

    images = Images(options.images, transform, thumbnails=_PICTURE)
    return {i: Example(images.id(rows[i]), *images.read([rows[i]]).thumbnails) for i in support}


def _features(options: Any, backbone: Any, images: Any) -> tuple[Any, Any, Sequence[int], list[str]]:
    """Return features, class numbers, the rows they are of, and the names of images that cannot be read."""
    from torch.utils.data import DataLoader, Subset

    def extracted(data: Any) -> tuple[Any, Any]:
        loader = DataLoader(data, batch_size=options.batch_size, num_workers=options.workers)
        return package.extract_features(backbone, loader, source(options), pool=pool(options))

    try:
        return *extracted(images.data), range(len(images)), []
    except (OSError, SyntaxError) as error:  # which image was it?
        bad: dict[int, str] = {}
        for row in range(len(images)):
            bad |= images.read([row]).bad
            if bad and not options.skip_bad_images:
                ((row, why),) = bad.items()
                what = f"{images.id(row)} cannot be read ({why}): mend or delete it, or add --skip-bad-images"
                raise OSError(what) from error
        if not bad:
            raise
    good = [row for row in range(len(images)) if row not in bad]
    if not good:
        raise ValueError(f"none of the {len(images)} images in {options.images} can be read")
    return *extracted(Subset(images.data, good)), good, [images.id(row) for row in bad]
