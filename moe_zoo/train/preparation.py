"""Make the shards a recipe reads, with progress for who looks on."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from data_pipelines import PreparedSummary, PrepareSpec, prepare
from moe_zoo.spec.recipe import Recipe


def prepare_data(recipe: Recipe, console: Console) -> PreparedSummary:
    """Tokenize, pack and shuffle the recipe's text once; what is done already is not done again."""
    data = recipe.data
    spec = PrepareSpec(
        source=data.source,
        tokenizer=data.tokenizer,
        output=data.path,
        seq_len=data.seq_len,
        heldout_percent=data.heldout_percent,
    )
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        return prepare(spec, show)
