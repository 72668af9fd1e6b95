"""Scores of pixels against scikit-learn, and against their definitions written out threshold by threshold."""

import itertools

import numpy as np
import pytest
import torch
from scipy import ndimage
from sklearn.decomposition import PCA
from sklearn.metrics import precision_recall_curve, roc_auc_score
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import ContributionCAM, PCASVMNet, evaluation, extract_features
from pytorch_grad_cam_pcasvm.studio.evaluation.pixels import by_class
from pytorch_grad_cam_pcasvm.studio.evaluation.positions import PixelValues, describe_localisation
from pytorch_grad_cam_pcasvm.studio.evaluation.subject import heat

RANDOM = np.random.default_rng(0)


def scenes(decimals=1, count=12, empty=4):
    """Return numbers with many ties, and masks with regions that touch at corners; some are empty."""
    masks = np.zeros((count, 24, 32), bool)
    for mask in masks[: count - empty]:
        for _ in range(RANDOM.integers(1, 4)):
            y, x = RANDOM.integers(0, 20, 2)
            mask[y : y + RANDOM.integers(2, 6), x : x + RANDOM.integers(2, 9)] = True
    masks[0, 1, 1] = masks[0, 0, 0] = masks[0, 2, 2] = True
    return np.round(RANDOM.normal(size=masks.shape) + masks, decimals), masks


def aupro_by_hand(numbers, masks):
    """The overlap with each region at every threshold, integrated over false positives up to 0.3, one by one."""
    thresholds, regions = np.unique(numbers)[::-1], []

    def above(some):
        return 1 - np.searchsorted(np.sort(some), thresholds) / len(some)

    for image, mask in enumerate(masks):
        labels, count = ndimage.label(mask, np.ones((3, 3)))
        regions += [numbers[image][labels == number] for number in range(1, count + 1)]
    points = zip(above(numbers[~masks]), np.mean([above(region) for region in regions], 0), strict=True)
    area = 0.0
    for (x0, y0), (x1, y1) in itertools.pairwise([(0.0, 0.0), *points]):
        end = min(x1, 0.3)
        if end > x0:
            area += (end - x0) * (y0 + y0 + (y1 - y0) * (end - x0) / (x1 - x0)) / 2
    return area / 0.3


@pytest.mark.parametrize("decimals", [0, 1, 12])
def test_areas_and_f1_are_those_of_scikit_learn_and_of_the_definitions(decimals):
    numbers, masks = scenes(decimals)
    scores = evaluation.pixel_scores(numbers, masks)
    assert scores.auroc.mean == pytest.approx(roc_auc_score(masks.ravel(), numbers.ravel()), abs=1e-12)
    precision, recall, thresholds = precision_recall_curve(masks.ravel(), numbers.ravel())
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-30)
    assert scores.f1.mean == pytest.approx(f1.max(), abs=1e-12)
    above = numbers >= scores.threshold
    assert scores.f1.mean == pytest.approx(2 * (above & masks).sum() / (above.sum() + masks.sum()), abs=1e-12)
    assert scores.threshold in thresholds
    assert scores.aupro.mean == pytest.approx(aupro_by_hand(numbers, masks), abs=1e-12)
    peaks, masked = numbers.max((1, 2)), masks.any((1, 2))
    assert scores.image_auroc.mean == pytest.approx(roc_auc_score(masked, peaks), abs=1e-12)
    assert (scores.images, scores.masked) == (12, 8)


def test_aupro_is_linear_between_thresholds():
    """One level of numbers: the curve is a line from 0 to 1, and its area to 0.3 is that of chance."""
    masks = np.zeros((1, 4, 4), bool)
    masks[0, 1, 1] = True
    assert evaluation.pixel_scores(np.zeros((1, 4, 4)), masks).aupro.mean == pytest.approx(0.15)
    perfect = evaluation.pixel_scores(masks.astype(float), masks)
    assert (perfect.aupro.mean, perfect.auroc.mean, perfect.f1.mean) == (1.0, 1.0, 1.0)


