"""Tensors that say they are on a GPU and hold their numbers on the CPU.

An operation on tensors of two devices is an error, as on real GPUs; all others are computed.
``FakeTensorMode`` won't do: it has no numbers, and the engine looks at some, such as those of a
mask or a sampled token.
"""

import threading

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")
aten = torch.ops.aten


class Placed(Tensor):
    """A tensor ``held`` on the CPU that says it is on ``device``."""

    held: Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "Placed":
        with torch.inference_mode(False):  # in which a view of another tensor can't be made
            made = Tensor._make_wrapper_subclass(
                cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
                dtype=held.dtype, device=CPU,
            )  # fmt: skip
        made.held, made.place = held, device
        return made

    @property
    def device(self) -> torch.device:  # PyTorch itself, built without CUDA, is not to know it
        return self.place

    def __repr__(self, **_) -> str:
        return f"Placed({self.held!r}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        placed = {one.device for one in tensors if isinstance(one, Placed)}
        # As CUDA has it: numbers and indices may be on the host.
        of_host = [one for one in tensors if not isinstance(one, Placed) and one.ndim > 0]
        indexed = func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
        if len(placed) > 1 and func is not aten.copy_.default:
            raise RuntimeError(f"{func}: tensors on {sorted(map(str, placed))}")
        if of_host and not indexed and func is not aten.copy_.default:
            raise RuntimeError(f"{func}: tensors on cpu and {placed}")
        where = args[0].device if func is aten.copy_.default else placed.pop()
        if func is aten.histc.default:  # CUDA counts integers, too
            args = (plain(args[0]).float(), *args[1:])
        with torch.inference_mode(False), torch.no_grad():
            found = func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        return on(found, where)


def plain(value):
    """For a tensor the held one; for a device the CPU."""
    if isinstance(value, Placed):
        return value.held
    return CPU if isinstance(value, torch.device) else value


def on(value, device):
    """The same with its tensors placed on a device."""
    if torch.device(device).type != "cuda":
        return value
    return tree_map(
        lambda one: Placed(one, torch.device(device)) if type(one) is Tensor else one, value
    )


class Moved(torch.autograd.Function):
    """A tensor on another device; its gradient goes back."""

    @staticmethod
    def forward(ctx, tensor, device):
        ctx.back = tensor.device
        return on(plain(tensor).clone(), device)

    @staticmethod
    def backward(ctx, gradient):
        return on(plain(gradient).clone(), ctx.back), None


class Gpus(TorchFunctionMode):
    """While it lasts, tensors can be made on GPUs and moved there, also by threads begun then."""

    def __enter__(self):
        self._patches = pytest.MonkeyPatch()
        run = threading.Thread.run

        def run_placed(thread):
            mode = Gpus()
            TorchFunctionMode.__enter__(mode)
            try:
                run(thread)
            finally:
                TorchFunctionMode.__exit__(mode, None, None, None)

        self._patches.setattr(threading.Thread, "run", run_placed)
        # One without kernels of its own for experts.
        self._patches.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
        self._patches.setattr(torch.cuda, "get_device_name", lambda *_: "pretended")
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.undo()
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        named = kwargs.get("device")
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            if len(args) > 1 and isinstance(args[1], Tensor):
                args = args[0], args[1].device, args[1].dtype
            devices = [one for one in [*args[1:], named] if isinstance(one, torch.device | str)]
            if func is Tensor.cpu:
                devices = [CPU]
            if devices and torch.device(devices[0]).type != "meta":
                rest = [one for one in args[1:] if not isinstance(one, torch.device | str)]
                kwargs.pop("device", None)
                if args[0].requires_grad and torch.is_grad_enabled():
                    own = args[0].to(*rest, **kwargs) if rest or kwargs else args[0]
                    return Moved.apply(own, devices[0])
                own = plain(args[0])
                with torch.inference_mode(False):
                    own = own.to(*rest, **kwargs) if rest or kwargs else own.clone()
                return on(own, devices[0])
        if named is not None and torch.device(named).type == "cuda":
            if any(isinstance(one, Placed) for one in tree_leaves(args)):
                return func(*args, **kwargs)
            with torch.inference_mode(False):
                return on(func(*args, **{**kwargs, "device": CPU}), named)
        return func(*args, **kwargs)
