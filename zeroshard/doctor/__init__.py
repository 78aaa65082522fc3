"""What this machine and this installation can do, for a person who reports a fault.

Looks and tells; changes nothing, and never fails: what cannot be found out is said to be unknown.
"""

from .diagnosis import Advice, Diagnosis
from .examination import examine

__all__ = ["Advice", "Diagnosis", "examine"]
