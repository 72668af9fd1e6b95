"""Signs, shared scales and upsampling."""

import copy
import json
import warnings
from contextlib import contextmanager, suppress
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from problems import Problem, damaged
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from reference import relative
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.svm import SVC

from pytorch_grad_cam_pcasvm import (
    BlankMapWarning,
    ClosedFormGradCAM,
    ClosedFormShapleyCAM,
    ContributionCAM,
    HeadOutput,
    PCASVMNet,
    PCATarget,
    ProbabilityTarget,
    SignedMaps,
    SVMTarget,
)
from pytorch_grad_cam_pcasvm.head import storage
from pytorch_grad_cam_pcasvm.maps.signed_maps import FORMATS
from pytorch_grad_cam_pcasvm.runtime.errors import warn
from pytorch_grad_cam_pcasvm.studio.figures.style import draw_signed
from pytorch_grad_cam_pcasvm.targets import PredictedScore, ScoreTarget

TENSORS = ("maps", "weights", "values", "nu", "log_scale")


@pytest.fixture(scope="module")
def problem():
    return Problem(seed=1, n=6)


@pytest.fixture(scope="module")
def maps(problem):
    targets = [PCATarget(b) for b in range(problem.components)]
    return ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x, targets)


def test_both_signs_share_nu(maps):
    positive, negative = maps.positive(), maps.negative()
    assert torch.maximum(positive.amax((2, 3)), negative.amax((2, 3))).eq(1).all()
    assert relative(positive - negative, maps.maps / maps.nu[..., None, None]) < 1e-14
    assert positive.min() == 0
    assert not (positive * negative).any()
    assert (maps.positive().amax((2, 3)) < 1).any(), "no map tests the shared scale"


def test_raw_parts(maps):
    assert relative(maps.positive(scale="none") - maps.negative(scale="none"), maps.maps) == 0
    assert relative(maps.numpy(), maps.maps) == 0


def test_one_scale_per_target_compares_images(maps):
    positive, negative = maps.positive(scale="target"), maps.negative(scale="target")
    expected = maps.maps / maps.nu.amax(0)[None, :, None, None]
    assert relative(positive - negative, expected) < 1e-12
    assert torch.maximum(positive, negative).amax((0, 2, 3)).eq(1).all()


def test_the_sign_of_a_component_is_a_convention(problem, maps):
    flipped = Problem(seed=1, n=6)
    flipped.head[1].components_[2] *= -1
    swapped = ClosedFormGradCAM(flipped.net, [flipped.target_layer]).explain(problem.x, list(maps.targets))
    assert relative(swapped.positive()[:, 2], maps.negative()[:, 2]) == 0
    assert relative(swapped.negative()[:, 2], maps.positive()[:, 2]) == 0
    assert relative(swapped.positive()[:, 1], maps.positive()[:, 1]) == 0


def test_a_negative_target_is_the_negative_map(problem, maps):
    cam = ClosedFormGradCAM(problem.net, [problem.target_layer])
    negative = cam.explain(problem.x, [PCATarget(1, sign="-")])
    assert relative(negative.maps[:, 0], -maps.maps[:, 1]) < 1e-14
    for sign, part in (("+", maps.positive), ("-", maps.negative)):
        shown = cam(problem.x, [PCATarget(1, sign)] * 6)
        assert shown.dtype == np.float32
        assert shown.shape == (6, 12, 12)
        assert relative(shown, part(size=(12, 12))[:, 1]) < 1e-6


@pytest.mark.parametrize("size", [(4, 4), (20, 33), (7, 50)])
def test_upsampling_is_that_of_the_host(maps, size):
    shown = maps.positive(size=size)
    assert shown.shape == (6, 4, *size)
    expected = np.stack([
        [cv2.resize(m.numpy().astype(np.float32), size[::-1]) for m in image] for image in maps.positive()
    ])
    assert relative(shown, expected) < 1e-5
    assert shown.max() <= 1


