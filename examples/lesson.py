"""Data-parallel training in eleven steps, with torch's calls.

samestep run --nproc 2 examples/lesson.py    # or: torchrun --nproc-per-node 2 examples/lesson.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samestep as dist  # was: import torch.distributed as dist
from samestep import DDP, DistributedSampler  # was: from torch.nn.parallel ..., from torch.utils.data ...


def main() -> None:
    # 1. The launcher starts this file once per device. Each copy is a process with a Python of its own, so
    #    none ever waits for another one's global interpreter lock.

    # 2. The copies differ in their rank: 0, 1, 2, ... All know how many they are, the world size. Rank 0
    #    alone logs and saves. get_rank() and get_world_size() tell both, once the copies have met:

    # 3. Before anything is communicated, each process joins the group. The backend is NCCL where there are
    #    GPUs and Gloo where there are none; init_process_group(backend="gloo") would insist.
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"this is rank {rank} of {world_size}")

    # 4. One device per process: the first process of a host takes its first GPU, and so on. What torch calls
    #    torch.cuda.set_device(local_rank) is done already. Without GPUs the device is the CPU.
    device = dist.device()
    torch.manual_seed(0)
    model = nn.Linear(8, 1).to(device)

    # 5. One line makes the copies of the model one model. All start from rank 0's weights.
    model = DDP(model, device_ids=[device] if device.type != "cpu" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    # 6. backward() averages the gradients over all processes (by all-reduce), and the code around it stays
    #    that of one process. A linear layer's gradient is its input: here 1 on rank 0, 2 on rank 1, ...
    model(torch.full((1, 8), rank + 1.0, device=device)).backward()
    print(f"rank {rank}: my own gradient is {rank + 1.0}, the average is {model.module.weight.grad[0, 0]}")

    # 7. Each process gets a share of the data that no other one sees. The task: add up 8 numbers.
    numbers = torch.randn(1000, 8)
    dataset = TensorDataset(numbers, numbers.sum(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    print(f"rank {rank} trains on {len(sampler)} of the {len(dataset)} samples")

    for epoch in range(4):
        # 8. Tell the sampler the epoch, or torch's would shuffle each one alike. (Ours counts by itself.)
        sampler.set_epoch(epoch)
        for inputs, sums in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs.to(device)), sums.to(device))
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.1e}")
    # Every rank saw other data and took the same steps: the same weights, to the last bit.
    print(f"rank {rank}: the first weight is {model.module.weight[0, 0].item()!r}")

    # 9. Rank 0 alone saves: the module without its wrapper, so that any script can load it.
    if rank == 0:
        torch.save(model.module.state_dict(), "ckpt.pt")

    # 10. All leave the group at the end, so that nothing hangs.
    dist.destroy_process_group()

    # 11. A question and a recap.
    if rank == 0:
        print(QUESTION)


QUESTION = """
Quick question: 4 processes, each with a batch of 32. Over how many samples does one step average?
(a) 8    (b) 32    (c) 128

Recap: one process per device; init_process_group; a rank and a world size; wrap the model in DDP;
DistributedSampler and set_epoch; backward() averages; rank 0 saves; destroy_process_group.

Answer: (c). Each process averages over its own 32 samples, and the all-reduce over those 4 averages."""


if __name__ == "__main__":
    main()
