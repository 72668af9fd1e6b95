"""Sheets: the maps of a photo beside each other, with titles, values and colours."""

from typing import Any

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from pytorch_grad_cam_pcasvm.studio.pictures.answers import MISSED, MOVED, Answers, Judgement
from pytorch_grad_cam_pcasvm.studio.pictures.frames import WHOLE
from pytorch_grad_cam_pcasvm.studio.pictures.panels import (
    FADED,
    GAP,
    LARGE,
    SPREAD,
    TEXT,
    TILE,
    UNSTABLE,
    UNSURE,
    ColourScale,
    Panel,
    draw_boxes,
    draw_hatching,
    fade_unsure,
    fit_picture,
    grey_out,
    load_font,
    mix_colours,
    place_values,
    read_colours,
    shorten,
    wrap_text,
)

PALE = 2 / 3  # of what good patches reach: less has no colour
FAINT = 0.1  # of the scale of a map: less has no line around it
BEFORE = 1e-3  # of a value: a start of less is not worth a word
RIGHT, WRONG, UNLIKE, OPEN = "#1b7837", "#b2182b", "#b45309", "#555555"


class Sheets(Answers):
    """The pictures of explanations: maps beside their photo, with titles, values and colour bars.

    Attributes:
        outline: surround the strongest evidence by lines on the photo, instead of colours over it.
    """

    outline = False

    def __init__(self, about: dict[str, Any]) -> None:
        super().__init__(about)
        self._colours = read_colours(about["colours"])

    def overlay(
        self, picture: Image.Image, values: np.ndarray, frame: Any = WHOLE, sure: np.ndarray | None = None
    ) -> Image.Image:
        """Return a signed map (H, W) in [-1, 1] over its picture in grey: red raises the value, blue lowers it.

        Args:
            picture: the picture.
            values: the map.
            frame: the part of the picture that the map is of, see :func:`find_frame`.
            sure: where its sign is sure, a mask (h, w); the rest is pale and hatched. None: not known.
        """
        values = place_values(values.astype(np.float32), picture.size, frame, Image.Resampling.BILINEAR, 0.0)
        if sure is not None:
            values = fade_unsure(values, _place_mask(sure, picture, frame))
        count = len(self._colours)
        place = np.clip((0.5 + 0.5 * values) * count, 0, count - 1).astype(int)
        opacity = 0.95 * np.abs(np.linspace(-1, 1, count)[place])[..., None] ** 0.7
        return mix_colours(opacity, self._colours[place], grey_out(picture))

    def outlined(
        self, picture: Image.Image, values: np.ndarray, frame: Any = WHOLE, sure: np.ndarray | None = None
    ) -> Image.Image:
        """Return a picture with lines around where a map (H, W) exceeds half of its largest value of either sign.

        What is below a tenth of the scale has no line; what is not sure of the rest is hatched, and has a pale one. The
        arguments are those of :meth:`overlay`.
        """
        values = place_values(values.astype(np.float32), picture.size, frame, Image.Resampling.BILINEAR, 0.0)
        drawn = picture.convert("RGB")
        is_sure = np.ones(values.shape, bool) if sure is None else _place_mask(sure, picture, frame)
        hatched = draw_hatching(values.shape) & ~is_sure
        strength = Image.fromarray(np.where(is_sure, 255, round(255 * FADED)).astype(np.uint8))
        for signed, colour in ((values, WRONG), (-values, "#2166ac")):
            if signed.max() < FAINT:
                continue
            strong = signed >= signed.max() / 2
            drawn.paste(colour, mask=Image.fromarray(np.where(strong & hatched, 255, 0).astype(np.uint8)))
            inside = Image.fromarray(np.where(strong, 255, 0).astype(np.uint8))
            for width, ink in ((7, "white"), (3, colour)):  # seen on dark and on light
                edge = ImageChops.difference(
                    inside.filter(ImageFilter.MaxFilter(width)), inside.filter(ImageFilter.MinFilter(width))
                )
                drawn.paste(ink, mask=edge if ink == "white" else ImageChops.multiply(edge, strength))
        return drawn

    def positions(
        self, picture: Image.Image, outputs: dict[str, np.ndarray], row: int = 0, frame: Any = WHOLE
    ) -> tuple[Any, str, Any] | None:
        """Return the decisions at every position over the picture of an image, their title and their colours.

        Between two classes these are the values of the target that is about the strongest position, else the classes.
        The strongest positions are outlined, and numbered if there are several.

        Returns:
            The picture, its title and a legend: pairs of colour and class, or a scale of colours; None: the head
            decides once for the image.
        """
        panel = self._positions(picture, outputs, row)
        return None if panel is None else (self.paint(panel, frame), panel.heading, panel.scale)

    def _positions(self, picture: Image.Image, outputs: dict[str, np.ndarray], row: int) -> Panel | None:
        """Return the panel of the decisions at every position; None: the head decides once for the image."""
        if "heat" not in self.about or not {"anomaly", "label"} & outputs.keys():
            return None
        strongest, caption = self.about.get("strongest", []), self._meaning(outputs, row)
        grid = outputs["anomaly" if "anomaly" in outputs else "label"].shape[1:]
        outlined: Any = LARGE, self._boxes(outputs, row), grid
        if "anomaly" in outputs:
            heading, scale = "where: anomaly at every position", self._anomaly_scale(outputs, row)
            return Panel(picture, outputs["anomaly"][row], heading, caption, scale, *outlined)
        if len(strongest) == 1 and len(self.about["classes"]) == 2 and "evidence" in outputs:
            values = outputs["evidence"][row, 0]
            scale = ColourScale(
                0.0, float(np.abs(values).max()), None, "0 or less has no colour", self._describe_shares(outputs, row)
            )
            name = self.about["meanings"][strongest[0]].split("{}")[0].strip()
            if name in ("margin", "log-ratio"):
                name += " of " + self.titles(outputs, row)[strongest[0]].removesuffix(" where strongest")
            return Panel(picture, values, f"where: {name} at every position", caption, scale, *outlined)
        colours = read_colours(self.about["label_colours"])
        legend = [
            (tuple(colours[number % len(colours)].astype(int).tolist()), f"{name}, {share:.1%}")
            for number, (name, share) in enumerate(self.shares(outputs, row).items())
            if share
        ]
        return Panel(picture, outputs["label"][row], "where: class at every position", caption, legend, *outlined)

    def paint(self, panel: Panel, frame: Any = WHOLE) -> Image.Image:
        """Return the photo of a panel with the colours of its map over it, and its strongest positions outlined."""
        if panel.map is None:
            drawn = panel.photo
        elif isinstance(panel.scale, ColourScale):
            drawn = self._heated(panel.photo, panel.map, panel.scale, frame)
        elif isinstance(panel.scale, list):
            drawn = self._classed(panel.photo, panel.map, frame)
        else:
            draw = self.outlined if self.outline else self.overlay
            drawn = draw(panel.photo, panel.map, frame, panel.sure)
        return draw_boxes(drawn, panel, frame) if panel.boxes else drawn

    def _classed(self, picture: Image.Image, numbers: np.ndarray, frame: Any) -> Image.Image:
        """Return the numbers of classes (h, w) over a picture in grey, each in its colour, but for absences."""
        colours = read_colours(self.about["label_colours"])
        large = place_values(numbers.astype(np.float32), picture.size, frame, Image.Resampling.NEAREST, np.nan)
        place = np.nan_to_num(large).astype(int)
        absent = [number for number, name in enumerate(self.about["classes"]) if name in self._absent]
        opacity = 0.55 * (np.isfinite(large) & ~np.isin(place, absent))[..., None]
        return mix_colours(opacity, colours[place % len(colours)], grey_out(picture))

    def _describe_shares(self, outputs: dict[str, np.ndarray], row: int) -> str:
        """Return the share of positions of each class in words, without classes that are absences."""
        shares = {name: share for name, share in self.shares(outputs, row).items() if name not in self._absent}
        return ", ".join(f"{name}: {share:.1%} of the positions" for name, share in shares.items())

    @property
    def _absent(self) -> list[Any]:
        """The classes that have no colour."""
        return list(self.about.get("absent", []))

    def _anomaly_scale(self, outputs: dict[str, np.ndarray], row: int) -> ColourScale:
        """Return the colours of anomalies: from where good patches end, bright from the threshold on."""
        values = outputs["anomaly"][row]
        values, threshold = values[np.isfinite(values)], self.about.get("threshold")
        ends = self.about.get("anomaly_range", [*map(float, (values.min(), values.max()))])
        usual, low, high = self.about.get("usual"), ends[0], ends[1]
        words = [] if usual is None else [f"good patches reach {usual:.3g}"]
        if usual is not None:
            low += PALE * ((usual if threshold is None else min(usual, threshold)) - low)
        if threshold is not None:
            high = max(2 * threshold - low, usual or threshold)
            words.insert(0, f"line: threshold {threshold:.3g}")
        return ColourScale(
            low, max(high, float(values.max())), threshold, f"up to {low:.3g}: no colour", "; ".join(words)
        )

    def _heated(self, picture: Image.Image, values: np.ndarray, scale: ColourScale, frame: Any) -> Image.Image:
        """Return numbers (h, w) over a picture in grey, in the colours of a scale."""
        large = place_values(values.astype(np.float32), picture.size, frame, Image.Resampling.BILINEAR, np.nan)
        colours, opacity = scale.paint(np.nan_to_num(large, nan=scale.low), read_colours(self.about["heat"]))
        return mix_colours(opacity * np.isfinite(large)[..., None], colours, grey_out(picture))

    def _boxes(self, outputs: dict[str, np.ndarray], row: int) -> tuple[tuple[int, int, str], ...]:
        """Return the strongest positions as the boxes of a panel, numbered if there are several."""
        places = self.strongest(outputs, row)
        return tuple((y, x, str(number) if len(places) > 1 else "") for number, (y, x) in enumerate(places, 1))

    def _meaning(self, outputs: dict[str, np.ndarray], row: int) -> str:
        """Return the meaning of the values at every position, and that the strongest one is explained."""
        strongest, words = self.about.get("strongest", []), self.about.get("anomaly", "")
        if not strongest or "evidence" not in outputs:
            return words
        if not words and len(strongest) == 1 and len(self.about["classes"] or ()) == 2:
            words = self.about["meanings"][strongest[0]].split("{}")[1].strip(" :")
        outlined = "outlined: the strongest, explained on the right"
        if len(strongest) > 1:
            outlined = "outlined: the strongest of each class, explained by a map each"
        return f"{words}; {outlined}" if words else outlined

    def drawn(
        self,
        picture: Image.Image,
        outputs: dict[str, np.ndarray],
        row: int = 0,
        *,
        frame: Any = WHOLE,
        truth: Any = None,
        shown: Any = None,
        note: str = "",
    ) -> Image.Image:
        """Return a sheet: whether it is right, the picture and the decision, then components, with titles and values.

        Where its large pictures are, left, top, right and bottom, is in ``sheet.info["pictures"]``.

        Args:
            picture: the picture.
            outputs: the outputs.
            row: which of their images it is.
            frame: the part of the picture that the network saw, see :func:`find_frame`.
            truth: the class that the picture is labelled; None: not known.
            shown: the numbers of the targets to draw, in their order; None: decisions, then components.
            note: what to say above; empty: whether the picture is unlike the training set, if that is known.

        Raises:
            ValueError: the maps are not finite.
        """
        if not np.isfinite(outputs["maps"][row]).all():
            raise ValueError("the maps of this picture are not finite, so the network's activations overflow")
        titles = self.titles(outputs, row)
        if shown is None:
            shown = sorted(range(len(titles)), key=lambda k: titles[k].startswith("component "))
        large, small = (fit_picture(picture.convert("RGB"), size) for size in (LARGE, TILE))
        panels = [Panel(large, size=LARGE)]
        if (where := self._positions(large, outputs, row)) is not None:
            panels.append(where)
        for place, k in enumerate(shown):
            first = not place and not titles[k].startswith("component ")
            big = first or k in self.about.get("strongest", [])  # as the one beside it, with the same outlines
            panels.append(self._map(large if big else small, outputs, row, k, titles[k], LARGE if big else TILE))
        words, colour = self._verdict(outputs, row, self.judge(outputs, row, truth))
        note = note or self.unlike(outputs, row)
        return self.arrange(panels, "; ".join(filter(None, (words, note))), UNLIKE if note else colour, frame)

    def _verdict(self, outputs: dict[str, np.ndarray], row: int, judged: Judgement) -> tuple[str, str]:
        """Return the prediction in words, whether it is right, and the colour of these words."""
        labelled = "" if judged.truth is None else f"labelled: {judged.truth}"
        if judged.open:
            words = f"open: {judged.label} is ahead, but {MOVED}"
            return words + (labelled and f"; {labelled}"), OPEN
        if judged.passes is not None:
            words = "pass" if judged.passes else "fail"
            words += f": anomaly {judged.anomaly:.3g}, threshold {self.about['threshold']:.3g}"
            words += labelled and f", {labelled}"
            is_well = judged.passes and judged.outcome != MISSED
            return f"{judged.outcome}: {words}" if judged.outcome else words, RIGHT if is_well else WRONG
        if self.shares(outputs, row) or judged.label is None:
            return (f"{judged.outcome}: labelled {judged.truth}", WRONG) if judged.outcome else (labelled, "black")
        if judged.right is None:
            return f"predicted: {judged.label}" + (labelled and f", {labelled}"), "black"
        words = "right" if judged.right else f"{judged.outcome or 'wrong'}: labelled {judged.truth}"
        return f"predicted: {judged.label}, {words}", RIGHT if judged.right else WRONG

    def _map(
        self, picture: Image.Image, outputs: dict[str, np.ndarray], row: int, k: int, title: str, size: int
    ) -> Panel:
        """Return the panel of a target's map."""
        numbers = {name: outputs[name][row, k] for name in ("values", "nu", "log_scale")}
        end = f"{numbers['nu']:.3g}" + (f" x exp({numbers['log_scale']:.4g})" if numbers["log_scale"] else "")
        # What maps of other methods add up to is no amount of the value: their numbers have no unit.
        unit = ", from one position" if size > TILE else ""  # for which a tile is too narrow
        end = f"strongest colour: {end}{unit}" if "baseline_values" in outputs else " "
        start = outputs["baseline_values"][row, k] if "baseline_values" in outputs else 0.0
        value, strongest = self.said(outputs, row, k), self.about.get("strongest", [])
        if abs(start) > BEFORE * max(abs(numbers["values"]), numbers["nu"]):
            change = float(f"{numbers['values'] - start:.3g}")
            value += f"\n= {start:.3g} before any evidence {'-' if change < 0 else '+'} {abs(change):.3g} by the photo"
        outlined: Any = ()
        if k in strongest and "evidence" in outputs:
            box = "the outlined patch" if len(strongest) == 1 else f"patch {strongest.index(k) + 1}"
            title = f"why: what of the photo made {box} so"
            outlined = (self._boxes(outputs, row)[strongest.index(k)],), outputs["evidence"].shape[2:]
            value = "\n".join(filter(None, (value, self.reason(outputs, row))))
        scale = end if numbers["nu"] else "blank: all zero"
        panel = Panel(picture, self.signed_map(outputs, row, k), title, value, scale, size, *outlined)
        # Of negative parts that a method makes anew, nothing is known.
        panel.sure = None if "sure" not in outputs or "opposite" in outputs else outputs["sure"][row, k]
        return panel

    def arrange(
        self, panels: list[Panel], title: str, colour: str = "black", frame: Any = WHOLE, most: int = 3 * (LARGE + GAP)
    ) -> Image.Image:
        """Return a sheet of panels, side by side where they have one size, below a title.

        Args:
            panels: those of one size come after each other.
            title: in one line or several; empty: there is none.
            colour: of the title.
            frame: the part of each photo that its map and its boxes are of, see :func:`find_frame`.
            most: how wide a row may be, in pixels.
        """
        font, bold = load_font(TEXT - 1), load_font(TEXT + 5)
        rows: list[list[Panel]] = []
        for panel in panels:
            width = sum(beside.size + GAP for beside in rows[-1]) if rows else 0
            if not rows or rows[-1][0].size != panel.size or width + panel.size > most:
                rows.append([])
            rows[-1].append(panel)
        lines = [max(len(panel.lines(font)) for panel in row) for row in rows]  # pictures begin side by side
        heights = [
            max(panel.height for panel in row) + count * (TEXT + 3) for row, count in zip(rows, lines, strict=True)
        ]
        titles = title.splitlines()
        top = 2 * GAP + (TEXT + 10) * len(titles)
        widths = [sum(panel.size + GAP for panel in row) for row in rows]
        width = GAP + max([*widths, *(int(bold.getlength(words)) + GAP for words in titles)])
        notes = f"pale and hatched: {UNSURE}; {SPREAD}"
        notes += f"; {UNSTABLE}" * any("(not stable)" in panel.caption for panel in panels)
        legend = wrap_text(notes, font, width - 2 * GAP)
        legend = legend if any(panel.sure is not None for panel in panels) else []
        bottom = top + sum(heights) + GAP * len(rows)
        sheet = Image.new("RGB", (width, bottom + (TEXT + 5) * len(legend)), "white")
        draw = ImageDraw.Draw(sheet)
        for line, words in enumerate(legend):
            draw.text((GAP, bottom - GAP / 2 + line * (TEXT + 3)), words, OPEN, font)
        for line, words in enumerate(titles):
            draw.text((GAP, GAP + line * (TEXT + 10)), words, colour, bold)
        y = top
        for row, height, count in zip(rows, heights, lines, strict=True):
            x = GAP
            for panel in row:
                for line, text in enumerate(panel.lines(font)):
                    draw.text((x, y + line * (TEXT + 3)), shorten(text, font, panel.size), panel.colour, font)
                sheet.paste(self.paint(panel, frame), (x, y + count * (TEXT + 3)))
                self._draw_scale(sheet, draw, panel, x, y + count * (TEXT + 3) + panel.photo.height + 4, font)
                x += panel.size + GAP
            y += height + GAP
        first = top + lines[0] * (TEXT + 3)
        sheet.info["pictures"] = (
            0,
            first,
            GAP + sum(panel.size + GAP for panel in rows[0]),
            first + rows[0][0].photo.height,
        )
        return sheet

    def _draw_scale(self, sheet: Image.Image, draw: Any, panel: Panel, x: int, y: int, font: Any) -> None:
        """Draw the meaning of a panel's colours on a sheet."""
        size, end = panel.size, panel.scale
        if isinstance(end, list):  # of classes
            for colour, name in end[:3]:
                draw.rectangle((x, y + 2, x + TEXT - 4, y + TEXT - 2), colour)
                name = name if len(end) <= 3 or name != end[2][1] else f"{name}, and {len(end) - 3} more"
                draw.text((x + TEXT, y), shorten(name, font, size), "black", font)
                y += TEXT + 2
        elif isinstance(end, ColourScale):
            ramp = end.paint(np.linspace(end.low, end.high, size)[None], read_colours(self.about["heat"]))
            sheet.paste(mix_colours(ramp[1], np.tile(ramp[0], (TEXT // 2, 1, 1)), 255.0), (x, y))
            draw.rectangle((x, y, x + size - 1, y + TEXT // 2 - 1), outline="#999999")
            if end.mark is not None:
                at = x + (end.mark - end.low) / ((end.high - end.low) or 1) * (size - 1)
                draw.rectangle((at - 1, y - 3, at + 1, y + TEXT // 2 + 3), "black")
            y += TEXT // 2 + 2
            draw.text((x, y), end.words, "black", font)
            draw.text((x + size, y), f"{end.high:.3g}", "black", font, anchor="ra")
            draw.text((x, y + TEXT + 2), shorten(end.note, font, size), "black", font)
        elif end:
            scale = self.overlay(Image.new("RGB", (size, TEXT // 2), "white"), np.linspace(-1, 1, size)[None])
            if not self.outline:
                sheet.paste(scale, (x, y))
            y += TEXT // 2 + 2
            draw.text((x, y), "lowers", "#2166ac", font)
            draw.text((x + size, y), "raises", WRONG, font, anchor="ra")
            draw.text((x + size // 2, y + TEXT + 2), shorten(end, font, size), "black", font, anchor="ma")


def _place_mask(sure: np.ndarray, picture: Image.Image, frame: Any) -> np.ndarray:
    """Return where the map of a frame is sure at the size of its picture, (H, W); there is no map in the rest."""
    return place_values(sure.astype(np.float32), picture.size, frame, Image.Resampling.NEAREST, 1.0) > 0
