"""Why was this one wrong: what the figure says, shows and refuses."""

import copy
import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from problems import Problem
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC, SVR, OneClassSVM

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ClosedFormLayerCAM,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    SVMTarget,
    recombined,
)
from pytorch_grad_cam_pcasvm.figures import plot_mistake
from pytorch_grad_cam_pcasvm.studio.figures.style import number

MINUS = "\N{MINUS SIGN}"


class Case:
    """A network, one image, the class that it is not, and a training set."""

    def __init__(self, classes=3, components=4):
        self.problem = Problem(seed=1, n=24, classes=classes, components=components)
        images, low, high = self.problem.x, self.problem.x.min(), self.problem.x.max()
        self.net, self.image, self.images = self.problem.net, images[0], images[1:]
        self.picture, *self.pictures = ((images - low) / (high - low)).numpy()
        self.labels = self.problem.labels[np.arange(23) % classes]
        (self.predicted,) = self.net.predict(images[:1])
        self.others = [label for label in self.problem.labels.tolist() if label != self.predicted]
        self.truth = self.others[0]
        self.layer = {"target_layer": self.problem.target_layer}

    def draw(self, **options):
        given = {"image": self.image, "truth": self.truth, "images": self.images, "labels": self.labels}
        given |= {"picture": self.picture, "pictures": self.pictures}
        options = self.layer | options if "cam" not in options else options
        return plot_mistake(self.net, **(given | options))


@pytest.fixture(scope="module")
def case():
    return Case()


def texts_of(figure):
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def decision_steps(figure):
    axis = next(axis for axis in figure.axes if axis.patches)
    return axis, [bar.get_height() for bar in axis.patches]


def neighbours_of(figure):
    """Return the pictures below, and the distances above them, from left to right."""
    axes = [axis for axis in figure.axes if axis.get_title().strip().startswith("distance")]
    axes.sort(key=lambda axis: axis.get_position().x0)
    return [axis.images[0].get_array() for axis in axes], [axis.get_title().split()[-1] for axis in axes]


@pytest.mark.parametrize("classes", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [2, 9])
def test_the_parts_add_up_to_the_decision_between_the_two_classes(classes, count):
    case = Case(classes)
    components = ContributionCAM(case.net, [case.problem.target_layer]).explain(case.image[None])
    with torch.no_grad():
        output = case.net(case.image[None])
    for truth in case.others:
        target = SVMTarget(case.predicted, versus=truth)
        whole = recombined(components, case.net.head, target)
        _, heights = decision_steps(case.draw(truth=truth, count=count))
        unit = 10.0 ** round(np.log10(float(whole.values) / heights[-1]))
        assert heights[0] * unit == pytest.approx(float(whole.baseline_values))
        assert heights[-1] * unit == pytest.approx(float(target(output)))
        assert sum(heights[:-1]) == pytest.approx(heights[-1])
        assert len(heights) == 2 + (3 if count == 2 else 4)


def test_its_maps_are_those_of_the_components_and_add_up(case):
    figure = case.draw(count=4)
    titles = ["input", *(f"component {b + 1}" for b in range(4)), "decision"]
    axes = {axis.get_title(): axis for axis in figure.axes if axis.get_title() in titles}
    assert set(axes) == set(titles)
    assert np.abs(axes["input"].images[0].get_array() - case.picture.transpose(1, 2, 0)).max() < 1e-6
    drawn = {title: np.asarray(axis.images[-1].get_array()) for title, axis in axes.items() if title != "input"}
    decision = drawn.pop("decision")
    assert np.abs(sum(drawn.values()) - decision).max() < 1e-6


@pytest.mark.parametrize("neighbours", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 50))])
def test_the_neighbours_are_the_nearest_of_both_classes(case, neighbours):
    pictures, distances = neighbours_of(case.draw(neighbours=neighbours))
    reduce = case.problem.head[:-1].transform
    features = [case.problem.backbone.classifier[:5](case.problem.backbone.features(x).flatten(1)).detach().numpy()
                for x in (case.images, case.image[None])]  # fmt: skip
    space, here = map(reduce, features)
    expected, rows = [], []
    for label in (case.predicted, case.truth):
        found = [row for row in range(23) if case.labels[row] == label]
        by_distance = sorted((sum((space[row] - here[0]) ** 2) ** 0.5, row) for row in found)[:neighbours]
        expected += [number(distance) for distance, _ in by_distance]
        rows += [row for _, row in by_distance]
    assert distances == expected
    for picture, row in zip(pictures, rows, strict=True):
        assert np.abs(picture - case.pictures[row].transpose(1, 2, 0)).max() < 1e-6