def test_small_and_large_regions_count_the_same_in_aupro_alone():
    masks = np.zeros((1, 20, 20), bool)
    masks[0, :10, :10] = masks[0, 15, 15] = True
    numbers = np.zeros((1, 20, 20))
    numbers[0, 15, 15] = 1.0
    scores = evaluation.pixel_scores(numbers, masks)
    assert scores.regions == 2
    assert scores.aupro.mean == pytest.approx(0.5 + 0.5 * 0.15)
    assert scores.auroc.mean < 0.51


def test_pointing_with_tolerance():
    masks = np.zeros((3, 20, 20), bool)
    masks[:2, 5, 5] = True
    numbers = np.zeros((3, 20, 20))
    numbers[0, 5, 8] = numbers[1, 5, 5] = numbers[1, 18, 18] = 1.0  # 3 away; half in it, half far away
    scores = evaluation.pixel_scores(numbers, masks, tolerance=3)
    assert scores.pointing.mean == pytest.approx(0.25)
    assert scores.near.mean == pytest.approx(0.75)
    assert evaluation.pixel_scores(numbers, masks, tolerance=2.9).near.mean == pytest.approx(0.25)
    assert scores.near.n == 2


def test_standard_errors_are_those_of_many_samples():
    """The spread over new sets of images is what the bootstrap of one set says."""
    measured = [evaluation.pixel_scores(*scenes(3, 30, 10)) for _ in range(40)]
    for measure in ("auroc", "aupro", "f1"):
        spread = np.std([getattr(scores, measure).mean for scores in measured], ddof=1)
        error = np.mean([getattr(scores, measure).standard_error for scores in measured])
        assert 0.6 < error / spread < 1.6, measure
    spread = np.std([scores.image_auroc.mean for scores in measured], ddof=1)
    assert 0.5 < np.mean([scores.image_auroc.standard_error for scores in measured]) / spread < 2


def test_what_cannot_be_measured_is_refused():
    numbers, masks = scenes()
    with pytest.raises(ValueError, match="both must be"):
        evaluation.pixel_scores(numbers[:, 1:], masks)
    with pytest.raises(ValueError, match="not finite"):
        evaluation.pixel_scores(np.where(masks, np.nan, numbers), masks)
    with pytest.raises(ValueError, match="nothing lies inside"):
        evaluation.pixel_scores(numbers, np.zeros_like(masks))
    assert np.isnan(evaluation.pixel_scores(numbers[:8], masks[:8]).image_auroc.mean)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, 1, 1), nn.ReLU())

    def forward(self, x):
        return self.stem(x).mean((2, 3))


def photos():
    """Return photos, of which two thirds have a bright or a dark spot, their masks, and labels."""
    random = np.random.default_rng(1)
    x, masks = random.normal(size=(30, 3, 16, 24)).astype(np.float32) * 0.2, np.zeros((30, 16, 24), bool)
    for n in range(20):
        y, left = random.integers(0, 10), random.integers(0, 18)
        masks[n, y : y + 5, left : left + 5] = True
        x[n][:, masks[n]] += 2.0 if n % 2 else -2.0
    return torch.from_numpy(x), masks, np.array(["dark", "bright"] * 10 + ["good"] * 10)


def test_localisation_measures_pixels_of_all_images_for_every_method():
    torch.manual_seed(0)
    x, masks, labels = photos()
    net = Net().eval()
    rows, _ = extract_features(net, [x], progress=False)
    net = PCASVMNet(net, make_pipeline(StandardScaler(), PCA(3), SVC()).fit(rows, labels)).eval()
    study = evaluation.Study(net, (x, labels), ["stem"], [ContributionCAM], images=None, progress=False)
    result = study.localisation(masks=masks, rivals=["random maps"], tolerance=2)
    maps = ContributionCAM(net, ["stem"]).explain(x)
    own = maps.maps[:, -1]
    values = heat(own, (16, 24))
    for measure, expected in {
        "pixel AUROC": roc_auc_score(masks.ravel(), values.ravel()),
        "AUPRO to 30 % of false positives": aupro_by_hand(values, masks),
        "best F1": evaluation.pixel_scores(values, masks).f1.mean,
        "pointing game, within 2 pixels": evaluation.pixel_scores(values, masks, tolerance=2).near.mean,
    }.items():
        assert result["ContributionCAM", measure].mean == pytest.approx(expected, abs=1e-4), measure
    dark = (labels == "dark") | (labels == "good")
    expected = roc_auc_score(masks[dark].ravel(), values[dark].ravel())
    assert result["ContributionCAM", "pixel AUROC, dark"].mean == pytest.approx(expected, abs=1e-4)
    assert result["the blind map", "pixel AUROC"].n == 30
    assert result["ContributionCAM", "pointing game"].n == 20  # of those with a mask, as before


