"""``python -m pytorch_grad_cam_pcasvm``: see :mod:`pytorch_grad_cam_pcasvm.studio.cli`."""

import sys

from pytorch_grad_cam_pcasvm.studio.cli import main

if __name__ == "__main__":  # the processes of a build import this file, too
    sys.exit(main())
