"""Texts that the deployed pair writes during training: what they hold, that they are the target's own, and that
training on them raises tau where they come from."""

from __future__ import annotations

import pytest
import torch
import yaml
from test_trainer import make_drafter, make_target

from hf_specdraft.training.arguments import DraftTrainingArguments
from hf_specdraft.training.config import TrainConfig
from hf_specdraft.training.loss import DraftLoss
from hf_specdraft.training.on_policy import OnPolicyTexts, prompts_of
from hf_specdraft.training.trainer import DraftTrainer


def row(*documents: tuple[list[int], int]) -> dict:
    """Packed (tokens, length of the prompt)."""
    ids, mask, numbers = [], [], []
    for number, (tokens, prompt) in enumerate(documents, 1):
        ids += tokens
        mask += [i >= prompt for i in range(len(tokens))]
        numbers += [number] * len(tokens)
    return {"input_ids": ids, "loss_mask": mask, "document_ids": numbers}


def test_prompts_stand_before_the_first_supervised_token():
    packed = row(([1, 2, 3, 4], 2), ([5, 6, 7], 0), ([8, 9, 10, 11], 3), ([12, 13], 2))
    assert prompts_of([packed, row(([14, 15], 1))]) == [[1, 2], [8, 9, 10], [14]]


PROMPTS = [[3, 9, 4], [7, 1], [8, 8, 2, 5], [11, 6], [2, 30, 31]]
TEXTS = [row((prompt + [1, 1], len(prompt))) for prompt in PROMPTS]


def texts(**options) -> OnPolicyTexts:
    given = dict(samples=3, uses=2, max_new_tokens=8, batch_size=2)
    return OnPolicyTexts(TEXTS, make_target(), make_drafter().train(), **{**given, **options})


def test_answers_are_the_targets_own():
    made, target = texts(), make_target()
    assert len(made) == 2 * len(PROMPTS)
    rows = [made[i] for i in range(6)]  # three answers, each twice
    assert made.model.training, "the drafter is put back as it was"
    for given in rows:
        assert rows.count(given) == 2
        prompt = given["input_ids"][: given["loss_mask"].index(True)]
        assert prompt in PROMPTS
        plain = target.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        assert given["input_ids"] == plain[0].tolist() and set(given["document_ids"]) == {1}
    rest = [made[i]["input_ids"] for i in range(6, 10)]
    assert not any(given["input_ids"] in rest for given in rows), "other prompts come next"


def test_a_seed_gives_the_same_stream_and_leaves_trainings_random_state_alone():
    streams = []
    for seed in (0, 0, 1):
        made = texts(seed=seed, temperature=1.0)
        state = torch.get_rng_state()
        streams.append([made[i] for i in range(6)])
        assert torch.equal(state, torch.get_rng_state())
    assert streams[0] == streams[1] != streams[2]


def test_answers_end_where_the_target_ends_them():
    target = make_target()
    free = target.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=8, do_sample=False)[0].tolist()
    target.generation_config.eos_token_id = free[len(PROMPTS[0]) + 2]
    made = OnPolicyTexts(TEXTS, target, make_drafter(), samples=5, uses=1, max_new_tokens=8, batch_size=5)
    end, found = target.generation_config.eos_token_id, [made[i] for i in range(5)]
    answers = [[t for t, mine in zip(f["input_ids"], f["loss_mask"]) if mine] for f in found]
    assert all(end not in answer[:-1] for answer in answers) and any(answer[-1] == end for answer in answers)


@pytest.mark.parametrize(
    "options, words",
    [({"uses": 0}, "uses"), ({"max_new_tokens": 1}, "max_new_tokens"), ({"temperature": -1.0}, "temperature")],
)
def test_impossible_numbers_are_refused(options, words):
    with pytest.raises(ValueError, match=f"on_policy.{words}"):
        texts(**options)
    with pytest.raises(ValueError, match="begins with a prompt"):
        OnPolicyTexts([row(([1, 2], 0))], make_target(), make_drafter())


# Training -------------------------------------------------------------------------------------------------------------


def tau(target, drafter, prompts) -> float:
    drafter.config.policy = "fixed"
    request = dict(max_new_tokens=16, do_sample=False, return_dict_in_generate=True)
    return target.generate(torch.tensor(prompts), assistant_model=drafter.eval(), **request).speculation.tau


def test_tau_rises_on_the_domain_of_the_prompts(tmp_path):
    """AdaFlash's loss, from a drafter that has never seen the prompts' domain."""
    target, drafter = make_target(initializer_range=0.2), make_drafter()
    generator = torch.Generator().manual_seed(3)
    domain = [torch.randint(40, 60, (4,), generator=generator).tolist() for _ in range(12)]
    before = tau(target, drafter, domain)
    stream = OnPolicyTexts(
        [row((prompt + [1, 1], 4)) for prompt in domain],
        target, drafter.train(), samples=12, uses=6, max_new_tokens=16, batch_size=12,
    )  # fmt: skip
    args = DraftTrainingArguments(
        output_dir=str(tmp_path), max_steps=45, learning_rate=1e-2, per_device_train_batch_size=6, report_to=[],
        save_strategy="no", use_cpu=True, unroll={"anchors": 16},
    )  # fmt: skip
    loss = DraftLoss({"argmax_ce": 0.8, "reverse_kl": {"weight": 0.2, "clip": 10.0}}, {"decay": {"gamma": 7}})
    DraftTrainer(drafter, args, target=target, loss=loss, train_dataset=stream).train()
    assert tau(target, drafter, domain) > before + 0.3


def test_the_config_reads_its_section(tmp_path):
    def read(**changes):
        values = dict(target="t", drafter={"family": "block"}, data="d", trainer={"output_dir": "o"}, **changes)
        (tmp_path / "train.yaml").write_text(yaml.safe_dump(values))
        return TrainConfig.read(tmp_path / "train.yaml")

    assert read(on_policy={"samples": 4}).on_policy == {"samples": 4}
    with pytest.raises(ValueError, match="on_policy.sample is unknown; did you mean samples"):
        read(on_policy={"sample": 4})
    with pytest.raises(ValueError, match="features to live"):
        read(on_policy={}, features="folder")
