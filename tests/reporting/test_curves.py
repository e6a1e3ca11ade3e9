"""The curves of a training run, by the data of their lines."""

import numpy as np
from matplotlib.figure import Figure

from speculative.reporting import curves

LOG = [
    {"step": 2, "loss": 3.0, "accuracy": 0.1, "gradient_norm": 1.5, "learning_rate": 0.01},
    {"step": 4, "loss": 2.5, "accuracy": 0.2, "gradient_norm": 1.2, "learning_rate": 0.01},
    {"step": 6, "loss": 2.0, "accuracy": 0.3, "gradient_norm": 1.1, "learning_rate": 0.01},
]
EVALUATED = [
    LOG[0] | {"held/loss": 3.5, "held/bleu": 7.0, "score": 7.0},
    LOG[1] | {"held/loss": 2.9, "held/bleu": 7.0, "score": 7.0},
    LOG[2],
]


def drawn(figure: Figure) -> list[dict[str, list[list[float]]]]:
    """Of each panel, the points of its lines by their labels."""
    return [
        {str(line.get_label()): np.array(line.get_data()).tolist() for line in axes.lines}
        for axes in figure.axes
    ]


def test_loss_scores_gradient_and_the_best_step() -> None:
    loss, score, gradient, speed = drawn(curves.training(EVALUATED))
    assert loss["training"] == [[2, 4, 6], [3.0, 2.5, 2.0]]
    assert loss["held"] == [[2, 4], [3.5, 2.9]]
    assert score == {"held, bleu": [[2, 4], [7, 7]], "best, step 4": [[4, 4], [0, 1]]}
    assert gradient["gradient's norm"][1] == [1.5, 1.2, 1.1]
    assert gradient["learning rate"][1] == [0.01] * 3
    assert speed == {}


def test_without_evaluations_there_is_accuracy_and_no_best_step() -> None:
    loss, score, _, _ = drawn(curves.training(LOG))
    assert [*loss] == ["training"]
    assert score == {"training": [[2, 4, 6], [0.1, 0.2, 0.3]]}
