"""Write torch_reference.json: what PyTorch's optimizers make of given gradients.

python tests/optim/make_torch_reference.py         # by hand; the tests read the file, so they need
                                                   no PyTorch
"""

import json
import platform
from pathlib import Path

import numpy as np
import torch

STEPS = 7
SHAPES = {"matrix": (5, 3), "bias": (4,)}
CASES = [
    {"name": "sgd", "kind": "SGD", "options": {"lr": 0.1}},
    {"name": "sgd momentum", "kind": "SGD", "options": {"lr": 0.05, "momentum": 0.9}},
    {
        "name": "sgd momentum decay",
        "kind": "SGD",
        "options": {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.1},
    },
    {"name": "rmsprop", "kind": "RMSProp", "options": {"lr": 0.01}},
    {
        "name": "rmsprop alpha eps decay",
        "kind": "RMSProp",
        "options": {"lr": 0.02, "alpha": 0.9, "eps": 1e-3, "weight_decay": 0.2},
    },
    {"name": "adam", "kind": "Adam", "options": {"lr": 0.01}},
    {
        "name": "adam betas eps",
        "kind": "Adam",
        "options": {"lr": 0.02, "betas": [0.8, 0.95], "eps": 1e-2},
    },
    {"name": "adam decay", "kind": "Adam", "options": {"lr": 0.01, "weight_decay": 0.3}},
    {"name": "adamw", "kind": "AdamW", "options": {"lr": 0.01, "weight_decay": 0.01}},
    {
        "name": "adamw decay eps",
        "kind": "AdamW",
        "options": {"lr": 0.03, "weight_decay": 0.5, "eps": 1e-4},
    },
]
TORCH_NAMES = {"RMSProp": "RMSprop"}


def inputs() -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """First weights, and the gradients of each step; numbers of few digits, exact in float32."""
    random = np.random.default_rng(2024)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        return np.round(random.standard_normal(shape) * 256) / 256

    return {n: draw(s) for n, s in SHAPES.items()}, [
        {n: draw(s) for n, s in SHAPES.items()} for _ in range(STEPS)
    ]


def run(case: dict, dtype: torch.dtype) -> list[dict[str, list]]:
    """The weights after every step."""
    first, gradients = inputs()
    weights = {
        name: torch.nn.Parameter(torch.tensor(value, dtype=dtype)) for name, value in first.items()
    }
    optimizer = getattr(torch.optim, TORCH_NAMES.get(case["kind"], case["kind"]))(
        weights.values(), **case["options"]
    )
    history = []
    for step in gradients:
        for name, weight in weights.items():
            weight.grad = torch.tensor(step[name], dtype=dtype)
        optimizer.step()
        history.append(
            {name: weight.detach().double().numpy().tolist() for name, weight in weights.items()}
        )
    return history


def main() -> None:
    first, gradients = inputs()
    listed = [{name: value.tolist() for name, value in step.items()} for step in gradients]
    reference = {
        "made_with": {
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "weights": {name: value.tolist() for name, value in first.items()},
        "gradients": listed,
        "cases": [
            {**case, "float64": run(case, torch.float64), "float32": run(case, torch.float32)}
            for case in CASES
        ],
    }
    path = Path(__file__).with_name("torch_reference.json")
    path.write_text(json.dumps(reference, separators=(",", ":")) + "\n")
    print(f"wrote {path.name}: {len(CASES)} cases, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
