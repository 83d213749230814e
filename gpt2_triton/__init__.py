"""GPT-2 training in which PyTorch provides memory and NCCL, and every arithmetic operation is a Triton kernel."""

__version__ = "0.2.0"
