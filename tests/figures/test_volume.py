"""Volumes: the figure of slices, the example, and MONAI's dicts."""

import sys
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
import torch
import volume as example
from reference import missing, relative
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ClosedFormLayerCAM,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    SignedMaps,
    SVMTarget,
    atlas,
    extract_features,
    mean_activations,
)
from pytorch_grad_cam_pcasvm.figures import plot_volume
from pytorch_grad_cam_pcasvm.studio.figures.style import number

SIZE = (8, 12, 10)
X = torch.randn(12, 1, *SIZE, generator=torch.Generator().manual_seed(0))
Y = np.arange(12) % 2


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.AvgPool3d(2), nn.Flatten()).eval()


@pytest.fixture(scope="module")
def net():
    backbone = network()
    names = np.array(["benign", "malignant"])
    return PCASVMNet(backbone, make_pipeline(PCA(3), SVC()).fit(backbone(X).detach().numpy(), names[Y]))


@pytest.fixture(scope="module")
def maps(net):
    return ContributionCAM(net, ["2"]).explain(X[:3])


def made(values, nu=None, **options):
    """Return maps of these values, shape (N, K, D, H, W), of as many components."""
    values = torch.as_tensor(values, dtype=torch.float32)
    n, k = values.shape[:2]
    nu = values.abs().flatten(2).amax(2) if nu is None else nu
    zeros = torch.zeros(n, k)
    return SignedMaps(values, zeros[..., None], zeros, nu, zeros, [PCATarget(b) for b in range(k)], zeros, **options)


def pictures(figure):
    """Return what is drawn last in every picture, without bars."""
    return [axis.images[-1] for axis in figure.axes if axis.images]


def arrays(figure):
    return [np.asarray(picture.get_array()) for picture in pictures(figure)]


def texts_of(figure):
    """Return all text around the pictures: titles of slices above, of targets at the left, the note below."""
    of_axes = (text for axis in figure.axes for text in (axis.title, axis.yaxis.label, *axis.texts))
    return [text for text in (*figure.texts, *of_axes) if text.get_text()]


def words(figure):
    return [text.get_text() for text in texts_of(figure)]


def slices_of(figure):
    return [int(text) for text in words(figure) if text.isdigit()]


def test_a_row_for_the_volume_and_for_each_target(maps):
    figure = plot_volume(X[:3], maps, image=1, slices=[2, 5, 6])
    drawn = arrays(figure)
    assert len(drawn) == 3 * (1 + 4)
    assert slices_of(figure) == [2, 5, 6]
    exact = F.interpolate(maps.maps, SIZE, mode="trilinear", align_corners=False)[1]
    for line, k in enumerate([3, 0, 1, 2]):  # the decision first
        for column, n in enumerate([2, 5, 6]):
            assert relative(drawn[3 + 3 * line + column], exact[k, n] / maps.nu[1, k]) < 1e-5
    assert all((picture.norm.vmin, picture.norm.vmax) == (-1, 1) for picture in pictures(figure)[3:])
    bars = [axis.child_axes[0] for axis in figure.axes if axis.child_axes]
    tops = [bar.get_yticklabels()[1].get_text() for bar in bars]
    assert tops == [number(float(nu)) for nu in maps.nu[1, [3, 0, 1, 2]]]
    text = "\n".join(words(figure))
    label, value = maps.output.labels()[1], number(float(maps.values[1, 3]))
    assert f"predicted class\n{label}: {value}" in text
    assert f"component 1\nvalue {number(float(maps.values[1, 0]))}" in text
    assert "Value at the start + everything on the map of the whole volume = " in text
    assert "slice of 8" in text


