"""Answers to fixed prompts over the run: a prompt after the other, each with both answers at every step side by side."""

from mem_core.domain.results.samples import Sample, StepSamples
from mem_core.infrastructure.telemetry.html import Cell, Html, counted, details, element, join, section, table
from mem_core.infrastructure.telemetry.report_page.data import ReportData

STEPS_SHOWN = 6
_KEPT = "white-space:pre-wrap;overflow-wrap:anywhere"
_HEADER = ("after step", "greedy", "sampled")


def samples_section(data: ReportData) -> Html:
    """The newest answers first; the earlier ones are folded away. Nothing where no prompt was ever answered."""
    found = [each for each in data.timeline.samples if each.step <= data.result.applied_steps]
    if not found:
        return Html("")
    temperature = found[-1].temperature
    note = f"Fixed prompts, answered by the likeliest token each time (greedy) and by a draw at temperature {temperature:g} (sampled). "
    note += "Three dots: cut at evaluation.sample_tokens."
    prompts = dict.fromkeys(sample.prompt for each in reversed(found) for sample in each.samples)
    return section("Samples", *(_prompt(prompt, found) for prompt in prompts), note=note)


def _prompt(prompt: str, found: list[StepSamples]) -> Html:
    """A prompt that was asked twice has both answers at each step, in their order."""
    rows = [_row(each.step, sample) for each in reversed(found) for sample in each.samples if sample.prompt == prompt]
    shown, folded = rows[:STEPS_SHOWN], rows[STEPS_SHOWN:]
    parts = [element("pre", prompt, style=_KEPT, tabindex="0"), table("Answers, the newest first", _HEADER, shown, empty="")]
    if folded:
        parts.append(details(f"{counted(len(folded), 'earlier answer')}", table("Earlier answers", _HEADER, folded, empty="")))
    return join(parts)


def _row(step: int, sample: Sample) -> tuple[Cell, ...]:
    when = f"{step:,}" if step else "0, before training"
    return (when, _answer(sample.greedy, sample.greedy_finish), _answer(sample.sampled, sample.sampled_finish))


def _answer(text: str, finish: str) -> Html:
    """With its own line breaks; three dots where it was cut and did not end by itself."""
    return element("span", f"{text.rstrip()} ..." if finish == "length" else text, style=_KEPT)
