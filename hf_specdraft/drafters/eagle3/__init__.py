"""EAGLE-3: a small transformer that goes on from the target's own hidden states, one token a step."""

from .configuration_eagle3 import Eagle3Config
from .modeling_eagle3 import Eagle3Drafter
from .session_eagle3 import Eagle3Session

__all__ = ["Eagle3Config", "Eagle3Drafter", "Eagle3Session"]
