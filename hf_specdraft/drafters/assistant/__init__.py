"""Any small causal LM as a drafter, with its own key/value cache."""

from .configuration_assistant import AssistantConfig
from .modeling_assistant import AssistantDrafter, AssistantSession
from .translation import Translated

__all__ = ["AssistantConfig", "AssistantDrafter", "AssistantSession", "Translated"]
