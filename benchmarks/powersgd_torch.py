"""PyTorch's side of powersgd.py: the same steps with DDP and its PowerSGD hook. Needs torch and numpy, not jaxcgx.

python benchmarks/powersgd_torch.py '{"address": ..., "port": ..., "rank": 0, "processes": 2, "ranks": [1, 4], ...}'
"""

import json
import os
import sys
import time

import numpy as np

SIZE = 2048
TERMS = 64  # terms of a gradient, with weights 1, 1/2, 1/3, ...


def gradient(rank, step):
    """Returns a rank's gradient in a step: a common part with falling singular values, and noise of the same size."""
    common = np.random.default_rng(1).standard_normal((2, SIZE, TERMS), np.float32)
    noise = np.random.default_rng((2, rank, step)).standard_normal((SIZE, SIZE), np.float32)
    return (common[0] / np.arange(1, TERMS + 1, dtype=np.float32)) @ common[1].T + noise


def start(low_rank):
    """Returns the first Q of both frameworks, [columns, rank]."""
    return np.random.default_rng(3).standard_normal((SIZE, low_rank), np.float32)


def relative_error(step, processes, steps):
    """Returns the error of the sum of all steps, relative to the sum of their means.

    step(t) is the mean that arrived.
    """
    sent, meant = np.zeros((2, SIZE, SIZE))
    for t in range(steps):
        sent += step(t)
        meant += sum(gradient(rank, t) for rank in range(processes)) / processes
    return float(np.linalg.norm(sent - meant) / np.linalg.norm(meant))


def serve(errors, programs):
    """Prints the errors. Then runs a program for each line of the input, "NAME TIMES", and prints the ms per run."""
    print("READY", json.dumps(errors), flush=True)
    for line in sys.stdin:
        name, times = line.rsplit(" ", 1)
        start = time.perf_counter()
        for _ in range(int(times)):
            programs[name]()
        print("MS", (time.perf_counter() - start) * 1e3 / int(times), flush=True)


def main(address, port, rank, processes, ranks, steps):
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    if "eth0" in os.listdir("/sys/class/net"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=processes)

    class Weights(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(SIZE, SIZE))

        def forward(self, gradient):
            return (self.w * gradient).sum()

    def model(low_rank):
        ddp = torch.nn.parallel.DistributedDataParallel(Weights(), gradient_as_bucket_view=True)
        if low_rank:
            # 2 is the smallest start_powerSGD_iter that PyTorch accepts.
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=low_rank, start_powerSGD_iter=2)
            state.p_memory_dict[0], state.q_memory_dict[0] = (
                torch.empty(SIZE * low_rank),
                torch.from_numpy(start(low_rank).reshape(-1)),
            )
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            for _ in range(2):
                ddp(given).backward()
        return ddp

    def mean(ddp, gradient):
        ddp.module.w.grad.zero_()
        ddp(gradient).backward()
        return ddp.module.w.grad

    def alone(ddp):
        with ddp.no_sync():
            mean(ddp, given)

    given = torch.from_numpy(gradient(rank, 0))
    models = {low_rank: model(low_rank) for low_rank in (0, *ranks)}
    models[0](given).backward()

    def error(ddp):
        return relative_error(lambda t: mean(ddp, torch.from_numpy(gradient(rank, t))).numpy(), processes, steps)

    errors = {str(n): error(models[n]) for n in ranks}
    programs = {str(n): lambda ddp=ddp: mean(ddp, given) for n, ddp in models.items()}
    serve(errors, programs | {"alone": lambda: alone(models[0])})


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