def test_maps_far_from_every_support_vector_are_not_blank():
    problem = Problem(kernel="rbf", classes=2, dtype=torch.float32)
    problem.head[-1].set_params(gamma=1.0)
    near = ClosedFormGradCAM(problem.net, [problem.target_layer])
    expected = near.explain(problem.x, [SVMTarget("bee")])
    assert not expected.log_scale.any()
    # The same decision, seen from far away: support vectors moved by 40 along one component.
    far = Problem(kernel="rbf", classes=2, dtype=torch.float32)
    far.head[-1].support_vectors_[:, 0] += 400.0
    net = PCASVMNet(far.backbone, far.head, layer="classifier.4").eval()
    output = net(problem.x)
    grad = torch.autograd.grad(output.margins[:, 1].sum(), far.backbone.classifier[0].weight)[0]
    assert not grad.any(), "autograd does not underflow: the test tests nothing"
    maps = ClosedFormGradCAM(net, [far.target_layer]).explain(problem.x, [SVMTarget("bee"), SVMTarget("ant")])
    assert (maps.log_scale < -745).all()
    assert maps.nu.isfinite().all()
    assert (maps.nu > 0).all()
    assert relative(maps.maps[:, 0], -maps.maps[:, 1]) < 1e-6
    assert torch.maximum(maps.positive(), maps.negative()).amax((2, 3)).eq(1).all()
    # Between images the factors count: their scale is in the logarithms.
    by_target = torch.maximum(maps.positive(scale="target"), maps.negative(scale="target")).amax((2, 3))
    largest = (maps.nu.log() + maps.log_scale)[:, 0]
    assert relative(by_target[:, 0], (largest - largest.max()).exp()) < 1e-5


def test_jacobians_far_from_every_support_vector():
    far = Problem(classes=3, dtype=torch.float32)
    far.head[-1].support_vectors_[:, 0] += 400.0
    net = PCASVMNet(far.backbone, far.head, layer="classifier.4").eval()
    for max_bytes in (None, 1):
        cam = ClosedFormGradCAM(net, [far.target_layer], max_bytes=max_bytes)
        jacobians = cam.jacobians(far.x)
        maps = cam.explain(far.x, [SVMTarget(label) for label in far.labels])
        assert jacobians.log_scale.shape == (5, 3)
        assert (jacobians.log_scale < -745).all()
        factor = (jacobians.log_scale - maps.log_scale).exp().unsqueeze(-1)
        assert relative(jacobians.margins.sum(-1).transpose(1, 2) * factor, maps.weights) < 1e-5


def test_grad_cam_on_a_support_vector_of_a_narrow_machine_is_blank_and_says_so():
    problem = Problem(kernel="rbf", classes=2, dtype=torch.float32)
    components = problem.net(problem.x).components.detach().numpy()
    support = np.random.default_rng(0).normal(size=(20, components.shape[1])) * components.std(0)
    support[:5] = components
    svm = SVC(gamma=2000 / components.var()).fit(support, np.arange(20) % 2)
    net = PCASVMNet(problem.backbone, [problem.head[:-1], svm], layer="classifier.4").eval()
    cam = ClosedFormGradCAM(net, [problem.target_layer])
    for x in (problem.x, problem.x[:1], problem.x[3:]):
        with pytest.warns(
            BlankMapWarning, match=r"lies on a support vector \(training image \d\).*use ContributionCAM"
        ):
            maps = cam.explain(x, [SVMTarget()])
        assert not maps.maps.any()
    # Of second order there is something to see, and contributions know nothing of it.
    for method in (ClosedFormShapleyCAM, ContributionCAM):
        assert method(net, [problem.target_layer]).explain(problem.x, [SVMTarget()]).nu.all()


def blank(values):
    maps = torch.tensor(values).reshape(1, 2, 1, 2)
    ones = torch.ones(1, 2)
    return SignedMaps(maps, ones, ones, maps.abs().amax((2, 3)), 0 * ones, [PCATarget(0), SVMTarget("a")], ones)


