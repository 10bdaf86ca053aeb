"""What a person sees while a run goes on: a live line in a terminal, plain lines elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from moe_zoo.train.metrics import Metrics

BARS = "▁▂▃▄▅▆▇█"


class TrainingDisplay:
    """Progress of ``num_steps`` steps on rank 0; silent on all others."""

    def __init__(self, num_steps: int, first_step: int, every: int, is_silent: bool):
        self.console = Console(quiet=is_silent, highlight=False, soft_wrap=True)
        self.num_steps, self.first_step, self.every = num_steps, first_step, every
        self.began = time.monotonic()
        columns = (BarColumn(bar_width=20), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
        self.progress = Progress(
            *columns,
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("{task.description}"),
            console=self.console,
            disable=is_silent or not self.console.is_terminal,
        )
        self.task = self.progress.add_task("", total=num_steps, completed=first_step)
        self.progress.start()

    def say(self, text: str) -> None:
        """One line above the progress bar."""
        self.progress.console.print(text, markup=False)

    def step(self, step: int, metrics: Metrics) -> None:
        """After each step."""
        self.progress.update(self.task, completed=step, description=f"loss {metrics['train/loss']:.3f}")
        if step % self.every == 0 or step == self.num_steps:
            self.say(self._line(step, metrics))

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.progress.stop()

    def _line(self, step: int, metrics: Metrics) -> str:
        per_step = (time.monotonic() - self.began) / (step - self.first_step)
        parts = [
            f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}",
            f"loss {metrics['train/loss']:.3f}",
            f"{metrics['train/tokens_per_s']:,.0f} tok/s",
            f"mfu {metrics['train/mfu']:.0%}",
        ]
        if "moe/load" in metrics:
            parts.append(f"load {sparkline(metrics['moe/load'])} max {metrics['moe/max_load']:.2f}")
            parts.append(f"dropped {metrics['moe/dropped']:.1%}")
        return "  ".join([*parts, f"left {clock((self.num_steps - step) * per_step)}"])


def sparkline(load_LE: list[list[float]], widest: int = 16) -> str:
    """One bar per expert, mean over layers, full height at twice the even load; runs of experts share a bar."""
    means = [sum(column) / len(column) for column in zip(*load_LE, strict=True)]
    run = -(-len(means) // widest)
    bars = [max(means[i : i + run]) for i in range(0, len(means), run)]
    return "".join(BARS[min(len(BARS) - 1, int(load / 2 * len(BARS)))] for load in bars)


def clock(seconds: float) -> str:
    """``3:07`` or ``1:02:45``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
