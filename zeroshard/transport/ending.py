"""The end of a process that has used gloo."""

import atexit
import time
from functools import cache

__all__ = ["rest_at_exit"]

REST_S = 0.05


@cache
def rest_at_exit() -> None:
    """Let gloo's threads come to rest when the process ends, while there is an interpreter.

    Such a thread gives back the tensors of an operation after it has said that the operation is
    done, and needs the interpreter for that. One that asks when the interpreter is ending aborts
    the process, so nobody else holds it for `REST_S` seconds before that.
    """
    atexit.register(time.sleep, REST_S)
