import torch, torch.distributed as dist
from hvdtrain.runtime.parts import local
def total_norm(gradients, mesh):
    total=torch.zeros(())
    for g in gradients:
        n=local(g).numel(); copies = 1 if n<g.numel() else dist.get_world_size()
        total+= local(g).float().square().sum()/copies
    dist.all_reduce(total); return total.sqrt()
