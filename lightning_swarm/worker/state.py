"""All that a worker of a stage must share with its replicas, as of one step: parameters, buffers, optimizer state.

A joining worker gets it from any holder, the trainer keeps it as a snapshot, and its `StageState.digest` shows that
replicas are the same bit for bit. Nothing is ever half loaded: what comes from a peer is compared with its checksums
when it arrives and with the module before the first value is assigned.

Checksums are BLAKE3: at 5 GB/s on one core they cost a tenth of what a transfer over loopback costs, where SHA-256
would cost half of it, and unlike a CRC they are long enough to compare whole states by. (The package comes with
hivemind.)
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from blake3 import blake3
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_swarm.swarm.calls import StateRequest
from lightning_swarm.swarm.errors import ProtocolError
from lightning_swarm.swarm.node import Node
from lightning_swarm.swarm.parts import take
from lightning_swarm.worker.statistics import squared_norm

Plain = bool | int | float | str | None
# At a gigabyte a second this is a quarter of one, so who asks whether a worker hangs sees that it does not.
_SLICE_BYTES = 256 << 20
_PLAIN = (bool, int, float, str, type(None))


class StateRejected(ProtocolError):
    """A state is damaged, not finite, or not that of this stage. Nothing was loaded; try the next donor."""


@dataclass(frozen=True)
class StageState:
    """The state of one stage; its tensors lie on the CPU."""

    version: int
    """The step that these parameters are to compute: the number of commits they have seen."""
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor | Plain]] = field(default_factory=dict)
    """By parameter name, as the optimizer keeps it: same keys, same dtypes."""
    numbers: dict[str, Plain] = field(default_factory=dict)
    """What else has to travel along."""

    @classmethod
    def capture(
        cls,
        version: int,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        optimizer: Optimizer | None = None,
        numbers: Mapping[str, Plain] | None = None,
        *,
        copy: bool = True,
        progressed: Callable[[], None] = lambda: None,
    ) -> "StageState":
        """The state as it is now; call it between two steps, on the compute thread.

        Args:
            version: Number of commits that the parameters have seen.
            parameters: The stage's parameters by name.
            buffers: Its buffers by name.
            optimizer: The optimizer over (some of) these parameters.
            numbers: What else has to travel along.
            copy: Whether training goes on while the state is used. Without, tensors on the CPU are shared, which is
                enough for `digest`.
            progressed: Called after every part of the copying.

        Raises:
            MisconfigurationException: The optimizer keeps something that is neither a tensor nor a plain value.
        """
        names = {id(parameter): name for name, parameter in parameters.items()}
        states: dict[str, dict[str, Tensor | Plain]] = {}
        for parameter, entries in (optimizer.state if optimizer is not None else {}).items():
            if id(parameter) not in names:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps state of a parameter that is not among {[*parameters]}."
                )
            name = names[id(parameter)]
            states[name] = {
                key: _kept(value, f"{key!r} of {name!r}", optimizer, copy, progressed) for key, value in entries.items()
            }
        return cls(
            version,
            {name: _host(tensor, copy, progressed) for name, tensor in parameters.items()},
            {name: _host(tensor, copy, progressed) for name, tensor in buffers.items()},
            states,
            dict(numbers or {}),
        )

    def load(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        optimizer: Optimizer | None = None,
        *,
        take: bool = False,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        """Assign everything to a stage, or nothing.

        Tensors of the optimizer keep the dtype they have here (`Optimizer.load_state_dict` would cast them to the
        parameter's) and go to the parameter's device, except step counts and the like, which stay on the CPU unless the
        optimizer is fused or capturable.

        Args:
            parameters: The stage's parameters, overwritten in place.
            buffers: Its buffers, overwritten in place.
            optimizer: An optimizer over (some of) the parameters; all that it kept is replaced. Without one, the
                optimizer's state here is left out.
            take: Whether this state is not used any more, so that its memory may become the stage's.
            progressed: Called after every tensor.

        Raises:
            StateRejected: Says what does not fit or is not finite.
        """
        _check_same("parameter", self.parameters, parameters)
        _check_same("buffer", self.buffers, buffers)
        for name, tensor in self.parameters.items():
            if not _is_finite(tensor):
                raise StateRejected(f"Parameter {name!r} has values that are not finite.")
            progressed()
        ready = self._optimizer_state(parameters, optimizer, progressed) if optimizer is not None else {}
        with torch.no_grad():
            for name, tensor in self.parameters.items():
                own = parameters[name]
                if take and own.device == tensor.device and own.stride() == tensor.stride():
                    own.data = tensor
                else:
                    own.copy_(tensor)
                progressed()
            for name, tensor in self.buffers.items():
                buffers[name].copy_(tensor)
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(ready)

    def _optimizer_state(
        self, parameters: Mapping[str, Tensor], optimizer: Optimizer, progressed: Callable[[], None]
    ) -> dict[Tensor, dict[str, Any]]:
        groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        ready: dict[Tensor, dict[str, Any]] = {}
        for name, entries in self.optimizer.items():
            parameter = parameters.get(name)
            if parameter is None or id(parameter) not in groups:
                raise StateRejected(
                    f"There is optimizer state of {name!r}, which {type(optimizer).__name__} does not train."
                )
            on_device = any(groups[id(parameter)].get(flag) for flag in ("capturable", "fused"))
            ready[parameter] = {}
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    if math.isnan(_norm(value)):
                        raise StateRejected(f"The optimizer's {key!r} of {name!r} has values that are not numbers.")
                    device = parameter.device if value.ndim or on_device else torch.device("cpu")
                    value = value.to(device, copy=True)
                    progressed()
                ready[parameter][key] = value
        return ready

    def is_finite(self) -> bool:
        """Whether all parameters are, and no value of the optimizer is NaN."""
        kept = (value for entries in self.optimizer.values() for value in entries.values())
        return all(_is_finite(tensor) for tensor in self.parameters.values()) and not any(
            isinstance(value, Tensor) and math.isnan(_norm(value)) for value in kept
        )

    def digest(self) -> str:
        """A hash over names, dtypes, shapes and bits of parameters, buffers and optimizer state: equal for replicas.

        The version and `numbers` are not part of it, nor is the order of the names.
        """
        header, _ = self.to_wire()
        sections = [sorted(header[section].items()) for section in ("parameters", "buffers")]
        optimizer = [(name, sorted(entries.items())) for name, entries in sorted(header["optimizer"].items())]
        return blake3(repr((*sections, optimizer)).encode()).hexdigest()

    def to_wire(self) -> tuple[dict[str, Any], list[Tensor]]:
        """What msgpack can carry, and the tensors that go with it, in the order in which it has their checksums.

        Computes all checksums: call it on a thread.
        """
        tensors: list[Tensor] = []

        def sign(value: Tensor | Plain) -> Any:
            if not isinstance(value, Tensor):
                return value
            tensors.append(value)
            return _checksum(value)

        header = {
            "version": self.version,
            "numbers": self.numbers,
            "parameters": {name: sign(tensor) for name, tensor in self.parameters.items()},
            "buffers": {name: sign(tensor) for name, tensor in self.buffers.items()},
            "optimizer": {name: {k: sign(v) for k, v in entries.items()} for name, entries in self.optimizer.items()},
        }
        return header, tensors

    @classmethod
    def from_wire(cls, header: Mapping[str, Any], tensors: Sequence[Tensor]) -> "StageState":
        """The state that `to_wire` described. Compares all checksums: call it on a thread.

        Raises:
            StateRejected: Something is malformed, missing or damaged; names it.
        """
        left = iter(tensors)

        def read(value: Any, what: str) -> Any:
            if not isinstance(value, bytes):
                return value
            tensor = next(left, None)
            if tensor is None or _checksum(tensor) != value:
                raise StateRejected(f"{what} has not the checksum that was sent with it.")
            return tensor

        def section(name: str, kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
            entries = header.get(name)
            if not isinstance(entries, dict) or not all(
                type(k) is str and type(v) in kinds for k, v in entries.items()
            ):
                raise StateRejected(f"A state's {name} are malformed.")
            yield from entries.items()

        if type(header.get("version")) is not int:
            raise StateRejected("A state has no version.")
        optimizer: dict[str, dict[str, Tensor | Plain]] = {}
        parameters = {name: read(value, f"Parameter {name!r}") for name, value in section("parameters", (bytes,))}
        buffers = {name: read(value, f"Buffer {name!r}") for name, value in section("buffers", (bytes,))}
        for name, entries in section("optimizer", (dict,)):
            if not all(type(k) is str and type(v) in (bytes, *_PLAIN) for k, v in entries.items()):
                raise StateRejected(f"The optimizer state of {name!r} is malformed.")
            optimizer[name] = {key: read(v, f"The optimizer's {key!r} of {name!r}") for key, v in entries.items()}
        if next(left, None) is not None:
            raise StateRejected("A state came with more tensors than it names.")
        return cls(header["version"], parameters, buffers, optimizer, dict(section("numbers", _PLAIN)))


async def fetch_state(node: Node, peer: str, request: StateRequest) -> StageState:
    """The state that a peer gives; given up soon after the peer has fallen silent.

    Raises:
        SwarmError: It gives none, or a damaged one.
    """
    header, tensors = await take(node, peer, "state", request.to_dict())
    return await asyncio.to_thread(StageState.from_wire, header, tensors)


def _checksum(tensor: Tensor) -> bytes:
    """Of dtype, shape and bits."""
    tensor = tensor.detach().cpu().contiguous()
    hasher = blake3(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    if tensor.numel():
        hasher.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return hasher.digest(length=16)


def _host(tensor: Tensor, copy: bool, progressed: Callable[[], None]) -> Tensor:
    tensor = tensor.detach()
    if not copy:
        return tensor.cpu().contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    for place, part in zip(_slices(host), _slices(tensor)):
        place.copy_(part)
        progressed()
    return host


def _slices(tensor: Tensor) -> Sequence[Tensor]:
    """Views of a large tensor's rows that together are the tensor."""
    if tensor.nbytes <= _SLICE_BYTES or not tensor.ndim:
        return (tensor,)
    return tensor.split(max(1, len(tensor) * _SLICE_BYTES // tensor.nbytes))


def _kept(
    value: Any, what: str, optimizer: Optimizer | None, copy: bool, progressed: Callable[[], None]
) -> Tensor | Plain:
    if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided:
        return _host(value, copy, progressed)
    if type(value) in _PLAIN:
        return value
    raise MisconfigurationException(
        f"{type(optimizer).__name__} keeps a {type(value).__name__} as {what}. Only dense tensors, numbers, strings "
        "and None can be handed to another worker; use an optimizer that keeps its state in those."
    )


def _check_same(kind: str, came: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    if came.keys() != own.keys():
        missing, unknown = sorted(own.keys() - came.keys())[:4], sorted(came.keys() - own.keys())[:4]
        raise StateRejected(f"The state is not that of this stage: {kind}s missing: {missing}, unknown: {unknown}.")
    for name, tensor in came.items():
        if (tensor.shape, tensor.dtype) != (own[name].shape, own[name].dtype):
            raise StateRejected(
                f"The {kind} {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)} in the state, here it is "
                f"{own[name].dtype} of shape {tuple(own[name].shape)}."
            )


def _is_finite(tensor: Tensor) -> bool:
    return math.isfinite(_norm(tensor))


def _norm(tensor: Tensor) -> float:
    """Not finite exactly if a value is not."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return squared_norm(tensor) if tensor.is_floating_point() else 0.0
