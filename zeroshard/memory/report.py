"""Reports for people: HTML, PNG, text, and scalars for dashboards. All ways out, in one place."""

from .figures import write_png
from .page import html, write_html
from .scalars import log_wandb, scalars, write_tensorboard
from .text import markdown, table

__all__ = [
    "html",
    "log_wandb",
    "markdown",
    "scalars",
    "table",
    "write_html",
    "write_png",
    "write_tensorboard",
]
