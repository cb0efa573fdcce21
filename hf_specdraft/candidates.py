"""Any chain drafter dressed as a transformers CandidateGenerator, for encoder-decoder targets in upstream's own loop.

That loop is for one row and one chain. It hands back no hidden states in a form our features have, so drafters that
read the target's layers are refused. Drafted tokens are returned without scores: the loop then keeps a token only while
the target picks it itself, which is exact for any draft.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.stopping_criteria import StoppingCriteriaList

from .draft import Commit, Context
from .drafters.base import Drafter, TargetView
from .policies import Settings, threshold_of
from .rows import Stops
from .sampling import CALL_ORDER


def refuse_unsupported(drafter: Drafter, batch: int, processors: list, criteria: StoppingCriteriaList) -> None:
    """Raise ValueError for what that loop cannot serve exactly with our drafters."""
    if drafter.feature_layers:
        raise ValueError(
            f"{type(drafter).__name__} reads the target's hidden states, which transformers' encoder-decoder loop "
            "does not hand out; use the 'ngram' family, or an encoder-decoder assistant without this package"
        )
    if batch > 1:
        raise ValueError(
            f"encoder-decoder targets run in transformers' own assisted loop, which takes one row, not {batch}; "
            "generate them one by one, or leave assistant_model out"
        )
    late = [type(c).__name__ for c in Stops(criteria, batch).others]
    if late:
        raise ValueError(
            f"transformers' encoder-decoder loop asks {', '.join(late)} only about the last token of a round, so the "
            "answer could run past its stop; stop by eos_token_id or max_new_tokens, or leave assistant_model out"
        )
    stateful = [type(p).__name__ for p in processors if isinstance(p, CALL_ORDER)]
    if stateful:
        raise ValueError(
            f"{', '.join(stateful)} keeps state from call to call, and transformers' encoder-decoder loop also calls "
            "it for rejected tokens; leave assistant_model out"
        )


class DraftCandidates(CandidateGenerator):
    """Candidates of one row's session."""

    def __init__(self, model, drafter: Drafter, config: GenerationConfig):
        view = TargetView(model)
        drafter.check(view)
        settings = Settings.of(config)
        self.threshold = threshold_of(settings, drafter)
        self.length = settings.length or drafter.config.num_assistant_tokens
        self.max_length = config.max_length
        self.session = drafter.start(view, 1)
        self.seen = 0

    @property
    def requires_model_outputs(self) -> bool:
        return False

    def get_candidates(self, input_ids: Tensor, **kwargs) -> tuple[Tensor, Tensor | None]:
        """[1, L] committed decoder ids -> [1, L + N] with the draft appended, and no scores."""
        new = input_ids[0, self.seen :].tolist()
        self.session.observe(Commit([new]))
        self.seen = input_ids.shape[1]
        room = min(self.length, self.max_length - self.seen - 1)
        if room < 1:
            return input_ids, None
        context = Context(input_ids[:, -1], [self.seen - 1], [room], room)
        if self.threshold is not None:
            context.more = self.threshold.more
        draft = self.session.propose(context)
        if self.threshold is not None:
            draft = self.threshold.cut(draft, [True])
        count = int(draft.valid[0].sum())
        return torch.cat([input_ids, draft.tokens[:, :count].to(input_ids.device)], dim=-1), None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Nothing to learn here: the session hears the committed tokens in the next `get_candidates`."""
