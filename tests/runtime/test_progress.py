"""Progress bars are shown when they are asked for; else tqdm, whose lock is shared with forks, is not even called."""

import pytest

from pytorch_grad_cam_pcasvm.runtime import log


@pytest.mark.parametrize("shown", [False, None])  # standard error is no terminal here
def test_hidden_bars_call_nothing(monkeypatch, shown):
    monkeypatch.setattr(log, "tqdm", None)
    with log.progress_bar(shown, total=3) as bar:
        bar.update()
        bar.update(2)


def test_bars_that_are_shown_count(capsys):
    with log.progress_bar(True, total=3, desc="atlas") as bar:
        bar.update(2)
    assert bar.n == 2
    assert "atlas" in capsys.readouterr().err
