"""torch.distributed: parts of parameters (DTensor: FSDP2, tensor parallelism), ZeRO-1, DDP's communication hook."""
