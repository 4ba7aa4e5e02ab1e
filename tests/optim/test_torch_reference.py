"""Every optimizer makes of given gradients what PyTorch makes of them (torch_reference.json)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidist import optim
from minidist.autograd.tensor import Parameter

REFERENCE = json.loads(Path(__file__).with_name("torch_reference.json").read_text())
CASES = {case["name"]: case for case in REFERENCE["cases"]}
# Of a tensor's largest weight: about ten roundings of 2^-53 or 2^-24, in seven steps of a dozen
# operations each.
TOLERANCE = {"float64": 1e-15, "float32": 6e-7}


def build(case: dict[str, Any], dtype: str) -> tuple[list[Parameter], optim.Optimizer]:
    parameters = [
        Parameter(np.array(value, dtype), name=name) for name, value in REFERENCE["weights"].items()
    ]
    options = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in case["options"].items()
    }
    return parameters, getattr(optim, case["kind"])(
        parameters, **options, decay=lambda weights: True
    )


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_same_weights_as_pytorch_after_every_step(name: str, dtype: str, scale: float) -> None:
    """`scale` multiplies gradients that were made that much larger, so the weights stay the
    same."""
    parameters, optimizer = build(CASES[name], dtype)
    for gradients, expected in zip(REFERENCE["gradients"], CASES[name][dtype], strict=True):
        for parameter in parameters:
            parameter.grad = np.array(gradients[parameter.name], dtype) / np.array(scale, dtype)
        optimizer.step(scale=scale)
        for parameter in parameters:
            assert parameter.data.dtype == dtype
            target = np.array(expected[parameter.name])
            np.testing.assert_allclose(
                parameter.data, target, rtol=0, atol=TOLERANCE[dtype] * np.abs(target).max()
            )
        optimizer.zero_grad()


def test_reference_states_its_versions_and_covers_every_optimizer() -> None:
    assert set(REFERENCE["made_with"]) == {"torch", "numpy", "python"}
    assert {case["kind"] for case in CASES.values()} == {"SGD", "RMSProp", "Adam", "AdamW"}
