"""The examination: all facts of this machine, and what follows from them."""

from collections.abc import Callable

from .advice import advise
from .backends import backends
from .devices import gpus, triton
from .diagnosis import Diagnosis
from .facts import Facts, within
from .machine import limits, machine, network
from .software import environment, packages, python, torch_build

__all__ = ["examine"]

SECTIONS: dict[str, Callable[[], Facts]] = {
    "packages": packages,
    "Python": python,
    "torch": torch_build,
    "GPUs": gpus,
    "triton": triton,
    "zeroshard uses": backends,
    "machine": machine,
    "limits": limits,
    "network": network,
    "environment": environment,
}


def examine() -> Diagnosis:
    """Look at this machine and this installation; takes a second or two, and never fails."""
    facts = {name: within(section) for name, section in SECTIONS.items()}
    return Diagnosis(facts=facts, advice=advise(facts))
