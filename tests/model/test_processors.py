"""Image processors, as Hugging Face has them, in the place of a transform: what they return is a dict for a batch."""

import warnings
from collections import UserDict

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn
from torch.utils.data import DataLoader, default_collate
from torchvision.transforms import v2

from pytorch_grad_cam_pcasvm import fit_model, load_model
from pytorch_grad_cam_pcasvm.data import Images
from pytorch_grad_cam_pcasvm.studio.cli.preparation import choose_preparation
from pytorch_grad_cam_pcasvm.studio.model.backbones import Backbone
from pytorch_grad_cam_pcasvm.studio.model.description import Origin

HEAD = make_pipeline(StandardScaler(), PCA(3), SVC())
LABELS = torch.arange(16) % 2


class Processor:
    """What AutoImageProcessor.from_pretrained returns, for a picture of PIL or an array (H, W, C)."""

    def __init__(self, mean=0.5, do_rescale=True):
        self.image_mean, self.image_std, self.do_normalize, self.do_rescale = [mean] * 3, [0.25] * 3, True, do_rescale

    def __call__(self, picture, return_tensors=None):
        resized = picture.resize((16, 16)) if isinstance(picture, Image.Image) else picture
        image = np.asarray(resized, np.float32) * (1 / 255 if self.do_rescale else 1)
        image = np.float32((image - self.image_mean) / self.image_std).transpose(2, 0, 1)
        forms = {None: [image], "np": image[None], "pt": torch.from_numpy(image)[None]}
        return UserDict(pixel_values=forms[return_tensors])


def by_hand(picture):
    """The same image, as one would write it."""
    return (torch.from_numpy(np.array(picture.resize((16, 16)))).permute(2, 0, 1).float() / 255 - 0.5) / 0.25


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


def pictures():
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 156, (20, 24, 3), np.uint8) + np.uint8(99 * (n % 2))) for n in range(16)]


def loader(transform=by_hand):
    return [(torch.stack([transform(picture) for picture in pictures()]), LABELS)]


