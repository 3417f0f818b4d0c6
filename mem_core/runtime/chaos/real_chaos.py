"""`RealChaos`: a seeded plan of real faults, carried out on a run from outside while it trains."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mem_core.domain.fault_kinds import FAULT_KINDS
from mem_core.runtime.chaos.faults.injectors import INJECTORS
from mem_core.runtime.chaos.faults.scene import NotNow, NotProven, Scene, Strike
from mem_core.runtime.chaos.faults.view import Sign
from mem_core.runtime.chaos.plan.plan import PlannedFault

POLL_S = 0.01
TRY_LIMIT_S = 300.0
RECOVERY_LIMIT_S = 300.0
SETTLE_LIMIT_S = 300.0


@dataclass(frozen=True)
class MetFault:
    """What became of a planned fault. `fired` is proven from outside; `recovered_s` is blow -> first step done again."""

    number: int
    kind: str
    title: str
    planned: str
    fired: bool
    proof: str
    step: int = 0
    time_unix_s: float = 0.0
    recovered_s: float | None = None
    disturbed_s: float = 0.0
    steps_redone: int = 0

    @property
    def survived(self) -> bool:
        """Whether it fired and the run went on."""
        return self.fired and self.recovered_s is not None


class RealChaos:
    """Injects one fault after the other, each when it is due and the run stands on proven ground again."""

    def __init__(self, plan: tuple[PlannedFault, ...], scene: Scene, say: Callable[[str], None] = lambda text: None) -> None:
        self._plan = plan
        self._scene = scene
        self._say = say
        self._over = threading.Event()
        self._highest_step = 0
        self._started_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="real-chaos", daemon=True)
        self.met: list[MetFault] = []
        self.crash: BaseException | None = None

    def start(self) -> None:
        """Begin to watch and to strike, in a thread."""
        self._thread.start()

    def finish(self) -> list[MetFault]:
        """The run is over: what each planned fault came to. A fault that never fired is listed as such."""
        self._over.set()
        self._thread.join()
        if self.crash is not None:
            raise self.crash
        told = {fault.number for fault in self.met}
        due = [fault for fault in self._plan if fault.number not in told and (fault.at_step is not None)]
        return [*self.met, *(_unfired(fault, "the run was over before it could strike") for fault in due)]

    def _run(self) -> None:
        try:
            for fault in self._plan:
                if not self._wait_due(fault):
                    return
                self.met.append(self._carry_out(fault))
                self._say(_words(self.met[-1]))
        except BaseException as exc:  # noqa: BLE001 - raised again by `finish` in the caller's thread
            self.crash = exc

    def _wait_due(self, fault: PlannedFault) -> bool:
        while not self._over.is_set():
            sign = self._scene.view.sign()
            if sign is not None:
                self._started_s = self._started_s or time.monotonic()
                self._highest_step = max(self._highest_step, sign.steps)
                if fault.at_step is not None and self._highest_step >= fault.at_step:
                    return True
                if fault.at_s is not None and time.monotonic() - self._started_s >= fault.at_s:
                    return True
            time.sleep(POLL_S)
        return False

    def _carry_out(self, fault: PlannedFault) -> MetFault:
        rng = random.Random(fault.salt)
        end = time.monotonic() + TRY_LIMIT_S
        why = "it never found its moment"
        while not self._over.is_set() and time.monotonic() < end:
            before = self._scene.view.sign()
            try:
                if before is None:
                    raise NotNow("no sign of life yet")
                strike = INJECTORS[fault.kind](self._scene, fault, rng)
            except NotNow as exc:
                why = str(exc)
                time.sleep(POLL_S)
            except NotProven as exc:
                return _unfired(fault, str(exc))
            else:
                return self._watch_recovery(fault, before, strike)
        return _unfired(fault, why)

    def _watch_recovery(self, fault: PlannedFault, before: Sign, strike: Strike) -> MetFault:
        kind = FAULT_KINDS[fault.kind]
        struck_step = max(before.steps, self._highest_step)
        recovered, from_step = self._wait_steps(before, strike, new_try=kind.recovery != "same_workers")
        met = MetFault(
            number=fault.number, kind=fault.kind, title=kind.title, planned=_moment(fault), fired=True, proof=strike.proof,
            step=struck_step, time_unix_s=time.time() - (time.monotonic() - strike.struck_s),
            recovered_s=None if recovered is None else round(max(0.0, recovered - (strike.lifted_s or strike.struck_s)), 3),
            disturbed_s=round((strike.lifted_s or strike.struck_s) - strike.struck_s, 3),
            steps_redone=max(0, struck_step - from_step) if from_step is not None else 0,
        )  # fmt: skip
        self._settle(struck_step)
        return met

    def _wait_steps(self, before: Sign, strike: Strike, *, new_try: bool) -> tuple[float | None, int | None]:
        """(moment of the first step done afterwards, the step it went on from)."""
        since_s = strike.lifted_s or strike.struck_s
        end = time.monotonic() + RECOVERY_LIMIT_S
        from_step: int | None = None
        baseline: int | None = None
        while time.monotonic() < end:
            over = self._over.is_set()
            sign = self._scene.view.sign()
            if sign is not None and sign.beat.beat_s > since_s:
                replaced = sign.source != before.source
                if replaced and sign.beat.phase in ("first_step", "step"):
                    from_step = sign.steps if from_step is None else min(from_step, sign.steps)
                if baseline is None:
                    baseline = sign.steps
                if sign.beat.phase == "step" and (replaced or (not new_try and sign.steps > baseline)):
                    self._highest_step = max(self._highest_step, sign.steps)
                    return sign.beat.beat_s, from_step
            if over:
                return (time.monotonic() if not new_try else None), from_step
            time.sleep(POLL_S / 4)
        return None, None

    def _settle(self, struck_step: int) -> None:
        """Until something newer than the blow is proven, so that faults do not pile up on one step."""
        end = time.monotonic() + SETTLE_LIMIT_S
        while time.monotonic() < end and not self._over.is_set():
            valid = self._scene.view.valid_checkpoints()
            if valid and int(valid[-1].name.removeprefix("step-")) > struck_step:
                return
            time.sleep(POLL_S * 5)


def _unfired(fault: PlannedFault, why: str) -> MetFault:
    return MetFault(fault.number, fault.kind, FAULT_KINDS[fault.kind].title, _moment(fault), False, why)


def _words(met: MetFault) -> str:
    recovery = f"recovered in {met.recovered_s:.2f} s, {met.steps_redone} steps redone" if met.recovered_s is not None else "NOT recovered"
    return f"fault {met.number}: {met.title} at step {met.step}: {recovery if met.fired else 'did not fire'} ({met.proof})"


def _moment(fault: PlannedFault) -> str:
    return f"step {fault.at_step}" if fault.at_step is not None else f"{fault.at_s or 0:.0f} s"