def test_an_image_of_the_training_set_is_not_its_own_neighbour(case):
    more = {"images": torch.cat([case.image[None], case.images]), "labels": [case.truth, *case.labels]}
    figure = case.draw(**more, pictures=[case.picture, *case.pictures])
    assert neighbours_of(figure)[1] == neighbours_of(case.draw())[1]


@pytest.mark.parametrize("of_atlas", [False, True])
def test_the_network_need_not_run_on_the_training_images_again(case, of_atlas):
    with torch.no_grad():
        output = case.net(case.images)
    features = SimpleNamespace(components=output.components.numpy()) if of_atlas else output.features.numpy()
    expected, ran = neighbours_of(case.draw()), []
    handle = case.net.backbone.register_forward_pre_hook(lambda module, args: ran.append(len(args[0])))
    try:
        pictures, distances = neighbours_of(case.draw(features=features))
    finally:
        handle.remove()
    assert set(ran) == {1}
    assert distances == expected[1]
    assert all(np.array_equal(*pair) for pair in zip(pictures, expected[0], strict=True))
    wrong = features.components[:, 1:] if of_atlas else features[1:]
    with pytest.raises(ValueError, match="give those of the images"):
        case.draw(features=SimpleNamespace(components=wrong) if of_atlas else wrong)


@pytest.mark.slow
def test_the_title_says_what_it_was_taken_for_and_which_components_tipped_it(case):
    names = {"ant": "A$", "bee": "B", "cat": "C"}
    found = 0
    for image, predicted in zip(case.images[:8], case.net.predict(case.images[:8]).tolist(), strict=True):
        truth = next(label for label in names if label != predicted)
        figure = case.draw(image=image, truth=truth, classes=names, size=(40, 12))
        classes = [names[label].replace("$", r"\$") for label in (predicted, truth)]
        title = figure.get_suptitle().replace("\n", " ")
        assert title.startswith(f'predicted "{classes[0]}", but it is "{classes[1]}": ')
        named = [int(b) for b in re.findall(r"\d+", "".join(re.findall(r": components? (.*) tipped it$", title)))]
        axis, heights = decision_steps(figure)
        labels = [label.get_text() for label in axis.get_xticklabels()][1:-1]
        numbers = [int(re.search(r"component (\d+)", label).group(1)) for label in labels]
        parts = dict(zip(numbers, heights[1:-1], strict=True))
        if named:  # the fewest, from the largest on, without which it would be the other class
            found += 1
            assert named == sorted(parts, key=lambda b: -parts[b])[: len(named)]
            assert heights[-1] - sum(parts[b] for b in named) <= 0
            assert heights[-1] - sum(parts[b] for b in named[:-1]) > 0
        else:
            assert heights[-1] - sum(part for part in parts.values() if part > 0) > 0
    assert 0 < found < 8


def sentence(parts, start):
    """Return the title for components with these parts in the decision."""
    from pytorch_grad_cam_pcasvm.studio.figures.decision import DecisionPart, Steps
    from pytorch_grad_cam_pcasvm.studio.figures.mistake import _sentence

    steps = [DecisionPart("", "", [b], torch.zeros(1, 1), rise, 0.0) for b, rise in enumerate(parts)]
    whole = DecisionPart("", "", range(len(parts)), torch.zeros(1, 1), sum(parts), 0.0)
    return _sentence(Steps(steps, whole, start, 0.0, ""), "a", "b")


@pytest.mark.parametrize(
    ("parts", "start", "why"),
    [
        ([0.1, 0.2, 0.5], -0.5, "component 3 tipped it"),
        ([0.1, 0.3, 0.5], -0.2, "components 3 and 2 tipped it"),
        ([0.4, 0.3, 0.5], 0.0, "components 3, 1 and 2 tipped it"),
        ([0.5, 0.4, 0.3, 0.2], 0.0, "components 1, 2, 3 and 4 tipped it"),
        ([0.5, 0.4, 0.3, 0.2, 0.1], 0.0, "components 1, 2, 3 and 2 others tipped it"),
        ([0.1, 0.2], 1e-8, "components 2 and 1 tipped it"),  # but for rounding it starts on the boundary
        ([-0.1, 0.2], 0.5, 'no component tipped it; "a" already wins at the start'),
        ([-0.7, 0.1], 0.5, 'between these two alone, "b" would win'),
    ],
)
def test_the_reason_is_told_in_words(parts, start, why):
    assert sentence(parts, start) == f'predicted "a", but it is "b": {why}'


