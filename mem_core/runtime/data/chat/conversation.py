"""What becomes of one chat."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class ChatRefused(ValueError):
    """The chat template does not take these messages, or what is to be trained of them cannot be told. `hint`: what would help."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Conversation:
    """A rendered chat: its ids and what of them is trained, shapes [tokens].

    `answer_start`: the token at which its last answer begins. `ends_answers`: each answer that is trained ends with a mark, so that
    the model learns to stop.
    """

    tokens: NDArray[np.uint32]
    mask: NDArray[np.uint8]
    answer_start: int
    ends_answers: bool = True