@pytest.mark.slow
def test_words_are_readable_where_a_readme_shows_them(maps, tmp_path):
    """About 850 pixels wide, letters of 10 pixels at least."""
    figure = plot_volume(X[:3], maps)
    pixels = 850 / figure.get_size_inches()[0]
    sizes = [text.get_fontsize() / 72 * pixels for text in texts_of(figure)]
    assert min(sizes) >= 10
    figure.savefig(tmp_path / "volume.png")
    boxes = [text.get_window_extent() for text in texts_of(figure)]
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)
    titles = [box for text, box in zip(texts_of(figure), boxes, strict=True) if "value" in text.get_text()[:30]]
    assert titles
    assert all(box.x1 < min(a.get_window_extent().x0 for a in figure.axes) for box in titles)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_along_every_axis(axis):
    values = torch.randn(1, 1, *SIZE)
    volume = torch.rand(1, 1, *SIZE)
    figure = plot_volume(volume, made(values), axis=axis, slices=[1, 7], window=(0, 1), overlay=False)
    drawn = arrays(figure)
    for i, n in enumerate([1, 7]):
        assert np.allclose(drawn[i], volume[0, 0].select(axis, n))
        assert relative(drawn[2 + i], values[0, 0].select(axis, n) / values.abs().max()) < 1e-6
    assert ("depth", "height", "width")[axis] in "".join(words(figure))


@pytest.mark.slow
def test_pictures_have_the_proportions_of_the_body():
    volume = torch.rand(1, *SIZE)
    axes = plot_volume(volume, made(torch.rand(1, 1, *SIZE)), axis=1, slices=1, spacing=(2.5, 1, 1)).axes
    box = axes[0].get_window_extent()
    assert box.height / box.width == pytest.approx(8 * 2.5 / 10)
    thin = plot_volume(volume[..., :1], made(torch.rand(1, 1, 8, 12, 1)), slices=1).axes[0].get_window_extent()
    assert thin.width > 40


@pytest.mark.slow
def test_the_slices_where_the_maps_are_largest():
    values = torch.zeros(2, 2, 40, 3, 3)
    values[1, 0, 10, 1, 1], values[1, 0, 11, 1, 1], values[1, 1, 30, 0, 2] = 3.0, 2.9, -0.001
    figure = plot_volume(torch.rand(2, 40, 3, 3), made(values), image=1)
    chosen = slices_of(figure)
    assert {10, 30} <= set(chosen)
    assert len(chosen) == 5
    assert np.diff(chosen).min() >= 4
    assert "where maps are largest" in " ".join(words(figure))
    only = plot_volume(torch.rand(2, 40, 3, 3), made(values), image=1, components=[1])
    assert 30 in slices_of(only)
    assert 10 not in slices_of(only)
    blank = plot_volume(torch.rand(2, 40, 3, 3), made(values), image=0)
    assert slices_of(blank) == [4, 12, 20, 28, 36]
    assert any("blank: all zero" in text for text in words(blank))
    assert "equally spaced" in " ".join(words(blank))


def test_slices_are_those_of_the_volume_where_maps_are_coarser():
    values = torch.zeros(1, 1, 4, 3, 3)
    values[0, 0, 3] = 1
    chosen = slices_of(plot_volume(torch.rand(1, 1, 32, 6, 6), made(values)))
    assert max(chosen) in range(28, 32)
    assert slices_of(plot_volume(torch.rand(1, 1, 32, 6, 6), made(values), slices=4)) == [4, 12, 20, 28]
    assert slices_of(plot_volume(torch.rand(1, 1, 3, 6, 6), made(values))) == [0, 1, 2]


def test_what_has_an_opposite_of_its_own_is_blue_where_that_is(net):
    maps = ClosedFormLayerCAM(net, ["2"]).explain(X[:1], [PCATarget(0)])
    assert maps.opposite is not None
    drawn = plot_volume(X[:1], maps, slices=8)
    exact = F.interpolate(maps.maps.relu() - maps.opposite.relu(), SIZE, mode="trilinear")[0, 0] / maps.nu[0, 0]
    assert relative(np.stack(arrays(drawn)[8:]), exact) < 1e-5
    assert min(array.min() for array in arrays(drawn)[8:]) < 0