def test_a_blank_map_says_why():
    maps = blank([-1.0, -0.5, 0.0, 0.0])
    with pytest.warns(BlankMapWarning) as warned:
        assert not maps.positive().any()
    text = str(warned[0].message)
    assert warned[0].filename == __file__
    assert "image 0, P+ of PCATarget(0): all its evidence has the other sign" in text
    assert "SVMTarget('a'): there is no gradient at all" in text
    assert text.endswith(". See .maps, which keeps both signs")
    with pytest.warns(BlankMapWarning, match="there is no gradient at all$"):
        blank([0.0, 0.0, 0.0, 0.0]).positive()
    with pytest.warns(BlankMapWarning, match="SVMTarget"):
        assert relative(maps.negative()[0, 0], torch.tensor([[1.0, 0.5]])) == 0
    with pytest.warns(BlankMapWarning):
        assert maps.positive(scale="target").isfinite().all()


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ([PCATarget(0)], "PCATarget(0)"),
        ([SVMTarget("cat")], "SVMTarget('cat')"),
        ([PCATarget(0), SVMTarget()], "PCATarget(0) and SVMTarget()"),
        ([*map(PCATarget, range(8))], "8 components"),
        ([*map(PCATarget, range(8)), SVMTarget()], "8 components and SVMTarget()"),
        ([PCATarget(1), PCATarget(0)], "PCATarget(1) and PCATarget(0)"),
        ([*map(SVMTarget, "abc")], "SVMTarget('a'), SVMTarget('b') and SVMTarget('c')"),
        ([*map(SVMTarget, "abcdefghi")], "SVMTarget('a'), SVMTarget('b'), SVMTarget('c') and 6 more"),
        (
            [PCATarget(0), PCATarget(1), *map(SVMTarget, range(3))],
            "2 components, SVMTarget(0), SVMTarget(1) and 1 more",
        ),
        ([], "no targets"),
    ],
)
def test_maps_are_written_in_a_few_words(targets, words):
    raw, per_map = torch.zeros(2, len(targets), 7, 5), torch.zeros(2, len(targets))
    maps = SignedMaps(raw, per_map, per_map, per_map, per_map, targets, None)
    assert repr(maps) == f"SignedMaps((2, {len(targets)}, 7, 5) float32 on cpu, {words})"


def test_only_blank_maps_are_named():
    raw = torch.tensor([1.0, -1.0, -2.0, -0.5, -3.0, 0.0, 0.5]).reshape(7, 1, 1, 1)
    ones = torch.ones(7, 1)
    # Loaded from a file: the output is plain scores, and nobody knows the predicted class.
    maps = SignedMaps(raw, ones, ones, raw.abs().amax((2, 3)), 0 * ones, [SVMTarget(versus="a")], ones)
    named = [f"image {n}, P+ of {maps.targets[0]}: all its evidence has the other sign" for n in range(5)]
    dead = f"image 5, P+ of {maps.targets[0]}: there is no gradient at all"
    for count, expected in ((5, named[1:]), (7, [dead, *named[1:4], "and 1 more"])):
        with pytest.warns(BlankMapWarning) as warned:
            maps[:count].positive()
        assert str(warned[0].message) == f"blank map: {'; '.join(expected)}. See .maps, which keeps both signs"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": "batch"}, r"scale must be one of \('map', 'target', 'none'\), got 'batch'"),
        ({"size": (4,)}, r"size must have 2 numbers for these maps, got \(4,\)"),
        ({"size": 24}, "size must have 2 numbers for these maps, got 24"),
        ({"size": (4, 4, 4)}, "size must have 2 numbers"),
    ],
)
def test_bad_arguments_are_refused(maps, arguments, message):
    for part in (maps.positive, maps.negative):
        with pytest.raises(ValueError, match=message):
            part(**arguments)


def test_maps_that_are_not_finite_are_not_given_as_arrays():
    with pytest.raises(ValueError, match="not finite"):
        blank([1.0, torch.nan, 1.0, 1.0]).numpy()


def assert_same(actual, expected, n=slice(None), k=slice(None)):
    """Hold maps against rows n and columns k of others, bit by bit."""
    for name in TENSORS:
        assert torch.equal(getattr(actual, name), getattr(expected, name)[n][:, k]), name
    assert torch.equal(actual.output.as_subclass(torch.Tensor), expected.output.as_subclass(torch.Tensor)[n])


