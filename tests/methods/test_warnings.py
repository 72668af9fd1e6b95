"""Warnings of maps that would be misread: each where it should be, once, and nowhere else."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from problems import explained
from sklearn.calibration import CalibratedClassifierCV
from sklearn.covariance import EllipticEnvelope
from sklearn.decomposition import PCA, FactorAnalysis, IncrementalPCA, KernelPCA, TruncatedSVD
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.feature_selection import SelectKBest
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.mixture import GaussianMixture
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, Normalizer, StandardScaler, normalize
from sklearn.svm import SVC, SVR, OneClassSVM
from torch import nn

from pytorch_grad_cam_pcasvm import (
    BaselineWarning,
    ClosedFormGradCAM,
    CoarseMapWarning,
    ContributionCAM,
    Head,
    OutsideTrainingWarning,
    PCASVMNet,
    PCATarget,
    SignedMaps,
    SVMTarget,
    evaluation,
    extract_features,
)
from pytorch_grad_cam_pcasvm.methods.warn_once import WarnOnce
from pytorch_grad_cam_pcasvm.network.outputs import HeadRun
from pytorch_grad_cam_pcasvm.runtime.device import forbid_sync

DOUBTS = (BaselineWarning, CoarseMapWarning, OutsideTrainingWarning)


def backbone():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(3, 40, 3, padding=1), nn.ReLU()), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers).eval()


def photos(count, seed, size=8):
    """Return images in [0, 1] of two colours, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    x = torch.rand(count, 3, size, size, generator=generator) / 2
    x[torch.arange(count), labels] += 0.3 * torch.rand(count, 1, 1, generator=generator)
    return x, labels


def network(*stages):
    """Return a network whose head has these stages, fitted on photos."""
    x, labels = photos(60, 1)
    net = backbone()
    features, _ = extract_features(net, [(x, labels)], progress=False)
    return PCASVMNet(net, make_pipeline(*stages).fit(features, np.array(["cat", "dog"])[labels])).eval()


@pytest.fixture(scope="module")
def net():
    return network(StandardScaler(), PCA(4), SVC(kernel="linear"))


@pytest.fixture(scope="module")
def x():
    return photos(6, 2)[0]


