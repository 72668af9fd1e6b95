"""An app in the browser: drop a photo, and see what your network and head predict, and why.

It takes a model from the command line's ``fit``, and runs on your own computer: photos stay there. It needs Gradio,
which ``pip install ".[app]"`` installs.

    pcasvm-cam fit photos
    python examples/app.py model.safetensors
"""

import argparse
import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.data import Images, in_colour
from pytorch_grad_cam_pcasvm.figures import plot_decision, plot_maps

SHOWN = 4  # components


@dataclass
class Answers:
    """Explains one photo after the other.

    Attributes:
        model: the backbone, the head, and the preparation of photos.
        cam: the method.
    """

    model: package.Model
    cam: Any

    def __call__(self, photo: str | Path, number: int) -> tuple[Any, ...]:
        """Return what the network says of a photo, its scores, its components, and figures of the maps.

        Args:
            photo: the photo's file.
            number: of the class to explain; -1: the predicted class.

        Returns:
            The prediction and any doubts, in Markdown; a row for each score; a row for each component; a picture of
            the maps; one of how they add up to the decision, or None for a method whose maps do not.

        Raises:
            ValueError: the photo cannot be read.
        """
        preparation = self.model.preparation
        data = Images([in_colour(photo, **preparation.reading)], preparation.transform, thumbnails=0)
        read = data.read([0])
        if read.bad:
            raise ValueError(read.bad[0])
        target = package.SVMTarget() if number < 0 else package.SVMTarget(self.model.classes[number])
        x = read.images.to(next(self.cam.model.parameters()).device)
        with warnings.catch_warnings(record=True) as doubts, torch.no_grad():
            warnings.simplefilter("always", UserWarning)
            output = self.cam.model(x)
            b = 0 if output.components is None else output.components.shape[1]
            maps = self.cam.explain(x, [*map(package.PCATarget, range(b)), target])
        scores = [
            [k, rounded(value)] for k, value in zip(self.model.classes or ["value"], output[0].tolist(), strict=True)
        ]
        picture = data.picture(read.images[0].float()).clamp(0, 1)[None]
        drawing = drawn(plot_maps(picture, maps, signed=True, components=SHOWN))
        sums = None
        if b and maps.baseline_values is not None:
            sums = drawn(plot_decision(picture, maps[:, :b], self.cam.model.head, target, count=SHOWN))
        told = [f"**{output.labels()[0]}**", *(str(doubt.message) for doubt in doubts)]
        components = [[f"P{k + 1}", rounded(value)] for k, value in enumerate(maps.values[0, :b].tolist())]
        return "\n\n".join(told), scores, components, drawing, sums


def rounded(value: float) -> float:
    """Return a number as the page shows it."""
    return float(f"{value:.4g}")


def drawn(figure: Figure) -> Image.Image:
    """Return a figure as a picture."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return Image.open(file)


def page(answers: Answers) -> Any:
    """Return the page, a ``gradio.Blocks``; its endpoint is ``/explain``."""
    import gradio as gr

    choices = [("the predicted class", -1), *((str(label), k) for k, label in enumerate(answers.model.classes))]
    with gr.Blocks(title="Signed attention maps", analytics_enabled=False) as blocks:
        with gr.Row():
            with gr.Column(scale=1):
                # The file as it is: how deep pictures are scaled is for the package to say.
                photo = gr.Image(type="filepath", image_mode=None, label="Photo", height=320,
                                 sources=["upload", "clipboard"], buttons=[])  # fmt: skip
                chosen = gr.Dropdown(choices, value=-1, label="Explain", visible=len(choices) > 1)
                said = gr.Markdown()
                scores = gr.Dataframe(headers=["class", "score"], label="Scores", interactive=False)
                components = gr.Dataframe(headers=["component", "value"], label="Components", interactive=False)
            with gr.Column(scale=2):
                pictures = [gr.Image(show_label=False, format="png", interactive=False, buttons=[]) for _ in range(2)]
        outputs = [said, scores, components, *pictures]
        explain = {"fn": lambda given, k: answers(given, k) if given else ("", [], [], None, None), "outputs": outputs}
        photo.change(inputs=[photo, chosen], api_name="explain", **explain)
        chosen.change(inputs=[photo, chosen], api_name=False, **explain)
    return blocks


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="model.safetensors", help="model from 'pcasvm-cam fit'")
    parser.add_argument("--backbone", metavar="NAME", help="module:function, for a backbone of your own")
    parser.add_argument("--method", default="ContributionCAM", metavar="NAME", help="ContributionCAM (default), ...")
    parser.add_argument("--port", type=int, help="of the page (default: the first free one from 7860)")
    return parser.parse_args(arguments)


def answers_of(options: argparse.Namespace) -> Answers:
    """Return what explains photos with these options.

    Raises:
        ValueError: the model does not say how photos become images.
    """
    model = package.load_model(options.model, options.backbone)
    if model.preparation is None:
        raise ValueError(f"{options.model} has no transform: make it with 'pcasvm-cam fit', or fit_model(transform=)")
    return Answers(model, model.cam(getattr(package, options.method)))


def main() -> None:
    """Serve the page to this computer, until Ctrl-C."""
    options = parsed()
    try:
        blocks = page(answers_of(options))
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    blocks.launch(server_name="127.0.0.1", server_port=options.port, show_error=True)


if __name__ == "__main__":
    main()