MASK = [True, False, True, False, False, True]


@pytest.mark.parametrize(
    ("index", "n", "k"),
    [
        (1, [1], range(4)),
        (-1, [5], range(4)),
        (np.int64(2), [2], range(4)),
        (torch.tensor(2), [2], range(4)),
        (slice(2, 5), [2, 3, 4], range(4)),
        (slice(None, None, 2), [0, 2, 4], range(4)),
        ([0, 2], [0, 2], range(4)),
        ([3, -1, 3], [3, 5, 3], range(4)),
        (np.array([4, 0]), [4, 0], range(4)),
        (MASK, [0, 2, 5], range(4)),
        (np.array(MASK), [0, 2, 5], range(4)),
        (torch.tensor(MASK), [0, 2, 5], range(4)),
        ([], [], range(4)),
        ((1, 2), [1], [2]),
        ((slice(None), slice(1, 3)), range(6), [1, 2]),
        (([0, 5], [3, 0]), [0, 5], [3, 0]),
        ((MASK, -1), [0, 2, 5], [3]),
    ],
    ids=str,
)
def test_some_images_and_targets(maps, index, n, k):
    n, k = list(n), list(k)
    some = maps[index]
    assert isinstance(some, SignedMaps)
    assert len(some) == len(n)
    assert_same(some, maps, n, k)
    assert list(some.targets) == [maps.targets[position] for position in k]
    assert isinstance(some.output, HeadOutput)
    assert torch.equal(some.output.components, maps.output.components[n])
    assert torch.equal(some.output.margins, maps.output.margins[n])


def test_maps_are_iterated_image_by_image(maps):
    assert len(maps) == 6
    for position, one in enumerate(maps):
        assert_same(one, maps, [position])
    assert position == 5
    assert torch.equal(maps[2:4].positive(size=(8, 8)), maps.positive(size=(8, 8))[2:4])
    plain = blank([1.0, 2.0, 3.0, 4.0])
    assert torch.equal(plain[0, 1].output, plain.output)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (6, IndexError, "there are 6 images, numbered from 0: 6 is out of range"),
        ([0, -7], IndexError, "there are 6 images, numbered from 0: -7 is out of range"),
        ((0, 4), IndexError, "there are 4 targets, numbered from 0: 4 is out of range"),
        ([True, False], IndexError, "a mask of 2 images for 6"),
        ((0, 0, 0), IndexError, "got 3 indices"),
        ("cat", TypeError, "images are chosen by an integer, a slice, a list of integers or a mask, got 'cat'"),
        (1.0, TypeError, "images are chosen by"),
        (True, TypeError, "images are chosen by"),
        ((0, None), TypeError, "targets are chosen by"),
    ],
    ids=str,
)
def test_bad_indices_are_refused(maps, index, error, message):
    with pytest.raises(error, match=message):
        maps[index]


def test_batches_are_joined(problem, maps):
    cam = ClosedFormGradCAM(problem.net, [problem.target_layer])
    parts = [cam.explain(problem.x[:4], list(maps.targets)), cam.explain(problem.x[4:], list(maps.targets))]
    joined = SignedMaps.cat(parts)
    assert len(joined) == 6
    assert joined.targets == maps.targets
    for name in TENSORS[:-1]:
        assert relative(getattr(joined, name), getattr(maps, name)) < 1e-12
    assert torch.equal(joined.log_scale, maps.log_scale)
    assert isinstance(joined.output, HeadOutput)
    assert relative(joined.output.components, maps.output.components) < 1e-12
    assert relative(joined.output, maps.output) < 1e-12
    assert_same(SignedMaps.cat(maps[i] for i in range(6)), maps)


def test_the_output_of_two_heads_is_joined_as_plain_scores(problem, maps):
    other = Problem(seed=1, n=6)
    parts = [maps, ClosedFormGradCAM(other.net, [other.target_layer]).explain(problem.x, list(maps.targets))]
    output = SignedMaps.cat(parts).output
    assert type(output) is torch.Tensor
    assert output.shape == (12, 3)