def test_localisation_of_a_head_at_every_position():
    torch.manual_seed(0)
    x, masks, labels = photos()
    net = Net().eval()
    good, _ = extract_features(net, [x[20:25]], "stem", pool="dense", progress=False)
    bank = PCASVMNet(net, NearestNeighbors(n_neighbors=1).fit(good), "stem", pool="dense").eval()
    result = evaluation.localisation(bank, (x, labels), ["stem"], masks=masks, images=None, progress=False)
    values = heat(torch.from_numpy(bank.anomaly_map(x)), (16, 24))
    expected = evaluation.pixel_scores(values, masks)
    assert result["every position", "pixel AUROC"].mean == pytest.approx(expected.auroc.mean, abs=1e-6)
    assert result["every position", "image AUROC"].mean == pytest.approx(expected.image_auroc.mean, abs=1e-6)
    assert result["every position", "pixel AUROC"].mean > 0.9
    assert {"pixel AUROC, dark", "pixel AUROC, bright"} < {row.measure for row in result.rows}
    patches, names = extract_features(net, [(x, torch.from_numpy(masks).long())], "stem", pool="dense", progress=False)
    for classes, category in ((np.array(["background", "spot"]), None), (np.array(["fine", "spot"]), "spot")):
        head = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(patches, classes[names])
        decided = PCASVMNet(net, head, "stem", pool="dense").eval()
        result = evaluation.localisation(
            decided, (x, labels), ["stem"], masks=masks, category=category, images=None, progress=False
        )
        values = heat(decided(x).margins[:, 1].detach(), (16, 24))
        expected = roc_auc_score(masks.ravel(), values.ravel())
        assert result["every position", "pixel AUROC"].mean == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="name the class that is an absence, normal=, or the one"):
        evaluation.localisation(decided, (x, labels), ["stem"], masks=masks, images=None, progress=False)
    with pytest.raises(ValueError, match="there is no class 'hole'"):
        evaluation.localisation(
            decided, (x, labels), ["stem"], masks=masks, category="hole", images=None, progress=False
        )
    with pytest.raises(ValueError, match="measured by true masks"):
        evaluation.localisation(decided, (x, labels), ["stem"], progress=False)
    with pytest.raises(ValueError, match="decides once for each image"):
        evaluation.completeness(decided, (x, labels), ["stem"], progress=False)


def test_scores_of_classes_are_of_their_images_and_those_without_anything():
    numbers, masks = scenes()
    labels = ["a", "b"] * 4 + ["good"] * 4
    scores = by_class(numbers, masks, labels)
    assert [*scores] == ["a", "b"]
    rows = [0, 2, 4, 6, 8, 9, 10, 11]
    assert repr(scores["a"]) == repr(evaluation.pixel_scores(numbers[rows], masks[rows]))  # NaN is no number
    assert by_class(numbers, masks, ["a"] * 12) == {}


def faults_by_hand(values, masks, rate):
    """Return the alarm threshold, and for each region its share of the image and whether it is found."""
    good = sorted(image.max() for image, mask in zip(values, masks, strict=True) if not mask.any())
    place = min(len(good), int(np.ceil((len(good) + 1) * (1 - rate))))
    faults = []
    for image, mask in zip(values, masks, strict=True):
        left = {tuple(place) for place in np.argwhere(mask).tolist()}
        while left:
            region, todo = [], [left.pop()]
            while todo:
                y, x = todo.pop()
                region.append((y, x))
                near = {(y + a, x + b) for a in (-1, 0, 1) for b in (-1, 0, 1)} & left
                left -= near
                todo += near
            faults.append((len(region) / mask.size, max(image[pixel] for pixel in region) > good[place - 1]))
    return good[place - 1], faults