def test_targets_and_names_are_chosen_as_in_plot_maps(maps):
    figure = plot_volume(X[:3], maps, components=[2, 0], classes=["good", "bad"], title="scan 7", slices=2)
    text = "\n".join(words(figure))
    assert len(arrays(figure)) == 2 * 4
    assert text.index("component 3") < text.index("component 1")
    assert "component 2" not in text
    assert "scan 7" in text
    assert "2 of 3 components are shown." in text
    assert ("good" if maps.output.labels()[0] == "benign" else "bad") in text
    one = plot_volume(X[:3], maps[:, [3]], slices=2)
    assert len(arrays(one)) == 2 * 2


@pytest.mark.slow
def test_grey_values_outlines_and_bare_maps(maps):
    volume = 1000 * X[:3] - 300
    grey = np.stack(arrays(plot_volume(volume, maps, slices=8, window=(-300, 700)))[:8])
    assert np.allclose(grey, X[0, 0].clip(0, 1), atol=1e-5)
    grey = np.stack(arrays(plot_volume(volume, maps, slices=8))[:8])
    assert (grey.min(), grey.max()) == (0, 1)
    mask = torch.zeros(3, *SIZE, dtype=torch.bool)
    mask[0, 3:5, 4:8, 4:8] = True
    for outline in (mask, mask[:, None].float()):
        axes = plot_volume(volume, maps, slices=[0, 3], outline=outline, overlay=False).axes
        outlined = [
            any(isinstance(c, mpl.contour.ContourSet) for c in axis.collections) for axis in axes if axis.images
        ]
        assert sum(outlined) == 5
        assert len(axes[2].images) == 1
    flat = plot_volume(torch.ones(1, 1, 4, 4, 4), made(torch.rand(1, 1, 4, 4, 4)))
    assert not arrays(flat)[0].any()


@pytest.mark.slow
def test_precisions(maps):
    expected = np.stack(arrays(plot_volume(X[:3], maps, slices=3))[3:])
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        drawn = arrays(plot_volume(X[:3].to(dtype), maps.to(dtype), slices=3))
        assert relative(np.stack(drawn[3:]), expected) < 0.02


GOOD = made(torch.rand(2, 2, 4, 5, 6))
VOLUME = torch.rand(2, 1, 4, 5, 6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"maps": GOOD.maps}, TypeError, "one SignedMaps, as returned by explain, got Tensor"),
        ({"maps": {"a": GOOD}}, TypeError, "one SignedMaps, as returned by explain, got dict"),
        ({"volume": VOLUME[:1]}, ValueError, r"\(1, 1, 4, 5, 6\) for maps of shape .*: give the 2 that were explained"),
        ({"volume": VOLUME[0, 0]}, ValueError, r"single one needs volume\[None\]"),
        ({"volume": VOLUME * np.nan}, ValueError, "NaN or infinite"),
        ({"image": 2}, ValueError, "image must be one of the 2 volumes, from 0 to 1, got 2"),
        ({"image": -1}, ValueError, "from 0 to 1, got -1"),
        ({"image": True}, ValueError, "got True"),
        ({"axis": 3}, ValueError, "axis must be 0, 1 or 2"),
        ({"axis": "D"}, ValueError, "axis must be 0, 1 or 2"),
        ({"slices": [1, 4]}, ValueError, r"slices=\[1, 4\]: those along the depth are numbered from 0 to 3"),
        ({"slices": [-1]}, ValueError, "numbered from 0 to 3"),
        ({"slices": 5}, ValueError, "slices=5: there are 4 along the depth"),
        ({"slices": 0}, ValueError, "draw at least one"),
        ({"slices": []}, ValueError, "a count or some numbers"),
        ({"slices": [0.5]}, ValueError, "a count or some numbers"),
        ({"slices": True}, ValueError, "a count or some numbers"),
        ({"slices": "all"}, ValueError, "a count or some numbers"),
        ({"components": [2]}, ValueError, r"these maps have components \[0, 1\]"),
        ({"components": 0}, ValueError, "leaves nothing to draw"),
        ({"classes": ["a", "b", "c"], "maps": "of a head"}, ValueError, "3 names for 2 classes"),
        ({"window": (3, 3)}, ValueError, "window must be the values shown black and white"),
        ({"spacing": (1, 0, 1)}, ValueError, "three positive numbers"),
        ({"spacing": (1, 1)}, ValueError, "three positive numbers"),
        ({"outline": VOLUME[0]}, ValueError, r"an outline of shape \(1, 4, 5, 6\) for volumes of shape \(2, 4, 5, 6\)"),
    ],
)
def test_bad_input_is_refused(options, error, message, maps):
    given = {"volume": VOLUME, "maps": GOOD, **options}
    if isinstance(given["maps"], str):
        given |= {"volume": X[:3], "maps": maps}
    with pytest.raises(error, match=message):
        plot_volume(**given)