def doubts(call):
    """Return the categories of the doubts that a call tells, in order."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    return [each.category for each in told if issubclass(each.category, DOUBTS)]


def told(call, category):
    """Return the message of the only doubt that a call tells."""
    with pytest.warns(category) as found:
        call()
    (message,) = [str(each.message) for each in found if issubclass(each.category, DOUBTS)]
    return message


# --- images unlike the training images --------------------------------------------------------------------------------


def as_a_call(cam, x):
    return cam(x)


def as_maps(cam, x):
    return cam.explain(x)


FRONTS = {
    "scaler": (StandardScaler(), PCA(4), SVC()),
    "scaler alone": (StandardScaler(), SVC()),
    "scaler and LDA": (StandardScaler(), LinearDiscriminantAnalysis()),
    "PCA": (PCA(4), SVC()),
    "whitened": (PCA(4, whiten=True), SVC()),
    "centred": (StandardScaler(with_std=False), PCA(4), SVC()),
}


@pytest.mark.parametrize("head", FRONTS)
@pytest.mark.parametrize("explained", [as_a_call, as_maps])
def test_other_preprocessing_is_told_once(x, head, explained):
    cam = ClosedFormGradCAM(network(*FRONTS[head]), ["0"])
    assert doubts(lambda: explained(cam, x)) == []
    message = told(lambda: explained(cam, 255 * x), OutsideTrainingWarning)
    where = "of their features lie more than 5 standard" if head.startswith("scaler") else "their components lie"
    assert where in message
    for cause in (
        "preprocessed as for extract_features",
        "0..255",
        "layer and pool",
        "make_pipeline(Normalizer(), ...)",
    ):
        assert cause in message
    assert doubts(lambda: explained(cam, 255 * x)) == []
    assert doubts(lambda: explained(ClosedFormGradCAM(cam.model, ["0"]), 255 * x)) == [OutsideTrainingWarning]


@pytest.mark.parametrize("stages", [(LogisticRegression(),), (RidgeClassifier(),), (NearestCentroid(),)], ids=str)
def test_heads_that_know_nothing_of_the_features_tell_nothing(x, stages):
    cam = ClosedFormGradCAM(network(*stages), ["0"])
    assert doubts(lambda: cam.explain(255 * x)) == []


# Heads that hold something of the features that they were fitted on, and whether that tells normalised features, too,
# beside which what the network gives is next to zero.
HOLDERS = {
    "machine": ((SVC(),), True),
    "linear machine": ((SVC(kernel="linear"),), True),
    "machine of another gamma": ((SVC(gamma=0.1),), True),
    "regressor": ((SVR(),), True),
    "PCA": ((PCA(4), SVC()), True),
    "PCA and a linear decision": ((PCA(4), LogisticRegression()), True),
    "PCA of all": ((PCA(40), SVC()), True),
    "PCA in parts": ((IncrementalPCA(4), SVC()), True),
    "whitened": ((PCA(4, whiten=True), SVC()), True),
    "centred": ((StandardScaler(with_std=False), PCA(4), SVC()), True),
    "scaler": ((StandardScaler(), SVC()), True),
    "scaler and PCA": ((StandardScaler(), PCA(4), SVC()), True),
    "neighbours": ((KNeighborsClassifier(3),), True),
    "kernel PCA": ((KernelPCA(4, kernel="linear"), SVC()), True),
    "not centred": ((TruncatedSVD(4), SVC()), True),
    "calibrated": ((CalibratedClassifierCV(SVC(), cv=3),), True),
    "process": ((GaussianProcessClassifier(),), True),
    "range": ((MinMaxScaler(), LogisticRegression()), False),
    "largest": ((MaxAbsScaler(), LogisticRegression()), False),
    "factors": ((FactorAnalysis(4), LogisticRegression()), False),
    "scaler at the end": ((TruncatedSVD(4), StandardScaler(), LogisticRegression()), False),
    "naive Bayes": ((GaussianNB(),), False),
    "quadratic": ((SelectKBest(k=2), QuadraticDiscriminantAnalysis(tol=1e-14)), False),
    "mixture": ((GaussianMixture(2),), False),
    "mixture of diagonals": ((GaussianMixture(2, covariance_type="diag"),), False),
    "envelope": ((EllipticEnvelope(support_fraction=0.9),), False),
}


def of_features(stages, change):
    """Return whether ordinary images are told to be unlike changed features that a head was fitted on."""
    net = backbone()
    x, labels = photos(60, 1)
    features, _ = extract_features(net, [(x, labels)], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's own
        head = make_pipeline(*stages).fit(change(features), labels)
    model = PCASVMNet(net, head).eval()
    told = []
    for images in (x, x[:1], x[30:38], photos(40, 7)[0]):
        with torch.no_grad():
            run = model.head_run(net(images))
        told.append(doubts(lambda run=run: WarnOnce().of_images(run)) == [OutsideTrainingWarning])
    return told


@pytest.mark.parametrize("name", HOLDERS)
def test_features_that_are_others_than_those_of_fit_are_told_by_what_a_head_holds(name):
    stages, of_normalised = HOLDERS[name]
    assert of_features(stages, lambda features: features) == [False] * 4
    assert of_features(stages, lambda features: features / 255) == [True] * 4
    if of_normalised:
        assert of_features(stages, lambda features: 100 * normalize(features)) == [True] * 4


@pytest.mark.parametrize(("norm", "what"), [("l2", "Euclidean length"), ("l1", "sum of absolute values")])
def test_norms_that_are_all_the_same_are_told_from_others(norm, what):
    net = backbone()
    x, labels = photos(60, 1)
    features, _ = extract_features(net, [(x, labels)], progress=False)
    fitted = SVC().fit(1.5 * normalize(features, norm=norm) * np.median(np.linalg.norm(features, axis=1)), labels)
    message = told(lambda: ClosedFormGradCAM(PCASVMNet(net, fitted).eval(), ["0"]).explain(x), OutsideTrainingWarning)
    assert f"the {what} of training features was " in message
    inside = make_pipeline(Normalizer(norm), SVC()).fit(features, labels)  # the way out that the message names
    assert doubts(lambda: ClosedFormGradCAM(PCASVMNet(net, inside).eval(), ["0"]).explain(x)) == []


def drawn(rng, total, width):
    """Return features like those of deep layers, with outliers, dead ones and classes, and their labels."""
    labels = np.arange(total) % 2
    match rng.integers(3):
        case 0:
            features = rng.gamma(rng.uniform(0.5, 4), size=(total, width)) * rng.gamma(1, size=width)
        case 1:
            features = np.maximum(rng.normal(size=(total, width)) + 2 * rng.normal(size=width) - 1, 0)
        case _:
            mixing = rng.normal(size=(int(rng.integers(1, width + 1)), width))
            features = rng.normal(size=(total, len(mixing))) @ mixing + 5 * rng.normal(size=width)
    return features * (1 + rng.random((2, width)))[labels], labels


def drawn_head(rng, rows, width):
    """Return stages of a head for so many rows and features."""
    count = int(rng.integers(2, min(rows, width) + 1))
    gamma = ["scale", "auto", 0.01, 10.0][rng.integers(4)]
    fronts = [(), (), (StandardScaler(),), (MinMaxScaler(),), (Normalizer(),)]
    middles = [(), (PCA(count),), (PCA(count, whiten=True),), (PCA(2),), (KernelPCA(2),)]
    kernel = ["rbf", "linear", "poly"][rng.integers(3)]
    lasts = [
        SVC(kernel=kernel, gamma=gamma),
        LogisticRegression(max_iter=50),
        RidgeClassifier(),
        KNeighborsClassifier(3),
    ]
    return *fronts[rng.integers(5)], *middles[rng.integers(5)], lasts[rng.integers(4)]


@pytest.mark.filterwarnings("ignore")  # scikit-learn's own, and of components that do not vary
@pytest.mark.slow
def test_random_heads_tell_nothing_of_their_own_images_nor_of_others_like_them():
    rng = np.random.default_rng(0)
    own, others = [], []
    for _ in range(150):
        rows, width = int(rng.choice([8, 12, 30, 100])), int(rng.choice([4, 16, 60]))
        features, labels = drawn(rng, rows + 40, width)
        head = Head.of(make_pipeline(*drawn_head(rng, rows, width)).fit(features[:rows], labels[:rows]))
        for images, seen in ((features[:rows], own), (features[:8], own), (features[rows:], others)):
            run = HeadRun(head, head(torch.from_numpy(images)))
            seen.append(doubts(lambda run=run: WarnOnce().of_images(run)))
    assert sum(map(bool, own)) == 0
    assert sum(map(bool, others)) <= 1  # of 150


def test_what_a_head_has_seen_is_kept_in_its_file_and_in_no_digest(tmp_path):
    net = network(PCA(4), SVC())
    net.head.save(tmp_path / "head")
    again = Head.load(tmp_path / "head")
    assert [dict(stage.seen) for stage in again.stages] == [dict(stage.seen) for stage in net.head.stages]
    assert again.stages[0].seen["count"] == 60
    digest = net.head.digest()
    for stage in net.head.stages:
        stage.seen = {}
    assert net.head.digest() == digest


def test_the_message_says_how_far(net, x):
    message = told(lambda: ClosedFormGradCAM(net, ["0"]).explain(255 * x), OutsideTrainingWarning)
    with torch.no_grad():
        features, training = (net.backbone(images).numpy() for images in (255 * x, photos(60, 1)[0]))
    shares = np.sort((abs(StandardScaler().fit(training).transform(features)) > 5).mean(1))
    assert message.startswith(f"the images are unlike the training images: {shares[2]:.0%} of their features")


def test_a_single_odd_image_is_no_reason(net, x):
    odd = x.clone()
    odd[:3] *= 255
    assert doubts(lambda: ClosedFormGradCAM(net, ["0"]).explain(odd)) == []
    cam = ClosedFormGradCAM(net, ["0"])
    one_by_one = [doubts(lambda image=image: cam.explain(image)) for image in [*x.split(1), *odd[:3].split(1)]]
    assert one_by_one == [[]] * 9
    # Of the latest eight there is one more now, and then another.
    last = [doubts(lambda: cam.explain(odd[:1])) for _ in range(3)]
    assert last == [[], [OutsideTrainingWarning], []]


def test_a_first_image_alone_is(net, x):
    assert doubts(lambda: ClosedFormGradCAM(net, ["0"]).explain(255 * x[:1])) == [OutsideTrainingWarning]


# --- baselines that decide --------------------------------------------------------------------------------------------


def activations_at(net, x, value):
    """Return activations whose margin of "dog" is a value, on the line between those of two images."""
    with torch.no_grad():
        margins = net(x).margins[:, 1]
        low, high = int(margins.argmin()), int(margins.argmax())
        both = net.backbone[0](x[[low, high]])
    share = (value - margins[low]) / (margins[high] - margins[low])
    return both[0] + share.float() * (both[1] - both[0])


def decided(net, x, **options):
    """Return images of which the head says that they are dogs, and a method whose baseline is more of a dog."""
    dogs = x[net.predict(x) == "dog"]
    largest = net(dogs).margins[:, 1].max()
    return dogs, ContributionCAM(net, ["0"], baseline=activations_at(net, x, 2 * largest), **options)


@pytest.mark.parametrize(
    "target",
    [None, SVMTarget(), SVMTarget("dog"), SVMTarget("cat"), SVMTarget("dog", versus="cat"), SVMTarget("dog", sign="-")],
    ids=str,
)
def test_baselines_that_decide_are_told_once(net, x, target):
    dogs, cam = decided(net, x)
    maps = []
    message = told(lambda: maps.append(cam.explain(dogs, target)), BaselineWarning)
    found = maps[0]
    value, start = float(found.values[0, -1]), float(found.baseline_values[0, -1])
    assert (found.maps[:, -1].sum((1, 2)) * found.values[:, -1] < 0).all()
    assert message == (
        f"for 3 of 3 images, the baseline contributes more to {found.targets[-1]} than the image: a value of "
        f"{value:.3g} is {start:.3g} at the baseline, so the map adds up to {value - start:.3g}; with "
        "baseline='neutral', it adds up to the value, if there is such a start"
    )
    assert doubts(lambda: cam.explain(dogs, target)) == []


def test_baselines_that_decide_in_calls(net, x):
    dogs, cam = decided(net, x)
    message = told(lambda: cam(dogs, [SVMTarget("dog"), PCATarget(0), SVMTarget("dog")]), BaselineWarning)
    assert message.startswith(f"for 2 of 2 images, the baseline contributes more to {SVMTarget('dog')} than")
    assert doubts(lambda: cam(dogs)) == []
    _, cam = decided(net, x)
    message = told(lambda: cam(dogs, [SVMTarget("dog"), SVMTarget("cat"), PCATarget(0)]), BaselineWarning)
    assert message.startswith("for 2 of 2 images, the baseline contributes more to the decisions than")


def test_most_images_decide(net, x):
    margins = net(x).margins[:, 1]
    # More than half of the value of some images is at the baseline.
    for count in range(7):
        sizes = margins.abs().sort().values
        value = 2 * (sizes[count - 1] if count else sizes[0] / 4) * (1 + 1e-3)
        cam = ContributionCAM(net, ["0"], baseline=activations_at(net, x, value))
        ruled = int((value.abs() > (margins - value).abs()).sum())
        assert doubts(lambda cam=cam: cam.explain(x, SVMTarget("dog"))) == [BaselineWarning] * (ruled > 3)


def test_baselines_on_the_boundary_components_and_regressors_tell_nothing(net, x):
    dogs, cam = decided(net, x)
    assert doubts(lambda: cam.explain(dogs, [PCATarget(b) for b in range(4)])) == []
    cam.baseline = activations_at(net, x, 0.0)
    assert doubts(lambda: cam.explain(x)) == []
    assert doubts(lambda: cam(x)) == []
    data, labels = photos(60, 1)
    features, _ = extract_features(net.backbone, [(data, labels)], progress=False)
    for last, expected in ((SVR(), []), (OneClassSVM(nu=0.1), [BaselineWarning])):
        other = PCASVMNet(net.backbone, make_pipeline(StandardScaler(), PCA(4), last).fit(features, 5.0 + labels))
        cam = ContributionCAM(other.eval(), ["0"], baseline="mean")
        assert doubts(lambda cam=cam: cam.explain(x)) == expected


# --- maps of few positions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "expected"), [(3, [CoarseMapWarning]), (4, []), (8, [])])
@pytest.mark.parametrize("explained", [as_a_call, as_maps])
def test_coarse_maps_are_told_once(net, size, expected, explained):
    small = photos(6, 2, size)[0]
    cam = ClosedFormGradCAM(net, ["0"])
    assert doubts(lambda: explained(cam, small)) == expected
    assert doubts(lambda: explained(cam, small)) == []


def test_the_message_names_layer_and_size(net):
    message = told(lambda: ClosedFormGradCAM(net, ["0"]).explain(photos(6, 2, 3)[0]), CoarseMapWarning)
    assert message.startswith("the maps of '0' have only 3x3 positions, ")
    assert message.endswith(": choose an earlier layer, or larger images")


# --- all of them ------------------------------------------------------------------------------------------------------


def doubtful(net, x):
    """Return a method with a baseline that decides, and images that give reason for every doubt."""
    small = photos(60, 3, 3)[0][1::2]
    cam = ContributionCAM(net, ["0"], baseline=activations_at(net, small, 1e9))
    return cam, 255 * small


def test_each_can_be_silenced_by_its_category(net, x):
    for category in DOUBTS:
        cam, images = doubtful(net, x)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", category)
            cam.explain(images)
        assert {each.category for each in found} == set(DOUBTS) - {category}
    assert all(issubclass(category, UserWarning) for category in DOUBTS)


def test_they_point_to_the_line_of_the_user(net, x):
    cam, images = doubtful(net, x)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        cam.explain(images)
    assert {each.filename for each in found} == {__file__}


def test_code_without_a_name_is_told_as_well(net, x):
    cam, images = doubtful(net, x)
    names = {"cam": cam, "images": images}  # no __name__, as where a snippet or a doctest runs
    assert set(doubts(lambda: exec("cam.explain(images)", names))) == set(DOUBTS)


def test_what_a_check_of_a_file_was_told_is_told_again():
    """Checks put other warnings in the place of those of the method, those of where contributions start among them."""
    p = explained("relu", "rbf")
    cam = ContributionCAM(p.net, [p.layer])
    own, cam._warnings = cam._warnings, WarnOnce()
    assert doubts(lambda: cam.explain(p.x)) == [CoarseMapWarning, BaselineWarning]
    assert doubts(lambda: cam.explain(p.x)) == []
    cam._warnings = own
    assert doubts(lambda: cam.explain(p.x)) == [CoarseMapWarning, BaselineWarning]


def test_where_no_number_may_be_looked_at_they_are_told_by_numpy(net, x):
    cam, images = doubtful(net, x)
    with forbid_sync():
        first = doubts(lambda: cam.explain(images))
        assert first == [CoarseMapWarning]  # which is seen without
        maps = cam.explain(images)
        for made in (maps, maps.cpu(), maps[:9], SignedMaps.cat([maps, maps]), pickle.loads(pickle.dumps(maps))):
            cam._warnings._told.clear()
            again = copy.deepcopy(made)
            assert sorted(doubts(again.numpy), key=str) == [BaselineWarning, OutsideTrainingWarning]
            assert doubts(again.numpy) == []
        assert sorted(doubts(maps.numpy), key=str) == [BaselineWarning, OutsideTrainingWarning]
        assert doubts(cam.explain(images).numpy) == []


def test_what_was_looked_at_is_not_looked_at_again(net, x):
    assert ClosedFormGradCAM(net, ["0"]).explain(x)._warnings is None


def test_ordinary_networks_tell_nothing(x):
    cam = ContributionCAM(backbone(), ["0"], baseline="zero")
    assert doubts(lambda: cam.explain(255 * x).numpy()) == []


@pytest.mark.slow
def test_a_study_tells_of_its_own_images_and_not_of_what_it_makes_of_them(net):
    data = photos(12, 2)
    options = {"images": 12, "progress": False}
    methods = {"mean": (ContributionCAM, {"baseline": "mean"})}
    assert doubts(lambda: evaluation.Study(net, data, ["0"], methods, **options).stability(noise=5.0)) == []
    bright = (255 * data[0], data[1])
    study = evaluation.Study(net, bright, ["0"], **options)
    assert doubts(study.completeness) == [OutsideTrainingWarning]
    assert doubts(study.stability) == []