@pytest.mark.parametrize(("good", "rate", "told"), [(9, 0.2, 0.2), (9, 0.01, 0.1), (40, 0.05, 0.05)])
def test_faults_are_found_where_few_good_images_raise_an_alarm(good, rate, told):
    random = np.random.default_rng(good)
    values, masks = random.normal(size=(good + 12, 40, 50)), np.zeros((good + 12, 40, 50), bool)
    for n in range(12):
        for side in (1, 3, 7):
            y, x = random.integers(0, 33), random.integers(0, 43)
            masks[n, y : y + side, x : x + side] = True
        values[n][masks[n]] += random.normal() + 2
    found = evaluation.pixel_scores(values, masks, rate=rate).found
    alarm, faults = faults_by_hand(values, masks, rate)
    assert found.alarm == alarm
    assert found.rate == pytest.approx(told)
    assert (found.good, found.wanted) == (good, rate)
    assert (values[12:].max((1, 2)) > alarm).mean() <= told
    assert (found.faults.n, found.faults.mean) == (len(faults), pytest.approx(np.mean([hit for _, hit in faults])))
    assert found.photos.mean == pytest.approx((values[:12].max((1, 2)) > alarm).mean())
    for name, (low, high) in {
        "up to 0.1% of the photo": (0, 0.001),
        "0.1% to 1%": (0.001, 0.01),
        "above 1%": (0.01, 1),
    }.items():
        hits = [hit for size, hit in faults if low < size <= high]
        assert (found.by_size[name].n, found.by_size[name].mean) == (len(hits), pytest.approx(np.mean(hits))), name
    words = found.describe()
    assert f"at most 1 in {1 / told:.3g} good photos" in words
    assert ("too few" in words) == (told > rate)


def test_without_good_images_no_alarm_can_be_measured():
    truth = np.zeros((2, 8, 8), bool)
    truth[:, 2:4, 2:5] = True
    assert evaluation.pixel_scores(truth + 0.0, truth).found is None
    with pytest.raises(ValueError, match="rate must be a share above 0 and below 1"):
        evaluation.pixel_scores(truth + 0.0, truth, rate=1.0)


def test_decisions_about_images_tell_those_with_a_fault():
    torch.manual_seed(0)
    x, masks, labels = photos()
    net = Net().eval()
    rows, _ = extract_features(net, [x], progress=False)
    net = PCASVMNet(net, make_pipeline(StandardScaler(), PCA(3), SVC()).fit(rows, labels)).eval()
    options = {"masks": masks, "images": None, "rivals": ["random maps"], "progress": False, "rate": 0.1}
    result = evaluation.localisation(net, (x, labels), ["stem"], [ContributionCAM], normal="good", **options)
    margins = net(x).margins.detach().numpy()
    evidence = margins[:, :2].max(1) - margins[:, 2]
    assert result["the decision", "image AUROC"].mean == pytest.approx(roc_auc_score(labels != "good", evidence))
    alarm = np.sort(evidence[20:])[-1]  # the tenth: ceil(11 x 0.9)
    assert result["the decision", "photos found at 1 in 10 false alarms"].mean == pytest.approx(
        (evidence[:20] > alarm).mean()
    )
    assert "1 in 10 good photos raises a false alarm" in describe_localisation(result)[0]
    without = evaluation.localisation(net, (x, labels), ["stem"], [ContributionCAM], **options)
    assert "the decision" not in {row.method for row in without.rows}


def test_photos_are_counted_by_the_threshold_of_the_model():
    pixels = PixelValues()
    masks = np.zeros((5, 2, 2), bool)
    masks[:3, 0, 0] = True  # three with a fault
    pixels.add(masks[:2], [0, 1], {})
    pixels.score(np.array([2.0, 0.5]))
    pixels.add(masks[2:], [2, 3, 4], {})
    pixels.score(np.array([1.0, 3.0, 0.1]))
    (sentence,) = pixels.tell_threshold(1.0)
    assert "By the threshold of the model, 1, 2 of 3 photos with a fault pass, and 1 of 2 good ones fail." in sentence
    assert pixels.tell_threshold(None) == PixelValues().tell_threshold(1.0) == []