def test_pictures_and_names_are_drawn_as_in_other_figures(case):
    grey = np.random.default_rng(0).random((24, 20, 16)).astype(np.float32)
    names = ["squamous cell carcinoma", "adenocarcinoma in situ", "benign"]
    for left_out in ("picture", "pictures"):
        with pytest.raises(ValueError, match="undo the normalisation"):
            case.draw(**{left_out: None})
    figure = case.draw(picture=grey[0], pictures=grey[1:], classes=names)
    assert neighbours_of(figure)[0][0].shape == (20, 16, 3)
    predicted = names[case.problem.labels.tolist().index(case.predicted)]
    assert any(text.replace("\n", " ") == f'nearest "{predicted}"' for text in texts_of(figure))
    assert case.draw(image=case.image[None]).get_suptitle() == case.draw().get_suptitle()


@pytest.mark.slow
def test_nothing_runs_into_anything(case):
    names = ["squamous cell carcinoma", "adenocarcinoma in situ", "benign"]
    for options in ({}, {"count": 1, "neighbours": 1}, {"neighbours": 5}):
        figure = case.draw(classes=names, **options)
        headings = [text for text in figure.findobj(Text) if re.match(r"nearest|distance|\s*distance", text.get_text())]
        labels = next(axis for axis in figure.axes if axis.patches).get_xticklabels()
        boxes = [text.get_window_extent() for text in (*headings, *labels, *figure.texts)]
        shown = [text.get_text().strip() for text in (*headings, *labels, *figure.texts)]
        for (one, box), (other, place) in itertools.combinations(zip(shown, boxes, strict=True), 2):
            both_above_a_picture = "distance" in one + other and "nearest" in one + other
            assert both_above_a_picture or not box.padded(-1).overlaps(place), (one, other)
        assert all(figure.bbox.padded(1).x0 <= box.x0 and box.x1 <= figure.bbox.padded(1).x1 for box in boxes)


def head_of(*steps):
    rows = np.random.default_rng(0).normal(size=(40, 9))
    return make_pipeline(*steps).fit(rows, np.arange(40) % 2)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (head_of(SVC()), "the head has no PCA: put one in front"),
        (head_of(PCA(3)), "the head has no classifier"),
        (head_of(PCA(3), SVR()), "the head is a regressor, which predicts no class"),
        (head_of(PCA(3), OneClassSVM()), "the head is a one-class SVM, which predicts no class"),
    ],
)
def test_heads_without_components_or_classes_are_refused_by_name(case, head, message):
    net = PCASVMNet(case.problem.backbone, head, layer="classifier.4")
    with pytest.raises(ValueError, match=message):
        plot_mistake(net, case.image, 1, case.images, case.labels, **case.layer)


def test_what_is_no_mistake_or_does_not_belong_together_is_refused(case):
    with pytest.raises(ValueError, match=f"classified correctly, as '{case.predicted}'.*plot_decision"):
        case.draw(truth=case.predicted)
    with pytest.raises(ValueError, match=r"'fly' is not a class of this head: choose one of \['ant', 'bee', 'cat'\]"):
        case.draw(truth="fly")
    with pytest.raises(ValueError, match=f"no other training image is labelled '{case.predicted}'"):
        case.draw(labels=[case.truth] * 23)
    with pytest.raises(ValueError, match="say where to look"):
        case.draw(target_layer=None)
    with pytest.raises(ValueError, match="another network"):
        case.draw(cam=ContributionCAM(copy.deepcopy(case.net), ["features.3"]))
    with pytest.raises(ValueError, match="gradient maps do not add up"):
        case.draw(cam=ClosedFormGradCAM(case.net, ["features.3"]))
    with pytest.raises(ValueError, match="not sums of component maps"):
        case.draw(cam=ClosedFormLayerCAM(case.net, ["features.3"]))
    with pytest.raises(ValueError, match="give one image"):
        case.draw(image=case.images[:2])
    for wrong in ({"neighbours": 0}, {"count": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            case.draw(**wrong)
    with pytest.raises(ValueError, match="23 training images: give one for each"):
        case.draw(labels=case.labels[1:])
    with pytest.raises(ValueError, match="22 pictures for 23"):
        case.draw(pictures=case.pictures[1:])
    with pytest.raises(ValueError, match="2 names for 3 classes"):
        case.draw(classes=["a", "b"])


def test_another_baseline_is_used_as_it_is(case):
    mean = case.problem.backbone.features(case.images).mean(0, keepdim=True).detach()
    cam = ContributionCAM(case.net, ["features"], baseline=mean)
    start = cam.explain(case.image[None], [PCATarget(b) for b in range(4)])
    _, heights = decision_steps(case.draw(cam=cam))
    whole = recombined(start, case.net.head, SVMTarget(case.predicted, versus=case.truth))
    unit = 10.0 ** round(np.log10(float(whole.values) / heights[-1]))
    assert heights[0] * unit == pytest.approx(float(whole.baseline_values))