def test_maps_of_images_are_refused():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 6 * 6, 3)).eval()
    x = torch.rand(2, 1, 8, 8)
    with pytest.raises(
        ValueError, match=r"the shape \(N, K, D, H, W\), .*\(2, 1, 6, 6\): plot_maps draws maps of images"
    ):
        plot_volume(x, ClosedFormGradCAM(net, ["1"]).explain(x))


FEW = ["--volumes", "24", "--epochs", "1"]


@pytest.mark.usefixtures("same_threads")
@pytest.mark.document
@pytest.mark.optional
def test_the_example_writes_nifti_in_the_geometry_of_the_input(tmp_path, capsys):
    nibabel = pytest.importorskip("nibabel")
    out = tmp_path / "new" / "volume.png"
    example.main([*FEW, "--out", str(out)])
    said = capsys.readouterr().out
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "RBF SVM" in said
    assert "% of the positive evidence" in said
    names = ["input", "margin", "p1", "p2", "p3"]
    assert sorted(path.name for path in out.parent.glob("*.nii.gz")) == [f"volume-{name}.nii.gz" for name in names]
    test = example.Shapes(6, 1)
    read = {name: nibabel.load(out.with_name(f"volume-{name}.nii.gz")) for name in names}
    for image in read.values():
        assert image.shape == example.SIZE
        np.testing.assert_array_equal(image.affine, example.AFFINE)
        assert image.header.get_zooms() == example.SPACING
    np.testing.assert_array_equal(read["input"].get_fdata(dtype=np.float32), test.images[1, 0])
    assert read["margin"].get_fdata().any()


@pytest.mark.usefixtures("same_threads")
@pytest.mark.document
@pytest.mark.slow
def test_the_example_without_nibabel_says_so_and_gives_the_same_numbers_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    example.main([*FEW, "--out", str(tmp_path / "a.png"), "--row", "0"])
    first = capsys.readouterr().out
    assert "nibabel is not installed" in first
    example.main([*FEW, "--out", str(tmp_path / "b.png"), "--row", "0"])
    assert capsys.readouterr().out.split("arrays")[0] == first.split("arrays")[0]
    for name in ("input", "margin", "p1", "p2", "p3"):
        one, other = (np.load(tmp_path / f"{run}-{name}.npy") for run in "ab")
        np.testing.assert_array_equal(one, other)
    assert not list(tmp_path.glob("*.nii.gz"))


def test_the_arrays_of_the_example_are_the_maps_voxel_by_voxel():
    volumes = example.Shapes(4, 0)
    assert volumes.masks.flatten(1).sum(1).min() > 100
    values = torch.randn(4, 2, 12, 12, 12)
    written = example.in_input_geometry(made(values))
    assert written.shape == (4, 2, *example.SIZE)
    assert relative(written, F.interpolate(values, example.SIZE, mode="trilinear")) < 1e-6
    constant = example.in_input_geometry(made(torch.full((1, 1, 12, 12, 12), -2.0)))
    assert np.allclose(constant, -2)
    # Twice as fine along each side: the sums are eight times as large.
    assert missing(values.flatten(2), torch.as_tensor(written).sum((2, 3, 4)) / 8) < 1e-6


def test_the_share_on_the_object_is_known_where_the_answer_is():
    masks = example.Shapes(6, 3).masks
    full = made(torch.ones(6, 1, *example.SIZE))
    assert example.on_object(full, masks) == pytest.approx(masks.float().mean().item())
    assert example.on_object(made(masks[:, None].float() - 0.5), masks) == 1
    assert example.on_object(made(-torch.ones(6, 1, *example.SIZE)), masks) == 0