FORMS = {
    "the processor": Processor(),
    "a tensor": lambda picture: Processor()(picture, return_tensors="pt"),
    "an array": lambda picture: Processor()(picture, return_tensors="np"),
    "another key": lambda picture: {"image": by_hand(picture)},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_processor_is_a_transform(form, tmp_path):
    pictures()[0].save(tmp_path / "a.png")
    expected = fit_model(network(), loader(), HEAD, transform=by_hand, progress=False)
    model = fit_model(network(), loader(), HEAD, transform=FORMS[form], progress=False)
    for images in (tmp_path / "a.png", pictures()[:2]):
        torch.testing.assert_close(model.explain(images).maps, expected.explain(images).maps, rtol=1e-4, atol=1e-6)
    model.save(tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors", network(), FORMS[form])
    torch.testing.assert_close(again.read(tmp_path / "a.png")[0], by_hand(pictures()[0]))
    with pytest.raises(ValueError, match="the features of a picture, which the transform prepares, are others"):
        load_model(tmp_path / "model.safetensors", network(), Processor(mean=0.4))


def test_a_processor_prepares_data_sets():
    rows = [(picture, int(label)) for picture, label in zip(pictures(), LABELS, strict=True)]
    images = Images(rows, Processor())
    torch.testing.assert_close(images.read([0, 3]).images, torch.stack([by_hand(rows[n][0]) for n in (0, 3)]))
    undone = images.picture(by_hand(rows[0][0])) * 255  # as small pictures show it
    assert np.allclose(undone.permute(1, 2, 0), np.array(rows[0][0].resize((16, 16))), atol=1e-3)


@pytest.mark.parametrize("form", [None, "pt", "np"])
def test_a_loader_of_what_a_processor_returns(form):
    rows = [(dict(Processor()(picture, form)), label) for picture, label in zip(pictures(), LABELS, strict=True)]
    batches = DataLoader(rows, 8, collate_fn=default_collate)
    model = fit_model(network(), batches, HEAD, transform=Processor(), progress=False)
    expected = fit_model(network(), loader(), HEAD, progress=False)
    maps, by_tensor = model.explain(pictures()[:1]).maps, expected.explain(by_hand(pictures()[0])[None]).maps
    torch.testing.assert_close(maps, by_tensor, rtol=1e-4, atol=1e-6)


def test_pictures_that_are_scaled_twice_are_told():
    def twice(picture):
        return torch.from_numpy(Processor()(np.float32(picture.resize((16, 16))) / 255)["pixel_values"][0])

    with pytest.warns(UserWarning, match="as if they had been divided by 255 twice: make the processor with"):
        fit_model(network(), loader(twice), HEAD, transform=Processor(), progress=False)
    scaled = [(torch.rand(16, 16, 3).numpy(), 0)]
    with pytest.warns(UserWarning, match="divides pictures by 255 that are 0 to 1 already: make the processor with"):
        Images(scaled, Processor()).read([0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit_model(network(), loader(), HEAD, transform=Processor(), progress=False)
        image = Images(scaled, Processor(do_rescale=False)).read([0]).images[0]  # the way out
    np.testing.assert_allclose(image, (scaled[0][0].transpose(2, 0, 1) - 0.5) / 0.25, rtol=1e-5)


def test_results_that_are_no_image_are_refused_in_plain_words():
    model = fit_model(network(), loader(), HEAD, transform=lambda p: {"pixel_values": torch.ones(2, 3, 16, 16)})
    with pytest.raises(ValueError, match=r"the processor returns a tensor \(2, 3, 16, 16\) for a picture"):
        model.explain(pictures()[0])
    model.transform = lambda picture: np.array(picture)
    with pytest.raises(TypeError, match="the transform returns a ndarray, and one tensor"):
        model.explain(pictures()[0])


def test_the_function_of_a_backbone_may_return_a_processor():
    class Options:
        resize = size = tiles = tile = white_level = float_white = None

    backbone = Backbone(network(), Processor(), True, Origin("function", "my:backbone"))
    preparation = choose_preparation(backbone, Options(), None, fits=True)
    torch.testing.assert_close(preparation.transform(pictures()[0]), by_hand(pictures()[0]))


class Settings(Processor):
    """One that tells what it does, as those of Hugging Face: with Pillow, or with torchvision on bytes or on floats."""

    def __init__(self, resized, size=None, resample=2):
        super().__init__()
        self.resized, self.size, self.resample = resized, size or {"height": 16, "width": 16}, resample

    def __call__(self, picture, return_tensors=None):
        sides = [self.size["shortest_edge"]] if "shortest_edge" in self.size else [16, 16]
        image = picture if self.resized == "pictures" else v2.functional.pil_to_tensor(picture)
        image = image.float() / 255 if self.resized == "floats" else image
        image = v2.functional.resize(image, sides, ["nearest", "lanczos", "bilinear", "bicubic"][self.resample])
        image = v2.functional.to_dtype(v2.functional.to_image(image), torch.float32, scale=True)
        top, left = ((side - 16) // 2 for side in image.shape[1:])
        image = image[:, top : top + 16, left : left + 16]
        return UserDict(pixel_values=((torch.as_tensor(image) - 0.5) / 0.25)[None])


@pytest.mark.parametrize("settings", [{}, {"size": {"shortest_edge": 16}, "resample": 3}])
@pytest.mark.parametrize("resized", ["pictures", "bytes", "floats"])
def test_what_the_settings_of_a_processor_tell_is_stored(resized, settings, tmp_path):
    processor = Settings(resized, **settings)
    pictures()[0].save(tmp_path / "a.png")
    model = fit_model(network(), loader(lambda p: processor(p)["pixel_values"][0]), HEAD, transform=processor)
    assert model.preparation.maker.split()[-1] == resized
    model.save(tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors", network())
    torch.testing.assert_close(
        again.read(tmp_path / "a.png")[0], processor(pictures()[0])["pixel_values"][0], rtol=0, atol=1e-6
    )
    torch.testing.assert_close(again.explain(tmp_path / "a.png").maps, model.explain(tmp_path / "a.png").maps)


def test_a_processor_that_does_more_than_its_settings_tell_is_asked_for_again(tmp_path):
    class More(Settings):
        def __call__(self, picture, return_tensors=None):
            return UserDict(pixel_values=super().__call__(picture)["pixel_values"].flip(-1))

    model = fit_model(network(), loader(), HEAD, transform=More("pictures"), progress=False)
    model.save(tmp_path / "model.safetensors")
    assert load_model(tmp_path / "model.safetensors", network()).preparation is None


@pytest.mark.optional
@pytest.mark.parametrize("name", ["ViTImageProcessor", "BitImageProcessor"])
@pytest.mark.parametrize("form", ["", "Pil"])
def test_processors_of_hugging_face(name, form, tmp_path):
    transformers = pytest.importorskip("transformers")
    make = getattr(transformers, name + form, getattr(transformers, name))
    size = {"height": 16, "width": 16}
    settings = {"size": size} if name.startswith("ViT") else {"size": {"shortest_edge": 16}, "crop_size": size}
    processor = make(**settings)
    pictures()[0].save(tmp_path / "a.png")

    def ready(picture):
        return processor(picture, return_tensors="pt")["pixel_values"][0]

    model = fit_model(network(), loader(ready), HEAD, transform=processor, progress=False)
    expected = fit_model(network(), loader(ready), HEAD, progress=False).explain(ready(pictures()[0])[None])
    assert torch.equal(model.explain(tmp_path / "a.png").maps, expected.maps)
    model.save(tmp_path / "model.safetensors")
    for transform in (processor, None):
        again = load_model(tmp_path / "model.safetensors", network(), transform)
        torch.testing.assert_close(again.read(tmp_path / "a.png")[0], ready(pictures()[0]), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="the features of a picture, which the transform prepares, are others"):
        load_model(tmp_path / "model.safetensors", network(), make(**settings, image_mean=[0.3] * 3))
