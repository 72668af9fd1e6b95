"""Operations that are made of others, which have rules."""

from collections.abc import Sequence
from typing import Any

import torch
import torchvision  # noqa: F401 - registers its operations
from torch import Tensor

from pytorch_grad_cam_pcasvm.runtime.torch_private import (
    decomposition_table,
    lstm_layer,
    split_lstm_weights,
    stack_lstm_layers,
)

aten = torch.ops.aten


def decomposed(function: Any) -> Any:
    """Return a function's decomposition into other operations; None if torch has none."""
    if function in _OWN:
        return _OWN[function]
    if getattr(function, "_schema", None) is None:
        return None
    by_table = function._schema.name.partition("::")[2] in _BY_TABLE
    return decomposition_table.get(function) if by_table else function.decompose if function._can_decompose() else None


def _lstm(
    input: Tensor, hx: Sequence[Tensor], params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """Return an LSTM by torch's decomposition, called directly: in single precision it is one operation."""
    parameters = split_lstm_weights(params, has_biases, hx[0].size(2) != hx[1].size(2))
    output, hidden = stack_lstm_layers(
        input, list(zip(*hx, strict=True)), parameters, has_biases, num_layers, dropout, train, bidirectional,
        batch_first, lstm_layer,
    )  # fmt: skip
    # Older versions of torch leave the states a dimension too many.
    states = (
        torch.stack(one, 0).reshape(start.shape) for one, start in zip(zip(*hidden, strict=True), hx, strict=True)
    )
    return output, *states


def _batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Any, var: Any, training: bool, momentum: float,
    eps: float, *rest: Any,
) -> Tensor:  # fmt: skip
    """Return a batch norm by the statistics of the batch itself."""
    dims = [dim for dim in range(input.dim()) if dim != 1]
    variance, centre = torch.var_mean(input, dims, correction=0, keepdim=True)
    y = (input - centre) * torch.rsqrt(variance + eps)
    shape = (-1, *[1] * (input.dim() - 2))
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def _deform_conv2d(
    input: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor, stride_h: int, stride_w: int, pad_h: int,
    pad_w: int, dilation_h: int, dilation_w: int, groups: int, offset_groups: int, use_mask: bool,
) -> Tensor:  # fmt: skip
    """Return the same as samples of the picture at each tap of the kernel, and a 1x1 convolution over them."""
    (count, channels, height, width), (rows, columns) = input.shape, offset.shape[-2:]
    kernel_h, kernel_w = weight.shape[-2:]
    offset = offset.reshape(count, offset_groups, kernel_h * kernel_w, 2, rows, columns)
    y = torch.arange(rows, device=input.device).mul(stride_h).sub(pad_h).to(offset.dtype)
    x = torch.arange(columns, device=input.device).mul(stride_w).sub(pad_w).to(offset.dtype)
    pictures = input.reshape(count * offset_groups, channels // offset_groups, height, width)
    samples = []
    for tap in range(kernel_h * kernel_w):
        at_y = offset[:, :, tap, 0] + (y + tap // kernel_w * dilation_h).unsqueeze(1)
        at_x = offset[:, :, tap, 1] + (x + tap % kernel_w * dilation_w)
        grid = torch.stack([(2 * at_x + 1) / width - 1, (2 * at_y + 1) / height - 1], -1).flatten(0, 1)
        sample = torch.nn.functional.grid_sample(pictures, grid, align_corners=False)
        sample = sample.reshape(count, offset_groups, channels // offset_groups, rows, columns)
        if use_mask:
            shares = mask.reshape(count, offset_groups, kernel_h * kernel_w, 1, rows, columns)
            sample = sample * shares[:, :, tap]
        samples.append(sample.reshape(count, channels, rows, columns))
    stacked = torch.stack(samples, 2).reshape(count, channels * kernel_h * kernel_w, rows, columns)
    return torch.conv2d(stacked, weight.reshape(len(weight), -1, 1, 1), bias, groups=groups)


_BY_TABLE = {"affine_grid_generator", "addr", "gru", "linalg_vector_norm", "lstm", "norm", "rnn_relu", "rnn_tanh"}
_OWN = {
    aten.lstm.input: _lstm,
    aten.batch_norm.default: _batch_norm,
    torch.ops.torchvision.deform_conv2d.default: _deform_conv2d,
}