def test_dicts_in_an_atlas(net, tmp_path):
    rows = [{"image": x, "label": int(y)} for x, y in zip(X, Y, strict=True)]
    store = atlas.build(net, rows, ["2"], tmp_path / "atlas", progress=False)
    assert store.labels.tolist() == Y.tolist()
    assert store.maps([3]).maps.shape == (1, 3, 4, 6, 5)
    with pytest.raises(RuntimeError, match="no image among"):
        atlas.build(net, [{"scan": X[0]}], ["2"], tmp_path / "other", progress=False)


@pytest.mark.optional
def test_loaders_of_monai(net, tmp_path):
    data = pytest.importorskip("monai.data")
    transforms = pytest.importorskip("monai.transforms")
    rows = [{"image": x, "label": int(y)} for x, y in zip(X.numpy(), Y, strict=True)]
    dataset = data.Dataset(rows, transforms.Compose([transforms.EnsureTyped("image")]))
    loader = data.DataLoader(dataset, batch_size=5)
    assert type(next(iter(loader))["image"]) is data.MetaTensor

    backbone = network()
    exact, _ = extract_features(backbone, [X], progress=False)
    features, labels = extract_features(backbone, loader, progress=False)
    assert relative(features, exact) < 1e-6
    assert labels.tolist() == Y.tolist()
    unlabelled = data.DataLoader(data.Dataset([{"image": row["image"]} for row in rows]), batch_size=5)
    assert extract_features(backbone, unlabelled, progress=False)[1] is None
    tensors, numbers = extract_features(backbone, loader, as_numpy=False, progress=False)
    assert type(tensors) is type(numbers) is torch.Tensor
    mean = mean_activations(net, loader, "2", progress=False)
    assert type(mean) is torch.Tensor
    assert relative(mean, mean_activations(net, [X], "2", progress=False)) < 1e-6

    batch = next(iter(loader))["image"]
    cam = ContributionCAM(net, ["2"], baseline=mean)
    maps, expected = cam.explain(batch, SVMTarget()), cam.explain(X[:5], SVMTarget())
    assert type(maps.maps) is torch.Tensor
    assert torch.equal(maps.maps, expected.maps)
    assert net.predict(batch).tolist() == net.predict(X[:5]).tolist()
    assert len(arrays(plot_volume(batch, maps, slices=2))) == 4
    store = atlas.build(net, dataset, ["2"], tmp_path / "atlas", progress=False)
    assert store.labels.tolist() == Y.tolist()
    assert relative(store.components, net(X).components) < 1e-5


def test_slices_are_pale_and_hatched_where_the_map_is_not_sure(maps):
    chosen = maps[:, -1:]
    error = torch.zeros_like(chosen.maps)
    error[..., error.shape[-1] // 2 :] = 1e6  # along the width, which is across each slice
    known = replace(chosen, error=error, values_error=torch.ones_like(chosen.values), _resamples=30)
    drawn, plain = (plot_volume(X[:3], of, slices=[3]) for of in (known, chosen))
    numbers, expected = (
        next(np.asarray(axis.images[-1].get_array()) for axis in figure.axes if len(axis.images) == 2)
        for figure in (drawn, plain)
    )
    times = len(numbers) // SIZE[1]
    expected = expected.repeat(times, 0).repeat(times, 1)
    border = -(-(error.shape[-1] // 2) * SIZE[2] // error.shape[-1]) * times
    np.testing.assert_array_equal(numbers[:, :border], expected[:, :border])
    share = numbers[:, border:] / expected[:, border:]
    assert set(share[np.isfinite(share)].astype(float).round(2)) == {0.2, 0.75}
    texts = ["\n".join(text.get_text() for text in figure.findobj(mpl.text.Text)) for figure in (drawn, plain)]
    assert "Pale and hatched" in texts[0].replace("\n", " ")
    assert "±" in texts[0]
    assert "hatched" not in texts[1]
