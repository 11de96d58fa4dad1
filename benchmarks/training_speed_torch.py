"""A host of training_speed.py in PyTorch: DistributedDataParallel over Gloo. Needs torch and numpy, not jaxcgx.

python benchmarks/training_speed_torch.py '{"address": "10.77.0.1:20000", "rank": 0, "ranks": 2, "model": ..., ...}'
"""

import functools
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from host import Data, serve
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

HEADS, GROUPS = 4, 8  # as in training_speed_models.py


class Transformer(torch.nn.Module):
    """training_speed_models.transformer."""

    def __init__(self, weights):
        super().__init__()
        self.w = torch.nn.ParameterDict({name: torch.from_numpy(value.copy()) for name, value in weights.items()})

    def norm(self, x, name):
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}_scale"], self.w[f"{name}_bias"])

    def dense(self, x, name):
        return F.linear(x, self.w[f"{name}_w"].T, self.w[f"{name}_bias"])

    def forward(self, tokens):
        x = self.w["embed"][tokens] + self.w["position"]
        for i in range(sum(name.endswith("_qkv_w") for name in self.w)):
            heads = self.dense(self.norm(x, f"{i}_norm1"), f"{i}_qkv").unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
            seen = F.scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
            x = x + self.dense(seen.transpose(1, 2).flatten(2), f"{i}_out")
            x = x + self.dense(
                F.gelu(self.dense(self.norm(x, f"{i}_norm2"), f"{i}_up"), approximate="tanh"), f"{i}_down"
            )
        return self.norm(x, "last_norm") @ self.w["head"]


class ResNet(torch.nn.Module):
    """training_speed_models.resnet."""

    def __init__(self, weights):
        super().__init__()
        self.w = torch.nn.ParameterDict()
        for name, value in weights.items():
            value = torch.from_numpy(value.copy())
            self.w[name] = value.permute(3, 2, 0, 1).contiguous() if value.ndim == 4 else value

    def conv(self, x, name, stride=1):
        x = F.conv2d(x, self.w[f"{name}_w"], stride=stride, padding=1)
        return F.group_norm(x, GROUPS, self.w[f"{name}_scale"], self.w[f"{name}_bias"])

    def forward(self, images):
        x = F.relu(self.conv(images.permute(0, 3, 1, 2), "stem"))
        for name in [name.removesuffix("_a_w") for name in self.w if name.endswith("_a_w")]:
            stride = len(self.w[f"{name}_a_w"]) // x.shape[1]
            short = F.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, 0, x.shape[1] * (stride - 1)))
            x = F.relu(short + self.conv(F.relu(self.conv(x, f"{name}_a", stride)), f"{name}_b"))
        return x.mean((2, 3)) @ self.w["head_w"] + self.w["head_bias"]


def low_rank(ddp):
    # 2 is the smallest start_powerSGD_iter that PyTorch accepts.
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


# What to do with the DistributedDataParallel. None: there is none, and nothing is exchanged.
METHODS = {
    "alone": {"PyTorch, no exchange": None},
    "PyTorch": {
        "PyTorch, no hook": lambda ddp: None,
        "PyTorch, fp16": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
        "PyTorch, PowerSGD(4)": low_rank,
    },
}


class Program:
    """A model that one method trains."""

    def __init__(self, model, rate, data, hook):
        self._model, self._rate, self._data, self._hook = model, rate, data, hook
        self.begin(0)

    def begin(self, batch):
        """Begins with the first weights, at this batch."""
        hook, transformer, self._at = self._hook, self._model == "transformer", batch
        self._net = (Transformer if transformer else ResNet)(self._data.weights)
        if hook:
            # With several buckets, PowerSGD's hooks call Gloo in an order that differs between hosts. Then Gloo ends
            # the processes ("Received data size doesn't match", torch 2.13).
            buckets = dict(bucket_cap_mb=1000) if hook is low_rank else {}
            self._net = torch.nn.parallel.DistributedDataParallel(self._net, gradient_as_bucket_view=True, **buckets)
            hook(self._net)
        parameters = self._net.parameters()
        if transformer:
            self._optimizer = torch.optim.Adam(parameters, self._rate)
        else:
            self._optimizer = torch.optim.SGD(parameters, self._rate, momentum=0.9)

    def _loss(self, net, batch):
        inputs, targets = map(torch.from_numpy, batch)
        return F.cross_entropy(net(inputs).flatten(0, -2), targets.flatten().long())

    def run(self, steps):
        for _ in range(steps):
            self._optimizer.zero_grad()
            self._loss(self._net, self._data.batch(self._at)).backward()
            self._optimizer.step()
            self._at += 1

    def loss(self):
        """Returns the loss of this host's part of the held-out examples."""
        with torch.no_grad():
            return self._loss(getattr(self._net, "module", self._net), self._data.held_out).item()


def main(address, rank, ranks, model, rate, data):
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=ranks)
    data = Data(data, rank, ranks)
    make = functools.partial(functools.partial, Program, model, rate, data)
    serve({kind: {name: make(hook) for name, hook in methods.items()} for kind, methods in METHODS.items()})


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
