"""Fixed prompts between segments: answered in the workers, recorded once for each step, and never a reason for training to change."""

from dataclasses import dataclass, field

from mem_core.core.results.samples import SampleBook
from mem_core.domain.events import Sampled
from mem_core.domain.results.samples import StepSamples
from mem_core.runtime.ranks.worker.protocol import AnswerPrompts
from mem_core.runtime.session.attempt import Attempt
from mem_core.runtime.session.results.beside_training import BesideTraining
from mem_core.runtime.session.segment_service import SegmentService


@dataclass
class SamplingService:
    """One for an attempt; `book` follows the journal. Does nothing where the request has no prompts."""

    attempt: Attempt
    segments: SegmentService
    book: SampleBook
    _beside: BesideTraining = field(init=False)

    def __post_init__(self) -> None:
        self._beside = BesideTraining(self.attempt, self.segments, "answers to prompts")

    def is_done(self, step: int) -> bool:
        """Whether nothing is left to be answered at a step."""
        wanted = self.segments.ranks.setup.spec.samples is not None
        return not wanted or self._beside.is_given_up(step) or self.book.is_sampled(step)

    def sample(self, step: int, *, grace_s: float = 0.0) -> bool:
        """Answer every prompt, once. False where it came to nothing: workers and position are gone then."""
        order = AnswerPrompts(self._beside.most_tokens)
        found = self._beside.ask(step, lambda group, on_beat: group.answer_prompts(order, on_beat), grace_s)
        if found is None:
            return False
        temperature = self.attempt.request.evaluation.sample_temperature
        answers = StepSamples(step=step, samples=found.samples, temperature=temperature)
        self.attempt.state.emit(Sampled(found=answers))
        self.segments.checkpoints.results.samples(self.book.in_order)
        self.attempt.progress.note(answers.words())
        return True
