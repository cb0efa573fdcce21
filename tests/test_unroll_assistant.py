"""Fine-tuning an assistant: a causal LM on the target's answers, supervised where decoding asks for it."""

import pytest
import torch
import transformers
from targets import TARGETS, target
from torch.nn import functional as F

from hf_specdraft import AssistantConfig, AssistantDrafter
from hf_specdraft.drafters.base import TargetView
from hf_specdraft.training.loss import DraftLoss
from hf_specdraft.training.records import TrainingBatch
from hf_specdraft.training.simulation import simulated_tau


def pack(rows: list[list[tuple[list[int], int]]]) -> TrainingBatch:
    """Rows of (tokens, length of the prompt) -> a batch; what stands in padding must not matter."""
    width = max(sum(len(tokens) for tokens, _ in row) for row in rows)
    ids, documents, positions = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    mask = torch.ones(len(rows), width, dtype=torch.bool)
    for b, row in enumerate(rows):
        end = 0
        for number, (tokens, prompt) in enumerate(row, start=1):
            at = slice(end, end + len(tokens))
            ids[b, at], documents[b, at] = torch.tensor(tokens), number
            positions[b, at], mask[b, at] = torch.arange(len(tokens)), torch.arange(len(tokens)) >= prompt
            end += len(tokens)
    return TrainingBatch(ids, documents, positions, mask)


def text(seed: int, length: int) -> list[int]:
    return torch.randint(1, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


DOCUMENTS = [(text(1, 14), 3), (text(2, 6), 4), (text(3, 9), 1)]


def assistant(name: str) -> AssistantDrafter:
    torch.manual_seed(4)
    tiny = TARGETS[name]
    config = getattr(transformers, tiny.config)(**tiny.settings)
    return AssistantDrafter.from_model(getattr(transformers, tiny.model)(config).eval())


# A sliding window, learned positions, ALiBi, and a soft-cap and a scale behind the head.
@pytest.mark.parametrize("name", ["mistral", "gpt2", "bloom", "gemma2", "granite"])
def test_states_and_logits_are_the_assistants_own(name):
    drafter = assistant(name)
    if name == "granite":
        drafter.model.config.logits_scaling = 4.0  # Gemma 2's soft-cap is there by default
    view = TargetView(target("llama"))
    a, b, c = DOCUMENTS
    with torch.no_grad():
        unrolled = drafter.unroll(view, pack([[a, b], [c]]))
        logits = drafter.logits(view, unrolled.hidden)
        want, labels = [], []
        for tokens, prompt in DOCUMENTS:
            own = drafter(input_ids=torch.tensor([tokens])).logits[0]
            want += list(own[prompt:-1])
            labels += tokens[prompt + 1 :]
        bare = drafter.model.get_output_embeddings()(unrolled.hidden)
    torch.testing.assert_close(logits[:, 0], torch.stack(want), atol=1e-4, rtol=1e-4)
    assert torch.equal(bare, logits) == (name not in ("gemma2", "granite"))
    assert unrolled.labels[:, 0].tolist() == labels and unrolled.mask.all()


def test_pairs_are_those_that_decoding_meets():
    """A row of 6 ids with the answer at 3..5: the first answer token is the prefill's, the first drafted is at 4."""
    unrolled = assistant("llama").unroll(TargetView(target("llama")), pack([[([9, 8, 7, 6, 5, 4], 3)]]))
    assert unrolled.anchors.tolist() == [3, 4] == unrolled.rows[:, 0].tolist()
    assert unrolled.labels.tolist() == [[5], [4]]


def test_packed_documents_train_as_they_do_apart():
    view, results = TargetView(target("llama")), []
    for rows in ([DOCUMENTS], [[document] for document in DOCUMENTS], [DOCUMENTS[1:], DOCUMENTS[:1]]):
        drafter = assistant("mistral").train()
        loss = DraftLoss({"ce": 1.0})(drafter, view, pack(rows))["loss"]
        loss.backward()
        results.append([loss.detach(), *(weight.grad for weight in drafter.parameters())])
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, atol=1e-6, rtol=1e-4)
    assert all(value.any() for value in results[0])


def test_a_vocabulary_of_another_size_drafts_what_both_have():
    torch.manual_seed(0)
    for own, width in ((80, 64), (48, 48)):
        drafter = AssistantDrafter(AssistantConfig.tiny(vocab_size=own))
        view = TargetView(target("llama"))
        unrolled = drafter.unroll(view, pack([[(text(1, 12), 3)]]))
        assert drafter.logits(view, unrolled.hidden).shape[-1] == width


def test_sampled_anchors_are_a_part_of_all():
    drafter, view, batch = assistant("llama"), TargetView(target("llama")), pack([DOCUMENTS])
    everything = drafter.unroll(view, batch)
    some = drafter.unroll(view, batch, anchors=2, generator=torch.Generator().manual_seed(0))
    assert len(some.anchors) == 2 + 1 + 2
    at = torch.searchsorted(everything.anchors, some.anchors)
    assert torch.equal(everything.anchors[at], some.anchors)
    torch.testing.assert_close(everything.hidden[at], some.hidden)


def test_overfitting_one_text_is_accepted_in_decoding():
    teacher, prompt = target("llama"), 5
    view = TargetView(teacher)
    ids = teacher.generate(torch.tensor([text(6, prompt)]), max_new_tokens=40, do_sample=False)
    assert len(set(ids[0].tolist())) > 15
    batch = pack([[(ids[0].tolist(), prompt)]])
    drafter = AssistantDrafter.from_model(assistant("qwen3").model, policy="fixed", num_assistant_tokens=4)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for steps in (0, 8, 60):
        for _ in range(steps):
            unrolled = drafter.unroll(view, batch)
            loss = F.cross_entropy(drafter.logits(view, unrolled.hidden).flatten(0, 1), unrolled.labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        out = teacher.generate(
            ids[:, :prompt],
            assistant_model=drafter,
            max_new_tokens=40,
            do_sample=False,
            return_dict_in_generate=True,
        )
        assert torch.equal(out.sequences, ids)
        with torch.no_grad():
            unrolled = drafter.unroll(view, batch, slots=None)
            best = drafter.logits(view, unrolled.hidden).argmax(-1)
        simulated = simulated_tau((best == unrolled.labels) & unrolled.mask, unrolled.anchors, batch)
        print(f"tau decoded {out.speculation.tau:.3f}, simulated {simulated:.3f}")
        assert simulated == pytest.approx(out.speculation.tau, rel=0.05)
    assert out.speculation.tau - 1 >= 0.9 * 4
