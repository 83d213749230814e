"""GPT-2 training where PyTorch gives memory and NCCL, and every arithmetic operation is a Triton kernel."""

__version__ = "0.1.0"