def test_maps_that_do_not_belong_together_are_not_joined(maps):
    plain = blank([1.0, 2.0, 3.0, 4.0])
    for parts, error, message in (
        ([], ValueError, "there are no maps to join"),
        ([maps, maps.maps], TypeError, "joins SignedMaps, got Tensor"),
        ([maps, maps[:, [1, 0, 2, 3]]], ValueError, "maps of different targets cannot be joined"),
        ([maps[:, :2], maps], ValueError, "maps of different targets"),
    ):
        with pytest.raises(error, match=message):
            SignedMaps.cat(parts)
    wide = SignedMaps(torch.ones(1, 2, 1, 3), *[torch.ones(1, 2)] * 4, plain.targets, torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"maps of shapes \(2, 1, 2\) and \(2, 1, 3\) per image cannot be joined"):
        SignedMaps.cat([plain, wide])
    with pytest.raises(ValueError, match="maps on cpu and meta: move them"):
        SignedMaps.cat([plain, plain.to("meta")])


def test_maps_in_another_precision(maps):
    single = maps.to(torch.float32)
    assert single.maps.dtype == single.weights.dtype == single.nu.dtype == torch.float32
    assert single.values.dtype == torch.float64
    assert isinstance(single.output, HeadOutput)
    assert torch.equal(single.nu, single.maps.abs().amax((2, 3)))
    assert single.positive(scale="target").dtype == torch.float32
    with pytest.raises(ValueError, match="use a floating dtype"):
        maps.to(torch.uint8)


def test_maps_on_another_device(maps):
    meta = maps.to("meta")
    assert {getattr(meta, name).device.type for name in TENSORS} == {"meta"}
    assert meta.output.device.type == meta.output.components.device.type == "meta"
    assert isinstance(meta.output, HeadOutput)
    assert_same(maps.cpu(), maps)
    assert maps.cpu().maps is maps.maps


def test_a_deep_copy(maps):
    twin = copy.deepcopy(maps)
    assert_same(twin, maps)
    assert twin.targets == maps.targets
    assert isinstance(twin.output, HeadOutput)
    assert torch.equal(twin.output.components, maps.output.components)
    for name in TENSORS:
        assert getattr(twin, name).data_ptr() != getattr(maps, name).data_ptr()


def test_an_output_of_several_tensors(tmp_path):
    """As of a network of Hugging Face: a dict of tensors, some without a row per image."""
    ones = torch.ones(3, 1)
    output = {"logits": torch.arange(6.0).reshape(3, 2), "hidden": (torch.rand(3, 4, 5), torch.tensor(7.0)), "n": "a"}
    maps = SignedMaps(torch.rand(3, 1, 2, 2), ones, ones, ones, 0 * ones, [ScoreTarget(1)], output)
    some = maps[1:].output
    assert some["logits"].tolist() == [[2, 3], [4, 5]]
    assert some["hidden"][0].shape == (2, 4, 5)
    assert some["hidden"][1] == 7
    joined = SignedMaps.cat([maps[1:], maps[0]]).output
    assert torch.equal(joined["logits"], output["logits"][[1, 2, 0]])
    assert joined["hidden"][0].shape == (3, 4, 5)
    assert joined["n"] == "a"
    assert maps.to("meta").output["hidden"][1].is_meta
    assert torch.equal(copy.deepcopy(maps).output["logits"], output["logits"])
    maps.save(tmp_path / "maps")
    loaded = SignedMaps.load(tmp_path / "maps")
    assert all(torch.equal(a, b) for a, b in zip(loaded.output, (output["logits"], *output["hidden"]), strict=True))
    plain = SignedMaps(maps.maps, ones, ones, ones, ones, maps.targets, output["logits"])
    with pytest.raises(ValueError, match="outputs of different structure cannot be joined"):
        SignedMaps.cat([maps, plain])
    narrow = SignedMaps(maps.maps, ones, ones, ones, ones, maps.targets, ones)
    with pytest.raises(ValueError, match=r"output of shapes \(2,\) and \(1,\) per image cannot be joined"):
        SignedMaps.cat([plain, narrow])


class Custom:
    def __call__(self, output):
        return output[..., 0]


def own_target(output):
    return output[..., 0]


