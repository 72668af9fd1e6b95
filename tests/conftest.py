"""For every test: threads, and which warnings are errors."""

import pytest
import torch

# Networks this small are slower on several threads, and ten times slower on a busy machine.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    # Here, not in pyproject.toml, whose filters import the package before its coverage is measured.
    config.addinivalue_line("filterwarnings", "error::pytorch_grad_cam_pcasvm.AutogradFallbackWarning")
    # pytest.warns sees it all the same.
    config.addinivalue_line("filterwarnings", "ignore::pytorch_grad_cam_pcasvm.BlankMapWarning")
