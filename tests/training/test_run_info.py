"""run.json: code, packages, device, plan of each start."""

from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.training.run_info import describe_start
from tests.support.tiny import tiny_config


def test_describe_start_has_plan_and_packages():
    config = tiny_config(
        train=dict(steps=10, total_batch_tokens=64), optim=dict(schedule="cosine", final_frac=0.1)
    )
    about = describe_start(
        config, StepShape.of(config), arena_bytes=1234, device="a GPU", after_step=5
    )
    assert about["plan"] == {
        "arena_bytes": 1234,
        "recompute": "gelu",
        "parameters": config.n_params,
    }
    assert about["table"].keys() == {"file", "gpu", "source", "date"} and about["table"][
        "file"
    ].endswith(".json")
    assert {"torch", "triton", "numpy", "python", "gpt2_triton"} <= about["packages"].keys()
    assert about["precision"]["products"] == "fp32"
    in_bf16 = tiny_config(train=dict(dtype="bf16"))
    started = describe_start(
        in_bf16, StepShape.of(in_bf16), arena_bytes=1, device="a GPU", after_step=0
    )
    assert started["precision"]["products"] == "bf16"
    assert (about["device"], about["gpus"], about["zero"], about["after_step"]) == (
        "a GPU",
        1,
        0,
        5,
    )