def assert_same_types(target, other):
    assert [type(value) for value in vars(target).values()] == [type(value) for value in vars(other).values()]


def test_saved_maps_are_bit_identical(problem, tmp_path):
    targets = [
        PCATarget(1, "-"),
        PCATarget(np.int64(0)),
        SVMTarget(),
        SVMTarget("ant", versus=np.str_("cat")),
        Custom(),
    ]
    maps = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x, [*targets, own_target])
    maps = maps[::2]  # a view
    maps.save(tmp_path / "maps.safetensors")
    loaded = SignedMaps.load(tmp_path / "maps.safetensors")
    assert_same(loaded, maps)
    assert {name: getattr(loaded, name).dtype for name in TENSORS} == {
        name: getattr(maps, name).dtype for name in TENSORS
    }
    assert loaded.targets == [*targets[:-1], "Custom", "own_target"]
    for read, written in zip(loaded.targets[:-2], targets[:-1], strict=True):
        assert_same_types(read, written)
    assert type(loaded.output) is torch.Tensor
    with safe_open(tmp_path / "maps.safetensors", framework="pt") as file:
        for name in ("components", "margins", "features"):
            assert torch.equal(file.get_tensor(f"output.{name}"), getattr(maps.output, name))
    loaded.save(str(tmp_path / "again.safetensors"))
    assert_same(SignedMaps.load(str(tmp_path / "again.safetensors")), maps)


@pytest.mark.parametrize(
    "target",
    [
        *[
            SVMTarget(label)
            for label in ("ü", 3, 2.5, True, np.str_("a"), np.int64(3), np.float32(0.1), np.bool_(True))
        ],
        SVMTarget("\ud800", versus=2**70),
        PCATarget(np.uint8(3), "-"),
        SVMTarget(versus="runner-up", sign="-"),
        ProbabilityTarget(np.int32(-1)),
        ScoreTarget(4),
        ScoreTarget(),
        PredictedScore(),
    ],
    ids=repr,
)
def test_targets_survive_a_file(target, tmp_path):
    maps = SignedMaps(torch.ones(2, 1, 3, 3, dtype=torch.bfloat16), *[torch.ones(2, 1)] * 4, [target], torch.ones(2, 3))
    maps.save(tmp_path / "maps")
    loaded = SignedMaps.load(tmp_path / "maps")
    assert loaded.targets == [target]
    assert_same_types(loaded.targets[0], target)
    assert_same(loaded, maps)


def test_a_label_that_is_a_tensor_is_saved_as_a_number(tmp_path):
    lone = torch.ones(1, 1)
    target = SVMTarget(torch.tensor(1), versus=[torch.tensor(0), 2])
    SignedMaps(torch.ones(1, 1, 1, 1), lone, lone, lone, lone, [target], lone).save(tmp_path / "maps")
    (loaded,) = SignedMaps.load(tmp_path / "maps").targets
    assert loaded == SVMTarget(1, versus=[0, 2])
    assert_same_types(loaded, SVMTarget(1, versus=[0, 2]))


def test_targets_of_others_are_saved_by_name(tmp_path):
    lone = torch.ones(1, 2)
    targets = [ClassifierOutputTarget(3), lambda output: output[..., 0]]
    SignedMaps(torch.ones(1, 2, 1, 1), lone, lone, lone, lone, targets, lone).save(tmp_path / "maps")
    assert SignedMaps.load(tmp_path / "maps").targets == ["ClassifierOutputTarget", "<lambda>"]


