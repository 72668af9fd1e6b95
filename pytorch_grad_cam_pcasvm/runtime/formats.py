"""Formats of files that more than one package reads, without torch."""

MODEL = "pytorch_grad_cam_pcasvm model 1"  # a head with its backbone's name, see model/description.py
