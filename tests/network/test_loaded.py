"""What a loader gives: pictures with NaN, named by number and path; labels of several numbers; tables of set_output."""

import numpy as np
import pytest
import sklearn
import torch
from sklearn.decomposition import PCA, IncrementalPCA
from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from pytorch_grad_cam_pcasvm import extract_features, fit_model
from pytorch_grad_cam_pcasvm.network.inputs import make_inputs
from pytorch_grad_cam_pcasvm.network.loaded import refuse_nan
from pytorch_grad_cam_pcasvm.studio.data.images import Images

torch.manual_seed(0)
NET = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
IMAGES = torch.rand(12, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 3
BAD = IMAGES.clone()
BAD[7, :, 2, 2] = torch.nan


class Pictures(Dataset):
    """As torchvision's folders: it knows the file of each picture."""

    def __init__(self):
        self.samples = [(f"folder/{number}.png", 0) for number in range(12)]

    def __len__(self):
        return 12

    def __getitem__(self, number):
        return BAD[number], int(LABELS[number])


def head():
    return make_pipeline(StandardScaler(), PCA(3), SVC())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "options", [{}, {"layer": "0", "pool": "dense"}, {"as_numpy": False}, {"fit": StandardScaler()}]
)
def test_a_picture_that_is_not_finite_is_named_by_its_number(value, options):
    bad = torch.where(BAD.isnan(), value, BAD)
    with pytest.raises(ValueError, match=r"picture 7 has NaN or infinite values.*leave it out"):
        extract_features(NET, [(bad[:5], LABELS[:5]), (bad[5:], LABELS[5:])], progress=False, **options)
    keep = torch.arange(12) != 7
    extract_features(NET, [(bad[keep], LABELS[keep])], progress=False, **options)
    extract_features(NET, [(bad.nan_to_num(posinf=1.0), LABELS)], progress=False, **options)


def test_it_is_named_by_its_file_where_that_is_known():
    loader = DataLoader(Pictures(), batch_size=5)
    for call in (extract_features, lambda *a, **k: fit_model(*a, head(), layer=None, **k)):
        with pytest.raises(ValueError, match=r"picture 7 \(folder/7.png\) has NaN"):
            call(NET, loader, progress=False)
    with pytest.raises(ValueError, match=r"picture 2 \(folder/7.png\) has NaN"):
        extract_features(NET, DataLoader(Subset(Pictures(), [0, 3, 7]), batch_size=2), progress=False)
    with pytest.raises(ValueError, match=r"picture \d+ has NaN"):  # of a random order no file is known
        extract_features(NET, DataLoader(Pictures(), batch_size=5, shuffle=True), progress=False)


def test_a_network_that_makes_nan_is_told_from_a_picture_that_has_it():
    class Logarithm(nn.Module):
        def forward(self, x):
            return x.log()

    broken = nn.Sequential(*NET[:2], nn.AdaptiveAvgPool2d(1), nn.Flatten(), Logarithm())
    with pytest.raises(
        ValueError, match="the network makes NaN or infinity of picture 0, whose own numbers are finite"
    ):
        extract_features(broken, [torch.zeros(3, 3, 8, 8) - 100], progress=False)
    several = make_inputs({"rgb": IMAGES, "depth": BAD})
    with pytest.raises(ValueError, match="picture 7 has NaN"):
        refuse_nan(torch.where(torch.arange(12) == 7, torch.nan, 0.0).unsqueeze(1), several, 0, None)


@pytest.mark.parametrize("output", ["pandas", "polars"])
def test_tables_of_set_output_become_arrays(output):
    pytest.importorskip(output)
    loader = [IMAGES[:6], IMAGES[6:]]
    expected, _ = extract_features(NET, loader, fit=make_pipeline(StandardScaler(), IncrementalPCA(2)), progress=False)
    own = make_pipeline(StandardScaler(), IncrementalPCA(2)).set_output(transform=output)
    found, _ = extract_features(NET, loader, fit=own, progress=False)
    assert isinstance(found, np.ndarray)
    assert np.abs(found - expected).max() < 1e-6
    with sklearn.config_context(transform_output=output):
        again = make_pipeline(StandardScaler(), IncrementalPCA(2))
        found, _ = extract_features(NET, loader, fit=again, progress=False)
    assert np.abs(found - expected).max() < 1e-6


class Table:
    """A table of pandas or polars, as far as NumPy knows it: its numbers are read-only."""

    def __init__(self, rows):
        self.rows = rows
        self.rows.flags.writeable = False

    def __array__(self, dtype=None, copy=None):
        return self.rows


class OfTables(IncrementalPCA):
    def transform(self, X):  # noqa: N803 - scikit-learn's name
        return Table(super().transform(X))


class ScaledTable(StandardScaler):
    def transform(self, X):  # noqa: N803 - scikit-learn's name
        return Table(super().transform(X))


@pytest.mark.filterwarnings("error:The given NumPy array is not writable")
def test_what_turns_into_an_array_is_taken_as_one(request):
    torch.set_warn_always(True)  # and not once
    request.addfinalizer(lambda: torch.set_warn_always(False))
    loader = [IMAGES[:6], IMAGES[6:]]
    expected, _ = extract_features(NET, loader, fit=make_pipeline(StandardScaler(), IncrementalPCA(2)), progress=False)
    found, _ = extract_features(NET, loader, fit=make_pipeline(ScaledTable(), OfTables(2)), progress=False)
    assert np.abs(found - expected).max() < 1e-6


def test_several_labels_for_a_picture_are_told_in_plain_words():
    one_hot = torch.eye(3, dtype=int)[LABELS]
    with pytest.raises(ValueError, match=r"3 labels for each picture, one-hot, and SVC takes one .*labels.argmax\(1\)"):
        fit_model(NET, [(IMAGES, one_hot)], head(), layer=None, progress=False)
    fit_model(NET, [(IMAGES, one_hot.argmax(1))], head(), layer=None, progress=False)
    several = torch.stack([LABELS > 0, LABELS > -1 + LABELS % 2], 1).int()
    several[0] = 0
    with pytest.raises(ValueError, match=r"2 labels for each picture, several at a time, and SVC takes one"):
        fit_model(NET, [(IMAGES, several)], head(), layer=None, progress=False)
    outputs = make_pipeline(StandardScaler(), PCA(3), MultiOutputClassifier(SVC()))
    assert fit_model(NET, [(IMAGES, several)], outputs, layer=None, progress=False).net.head.vote.about == "outputs"


@pytest.mark.parametrize("label", [np.eye(3, dtype=int)[1], [1, 0, 1]])
def test_an_atlas_says_that_it_keeps_one_label(label):
    data = [(image, label) for image in IMAGES]
    with pytest.raises(
        TypeError, match=r"the label of an image is \[.*\], 3 numbers, but one number or string is kept"
    ):
        Images(data).read([0])
    assert Images([(image, int(np.argmax(label))) for image in IMAGES]).read([0]).labels == [int(np.argmax(label))]


def test_an_archive_of_arrays_is_no_folder(tmp_path):
    np.savez(tmp_path / "pictures.npz", train_images=IMAGES.numpy())
    with pytest.raises(ValueError, match=r"pictures.npz holds arrays of NumPy's, and is no folder.*TensorDataset"):
        Images(tmp_path / "pictures.npz", lambda image: image)