def test_files_that_hold_no_maps_are_refused(tmp_path):
    maps = blank([1.0, 2.0, 3.0, 4.0])
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        maps.save(tmp_path / "none" / "maps")
    with pytest.raises(FileNotFoundError):
        SignedMaps.load(tmp_path / "none")
    with pytest.raises(ValueError, match="is a folder"):
        SignedMaps.load(tmp_path)
    maps.save(tmp_path / "maps")
    written = (tmp_path / "maps").read_bytes()
    (tmp_path / "short").write_bytes(written[:-8])
    with pytest.raises(ValueError, match="not a safetensors file, or is truncated"):
        SignedMaps.load(tmp_path / "short")
    save_file({"maps": maps.maps}, tmp_path / "other")
    with pytest.raises(ValueError, match=r"is not a file that maps.save\(path\) wrote"):
        SignedMaps.load(tmp_path / "other")
    later = json.dumps([{"target": "LaterTarget", "fields": {}}])
    storage.write(tmp_path / "later", {"output.scores": maps.output}, {"format": FORMATS[-1], "targets": later})
    with pytest.raises(ValueError, match="unknown target 'LaterTarget': the file is from a later version"):
        SignedMaps.load(tmp_path / "later")
    with pytest.raises(TypeError, match="a label must be a string, a number or a boolean, got bytes"):
        SignedMaps(*[maps.maps] * 5, [SVMTarget(b"a")], maps.output).save(tmp_path / "bytes")


def test_files_of_version_0_2_have_no_checksum(problem, tmp_path):
    maps = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x, [PCATarget(1, "-"), SVMTarget()])
    tensors = {name: getattr(maps, name).clone() for name in TENSORS} | {"output.scores": maps.output.margins}
    metadata = {"format": "pytorch_grad_cam_pcasvm maps 1", "linear": "true"}
    targets = [{"target": "PCATarget", "fields": {"component": 1, "sign": "-"}}]
    targets.append({"target": "SVMTarget", "fields": {"category": None, "versus": None, "sign": "+"}})
    file = tmp_path / "maps"
    save_file(tensors, file, metadata | {"targets": json.dumps(targets)})
    with pytest.warns(UserWarning, match=r"has no checksum.*: write it again with maps.save\(path\)"):
        loaded = SignedMaps.load(file)
    assert loaded.targets == list(maps.targets)
    assert loaded.linear
    assert all(torch.equal(getattr(loaded, name), getattr(maps, name)) for name in TENSORS)
    for content in damaged(file.read_bytes()):  # as far as it can be seen
        file.write_bytes(content)
        with warnings.catch_warnings(), suppress(ValueError):
            warnings.simplefilter("ignore")
            SignedMaps.load(file)


@contextmanager
def around():
    yield


def blank_targets(problem):
    """Return a target whose map is blank for every image: a constant of the output."""
    return [lambda output: output[..., 0] * 0] * len(problem.x)


@pytest.mark.filterwarnings("always::pytorch_grad_cam_pcasvm.BlankMapWarning")
def test_warnings_name_the_line_of_the_user(problem):
    cam = ClosedFormGradCAM(problem.net, [problem.target_layer])
    maps = blank([-1.0, -0.5, 0.0, 0.0])

    def helper():
        with around(), torch.no_grad():
            return maps.positive()

    calls = [
        maps.positive,
        maps.numpy,
        helper,
        torch.no_grad()(helper),
        lambda: cam(problem.x, blank_targets(problem)),
        lambda: cam(problem.x, blank_targets(problem), aug_smooth=True),
        lambda: cam.explain(problem.x, blank_targets(problem)[:1]),
    ]
    for call in calls:
        with warnings.catch_warnings(record=True) as caught, cam:
            warnings.simplefilter("always")
            call()
        assert caught
        assert {warning.filename for warning in caught if warning.category is BlankMapWarning} == {__file__}


def test_a_warning_is_shown_once_per_line_of_the_user():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            warn("the message", UserWarning)
        warn("the message", UserWarning)
    assert [str(warning.message) for warning in caught] == ["the message"] * 2
    assert caught[0].lineno != caught[1].lineno
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module=__name__)
        with pytest.raises(UserWarning, match="the message"):
            warn("the message", UserWarning)


def of_values(values, **more):
    """Return maps of one target, one value each, as one picture."""
    maps = torch.tensor(values).reshape(1, 1, 1, -1)
    ones = torch.ones(1, 1)
    return SignedMaps(maps, ones, ones, maps.abs().amax((2, 3)), 0 * ones, [PCATarget(0)], ones, **more)


def test_an_overlay_is_red_where_the_value_rises_and_the_picture_in_grey_where_there_is_nothing():
    (((red, grey, blue),),) = of_values([2.0, 0.0, -2.0]).overlay(np.ones((1, 1, 3, 3)))[0]
    assert red[0] > 100
    assert red[0] > 2 * red[1:].max()
    assert blue[2] > 90
    assert blue[2] > 2 * blue[0]
    assert grey.tolist() == [255] * 3
    ((black, *_),) = of_values([0.0, 1.0, 1.0]).overlay(np.zeros((1, 1, 3)))[0, 0]
    assert black.tolist() == [round(0.35 * 255)] * 3  # the pictures are pale, as in figures


def test_an_overlay_has_the_pixels_of_a_figure(maps):
    pictures = np.random.default_rng(0).random((len(maps), 48, 40, 3))
    colours = maps.overlay(pictures)
    assert colours.dtype == np.uint8
    assert colours.shape == (*maps.maps.shape[:2], 48, 40, 3)
    signed = maps.positive((48, 40)) - maps.negative((48, 40))
    for n, k in ((0, 0), (1, -1)):
        figure = Figure(figsize=(0.40, 0.48), dpi=100)
        draw_signed(figure.add_axes((0, 0, 1, 1)), pictures[n], signed[n, k].numpy())
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        drawn = np.asarray(canvas.buffer_rgba())[..., :3].astype(int)
        assert np.abs(drawn - colours[n, k]).max() <= 3  # matplotlib has 256 greys, and rounds twice


def test_an_overlay_takes_pictures_as_figures_do(maps):
    pictures = np.random.default_rng(0).integers(0, 256, (len(maps), 12, 10, 3), np.uint8)
    expected = maps.overlay(pictures)
    for same in (pictures / 255, torch.from_numpy(pictures).permute(0, 3, 1, 2)):
        assert np.abs(maps.overlay(same).astype(int) - expected).max() <= 1
    assert maps.overlay(pictures[..., 0]).shape == expected.shape
    assert np.abs(maps.to(torch.bfloat16).overlay(pictures).astype(int) - expected).max() <= 4


def test_overlays_of_one_target_are_comparable_on_its_scale(maps):
    weak = replace(maps, maps=maps.maps / 4, nu=maps.nu / 4)[:1]
    both, pictures = SignedMaps.cat([maps[:1], weak]), np.ones((2, 8, 8))
    own, shared = both.overlay(pictures), both.overlay(pictures, scale="target")
    assert (own[0] == own[1]).all()
    assert (own[0] == shared[0]).all()
    assert shared[1].min() > own[1].min()


def test_an_overlay_of_two_parts_shows_both():
    maps = of_values([1.0, 0.0], opposite=torch.tensor([0.0, 1.0]).reshape(1, 1, 1, 2))
    expected = of_values([1.0, -1.0]).overlay(np.ones((1, 1, 2)))
    assert (maps.overlay(np.ones((1, 1, 2))) == expected).all()


@pytest.mark.parametrize(
    ("change", "pictures", "scale", "message"),
    [
        ({}, np.ones((2, 4, 4)), "map", r"2 pictures for maps of shape \(1, 1, 1, 2\)"),
        ({}, np.ones((1, 4, 4)), "none", "scale must be one of"),
        ({}, 2 * np.ones((1, 4, 4)), "map", r"undo the normalisation"),
        ({"maps": torch.ones(1, 1, 2, 2, 2)}, np.ones((1, 4, 4)), "map", "plot_volume"),
        ({"maps": torch.full((1, 1, 1, 2), torch.nan)}, np.ones((1, 4, 4)), "map", "not finite"),
    ],
)
def test_overlays_that_cannot_be_made(change, pictures, scale, message):
    with pytest.raises(ValueError, match=message):
        replace(of_values([1.0, 0.0]), **change).overlay(pictures, scale)


def test_an_overlay_warns_of_maps_without_anything_on_them():
    with pytest.warns(BlankMapWarning, match=r"image 0, PCATarget\(0\): there is no gradient"):
        of_values([0.0, 0.0]).overlay(np.ones((1, 1, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_values([-1.0, 0.0]).overlay(np.ones((1, 1, 2)))  # blue is something
